"""WorldLayout becomes resources and launch lines in one place, and what cannot work is refused there."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forge.cluster import placement, slurm
from forge.cluster.placement import Placement, WorldLayout, allocation_resources, sbatch_options
from forge.core.config import Config
from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import load_machine
from forge.core.process import hostname

SPEC = "results/base/.launch/20260101T000000-7/spec.json"
ENTRY = ["-m", "forge.worker", SPEC]
JOB = slurm.Job("42", "RUNNING", 0, ("n1", "n2", "n3"), 6, "gpu", "x", True, None)
PLACEMENT = Placement(("n1", "n2"), JOB)
SRUN = ["srun", "--jobid=42", "--nodes=2"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"),
    "--signals-to-handle=SIGTERM,SIGUSR1,SIGINT",
]


def line_of(keys, ranks, where):
    return placement.launch_line(
        load_machine(None, keys), ranks, where, Path(SPEC), master=("n1", 29500)
    )


def test_line_of_one_process_is_as_recorded():
    assert line_of({}, WorldLayout(), Placement.here()) == [sys.executable, *ENTRY]


@pytest.mark.parametrize(("grace", "shutdown"), [(60, 50), (8, 5)])
def test_line_of_torchrun_on_this_host_is_as_recorded(grace, shutdown):
    keys = {"launcher": "torchrun", "stop_grace_sec": grace}
    assert line_of(keys, WorldLayout(1, 4), Placement.here()) == [
        *TORCHRUN,
        f"--shutdown-timeout={shutdown}",
        "--standalone",
        *ENTRY,
    ]


def test_line_of_srun_starts_every_rank_itself():
    assert line_of({"launcher": "srun"}, WorldLayout(2, 4), PLACEMENT) == [
        *SRUN,
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--nodelist=n1,n2",
        "--cpus-per-task=6",
        "--mpi=none",
        "--export=ALL",
        "--job-name=20260101T000000-7",
        "--kill-on-bad-exit=1",
        "--overlap",
        sys.executable,
        *ENTRY,
    ]


def test_line_of_torchrun_on_two_nodes_is_one_task_a_node():
    assert line_of({"launcher": "torchrun"}, WorldLayout(2, 4), PLACEMENT) == [
        *SRUN,
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--nodelist=n1,n2",
        "--cpus-per-task=24",
        "--mpi=none",
        "--export=ALL",
        "--job-name=20260101T000000-7",
        "--kill-on-bad-exit=1",
        "--overlap",
        *TORCHRUN,
        "--shutdown-timeout=50",
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=n1:29500",
        "--rdzv-id=20260101T000000-7",
        "--rdzv-conf=join_timeout=300",
        *ENTRY,
    ]


# --- what Slurm is asked for ---------------------------------------------------------------------

GPUS = {"nodes": 2, "tasks_per_node": 4, "gres": "gpu:4", "slurm_partition": "gpu"}
CPUS = {"nodes": 2, "tasks_per_node": 3}


def test_gpu_ranks_are_counted_by_node_and_never_as_tasks_per_gpu():
    made = allocation_resources(GPUS, load_machine(None, {"launcher": "srun"}))
    assert made == {**GPUS, "mpi": ""}


def test_cpu_ranks_are_counted_as_tasks():
    made = allocation_resources(CPUS, load_machine(None, {"launcher": "srun"}))
    assert made == {**CPUS, "mpi": "", "tasks": 6}


def test_spare_nodes_are_asked_for_on_top():
    machine = load_machine(None, {"launcher": "srun", "preflight.spare_nodes": 1})
    assert allocation_resources(CPUS, machine)["nodes"] == 3
    assert allocation_resources(CPUS, machine)["tasks"] == 9


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({**CPUS, "tasks": 6}, "tasks=6"),
        ({**CPUS, "mpi": "srun"}, "mpi='srun'"),
        ({**CPUS, "slurm_extra": "--exclude=n1"}, "slurm_extra='--exclude=n1'"),
        ({**CPUS, "gpu": 8}, "gpu=8"),
        ({**GPUS, "tasks_per_node": 2}, "4 GPUs a node and 2 ranks"),
        ({**GPUS, "gres": "gpu:h100:8"}, "8 GPUs a node and 4 ranks"),
        ({**GPUS, "gres": "4 gpus"}, "gres '4 gpus'"),
        ({**CPUS, "nodes": "two"}, "nodes='two'"),
        ({**CPUS, "nodes": 0}, "nodes=0"),
        ({**GPUS, "gres": "gpu"}, "1 GPUs a node and 4 ranks"),
    ],
)
def test_resources_that_cannot_work_are_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        allocation_resources(given, load_machine(None, {"launcher": "srun"}))


def test_many_ranks_with_launcher_process_are_refused_before_submission():
    with pytest.raises(ConfigError, match="launcher single"):
        allocation_resources(CPUS, load_machine(None))


@pytest.mark.parametrize(
    ("gres", "count"), [("gpu:4", 4), ("gpu:a100:2", 2), ("gpu", 1), ("gpu:h100", 1), ("", None)]
)
def test_gpus_of_a_gres(gres, count):
    assert placement.gpus_per_node({"gres": gres}) == count


def test_options_of_sbatch_warn_the_ranks_and_merge_excluded_nodes():
    keys = {"slurm.options": "--exclude=n[7-8] --mail-type=END", "slurm.exclude": ["n1"]}
    options = sbatch_options(load_machine(None, keys), 4, ["n3", "n1"])
    assert options == (
        "--ntasks-per-node=4 --open-mode=append --signal=SIGUSR1@120"
        " --exclude=n7,n8,n1,n3 --mail-type=END"
    )


def test_a_job_with_spare_nodes_outlives_a_node():
    machine = load_machine(None, {"preflight.spare_nodes": 1})
    assert "--no-kill" in sbatch_options(machine, 1, []).split()


def test_no_nodes_to_leave_out_means_no_exclude():
    options = sbatch_options(load_machine(None, {"slurm.warn_sec": 0}), 1, [])
    assert options == "--ntasks-per-node=1 --open-mode=append"


# --- where ---------------------------------------------------------------------------------------


def test_ranks_of_one_node_need_no_slurm():
    machine = load_machine(None, {"launcher": "torchrun"})
    assert placement.find_placement(machine, WorldLayout(1, 4)) == Placement((hostname(),), None)


def test_srun_outside_of_a_job_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UnfitError, match="this shell is in none") as caught:
        placement.find_placement(load_machine(None, {"launcher": "srun"}), WorldLayout(2, 2))
    assert "salloc" in caught.value.fix


def test_a_job_with_too_few_nodes_is_refused(monkeypatch):
    monkeypatch.setattr(slurm, "this_job", lambda: JOB)
    with pytest.raises(UnfitError, match="training needs 4"):
        placement.find_placement(load_machine(None, {"launcher": "srun"}), WorldLayout(4, 2))


def test_allocation_with_too_few_cores_on_one_node_is_told_as_slurm_gave_it(monkeypatch):
    job = replace(JOB, nodes=("n1", "n2"), cpus_per_task=1, cpus=(("n1", 3), ("n2", 1)))
    monkeypatch.setattr(slurm, "this_job", lambda: job)
    machine = load_machine(None, {"launcher": "srun"})
    with pytest.raises(UnfitError, match=r"cores: n1 3 \(3 tasks\), n2 1 \(1 tasks\)") as caught:
        placement.find_placement(machine, WorldLayout(2, 2))
    assert "--ntasks-per-node=2" in caught.value.fix
    assert placement.find_placement(machine, WorldLayout(2, 1)).hosts == (
        "n1",
        "n2",
    )  # one rank fits


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("task_per_node", r"task_per_node=2.*did you mean tasks_per_node\?"),
        ("mem_gb", r"mem_gb=2.*did you mean mem_mb\?"),
        ("beverage", r"no such resource is known\n"),
    ],
)
def test_unknown_resource_is_refused_with_a_close_match(name, told):
    with pytest.raises(ConfigError, match=told):
        placement.refuse_unknown({**GPUS, name: 2}, [])


def test_resource_with_a_limit_of_the_users_own_is_known():
    placement.refuse_unknown({**CPUS, "licenses": 1}, ["licenses"])


def test_every_resource_that_the_executor_reads_is_known():
    """Of the plugins as installed: what a newer one reads must not be refused."""
    import snakemake_executor_plugin_slurm
    import snakemake_executor_plugin_slurm_jobstep

    plugins = (snakemake_executor_plugin_slurm, snakemake_executor_plugin_slurm_jobstep)
    files = [file for plugin in plugins for file in Path(plugin.__file__).parent.glob("*.py")]
    text = "".join(file.read_text() for file in files)
    read = set(re.findall(r"""resources\.get\(\s*["'](\w+)["']""", text))
    assert len(read) > 10
    ours = {"tasks", "mpi", "slurm_extra", "gpu"}  # refused with a reason of their own
    made = {"threads"}  # by Snakemake
    assert read - ours - made <= set(placement._KNOWN_RESOURCES)


def test_batch_must_share_out_among_all_nodes():
    config = Config.model_validate({"run": "base", "train": {"batch_size": 8}})
    with pytest.raises(ConfigError, match="world of 6 ranks"):
        placement.check_layout(load_machine(None, {"launcher": "srun"}), WorldLayout(3, 2), config)
