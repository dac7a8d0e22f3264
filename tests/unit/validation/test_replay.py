"""Against rejecting a valid checkpoint: losses of another launch, or from before a restart."""

from pathlib import Path

import pytest
import torch
from support import happenings
from support.manifests import IDS, NUMERICS, lineage_of, manifest_of

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Hardware, SkippedSteps, StoredFile, Versions
from forge.core import events
from forge.core.config import ResolvedConfig, checked, load_config
from forge.core.paths import RunPaths
from forge.core.provenance import cpu_name
from forge.core.train_settings import Train
from forge.data.content_ids import resolve
from forge.hosts.network import available_cores
from forge.launch.rank_records import RankRecord, ReplayResult
from forge.trainer import metrics
from forge.trainer.divergence import SkippedCounts
from forge.validation import replay
from forge.validation.replay import Recorded, _compare, check_next_losses, recorded_losses

VERSIONS = Versions.of(Train())
HARDWARE = Hardware(host="laptop", cpu=cpu_name())


def checkpoint(step=10, *, made_by=None, dropout=0.0, train=None, **facts):
    """made_by: parts of the lineage that are not those of this host. train: keys of that section."""
    keys = {f"train.{key}": value for key, value in (train or {}).items()}
    config = resolve(load_config("/dev/null", {"model.dropout": dropout, "ids": IDS, **keys}))
    made_by = {"versions": VERSIONS, "hardware": HARDWARE, **(made_by or {})}
    lineage = lineage_of(config, **made_by)
    manifest = manifest_of(step, lineage=lineage, **facts)
    return Checkpoint(RunPaths(Path("/nowhere")).checkpoints, manifest)


@pytest.fixture
def run(tmp_path):
    return RunPaths(tmp_path)


def line(launch, step, loss):
    facts = {"grad_norm": 1.0, "lr": 1e-3, "tokens_per_sec": 9.0, "mfu": None, "tokens": step}
    return metrics.TrainLine(launch=launch, step=step, loss=loss, **facts)


def log(run, launch, steps, world_size=2, precision="fp32"):
    """Log steps as a launch of so many ranks does; each loss is different."""
    numerics = {"device": "cpu", "precision": precision}
    init = happenings.init(launch=launch, world_size=world_size, numerics=numerics)
    events.record(run.events, init)
    for step in steps:
        metrics.write(run.metrics, line(launch, step, step + ord(launch) / 1000))


def loss(launch, *steps):
    return {step: step + ord(launch) / 1000 for step in steps}


# --- which losses ---------------------------------------------------------------------------------


def test_two_next_losses_are_enough(run):
    log(run, "a", range(1, 20))
    assert recorded_losses(run, checkpoint()) == Recorded(loss("a", 11, 12), by_maker=True)


def test_losses_logged_every_few_steps_are_found(run):
    log(run, "a", range(5, 40, 5))
    assert recorded_losses(run, checkpoint(10)) == Recorded(loss("a", 15), by_maker=True)
    assert recorded_losses(run, checkpoint(14)) == Recorded(loss("a", 15, 20), by_maker=True)


@pytest.mark.parametrize("steps", [range(1, 11), range(0, 100, 25)])
def test_no_loss_was_recorded_soon_after_the_checkpoint(run, steps):
    log(run, "a", steps)
    assert recorded_losses(run, checkpoint()) is None
    check = check_next_losses(None, checkpoint(), run)
    assert check.status == "ok" and check.message.startswith("not recorded")


def test_a_launch_of_another_world_size_does_not_count(run):
    log(run, "a", range(1, 11))
    log(run, "b", range(11, 15), world_size=1)
    assert recorded_losses(run, checkpoint()) is None


def test_a_launch_of_another_precision_does_not_count(run):
    log(run, "a", range(1, 11))
    log(run, "b", range(11, 15), precision="bf16")  # on GPUs, without train.precision
    assert recorded_losses(run, checkpoint()) is None


def test_the_launch_that_saved_the_checkpoint_is_preferred_to_the_next_one(run):
    log(run, "a", range(1, 13))
    log(run, "b", range(11, 20))
    assert recorded_losses(run, checkpoint()) == Recorded(loss("a", 11, 12), by_maker=True)


