"""Against losses that depend on where validation computes them: in one process, or on ranks that share
the weights. Gloo ranks take the place of those on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.live_run import forge

from forge.checkpoint import resume, storage
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Manifest
from forge.core.config import ResolvedConfig, checked
from forge.data.shards import ShardSet
from forge.launch.rank_records import LossesTask
from forge.trainer.models.decoder import make_decoder
from forge.trainer.numerics import prepare
from forge.validation import estimates, replay
from forge.validation.rank_losses import LossEvaluator

EARLIER = "step-00000006"


def of_gpus(run):
    """The same run, as if a GPU had trained its checkpoints."""
    for folder in run.paths.checkpoints.glob("step-*"):
        manifest = Manifest.read(folder)
        numerics = manifest.lineage.numerics
        on_gpu = numerics.model_copy(update={"device": "cuda", "device_name": "NVIDIA H100"})
        lineage = manifest.lineage.model_copy(update={"numerics": on_gpu})
        manifest.model_copy(update={"lineage": lineage}).write(folder)
    return run


@pytest.fixture
def two_gpus(monkeypatch):
    """A node that shows two GPUs, of which ranks find none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def launched(two_gpus, monkeypatch):
    """(ranks, device) of each launch of fresh ranks, all of which run on the CPU."""
    found, machine = [], replay._machine

    def on_cpu(num_ranks, device):
        found.append((num_ranks, device))
        return machine(num_ranks, "cpu")

    monkeypatch.setattr(replay, "_machine", on_cpu)
    return found


def work_on(run, precision="fp32"):
    """Checkpoint and config of a run, and a task for which ranks have unequal work."""
    checkpoint = resume.latest(run.paths)
    config = checked(ResolvedConfig, checkpoint.manifest.lineage.config.to_json(), "the test")
    task = LossesTask(
        checkpoint=str(checkpoint.folder),
        shards=replay.shards_folder(config),
        precision=precision,
        threads=1,
        ranks=[0, 3, 7],
        eval_samples=11,
        prompts=[[1, 2, 3], [4], [5, 6]],
        sample_tokens=5,
    )
    return checkpoint, config, task


def in_this_process(checkpoint, config, task, damage=lambda model: None):
    prepare(torch.device("cpu"))
    shards = ShardSet.open(Path(task.shards))
    model = make_decoder(config.model, shards.vocab_size).to_empty(device="cpu")
    storage.read_tensors({"model": model.state_dict()}, checkpoint.folder, no_dist=True)
    damage(model)
    return LossEvaluator(model, shards, config).compute(task)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_compute_the_losses_and_samples_of_one_process(solo, num_ranks, precision):
    checkpoint, config, task = work_on(solo, precision)
    alone = in_this_process(checkpoint, config, task)
    record = replay.run_here(task, config, checkpoint, num_ranks, "cpu")
    assert record.status == "completed", record.message
    found = record.result
    assert found.reference == alone.reference and len(set(alone.reference)) == 3
    assert found.validation[""][0] == pytest.approx(alone.validation[""][0], rel=1e-6)
    assert found.validation[""][1] == alone.validation[""][1] == 11 * config.train.seq_len
    assert found.samples == alone.samples
    assert [len(ids) for ids in found.samples] == [5, 5, 5]
    assert found.numerics == alone.numerics


def test_losses_that_are_not_finite_have_no_number_and_no_samples(solo):
    """Records are JSON, which has no NaN, and torch cannot draw from NaN."""
    overflow = lambda model: model.model.norm.weight.data.fill_(1e38)  # noqa: E731
    found = in_this_process(*work_on(solo), damage=overflow)
    assert found.reference == [None, None, None]
    assert found.validation[""][0] is None and found.samples == []


def test_checkpoint_of_gpus_is_validated_on_those_of_the_job(solo, tmp_path, launched):
    run = of_gpus(solo.copy(tmp_path / "gpus"))
    outcome = forge("validate", str(run.paths.checkpoints / EARLIER), run.data)
    assert outcome.code == 0, outcome.text
    assert "probe: 1 of 1 recorded losses recomputed, within 0.001, on 2 GPUs" in outcome.text
    assert "next loss: replayed: step 7 within 0.001, step 8 within 0.001" in outcome.text
    assert "over 128 tokens, on 2 GPUs" in outcome.text
    assert "samples: 3 prompts continued" in outcome.text
    assert launched == [(2, "cpu"), (2, "cuda"), (1, "cuda"), (2, "cuda")]


def test_wrong_loss_is_found_on_gpus(solo, tmp_path, launched):
    run = of_gpus(solo.copy(tmp_path / "wrong"))
    folder = run.paths.checkpoints / EARLIER
    manifest = Manifest.read(folder)
    wrong = manifest.reference.model_copy(update={"losses": [manifest.reference.losses[0] + 0.01]})
    manifest.model_copy(update={"reference": wrong}).write(folder)
    outcome = forge("validate", str(folder), run.data)
    assert outcome.code == 65
    assert "must be within 0.001, on 2 GPUs" in outcome.text


def test_where_gpus_fail_the_cpu_computes_the_losses(solo, tmp_path, two_gpus):
    run = of_gpus(solo.copy(tmp_path / "failing"))
    outcome = forge("validate", str(run.paths.checkpoints / EARLIER), run.data)
    assert outcome.code == 0, outcome.text
    said = "on the CPU, since it failed on 2 GPUs: 2 of 2 ranks have no GPU of their own"
    assert f"recomputed, within 0.001, {said}" in outcome.text
    assert "next loss: not done: 1 ranks here: 1 of 1 ranks have no GPU" in outcome.text
    assert f"over 128 tokens, {said}" in outcome.text


def test_without_gpus_the_cpu_computes_what_takes_minutes(session_runs, tmp_path, monkeypatch):
    run = session_runs("four", "--train.checkpoint_every=6")
    trained = run.fork("train", "--machine.launcher=torchrun", "--ranks-per-node=4").end()
    assert trained.code == 0, trained.text
    of_gpus(run)
    checkpoint = Checkpoint.open(run.paths.checkpoints / EARLIER)
    weights = sum(file.bytes for file in checkpoint.manifest.files.values()) / 12
    # The losses of two ranks take all the time that there is.
    seconds = estimates.CPU_SEC / 2
    tokens = 4 * 16
    cores = replay.available_cores()
    monkeypatch.setattr(estimates, "CORE_FLOPS", 2 * weights * tokens / seconds / cores * 1.2)
    outcome = forge("validate", str(checkpoint.folder), run.data)
    assert outcome.code == 0, outcome.text
    assert (
        "probe: 2 of 4 recorded losses recomputed, within 0.001, on the CPU (faster" in outcome.text
    )
    assert "trained on 4 GPUs, of which this job sees 0" in outcome.text
