"""Nodes for the ranks: what cannot work is refused before anything starts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from forge.core.config import Config
from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import load_machine
from forge.core.process import hostname
from forge.core.train_settings import ranks_per_copy
from forge.flow import resources
from forge.hosts import placement
from forge.hosts.allocation import Allocation, Profile
from forge.hosts.placement import Placement, WorldLayout
from forge.slurm import slurm

JOB = slurm.Job("42", "RUNNING", 0, ("n1", "n2", "n3"), 6, "gpu", "x", True, None)


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


LONE = {"launcher": "srun", "stage.project": "auto", "stage.results": "first_node"}


def test_first_node_without_the_results_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(slurm, "this_job", lambda: JOB)
    monkeypatch.setattr(slurm, "refuse_missing", lambda *_: None)
    with pytest.raises(UnfitError) as caught:
        placement.find_placement(load_machine(None, LONE), WorldLayout(2, 2))
    first = JOB.nodes[0]
    assert f"runs on {hostname()}: the first node of job {JOB.id} is {first}" in caught.value.what
    assert "slurm.exclude" in caught.value.fix
    here = replace(JOB, nodes=(hostname(), *JOB.nodes[1:]))
    monkeypatch.setattr(slurm, "this_job", lambda: here)
    found = placement.find_placement(load_machine(None, LONE), WorldLayout(2, 2))
    assert found.hosts == here.nodes


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"stage.project": False}, "set project: auto"),
        ({"stage.mode": "never"}, "set mode: auto"),
        ({"container.image": "/x.sif"}, "does not work with a container yet"),
        ({"stage.results": "first-node"}, "'shared' or 'first_node'"),
    ],
)
def test_results_on_the_first_node_are_refused_without_what_the_others_need(keys, what):
    with pytest.raises(ConfigError, match=what):
        load_machine(None, {**LONE, **keys})


def test_results_on_the_first_node_are_refused_without_a_plugin_for_the_others(monkeypatch):
    monkeypatch.setattr(placement.hooks, "is_implemented", lambda name: name != "run_directories")
    machine, config = load_machine(None, LONE), Config(run="base", train={"batch_size": 8})
    with pytest.raises(ConfigError, match=r"stage\.results is first_node, and no plugin is here"):
        placement.check_layout(machine, WorldLayout(2, 2), config)


@pytest.mark.parametrize("there", [[], ["scontrol"]])
def test_slurms_programs_that_are_not_found_in_a_job_are_named_with_the_path(
    there, monkeypatch, tmp_path
):
    """Not as "this shell is in no job", a bug, or a directory to change."""
    for name in there:
        (tmp_path / name).touch(mode=0o755)
    path = f"{tmp_path}:/etc/passwd"  # an entry that is no directory gives ENOTDIR, not ENOENT
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    missing = [name for name in ("scontrol", "srun") if name not in there]
    with pytest.raises(UnfitError) as caught:
        placement.find_placement(load_machine(None, {"launcher": "srun"}), WorldLayout(2, 1))
    names = ", ".join(missing)
    assert caught.value.what == f"{names} not found on {hostname()}; searched PATH={path}"
    assert f"`command -v {missing[0]}` prints a path" in caught.value.fix


def test_login_node_without_slurms_programs_is_refused_before_the_plan_is_judged(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnfitError, match=r"^sbatch, squeue, scontrol not found on .*PATH=/nowhere"):
        resources.check_submission(None, [], [], pytest.fail)


def test_allocation_with_too_few_cores_on_one_node_is_reported_as_slurm_gave_it(monkeypatch):
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


@pytest.mark.parametrize(("tasks", "cores"), [(2, 16), (8, 64)])
def test_ranks_share_the_cores_of_their_node_where_the_job_has_fewer_tasks(
    monkeypatch, tasks, cores
):
    """As salloc --nodes=2 --gres=gpu:4 --cpus-per-task=64 gives them: one task a node."""
    whole = (("n1", 64 * tasks // 2), ("n2", 64 * tasks // 2))
    job = replace(JOB, nodes=("n1", "n2"), cpus_per_task=64, cpus=whole, tasks=tasks)
    monkeypatch.setattr(slurm, "this_job", lambda: job)
    found = placement.find_placement(load_machine(None, {"launcher": "srun"}), WorldLayout(2, 4))
    assert found.job.cpus_per_task == cores


@pytest.mark.parametrize(
    ("num_cpus", "asked", "cores"),
    [
        (128, 1, 16),
        (64, 1, 8),  # two threads on each core, of which Slurm counts the core
        (0, 1, 1),  # of --threads-per-core=1
        (128, 4, 4),  # of --cpus-per-task=4
    ],
)
def test_ranks_share_whole_nodes_of_a_job_that_asked_for_no_cores(
    monkeypatch, num_cpus, asked, cores
):
    """As salloc --nodes=2 --exclusive --gres=gpu:4 gives them."""
    facts = {"cpus": (("n1", 64), ("n2", 64)), "num_cpus": num_cpus, "tasks": 2, "exclusive": True}
    job = replace(JOB, nodes=("n1", "n2"), cpus_per_task=asked, **facts)
    monkeypatch.setattr(slurm, "this_job", lambda: job)
    found = placement.find_placement(load_machine(None, {"launcher": "srun"}), WorldLayout(2, 4))
    assert found.job.cpus_per_task == cores


def test_batch_must_share_out_among_all_nodes():
    config = Config.model_validate({"run": "base", "train": {"batch_size": 8}})
    with pytest.raises(ConfigError, match="world of 6 ranks"):
        placement.check_layout(load_machine(None, {"launcher": "srun"}), WorldLayout(3, 2), config)


def test_program_whose_directory_is_missing_is_refused_before_a_job_is_submitted(tmp_path):
    program = {"command": ["x"], "source": str(tmp_path / "gone")}
    config = Config.model_validate({"run": "base", "results": str(tmp_path), "program": program})
    with pytest.raises(ConfigError, match=r"gone': there is no such directory"):
        placement.check_layout(load_machine(None), WorldLayout(), config)
    submitted = Allocation({}, {"base": config}, {}, Profile())
    job = SimpleNamespace(
        rule=SimpleNamespace(name="train_run"), wildcards=SimpleNamespace(run="base")
    )
    with pytest.raises(ConfigError, match=r"run base: program\.source is .*gone'") as caught:
        submitted.check_runs([job], {})
    assert caught.value.code == 78
    (tmp_path / "gone").mkdir()
    submitted.check_runs([job], {})


@pytest.mark.parametrize(
    ("shard", "ranks"), [("none", 1), ("node", 4), ("all", 12), (2, 2), (6, 6), (12, 12)]
)
def test_copies_of_the_model_share_out_the_ranks(shard, ranks):
    config = Config.model_validate({"train": {"batch_size": 12, "shard": shard}})
    placement.check_layout(load_machine(None, {"launcher": "srun"}), WorldLayout(3, 4), config)
    assert ranks_per_copy(config.train.shard, 12, ranks_per_node=4) == ranks


@pytest.mark.parametrize("shard", [5, 8, 24])
def test_copies_of_the_model_that_ranks_cannot_hold_are_refused_before_a_job_is_submitted(shard):
    config = Config.model_validate({"train": {"batch_size": 12, "shard": shard}})
    with pytest.raises(ConfigError, match=f"shard {shard} does not divide a world of 12") as error:
        placement.check_layout(load_machine(None, {"launcher": "srun"}), WorldLayout(3, 4), config)
    assert "none, all, 2, 3, 4, 6, 12" in str(error.value)


@pytest.mark.parametrize(
    ("source", "project", "nodes", "refused"),
    [
        (None, True, 2, True),
        (".", True, 2, False),
        (None, False, 2, False),
        (None, True, 1, False),
        (None, "auto", 2, False),  # the nodes may see it, which stage asks them
    ],
)
def test_program_needs_a_directory_that_is_copied_to_nodes_that_do_not_see_the_project(
    source, project, nodes, refused
):
    machine = load_machine(None, {"launcher": "torchrun", "stage.project": project})
    config = Config.model_validate({"program": {"command": ["x"], "source": source}})
    try:
        placement.check_layout(machine, WorldLayout(nodes, 1), config)
    except ConfigError as err:
        assert refused and "set program.source" in err.fix
    else:
        assert not refused


# --- fewer nodes (slurm.nodes_min) ---------------------------------------------------------------

FEWER = {"launcher": "srun", "slurm.nodes_min": 2}
EIGHT = Config.model_validate({"train": {"batch_size": 8}})


@pytest.mark.parametrize(
    ("given", "spare", "nodes"),
    [(4, 0, 4), (3, 0, 2), (2, 0, 2), (5, 1, 4), (4, 1, 2), (3, 1, 2), (6, 0, 4)],
)
def test_as_many_of_the_nodes_that_slurm_gave_train_as_share_the_batch(
    given, spare, nodes, monkeypatch
):
    hosts = tuple(f"n{number}" for number in range(given))
    monkeypatch.setattr(slurm, "this_job", lambda: replace(JOB, nodes=hosts))
    machine = load_machine(None, {**FEWER, "preflight.spare_nodes": spare})
    fitting = placement.fitting_layout(machine, WorldLayout(4, 2), EIGHT)
    assert fitting == WorldLayout(nodes, 2)


def test_without_nodes_min_the_layout_is_the_one_asked_for(monkeypatch):
    monkeypatch.setattr(slurm, "this_job", lambda: replace(JOB, nodes=("n1",)))
    machine = load_machine(None, {"launcher": "srun"})
    assert placement.fitting_layout(machine, WorldLayout(4, 2), EIGHT) == WorldLayout(4, 2)


def test_warning_about_memory_is_said_once_for_one_number_of_nodes(monkeypatch, capsys):
    monkeypatch.setattr(placement.memory, "warning", lambda *_: "this is tight")
    machine = load_machine(None, {"launcher": "srun", "gpu_memory_gib": 80})
    placement.check_layouts(machine, WorldLayout(4, 2), EIGHT)
    assert capsys.readouterr().err.count("this is tight") == 1


# --- fewer nodes after the loss of one (slurm.shrink) --------------------------------------------


@pytest.mark.parametrize(
    ("keys", "healthy", "nodes"),
    [
        ({}, 3, None),
        ({"slurm.nodes_min": 2}, 3, None),
        ({"slurm.shrink": True}, 5, 4),
        ({"slurm.shrink": True}, 3, 2),
        ({"slurm.shrink": True}, 1, 1),
        ({"slurm.shrink": True}, 0, None),
        ({"slurm.shrink": True, "slurm.nodes_min": 2}, 3, 2),
        ({"slurm.shrink": True, "slurm.nodes_min": 2}, 1, None),
    ],
)
def test_healthy_nodes_that_are_too_few_train_as_many_as_share_the_batch_if_shrink_is_set(
    keys, healthy, nodes
):
    machine = load_machine(None, {"launcher": "srun", **keys})
    left = placement.shrunk_layout(machine, WorldLayout(4, 2), EIGHT, healthy)
    assert left == (WorldLayout(nodes, 2) if nodes else None)


def test_nodes_that_a_job_has_lost_before_training_are_done_without(monkeypatch):
    monkeypatch.setattr(slurm, "this_job", lambda: replace(JOB, nodes=("n1", "n3", "n4")))
    machine = load_machine(None, {"launcher": "srun", "slurm.shrink": True})
    assert placement.fitting_layout(machine, WorldLayout(4, 2), EIGHT) == WorldLayout(2, 2)


@pytest.mark.parametrize(
    ("keys", "batch", "told"),
    [
        ({"slurm.nodes_min": 3}, 6, "slurm.nodes_min is 3, which is the number of nodes"),
        ({"fabric.backend": "nccl", "gpu_memory_gib": 0.5}, 6, "no fewer nodes than 3 can train"),
    ],
)
def test_shrink_that_could_never_do_anything_is_refused(keys, batch, told, monkeypatch):
    def refuse(shape, gib):
        if shape.world_size < 6:
            raise ConfigError("the model does not fit")

    monkeypatch.setattr(placement.memory, "refuse_what_cannot_fit", refuse)
    monkeypatch.setattr(placement.memory, "warning", lambda *_: "")
    config = Config.model_validate({"train": {"batch_size": batch}})
    machine = load_machine(None, {"launcher": "srun", "slurm.shrink": True, **keys})
    with pytest.raises(ConfigError, match=told):
        placement.check_layouts(machine, WorldLayout(3, 2), config)
    one_node = load_machine(None, {"launcher": "srun", "slurm.shrink": True})
    placement.check_layouts(one_node, WorldLayout(1, 2), config)


@pytest.mark.parametrize(
    ("fewest", "told"),
    [
        (3, "batch_size"),
        (5, "slurm.nodes_min is 5, and 4 nodes train"),
        (1, "slurm.nodes_min is 1, with 2 ranks a node, for 4 nodes"),
    ],
)
def test_fewest_nodes_that_cannot_train_the_config_are_refused_before_submission(fewest, told):
    machine = load_machine(None, {**FEWER, "slurm.nodes_min": fewest})
    with pytest.raises(ConfigError, match=told):
        placement.check_layouts(machine, WorldLayout(4, 2), EIGHT)
