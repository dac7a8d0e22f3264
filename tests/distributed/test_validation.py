"""Against a corrupt checkpoint that is not rejected, or a valid one that is: of one run, or of all.

A checkpoint with the right weights and a wrong optimizer state trains to another model, which only the
replay check detects. A repair that moves valid checkpoints away loses work.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch.distributed.checkpoint as dcp
from support.live_run import GOAL, TWO_RANKS, forge
from support.saved import make_digests_right, state_of

from forge.checkpoint import directory, resume, storage
from forge.checkpoint.manifest import FORMAT, MANIFEST, Manifest
from forge.core import failpoints
from forge.core.files import read_json, write_json
from forge.core.records import Validated
from forge.hosts.lock import lock

LAST, BEFORE = f"step-{GOAL:08d}", "step-00000195"


@pytest.fixture
def run(uninterrupted, tmp_path):
    """A finished run with two checkpoints; its last one was found valid."""
    copy = uninterrupted.copy(tmp_path / "copied")
    Validated(step=GOAL, checkpoint_digest="d" * 64).write(copy.paths.validated)
    return copy


@pytest.fixture(scope="module")
def ten_ranks(session_runs):
    """A run of one step on ten ranks."""
    steps = ("--train.max_steps=1", "--train.decay_steps=1", "--train.warmup_steps=0")
    run = session_runs("ten", "--train.batch_size=10", *steps)
    outcome = run.fork("train", "--machine.launcher=torchrun", "--ranks-per-node=10").end()
    assert outcome.code == 0, outcome.text
    return run


@pytest.fixture
def hook():
    """Sets what happens at the points that a validation in this process comes by."""

    def install(action):
        failpoints.hook = action

    yield install
    failpoints.hook = None


def damage(folder):
    path = next(folder.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path.name


def rewrite(folder, state):
    """The checkpoint as if it had been saved with this state."""
    for path in folder.glob("*.distcp"):
        path.unlink()
    dcp.save(state, storage_writer=storage.TensorWriter(folder, 1), no_dist=True)
    make_digests_right(folder)


def content(run):
    """Every file of the run with its bytes, and where `latest` points."""
    files = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    return files, run.paths.latest.readlink()


def table(text):
    """The rows by step: the other cells as they stand there."""
    head, *rows = text.splitlines()
    assert head.endswith("verdict")
    return {row.split()[0]: row for row in rows}


def names(folder):
    return sorted(path.name for path in folder.glob("step-*"))


def cheaply(run, *more):
    return forge("validate", str(run.folder), "--validate.depth=digests", *more)


# --- all of a run ---------------------------------------------------------------------------------


def test_all_checkpoints_are_in_the_table_and_nothing_is_changed(run, capsys):
    before = content(run)
    outcome = forge("validate", str(run.folder), "--all", run.data)
    assert outcome.code == 0, outcome.text
    rows = table(capsys.readouterr().out)
    assert list(rows) == [str(GOAL), "195"]
    assert rows["195"].endswith("ok       ok     ok     ok            valid")
    assert rows[str(GOAL)].endswith("ok       ok     ok     not recorded  valid")
    assert content(run) == before


def test_each_corrupt_one_is_named_with_its_reason_whatever_latest_is(run, capsys):
    file = damage(run.paths.checkpoints / BEFORE)
    before = content(run)
    outcome = cheaply(run, "--all")
    assert outcome.code == 65
    assert f"{BEFORE}: invalid: digests: {file} has digest" in outcome.text
    assert f"1 of 2 checkpoints of {run.folder} are invalid: {BEFORE}" in outcome.text
    assert f"forge validate {run.folder} --fix" in outcome.text
    rows = table(capsys.readouterr().out)
    assert "FAIL" in rows["195"] and rows["195"].endswith("invalid")
    assert rows[str(GOAL)].endswith("valid") and "FAIL" not in rows[str(GOAL)]
    assert content(run) == before


def test_a_folder_that_is_no_run_is_a_mistake_of_the_command(run):
    outcome = forge("validate", str(run.paths.checkpoints / LAST), "--all")
    assert outcome.code == 78 and "is not a run's folder" in outcome.text


def test_checkpoint_of_another_version_is_neither_invalid_nor_moved(run, capsys):
    manifest = run.paths.checkpoints / BEFORE / MANIFEST
    write_json(manifest, {**read_json(manifest), "format": FORMAT + 1})
    assert cheaply(run, "--fix").code == 0
    assert table(capsys.readouterr().out)["195"].endswith("other format")
    assert names(run.paths.checkpoints) == [BEFORE, LAST]


def test_checkpoint_that_training_prunes_meanwhile_is_not_called_invalid(run, hook, capsys):
    def prune(name, path):
        if name == "load.verify" and path.name == BEFORE:
            shutil.rmtree(path)

    hook(prune)
    outcome = cheaply(run, "--all")
    assert outcome.code == 0, outcome.text
    assert table(capsys.readouterr().out)["195"].endswith("gone")


@pytest.mark.parametrize("point", ["load.verify", "load.read"])
def test_checkpoint_that_is_pruned_while_it_is_validated_is_said_to_be_removed(run, hook, point):
    folder = run.paths.checkpoints / BEFORE

    def prune(name, path):
        if name == point and path.name == BEFORE:
            shutil.rmtree(path)

    hook(prune)
    outcome = forge("validate", str(folder), "--validate.depth=load", run.data)
    assert outcome.code == 65, outcome.text
    assert f"{folder} was removed while it was read" in outcome.text
    assert "invalid" not in outcome.text and "bug" not in outcome.text


def test_verdict_of_a_corrupt_checkpoint_takes_the_one_before_so_that_the_workflow_validates_again(
    run,
):
    damage(run.paths.checkpoints / LAST)
    outcome = run.forge("validate", "--validate.depth=digests")
    assert outcome.code == 65, outcome.text
    assert read_json(run.paths.validation)["status"] == "invalid"
    assert not run.paths.validated.exists()


# --- recorded losses ------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "code"), [(0, 65), (5, 65), (9, 65), (4, 0)])
def test_wrong_loss_of_a_chosen_rank_is_found(ten_ranks, tmp_path, rank, code):
    """Eight of ten ranks are chosen; 4 is not among them."""
    run = ten_ranks.copy(tmp_path / "wrong")
    folder = resume.latest(run.paths).folder
    manifest = Manifest.read(folder)
    losses = list(manifest.reference.losses)
    losses[rank] += 1e-4
    reference = manifest.reference.model_copy(update={"losses": losses})
    manifest.model_copy(update={"reference": reference}).write(folder)
    outcome = run.forge("validate")
    assert outcome.code == code, outcome.text
    if code:
        assert f"of rank {rank}, recorded {losses[rank]}; must be bitwise equal" in outcome.text
    else:
        assert "ok   probe: 8 of 10 recorded losses recomputed, bitwise equal" in outcome.text


# --- training on ----------------------------------------------------------------------------------


# DCP warns that it overwrites, and that it runs in one process.
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
def test_optimizer_state_of_another_step_passes_the_probe_and_fails_the_next_loss(run):
    folder = run.paths.checkpoints / BEFORE
    state, later = state_of(folder), state_of(run.paths.checkpoints / LAST)
    state.update({name: later[name] for name in state if name.startswith("optimizer.")})
    rewrite(folder, state)
    outcome = forge("validate", str(folder), run.data)
    assert outcome.code == 65, outcome.text
    assert "ok   probe: 2 of 2 recorded losses recomputed, bitwise equal" in outcome.text
    assert "fail next loss: loss " in outcome.text
    assert (
        "of step 197, recorded " in outcome.text and "the optimizer state differs" in outcome.text
    )


def test_every_fifth_loss_is_enough_and_one_rank_is_trained_on_as_well(solo, tmp_path):
    run = solo.copy(tmp_path / "sparse")
    lines = run.paths.metrics.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] % 5 == 0]  # as with log_every: 5
    run.paths.metrics.write_text("".join(kept))
    outcome = forge("validate", str(run.paths.checkpoints / "step-00000006"), run.data)
    assert outcome.code == 0, outcome.text
    assert "ok   next loss: replayed: step 10 bitwise equal" in outcome.text


# --- repair ---------------------------------------------------------------------------------------


def test_corrupt_last_checkpoint_is_moved_and_the_run_resumes_to_the_same_weights(run):
    wanted = run.weights_digest()
    damage(run.paths.checkpoints / LAST)
    outcome = cheaply(run, "--fix")
    assert outcome.code == 65
    assert names(run.paths.quarantine) == [LAST] and names(run.paths.checkpoints) == [BEFORE]
    assert "digests: " in read_json(run.paths.quarantine / LAST / "damage.json")["reasons"][0]
    assert run.paths.latest.resolve().name == BEFORE
    assert not run.paths.trained.exists() and not run.paths.validated.exists()
    assert "rerun the command that trained the run: it resumes from step 195" in outcome.text
    trained = run.forge("train", *TWO_RANKS)
    assert trained.code == 0, trained.text
    assert run.weights_digest() == wanted


def test_corrupt_older_checkpoint_is_moved_and_the_run_stays_complete(run, capsys):
    (run.paths.checkpoints / BEFORE / MANIFEST).unlink()
    outcome = cheaply(run, "--fix")
    assert outcome.code == 65 and "the run is at its goal" in outcome.text
    assert names(run.paths.quarantine) == [BEFORE]
    assert run.paths.latest.resolve().name == LAST
    assert run.paths.trained.exists() and run.paths.validated.exists()
    capsys.readouterr()
    outcome = cheaply(run, "--all")
    assert outcome.code == 0, outcome.text
    assert table(capsys.readouterr().out)["195"].endswith("in quarantine")


def test_when_all_are_corrupt_all_are_moved_and_the_run_starts_again(run):
    damage(run.paths.checkpoints / LAST)
    damage(run.paths.checkpoints / BEFORE)
    outcome = cheaply(run, "--fix")
    assert outcome.code == 65 and "it starts at step 0" in outcome.text
    assert names(run.paths.quarantine) == [BEFORE, LAST]
    assert not run.paths.latest.is_symlink() and not run.paths.trained.exists()


def test_latest_that_points_to_nothing_is_reported_and_repaired(run):
    shutil.rmtree(run.paths.checkpoints / LAST)
    outcome = cheaply(run, "--all")
    assert outcome.code == 65 and f"points to {LAST}, which does not exist" in outcome.text
    assert cheaply(run, "--fix").code == 65
    assert run.paths.latest.resolve().name == BEFORE
    assert cheaply(run, "--all").code == 0


def test_config_that_was_edited_moves_no_checkpoint(run):
    outcome = run.forge("validate", "--fix", "--validate.depth=load", "--model.dropout=0.2")
    assert outcome.code == 65
    assert "model.dropout is 0.2" in outcome.text and "the files are valid" in outcome.text
    assert names(run.paths.checkpoints) == [BEFORE, LAST]
    assert run.paths.trained.exists()


def test_config_that_does_not_fit_says_nothing_of_the_checkpoint(run):
    """validated.json and the event log stay: the checkpoint is as good as before the config was
    edited."""
    before = content(run)
    outcome = run.forge("validate", "--validate.depth=load", f"--train.max_steps={GOAL - 5}")
    assert outcome.code == 78, outcome.text
    assert f"train.max_steps is {GOAL - 5}, but" in outcome.text
    assert content(run) == before


def test_no_repair_while_training_holds_the_run(run):
    damage(run.paths.checkpoints / LAST)
    with lock(run.paths.root, "train"):
        outcome = cheaply(run, "--fix")
    assert outcome.code == 69 and "is being written by `forge train`" in outcome.text
    assert names(run.paths.checkpoints) == [BEFORE, LAST]


@pytest.mark.parametrize("point", ["load.verify", "load.read"])
def test_error_of_the_disk_moves_nothing(run, hook, point):
    damage(run.paths.checkpoints / LAST)

    def fail(name, path):
        if name == point and path.name == BEFORE:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    hook(fail)
    outcome = forge("validate", str(run.folder), "--fix", "--validate.depth=load", run.data)
    assert outcome.code == 69, outcome.text
    assert f"{BEFORE}: unknown: " in outcome.text and "nothing was moved" in outcome.text
    assert names(run.paths.checkpoints) == [BEFORE, LAST]
    assert run.paths.trained.exists() and run.paths.latest.resolve().name == LAST


# --- beyond memory --------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
from forge import cli
import forge.validation.model_checks  # and torch, at every validate.depth
assert cli.main(sys.argv[1:]) == 0
lines = Path("/proc/self/status").read_text().splitlines()
print("peak", next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


def peak_bytes(*arguments):
    """Most memory that a `forge` command in a process of its own has held at once."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments], check=True, capture_output=True, text=True
    )
    return int(done.stdout.split()[-1]) * 1024


def test_validation_has_the_weights_in_memory_once_and_not_the_optimizer_state(session_runs):
    sizes = ("--model.dim=512", "--model.layers=8", "--model.heads=8", "--model.ffn_dim=1408")
    steps = ("--train.max_steps=2", "--train.warmup_steps=0", "--train.checkpoint_every=1")
    run = session_runs("large", *sizes, *steps)
    outcome = run.forge("train", *TWO_RANKS)
    assert outcome.code == 0, outcome.text
    checkpoint = resume.latest(run.paths)
    state = state_of(checkpoint.folder)
    moments = sum(tensor.nbytes for name, tensor in state.items() if name.startswith("optimizer."))
    weights = sum(tensor.nbytes for tensor in state.values()) - moments
    assert moments > 190 * 2**20
    assert len(directory.committed(run.paths.checkpoints)) == 2
    before = peak_bytes("validate", str(run.folder), "--all", "--validate.depth=digests", run.data)
    peak = peak_bytes("validate", str(run.folder), "--all", "--validate.depth=load", run.data)
    print(f"{weights:,} bytes of weights, {moments:,} of moments, {peak - before:,} at once")
    assert weights < peak - before < weights + 0.75 * moments
