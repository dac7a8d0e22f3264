"""A run that starts from a checkpoint of another one trains on exactly, and a diverged one has a way on.

Threats: a start from other weights, moments or samples than the parent's; from a corrupt checkpoint;
anything written into the parent's directory.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import pytest
from support.forked import stop_before_a_step
from support.live_run import GOAL, TWO_RANKS, forge

from forge.checkpoint import directory, resume
from forge.core.files import read_json
from forge.core.paths import checkpoint_step
from forge.reporting.summary import summarize


@pytest.fixture
def base(solo, tmp_path):
    """A finished run with checkpoints at 6 and 12."""
    return solo.copy(tmp_path / "base")


def child_of(run, name, parent, *overrides):
    """A run in the same `results`, with the settings of `run`."""
    arguments = (*run.overrides, f"--run={name}", f"--parent={parent}", *overrides)
    return replace(run, folder=run.folder.parent / name, overrides=arguments)


def listing(run):
    return {path: path.read_bytes() for path in sorted(run.folder.rglob("*")) if path.is_file()}


def trained(run, *more):
    outcome = run.forge("train", *more)
    assert outcome.code == 0, outcome.text
    return outcome


def test_unchanged_settings_give_the_weights_of_the_parents_own_continuation(base):
    child = child_of(base, "child", "base@6")
    before = listing(base)
    outcome = trained(child)
    assert f"start from {base.paths.checkpoints}/step-00000006" in outcome.text
    assert [event["step"] for event in child.events("init")] == [6]
    assert child.losses() == base.losses()[6:]
    assert child.weights_digest() == base.weights_digest()
    assert listing(base) == before


def test_two_ranks_with_dropout_start_from_a_parent_as_they_resume_also_after_a_stop_before_a_step(
    uninterrupted, tmp_path
):
    base = uninterrupted.copy(tmp_path / "base")
    step = checkpoint_step(directory.committed(base.paths.checkpoints)[0].name)
    child = child_of(base, "child", f"base@{step}")
    outcome = child.fork("train", *TWO_RANKS, arm=stop_before_a_step).end()
    assert outcome.code == 75, outcome.text
    assert f"stopped at step {step} of {GOAL}" in outcome.text
    assert "nothing had been trained yet" in outcome.text
    assert resume.latest(child.paths) is None

    trained(child, *TWO_RANKS)
    assert child.losses() == base.losses()[-len(child.losses()) :]
    assert child.step() == GOAL
    assert child.weights_digest() == base.weights_digest()


# The rate rises until weights grow by more than half at each step (lr x weight_decay > 2).
TOO_HOT = (
    *("--train.lr=4", "--train.weight_decay=1", "--train.warmup_steps=200"),
    *("--train.max_steps=400", "--train.decay_steps=400"),
    *("--train.checkpoint_every=10", "--train.keep_every=10"),
)


def test_run_that_diverged_resumes_under_a_new_name_with_a_lower_rate(runs):
    hot = runs("hot", *TOO_HOT)
    diverged = hot.forge("train")
    assert diverged.code == 70, diverged.text
    assert "not finite" in diverged.text
    newest = resume.latest(hot.paths).step
    assert f"start a new run with parent: hot@{newest}, or a step from before" in diverged.text
    assert newest > 40

    schedule = ("--train.warmup_steps=0", "--train.max_steps=30", "--train.decay_steps=null")
    cool = child_of(hot, "cool", "hot@20", "--train.lr=3e-3", *schedule)
    trained(cool)
    assert cool.losses()[0] == hot.losses()[20], "the first loss is of the parent's weights"
    assert cool.losses()[1] != hot.losses()[21], "the first update is at the run's own rate"
    assert resume.latest(cool.paths).manifest.decay_steps == 30, "the schedule is its own"
    validated = cool.forge("validate")
    assert validated.code == 0, validated.text

    then = directory.Checkpoint.open(hot.paths.checkpoints / "step-00000020").manifest.digest
    lineage = {"run": "hot", "step": 20, "digest": then}
    assert resume.latest(cool.paths).manifest.lineage.parent.to_json() == lineage
    assert read_json(cool.paths.trained)["parent"] == lineage
    assert ("parent", f"hot@20 (digest {then})") in summarize(cool.paths).lineage


def test_parent_alone_is_no_cure(runs):
    """With unchanged settings the same step diverges again."""
    hot = runs("hot", *TOO_HOT)
    first = hot.forge("train")
    child = child_of(hot, "child", f"hot@{resume.latest(hot.paths).step}")
    again = child.forge("train")
    assert (first.code, again.code) == (70, 70), again.text
    diverged = [run.events("failed")[-1]["message"].split("\n")[0] for run in (hot, child)]
    assert diverged[0] == diverged[1]
    assert f"parent: hot@{resume.latest(hot.paths).step}" in again.text
    assert resume.latest(child.paths) is None


def test_run_with_a_checkpoint_of_its_own_resumes_from_that_when_the_parent_is_gone(base):
    child = child_of(
        base, "child", "base@6", "--train.checkpoint_every=1", "--train.decay_steps=12"
    )
    trained(child, "--train.max_steps=8")
    lineage = resume.latest(child.paths).manifest.lineage.parent
    shutil.rmtree(base.folder)
    outcome = trained(child)
    assert f"resume from {child.paths.checkpoints}/step-00000008" in outcome.text
    assert resume.latest(child.paths).manifest.lineage.parent == lineage

    changed = child.forge("train", "--parent=base@12", "--train.max_steps=14")
    assert changed.code == 78
    assert "parent is 'base@12', the checkpoint has 'base@6'" in changed.text

    for checkpoint in directory.committed(child.paths.checkpoints):
        shutil.rmtree(checkpoint)
    lost = child.forge("train")
    assert lost.code == 78, "it starts from nothing else"
    assert "there is no run base" in lost.text


def test_corrupt_parent_is_refused_by_name_and_nothing_of_it_is_moved(base):
    """A flipped bit has the right size: only the ranks, which read all bytes, can see it."""
    file = next((base.paths.checkpoints / "step-00000012").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = listing(base)
    child = child_of(base, "child", "base@12", "--train.max_steps=14")
    refused = child.forge("train", *TWO_RANKS)
    assert refused.code == 65, refused.text
    assert f"its parent base@12 is corrupt: {file.name} has digest" in refused.text
    assert listing(base) == before
    assert resume.latest(child.paths) is None


def test_parent_that_does_not_fit_is_refused_before_anything_is_written(base):
    child = child_of(base, "child", "base@6", "--model.dim=64", "--train.batch_size=4")
    refused = child.forge("train")
    assert refused.code == 78
    assert "model.dim is 64, the checkpoint has 32" in refused.text
    assert "train.batch_size is 4, the checkpoint has 8" in refused.text
    missing = child_of(base, "child", "base@7").forge("train")
    assert missing.code == 78
    assert "has the steps 6, 12" in missing.text
    assert not child.paths.config.exists()
    assert not child.paths.checkpoints.exists()


def test_a_lone_checkpoint_of_a_child_is_valid_where_its_parent_is_not(base, tmp_path):
    child = child_of(base, "child", "base@6")
    trained(child)
    copy = shutil.copytree(resume.latest(child.paths).folder, tmp_path / "elsewhere" / "best")
    shutil.rmtree(base.folder)
    outcome = forge("validate", str(copy), child.data)
    assert outcome.code == 0, outcome.text


def test_child_goes_on_from_a_parent_trained_again_alike_and_is_refused_after_another(runs):
    """On two ranks: the parent's second training has the bytes of the first."""
    base = runs("base", "--train.checkpoint_every=6")
    trained(base, *TWO_RANKS)
    child = child_of(base, "child", "base@6", "--train.decay_steps=12")
    trained(child, *TWO_RANKS, "--train.max_steps=8")
    shutil.rmtree(base.folder)
    trained(base, *TWO_RANKS)
    assert "digest" not in trained(child, *TWO_RANKS, "--train.max_steps=10").text

    shutil.rmtree(base.folder)
    trained(base, *TWO_RANKS, "--train.seed=7")
    before = listing(child)
    refused = child.forge("train", *TWO_RANKS)
    assert refused.code == 78, refused.text
    assert "run child started from base@6 with digest" in refused.text
    assert listing(child) == before
    complete = trained(child, *TWO_RANKS, "--train.max_steps=10").text
    assert "it is complete and stays as it is" in complete and "nothing to train" in complete

    aside = child.folder.with_name("child.old")
    move = f"mv {child.folder} {aside}"
    assert f"rerun the command after {move};" in refused.text
    subprocess.run(move.split(), check=True)
    losses = replace(child, folder=aside).losses()
    trained(child, *TWO_RANKS)
    assert child.losses()[: len(losses)] != losses and len(child.losses()) == 6
    validated = forge("validate", str(aside), child.data)
    assert validated.code == 0, validated.text
