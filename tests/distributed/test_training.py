"""Against silent differences: a config trains alike, whoever runs it and in how many starts."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace

import pytest
import torch
from support.live_run import TWO_RANKS, wait_until

from forge.checkpoint import resume, storage
from forge.core import json_lines
from forge.core.errors import Exit
from forge.core.paths import kernels_folder
from forge.trainer import metrics
from forge.trainer.metrics import TrainLine
from forge.trainer.parallel import NOT_ASKED

SAME_LOSS = 1e-4
COMPILING_SEC = 240.0  # on cores that other tests keep busy


def losses_of(run):
    return dict(run.losses())


def assert_same_losses(found, expected, steps):
    apart = {step: abs(found[step] - expected[step]) for step in steps}
    assert max(apart.values()) < SAME_LOSS, apart


def next_sample(run):
    checkpoint = resume.latest(run.paths)
    return checkpoint.step, checkpoint.manifest.next_sample, checkpoint.manifest.world_size


# --- how many ranks, how they share the model -------------------------------------------------------


def test_sharded_replicated_and_one_rank_with_accumulation_give_the_same_losses(
    runs, solo, tmp_path
):
    # Two copies of the model, each held by two ranks that recompute.
    sharded = ("--train.shard=2", "--train.recompute=selective")
    run = runs("shared", "--train.max_steps=3", *sharded)
    outcome = run.forge("train", "--machine.launcher=torchrun", "--ranks-per-node=4")
    assert outcome.code == 0, outcome.text
    assert next_sample(run) == (3, 24, 4)
    narrow = run.copy(tmp_path / "narrow")

    # From its checkpoint training resumes on one rank, in micro-batches, and on two that replicate.
    settings = ("--train.max_steps=6", "--train.shard=none")
    started = narrow.fork("train", *settings, "--train.micro_batch_size=2")
    replicated = run.forge("train", *settings, *TWO_RANKS)
    assert replicated.code == 0, replicated.text
    on_one_rank = started.end()
    assert on_one_rank.code == 0, on_one_rank.text
    assert next_sample(run) == (6, 48, 2)
    assert next_sample(narrow) == (6, 48, 1)

    expected = losses_of(solo)
    assert_same_losses(losses_of(run), expected, range(1, 7))
    assert_same_losses(losses_of(narrow), expected, range(1, 7))


def test_bf16_trains_near_fp32(bf16, solo):
    found, expected = losses_of(bf16), losses_of(solo)
    assert found != {step: expected[step] for step in found}
    assert max(abs(found[step] - expected[step]) for step in found) < 0.05
    [init] = bf16.events("init")
    assert init["numerics"]["precision"] == "bf16"


def test_compile_without_a_compiler_warns_and_trains(runs, solo, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run = runs("plain", "--train.compile=true", "--train.max_steps=2")
    outcome = run.forge("train")
    assert outcome.code == 0, outcome.text
    assert "warning: training without torch.compile: no C++ compiler on the PATH" in outcome.text
    assert losses_of(run) == {step: losses_of(solo)[step] for step in (1, 2)}


@pytest.mark.weekly
def test_run_that_began_compiled_is_refused_where_it_cannot_be_until_the_key_is_changed(
    runs, tmp_path, monkeypatch
):
    run = runs("began-compiled", "--train.compile=true", "--train.max_steps=2")
    assert run.forge("train").code == 0
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = run.forge("train", "--train.max_steps=3")
    assert refused.code == Exit.UNFIT, refused.text
    assert "cannot compile: no C++ compiler on the PATH" in refused.text
    assert "set train.compile: false" in refused.text
    assert len(run.events("save")) == 1
    ended = run.forge("train", "--train.max_steps=3", "--train.compile=false")
    assert ended.code == 0, ended.text
    assert [event["why_not_compiled"] for event in run.events("init")] == ["", NOT_ASKED]
    lines = [line for line in metrics.read(run.paths.metrics) if isinstance(line, TrainLine)]
    assert [line.compiled for line in lines] == [True, True, False]


def test_run_that_began_uncompiled_stays_so_where_it_could_be_compiled(runs, solo, tmp_path):
    run = runs("began-uncompiled", "--train.compile=true", "--train.max_steps=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert run.forge("train").code == 0
    outcome = run.forge("train", "--train.max_steps=4")
    assert outcome.code == 0, outcome.text
    reasons = [event["why_not_compiled"] for event in run.events("init")]
    assert reasons == ["no C++ compiler on the PATH"] * 2
    assert losses_of(run)[4] == losses_of(solo)[4]


@pytest.mark.weekly
def test_compiled_kernels_survive_a_requeue_and_are_removed_at_the_goal(
    runs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # the project
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    run = runs("kept-kernels", "--train.compile=true", "--train.max_steps=100000")
    kernels = kernels_folder(run.folder)
    stop_after_a_step(run)
    compiled = {path: path.stat().st_mtime_ns for path in kernels.rglob("*.so")}
    assert compiled
    # torch's default is a name that anybody can make before; its headers are code, too.
    assert not list((tmp_path / "node").glob("torchinductor_*"))
    assert list(kernels.rglob("precompiled_headers/*.h"))
    stop_after_a_step(run)
    assert {path: path.stat().st_mtime_ns for path in kernels.rglob("*.so")} == compiled
    assert not list(run.folder.rglob("*.so"))
    ended = run.forge("train", f"--train.max_steps={run.step() + 1}")
    assert ended.code == 0, ended.text
    assert not kernels.exists()


def stop_after_a_step(run):
    """A launch that is asked to stop when it has taken a step."""
    before = run.step()
    started = run.start("train")
    wait_until(lambda: run.step() > before, f"a step after {before}", COMPILING_SEC)
    started.process.send_signal(signal.SIGTERM)
    ended = started.end()
    assert ended.code == Exit.STOPPED, ended.text


# --- going on ---------------------------------------------------------------------------------------


def test_raised_max_steps_ends_as_a_run_that_was_never_shorter(runs, solo):
    run = runs("raised", "--train.max_steps=6")
    assert run.forge("train").code == 0
    outcome = run.forge("train", "--train.max_steps=12")
    assert outcome.code == 0, outcome.text
    assert [event["step"] for event in run.events("init")] == [0, 6]
    assert run.losses() == solo.losses()
    assert run.weights_digest() == solo.weights_digest()


def test_steps_beyond_the_decay_warn_and_run_at_the_minimum_rate(solo, tmp_path):
    run = solo.copy(tmp_path / "beyond")
    outcome = run.forge("train", "--train.max_steps=14")
    assert outcome.code == 0, outcome.text
    assert "warning: train.max_steps 14 is beyond decay_steps 12" in outcome.text
    last = json_lines.read(run.paths.metrics)[-3:]
    assert [line["lr"] for line in last if line["kind"] == "train"] == [3e-3 * 0.1] * 2


def test_goal_below_the_last_checkpoint_is_refused_and_nothing_deleted(solo, tmp_path):
    run = solo.copy(tmp_path / "lowered")
    before = listing(run)
    outcome = run.forge("train", "--train.max_steps=10")
    assert outcome.code == 78
    assert "train.max_steps is 10" in outcome.text
    assert listing(run) == before


def test_changed_learning_rate_is_refused_by_name_and_config_stays(solo, tmp_path):
    run = solo.copy(tmp_path / "changed")
    assert run.forge("config").code == 0
    before = listing(run)
    outcome = run.forge("train", "--train.lr=0.01")
    assert outcome.code == 78
    assert "train.lr is 0.01, the checkpoint has 0.003" in outcome.text
    assert listing(run) == before


def listing(run):
    """Name and content of every file."""
    return {path: path.read_bytes() for path in sorted(run.folder.rglob("*")) if path.is_file()}


def test_run_at_its_goal_starts_no_rank(solo, tmp_path):
    run = solo.copy(tmp_path / "finished")
    outcome = run.forge("train")
    assert outcome.code == 0
    assert "nothing to train" in outcome.text
    assert len(run.events("launch")) == 1
    assert run.weights_digest() == solo.weights_digest()


# --- what must not be trained on --------------------------------------------------------------------


def test_ranks_with_staged_shards_need_no_data_directory(runs, solo, tiny_project, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tiny_project / "data", data)
    run = runs("staged", f"--data={data}", "--train.checkpoint_every=6")
    here = ("--machine.stage.mode=always", f"--machine.stage.folder={tmp_path}/disk")
    assert run.forge("stage", *here, "--machine.stage.keep=true").code == 0
    shutil.rmtree(data)
    outcome = run.forge("train")
    assert outcome.code == 0, outcome.text
    assert run.weights_digest() == solo.weights_digest()


def test_data_edited_in_place_under_a_run_is_refused(solo, tiny_project, tmp_path):
    """A flipped byte in a shard; another tokenizer under the same id."""
    started = {}
    for name in ("shard", "tokenizer"):
        shutil.copytree(tiny_project / "data", tmp_path / f"data-{name}")
        run = solo.copy(tmp_path / name)
        data = f"--data={tmp_path}/data-{name}"
        started[name] = replace(run, overrides=(*run.overrides, data))
    lineage = resume.latest(solo.paths).manifest.lineage  # other tests have data in the same folder
    shard = next((tmp_path / "data-shard/tokens" / lineage.tokens.id).glob("*.bin"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    tokenizer = tmp_path / "data-tokenizer/tokenizers" / lineage.tokenizer.id / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")

    under_way = [run.fork("train", "--train.max_steps=14") for run in started.values()]
    damaged, other = (command.end() for command in under_way)
    assert damaged.code == 65
    assert shard.name in damaged.text
    assert other.code == 65
    assert "the tokenizer of this run have digest" in other.text
    for run in started.values():
        assert resume.latest(run.paths).step == 12


def test_divergence_ends_with_70_and_leaves_finite_weights(runs):
    """1e30 breaks the gradients of the next step, 3e38 the weights themselves."""
    settings = ("--train.warmup_steps=0", "--train.checkpoint_every=1")
    late, at_once = (
        runs(f"diverged-{rate}", f"--train.lr={rate}", *settings) for rate in ("1e30", "3e38")
    )
    for started in [run.fork("train") for run in (late, at_once)]:
        outcome = started.end()
        assert outcome.code == 70, outcome.text
        assert "not finite" in outcome.text
        assert "Traceback" not in outcome.text
    assert_finite(resume.latest(late.paths))
    assert resume.latest(at_once.paths) is None

    for run in (late, at_once):
        again = run.forge("train")
        assert again.code == 70
        assert "failed before" in again.text
        assert len(run.events("launch")) == 1


def assert_finite(checkpoint):
    index = storage.SafeReader(checkpoint.folder).read_metadata()
    names = [name for name in index.state_dict_metadata if name.startswith("model.")]
    state = {name: torch.empty(index.state_dict_metadata[name].size) for name in names}
    storage.read_tensors(state, checkpoint.folder, no_dist=True)
    assert names
    assert [name for name in names if not torch.isfinite(state[name]).all()] == []


def test_ranks_variables_left_over_in_the_shell_are_named_and_what_to_do(runs):
    ended = runs("left-over").start("train", RANK="3", WORLD_SIZE="8").end()
    assert ended.code == 78, ended.text
    assert "the environment has RANK=3, WORLD_SIZE=8" in ended.text
    assert "unset RANK WORLD_SIZE" in ended.text
