"""What runs cost, by numbers computed by hand: against a sheet that spends the GPU-hours of a group
before anybody has added them up."""

from types import SimpleNamespace

import pytest

from forge.core.config import Config, checked, load_config
from forge.core.errors import ConfigError, Exit
from forge.core.machine import load_machine
from forge.data.content_ids import resolve
from forge.hosts.allocation import Allocation, Profile
from forge.hosts.placement import WorldLayout
from forge.run import forge_trainer
from forge.run.cost import Cost, costs, refuse_more, summary
from forge.run.programs import program_of

HOUR = 3600
BASE = Cost(
    "base", nodes=2, gpus=4, limit_sec=48 * HOUR, left_sec=10 * HOUR
)  # 384 by limit, 80 left
BIG = Cost("big", nodes=8, gpus=4, limit_sec=48 * HOUR, left_sec=100 * HOUR)  # 1536, 3200
OTHER = Cost("other", nodes=2, gpus=4, limit_sec=24 * HOUR, left_sec=None)  # 192
ON_CPUS = Cost("cpus", nodes=3, gpus=0, limit_sec=HOUR // 2, left_sec=None)  # 1.5 node-hours
H100 = load_machine(None, {"gpu": "H100"})


def limited(most, **keys):
    return load_machine(None, {"gpu": "H100", **keys, "slurm.max_gpu_hours": most})


def test_line_of_one_run_and_of_several_alike():
    assert summary([BASE], H100) == (
        "1 run to train on 2 nodes x 4 GPUs: at most 384 GPU-hours (96 node-hours) by its time limit, as"
        " much again with each requeue; about 80 GPU-hours (20 node-hours) up to its goal by forge plan's"
        " estimate for H100 GPUs, without restarts"
    )
    assert summary([BASE] * 3, H100) == (
        "3 runs to train on 2 nodes x 4 GPUs: at most 1,152 GPU-hours (288 node-hours) by their time"
        " limits, as much again with each requeue; about 240 GPU-hours (60 node-hours) up to their goals"
        " by forge plan's estimate for H100 GPUs, without restarts"
    )


def test_line_of_runs_that_differ_names_each_layout_and_how_many_have_an_estimate():
    assert summary([BASE, BIG, OTHER], H100) == (
        "3 runs to train (2 on 2 nodes x 4 GPUs, 1 on 8 nodes x 4 GPUs): at most 2,112 GPU-hours (528"
        " node-hours) by their time limits, as much again with each requeue; about 3,280 GPU-hours (820"
        " node-hours) up to the goals of 2 by forge plan's estimate for H100 GPUs, without restarts"
    )


def test_line_without_an_estimate_and_without_gpus_has_only_what_is_known():
    assert summary([OTHER], H100).endswith("by its time limit, as much again with each requeue")
    assert summary([ON_CPUS, ON_CPUS], H100) == (
        "2 runs to train on 3 nodes: at most 3 node-hours by their time limits, as much again with each"
        " requeue"
    )
    one = Cost("one", nodes=1, gpus=1, limit_sec=HOUR, left_sec=None)
    assert summary([one], H100).startswith(
        "1 run to train on 1 node x 1 GPU: at most 1 GPU-hours (1 node"
    )
    assert summary([], H100) == ""


def test_line_says_that_spare_nodes_are_included():
    machine = load_machine(None, {"launcher": "srun", "preflight.spare_nodes": 1})
    assert summary([OTHER], machine).startswith(
        "1 run to train on 2 nodes x 4 GPUs (spare nodes included): at most"
    )


def test_more_gpu_hours_than_allowed_are_refused_with_each_runs_own_the_largest_first():
    with pytest.raises(ConfigError) as error:
        refuse_more([BASE, OTHER, BIG], limited(3471), "profiles/mine/machine.yaml")
    assert error.value.code == Exit.CONFIG == 78
    assert error.value.what == (
        "3 runs to train need 3,472.0 GPU-hours, more than slurm.max_gpu_hours: 3,471"
        " (profiles/mine/machine.yaml): big 3,200 (estimate of 4 d 4 h up to its goal on 8 nodes x 4"
        " GPUs), other 192 (time limit of 1 d on 2 nodes x 4 GPUs), base 80 (estimate of 10 h up to its"
        " goal on 2 nodes x 4 GPUs)"
    )
    assert "a run without an estimate counts with the time limit" in error.value.cause
    assert error.value.fix == (
        "train fewer runs in one command (rows of the sample sheet), fewer steps (train.max_steps) or"
        " shorter (runtime of train_run), or raise slurm.max_gpu_hours in profiles/mine/machine.yaml"
    )


def test_refusal_advises_only_what_helps():
    """A shorter time limit changes no estimate; the name of the GPU gives one."""
    with pytest.raises(ConfigError) as error:
        refuse_more([BASE], limited(79.9), "m.yaml")
    assert "runtime" not in error.value.fix and "time limit" not in error.value.cause
    with pytest.raises(ConfigError, match=r"m\.yaml; gpu there gives runs of Forge's own trainer"):
        refuse_more([OTHER], limited(1, gpu=None), "m.yaml")


def test_refusal_of_a_long_sheet_names_the_eight_largest():
    with pytest.raises(ConfigError) as error:
        refuse_more([BASE] * 9 + [BIG], limited(1), "m.yaml")
    assert "need 3,920.0 GPU-hours" in error.value.what
    assert error.value.what.count("base 80") == 7 and error.value.what.endswith(", 2 more")


def test_as_many_gpu_hours_as_allowed_and_any_number_on_cpus_are_not_refused():
    refuse_more([BASE, BIG, OTHER], limited(3472), "m.yaml")
    refuse_more([BASE, BIG, OTHER], H100, "m.yaml")
    refuse_more([ON_CPUS] * 1000, limited(0.001), "m.yaml")


# --- what is counted ---------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A run of 1,000 steps, one that continues a parent from step 400, and one of another program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("words")
    own = {"tokenize": {"inputs": ["text.txt"]}, "train": {"batch_size": 8, "max_steps": 1000}}
    program = {"command": ["true"]}
    values = {
        "base": own,
        "child": {**own, "parent": "base@400"},
        "other": {"program": program},
    }
    return {
        name: resolve(checked(Config, {"run": name, **of_run}, "the test"))
        for name, of_run in values.items()
    }


@pytest.fixture
def ten_seconds_a_step(monkeypatch):
    monkeypatch.setattr(forge_trainer, "step_seconds", lambda *_: 10.0)


PROFILE = {"nodes": 2, "tasks_per_node": 4, "gres": "gpu:4", "runtime": 100}


def allocation(tmp_path, runs, resources=PROFILE, **machine):
    path = tmp_path / "machine.yaml"
    keys = {"launcher": "srun", "gpu": "H100", **machine}
    path.write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    return Allocation({**resources, "machine": str(path)}, runs, {}, Profile())


def due(allocation, *names, rules=("stage_run", "preflight_run", "train_run")):
    """Jobs of Snakemake, with what the rules and the profile ask for."""
    of_rule = {"train_run": {**allocation.own, **allocation.of_profile}}
    return [
        SimpleNamespace(
            rule=SimpleNamespace(name=rule),
            wildcards=SimpleNamespace(run=name),
            resources=of_rule.get(rule, allocation.whole),
        )
        for name in names
        for rule in rules
    ]


def test_time_limit_is_the_sum_of_the_allocation_and_the_estimate_counts_from_the_parents_step(
    tmp_path, runs, ten_seconds_a_step
):
    asked = allocation(tmp_path, runs)
    found = costs(runs, asked, due(asked, "other", "child", "base"))
    limit = 120 * 60  # 100 minutes of training, 10 of stage, 10 of preflight
    assert found == [
        Cost("base", 2, 4, limit, 1000 * 10.0),
        Cost("child", 2, 4, limit, 600 * 10.0),
        Cost("other", 2, 4, limit, None),
    ]


def test_spare_nodes_cost_as_much_as_those_that_train(tmp_path, runs, ten_seconds_a_step):
    asked = allocation(tmp_path, runs, preflight="{spare_nodes: 1}")
    [cost] = costs(runs, asked, due(asked, "base"))
    assert cost.nodes == 3
    assert cost.gpu_hours == pytest.approx(3 * 4 * 10_000 / 3600)


def test_only_runs_that_will_be_trained_are_counted(tmp_path, runs, ten_seconds_a_step):
    asked = allocation(tmp_path, runs)
    before = due(asked, "child", rules=("stage_run", "preflight_run"))  # the target preflight
    after = due(asked, "other", rules=("validate_run",))
    assert [cost.run for cost in costs(runs, asked, [*before, *after])] == []
    assert [cost.run for cost in costs(runs, asked, [*before, *after, *due(asked, "base")])] == [
        "base"
    ]


@pytest.mark.parametrize(("saved", "left"), [(None, 1000), (750, 250), (1000, 0), (1200, 0)])
def test_only_the_steps_after_the_last_checkpoint_are_counted(
    runs, ten_seconds_a_step, monkeypatch, saved, left
):
    monkeypatch.setattr(forge_trainer.ForgeTrainer, "resumable_step", lambda _: saved)
    assert program_of(runs["base"]).seconds_left(H100, WorldLayout(2, 4)) == left * 10.0


def test_on_cpus_nothing_is_estimated(tmp_path, runs):
    plain = {name: value for name, value in PROFILE.items() if name != "gres"}
    asked = allocation(tmp_path, runs, plain, device="cpu")
    [cost] = costs(runs, asked, due(asked, "base"))
    assert cost == Cost("base", 2, 0, 120 * 60, None)


@pytest.mark.parametrize("keys", [{}, {"gpu": "GTX 970"}, {"gpu": "H100", "device": "cpu"}])
def test_gpus_without_a_known_name_have_no_estimate(runs, keys):
    machine = load_machine(None, keys)
    assert program_of(runs["base"]).seconds_left(machine, WorldLayout(1, 4)) is None


def test_estimate_is_that_of_forge_plan(monkeypatch):
    """12.3 s a step of the 7B on 32 H100 (docs/gpu.md), 32,500 steps."""
    config = load_config("config/sizes/7b.yaml", {})
    machine = load_machine("profiles/kempner/machine.yaml")
    monkeypatch.setattr(forge_trainer.ForgeTrainer, "resumable_step", lambda _: None)
    left = program_of(config).seconds_left(machine, WorldLayout(8, 4))
    assert left / 32_500 == pytest.approx(12.3, rel=0.005)
