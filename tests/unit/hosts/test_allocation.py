"""Resources and sbatch options of an allocation are as recorded, and what cannot work is refused."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.machine import load_machine
from forge.hosts import allocation
from forge.hosts.allocation import (
    Allocation,
    Profile,
    allocation_resources,
    command_resources,
    held_allocation,
    run_layouts,
)
from forge.slurm import slurm
from forge.slurm.sbatch import slurm_extra

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
        ({**GPUS, "cpus_per_gpu": 16}, "cpus_per_gpu=16"),
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
    ("gres", "count"),
    [
        *(("gpu:4", 4), ("gpu:a100:2", 2), ("gpu", 1), ("gpu:h100", 1), ("", None)),
        *(("gpu:2080ti:2", 2), ("gpu:1g.10gb", 1)),
    ],
)
def test_gpus_of_a_gres(gres, count):
    assert allocation.gpus_per_node({"gres": gres}) == count


def test_a_type_of_gpu_that_the_executor_refuses_is_refused_before():
    with pytest.raises(ConfigError, match="with a dash") as caught:
        allocation.gpus_per_node({"gres": "gpu:nvidia_a100-sxm4-80gb:4"})
    assert "gpu:4" in caught.value.fix


def test_options_of_sbatch_warn_the_ranks_and_merge_excluded_nodes():
    keys = {"slurm.options": "--exclude=n[7-8] --mail-type=END", "slurm.exclude": ["n1"]}
    options = slurm_extra(load_machine(None, keys), 2, 4, ["n3", "n1"])
    assert options == (
        "--ntasks-per-node=4 --open-mode=append --signal=SIGUSR1@120"
        " --exclude=n7,n8,n1,n3 --mail-type=END"
    )


def test_a_job_with_spare_nodes_outlives_a_node():
    machine = load_machine(None, {"preflight.spare_nodes": 1})
    assert "--no-kill" in slurm_extra(machine, 2, 1, []).split()


@pytest.mark.parametrize(("nodes", "outlives"), [(2, True), (1, False)])
def test_a_job_that_may_shrink_outlives_a_node(nodes, outlives):
    machine = load_machine(None, {"slurm.shrink": True})
    assert ("--no-kill" in slurm_extra(machine, nodes, 1, []).split()) == outlives


def test_no_nodes_to_leave_out_means_no_exclude():
    options = slurm_extra(load_machine(None, {"slurm.warn_sec": 0}), 2, 1, [])
    assert options == "--ntasks-per-node=1 --open-mode=append"


def test_fewer_nodes_are_asked_of_slurm_with_the_tasks_of_the_fewest_nodes():
    keys = {"launcher": "srun", "slurm.nodes_min": 1, "preflight.spare_nodes": 1}
    machine = load_machine(None, keys)
    assert "-N2-3" in slurm_extra(machine, 2, 3, []).split()
    assert allocation_resources(CPUS, machine)["tasks"] == 6
    assert allocation_resources(CPUS, machine)["nodes"] == 3
    assert "-N" not in slurm_extra(machine, 1, 3, [])


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
        allocation.refuse_unknown({**GPUS, name: 2}, [])


def test_resource_with_a_limit_of_the_users_own_is_known():
    allocation.refuse_unknown({**CPUS, "licenses": 1}, ["licenses"])


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
    assert read - ours - made <= set(allocation._KNOWN_RESOURCES)


# --- nodes and ranks by run ----------------------------------------------------------------------------


def test_columns_of_the_sheet_win_over_the_profile_and_gpus_follow_the_ranks():
    columns = {"a": {"nodes": 5}, "b": {"tasks_per_node": 2}, "c": {}}
    assert run_layouts({**GPUS, "gres": "gpu:h100:4"}, columns) == {
        "a": {"nodes": 5, "tasks_per_node": 4, "gres": "gpu:h100:4"},
        "b": {"nodes": 2, "tasks_per_node": 2, "gres": "gpu:h100:2"},
        "c": {"nodes": 2, "tasks_per_node": 4, "gres": "gpu:h100:4"},
    }


def test_without_such_columns_the_profile_stays_as_it_is():
    assert run_layouts(GPUS, {"a": {}, "b": {}}) == {}


def test_what_differs_between_runs_is_a_function_of_the_run(tmp_path):
    runs = {name: Config(run=name, results=str(tmp_path)) for name in "ab"}
    machine = tmp_path / "machine.yaml"
    machine.write_text("launcher: srun\n")
    profile = {**CPUS, "machine": str(machine), "runtime": 40}
    layouts = run_layouts(profile, {"a": {}, "b": {"nodes": 5}})
    made = Allocation(profile, runs, layouts, Profile())
    assert made.of_profile == {"tasks_per_node": 3, "machine": str(machine), "runtime": 40}
    for name, of_a, of_b in (("nodes", 2, 5), ("train_nodes", 2, 5), ("tasks", 6, 15)):
        of_run = made.own[name]
        assert [of_run(SimpleNamespace(run=run)) for run in "ab"] == [of_a, of_b]
    assert made.whole["tasks_per_node"] == 3
    assert made.layout("b").world_size == 15


# --- for one command (--config) ------------------------------------------------------------------------


def test_keys_of_one_command_are_resources_and_gpus_follow_the_ranks():
    given = {"nodes": 8, "tasks_per_node": 2, "partition": "big", "train": {"max_steps": 3}}
    found = command_resources(given)
    assert found == {"nodes": 8, "tasks_per_node": 2, "slurm_partition": "big"}
    assert run_layouts(GPUS, {"a": found})["a"] == {**found, "gres": "gpu:2"}
    assert command_resources({"train": {"max_steps": 3}}) == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"nodes": 0}, r"nodes=0\n  fix:   give a number of 1 or more"),
        ({"nodes": True}, "nodes=True"),
        ({"nodes": "8"}, "nodes='8'"),
        ({"tasks_per_node": 1.5}, "tasks_per_node=1.5"),
        ({"partition": ""}, r"partition=''\n  fix:   give the name of a partition"),
        ({"partition": "a b"}, "partition='a b'"),
        ({"partition": None}, "partition=None"),
    ],
)
def test_value_of_one_command_that_is_none_is_refused(given, told):
    with pytest.raises(ConfigError) as caught:
        command_resources(given)
    assert re.search(told, str(caught.value))


# --- inside an allocation (salloc) ---------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch):
    def hold(**facts):
        usual = {"id": "7", "state": "RUNNING", "restarts": 0, "nodes": ("n1", "n2", "n3")}
        more = {
            "cpus_per_task": 1,
            "partition": "p",
            "name": "sh",
            "batch": False,
            "end_time": None,
        }
        job = slurm.Job(**{**usual, **more, **facts})
        monkeypatch.setattr(slurm, "this_job", lambda: job)

    return hold


@pytest.mark.parametrize(
    ("facts", "given", "found"),
    [
        ({"tasks": 6}, {}, (3, 2)),
        ({"tasks": 3, "gpus_per_node": 4}, {}, (3, 4)),
        ({"tasks": 6, "gpus_per_node": 4}, {"device": "cpu"}, (3, 2)),  # of whole nodes
        ({"tasks": 1}, {}, (3, 1)),
        ({"tasks": 6}, {"preflight.spare_nodes": 1}, (2, 2)),
    ],
)
def test_profile_without_nodes_takes_those_of_the_allocation_that_the_shell_holds(
    held, facts, given, found
):
    held(**facts)
    machine = load_machine(None, {"launcher": "srun", **given})
    assert tuple(held_allocation({}, machine).values()) == found


def test_profile_that_sets_nodes_and_ranks_asks_nobody(monkeypatch):
    monkeypatch.setattr(slurm, "this_job", lambda: pytest.fail("it was asked"))
    assert held_allocation(CPUS, load_machine(None, {"launcher": "srun"})) == {}
    assert held_allocation({}, load_machine(None)) == {}  # one rank on this host