def test_losses_of_the_next_launch_are_used_where_the_first_logged_none(run):
    log(run, "a", range(1, 11))
    log(run, "b", range(11, 20))
    assert recorded_losses(run, checkpoint()) == Recorded(loss("b", 11, 12), by_maker=False)


def test_losses_from_before_a_step_was_recomputed_do_not_count(run):
    log(run, "a", range(1, 13))
    log(run, "b", range(6, 11), world_size=1)
    assert recorded_losses(run, checkpoint()) is None


def test_a_loss_that_was_not_finite_is_not_compared(run):
    log(run, "a", range(1, 11))
    metrics.write(run.metrics, line("a", 11, float("nan")))
    assert recorded_losses(run, checkpoint()) is None


# --- limits of this host --------------------------------------------------------------------------


def test_more_ranks_or_memory_than_this_host_has_only_warns(run):
    log(run, "a", range(1, 20), world_size=10_000)
    check = check_next_losses(None, checkpoint(world_size=10_000), run)
    assert check.status == "warn"
    assert f"saved by 10000 ranks, this host has {available_cores()} cores" in check.message
    log(run, "b", range(1, 20))
    check = check_next_losses(
        None, checkpoint(files={"a": StoredFile(bytes=2**50, digest="")}), run
    )
    assert check.status == "warn" and "GiB are free" in check.message


# --- on GPUs --------------------------------------------------------------------------------------

ON_GPUS = NUMERICS.model_copy(update={"device": "cuda", "device_name": "NVIDIA H100"})
TRAINED = {"train": {"batch_size": 4096, "seq_len": 2048}, "made_by": {"numerics": ON_GPUS}}


def replayed(run, monkeypatch, *, num_gpus, num_parameters=1e8, trained=TRAINED):
    """The check, of a checkpoint of two ranks, and the device of the ranks that it started, if any."""
    devices = []

    def run_here(task, config, checkpoint, num_ranks, device, **_):
        devices.append((num_ranks, device))
        result = ReplayResult(list(loss("a", 11, 12).values()), True, ON_GPUS.to_json())
        return RankRecord("completed", result=result)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(replay, "run_here", run_here)
    log(run, "a", range(1, 20))
    files = {"a": StoredFile(bytes=int(12 * num_parameters), digest="")}
    made = checkpoint(files=files, **trained)
    config = checked(ResolvedConfig, made.manifest.lineage.config.to_json(), "the test")
    return check_next_losses(config, made, run), devices


def test_steps_of_gpus_are_repeated_on_as_many(run, monkeypatch):
    check, devices = replayed(run, monkeypatch, num_gpus=2)
    assert (check.status, devices) == ("ok", [(2, "cuda")])
    assert check.message == "replayed: step 11 within 0.001, step 12 within 0.001"


def test_where_gpus_are_missing_the_cpu_repeats_what_takes_minutes(run, monkeypatch):
    check, devices = replayed(run, monkeypatch, num_gpus=1)
    assert (check.status, devices) == ("warn", [])
    assert "not done: trained on 2 GPUs, of which this job sees 1; its" in check.message
    check, devices = replayed(run, monkeypatch, num_gpus=1, num_parameters=1e3)
    assert (check.status, devices) == ("ok", [(2, "cpu")])


def test_steps_of_cpus_are_repeated_on_cpus_however_long_they_take(run, monkeypatch):
    by_cpus = {**TRAINED, "made_by": {}}
    check, devices = replayed(run, monkeypatch, num_gpus=8, trained=by_cpus)
    assert (check.status, devices) == ("ok", [(2, "cpu")])


# --- skipped steps --------------------------------------------------------------------------------


def test_a_checkpoint_amid_a_series_of_skipped_steps_is_repeated_beyond_the_limit(run, monkeypatch):
    limits = []

    def run_here(*_, overrides, **__):
        limits.append(overrides["train.max_skipped_steps"])
        losses = list(loss("a", 11, 12).values())
        return RankRecord("completed", result=ReplayResult(losses, True, NUMERICS.to_json()))

    monkeypatch.setattr(replay, "run_here", run_here)
    log(run, "a", range(1, 20))
    made = checkpoint(skipped=SkippedSteps(steps=9, in_a_row=9))
    config = checked(ResolvedConfig, made.manifest.lineage.config.to_json(), "the test")
    assert check_next_losses(config, made, run).status == "ok"
    counts, settings = SkippedCounts.of(made.manifest), Train(on_nonfinite="skip")
    settings = settings.model_copy(update={"max_skipped_steps": limits[0]})
    assert [counts.count("not finite", settings) for _ in range(2)] == ["", ""]


def test_losses_after_a_step_that_only_one_of_both_skipped_are_not_compared(run):
    """train.spike or its factor was changed between the checkpoint and the launch."""
    log(run, "a", range(1, 11))
    log(run, "b", range(11, 13))
    events.record(run.events, events.Skipped(step=11, in_a_row=1, reason="a spike"))
    recorded = recorded_losses(run, checkpoint())
    assert recorded.skipped == {11}
    first, second = recorded.losses.values()

    def check(losses, skipped):
        result = ReplayResult(losses, True, NUMERICS.to_json(), skipped=skipped)
        return _compare(checkpoint(), recorded, result)

    assert check([first, second], [11]).status == "ok"
    assert check([first, second + 1], [11]).status == "fail"
    other = check([first, second + 1], [])
    assert (
        other.status == "warn" and "step 11 was skipped in training and not here" in other.message
    )
    assert check([first + 1, second + 1], []).status == "fail"


# --- tolerance ------------------------------------------------------------------------------------

TWO = Recorded({11: 3.0, 12: 2.9}, by_maker=True)
TWO_THREADS = NUMERICS.model_copy(update={"threads": 2})


def compare(losses, made=None, recorded=TWO, finite=True, numerics=NUMERICS):
    result = ReplayResult(losses, finite, numerics.to_json())
    return _compare(made or checkpoint(), recorded, result)


def test_equal_conditions_must_give_bitwise_equal_losses():
    assert compare([3.0, 2.9]).status == "ok"
    check = compare([3.0, 2.9000001])
    assert check.status == "fail"
    assert "step 12, recorded 2.9; must be bitwise equal: the optimizer state" in check.message
    check = compare([3.0000001, 2.9])
    assert check.status == "fail" and "weights or data differ" in check.message


@pytest.mark.parametrize(
    "conditions",
    [
        {"recorded": Recorded(TWO.losses, by_maker=False)},
        {"numerics": TWO_THREADS},
        {"made": checkpoint(why_not_compiled="")},
        {
            "made": checkpoint(
                made_by={"versions": Versions(python="3.11.9", torch="another", torchao=None)}
            )
        },
        {"made": checkpoint(made_by={"hardware": Hardware(host="laptop", cpu="another")})},
    ],
)
def test_other_conditions_have_a_tolerance(conditions):
    assert compare([3.0001, 2.9001], **conditions).status == "ok"
    check = compare([3.01, 2.9], **conditions)
    assert check.status == "fail" and "must be within 0.001" in check.message


def test_dropout_under_other_conditions_only_warns(run):
    made = checkpoint(dropout=0.1)
    assert compare([3.0, 2.9], made).status == "ok"
    assert compare([3.1, 2.9], made).status == "fail"
    check = compare([3.1, 2.9], made, numerics=TWO_THREADS)
    assert check.status == "warn" and check.message.startswith("not done: dropout")
    log(run, "a", range(1, 20))
    check = check_next_losses(None, checkpoint(dropout=0.1, why_not_compiled=""), run)
    assert check.status == "warn" and check.message.startswith("not done: dropout")


@pytest.mark.parametrize("shard", ["none", "all"])
def test_many_ranks_have_no_tolerance_either(shard):
    many = checkpoint(world_size=3, train={"shard": shard})
    assert compare([3.0, 2.9], many).status == "ok"
    assert compare([3.0, 2.9000001], many).status == "fail"


@pytest.mark.parametrize("broken", [{"losses": [3.0, None]}, {"finite": False}])
def test_numbers_that_are_not_finite_fail(broken):
    assert compare(**{"losses": [3.0, 2.9], **broken}).status == "fail"
