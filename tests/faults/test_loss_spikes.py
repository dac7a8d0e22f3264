"""Against a rule for loss spikes that decides differently after a kill, a requeue or on other ranks.

The corpus repeats two words, which are learned within ten steps. Two documents end with odd characters:
each batch with them is a spike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from injection import Fault
from plans import Plan
from runs import FaultyRun
from support import forked
from support.live_run import TINY
from support.saved import state_of

from forge.checkpoint import resume
from forge.core.errors import Exit
from forge.reporting.summary import summarize

GOAL, INTERVAL = 33, 3
SPIKES = [22, 32]
SKIP, STOP = "--train.spike=skip", "--train.spike=stop"


def write_odd_corpus(root: Path) -> Path:
    corpus, drawn = root / "corpus", random.Random(0)
    corpus.mkdir()
    odd = "".join(chr(drawn.randrange(33, 127)) for _ in range(40))
    for number in range(24):
        text = "one two, " * 300 + str(number)
        (corpus / f"{number:02}.txt").write_text(text + odd if number in (5, 11) else text)
    return corpus


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FaultyRun]:
    """make(name, ranks, *overrides): a run on the corpus."""
    root = tmp_path_factory.mktemp("spikes")
    lengths = {"max_steps": GOAL, "decay_steps": 40, "checkpoint_every": INTERVAL}
    rule = {"spike_window": 8, "keep_last": 20, "lr": 0.02}
    values = {
        **TINY,
        "train": {**TINY["train"], **lengths, **rule},
        "data": str(root / "data"),
        "tokenize": {"inputs": [str(write_odd_corpus(root))], "val_fraction": 0.3},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(values))
    maker = FaultyRun(root / "config.yaml", root / "none")
    for command in ("tokenizer", "tokenize"):
        ended = maker.command(command)
        assert ended.code == Exit.DONE, ended.text
    return lambda name, ranks, *more: FaultyRun.make(root, root / "results", name, ranks, more)


@pytest.fixture(scope="module")
def uninterrupted(make: Callable[..., FaultyRun]) -> FaultyRun:
    """A run of two ranks that skips its spikes."""
    run = make("uninterrupted", 2, SKIP)
    ended = run.train()
    assert ended.code == Exit.DONE, ended.text
    assert f"the update of step {SPIKES[0]} is skipped: the loss " in ended.text
    return run


def skipped(run: FaultyRun) -> list[int]:
    return [event["step"] for event in run.events("skipped")]


def checkpoint(run: FaultyRun, step: int) -> Path:
    return run.paths.checkpoints / f"step-{step:08d}"


def test_spikes_are_skipped_counted_and_replayed_by_validation(uninterrupted, tmp_path):
    assert skipped(uninterrupted) == SPIKES
    manifest = resume.latest(uninterrupted.paths).manifest
    assert (manifest.skipped.steps, len(manifest.spike_window)) == (2, 8)
    assert ("skipped steps", "2") in summarize(uninterrupted.paths).lineage
    reasons = [event["reason"] for event in uninterrupted.events("skipped")]
    assert all("is a spike, above " in reason for reason in reasons)

    # Its loss after the spike is that of weights which the spike did not update.
    before = checkpoint(uninterrupted, SPIKES[0] - 1)
    ended = forked.start(
        ["validate", str(before), uninterrupted.data], tmp_path / "validate.out"
    ).end()
    assert ended.code == Exit.DONE, ended.text
    assert f"step {SPIKES[0] + 1} bitwise equal" in ended.text


def test_run_killed_after_a_spike_decides_as_the_uninterrupted_one(make, uninterrupted):
    """Up to its second start by hand its results are read a step late, as on GPUs."""
    run = make("killed", 2, SKIP)
    after_spike = Fault("kill", "data.read", at=SPIKES[0] + 2, rank=1)
    saved = SPIKES[0] + 2
    ended = run.train(plan=Plan((after_spike,), ahead=True), more=(f"--train.max_steps={saved}",))
    assert ended.code == Exit.DONE, ended.text
    ended = run.train()
    assert ended.code == Exit.DONE, ended.text
    first, before_spike, last = run.starts()
    assert first == 0 and before_spike < SPIKES[0] and last == saved
    assert skipped(run)[-2:] == SPIKES and set(skipped(run)) == set(SPIKES)
    assert run.story() == uninterrupted.story()


def test_run_that_a_spike_stopped_is_refused_until_it_may_skip(make, uninterrupted):
    run = make("stopped", 2)
    ended = run.train(more=(STOP,))
    assert ended.code == Exit.FAILED, ended.text
    assert f"step {SPIKES[0]}: the loss " in ended.text
    assert "is a spike, above " in ended.text and "the weights were not updated" in ended.text
    assert f"parent: stopped@{SPIKES[0] - 1}" in ended.text and "another train.seed" in ended.text
    assert "train.spike=skip" in ended.text and "Traceback" not in ended.text
    assert resume.latest(run.paths).step == SPIKES[0] - 1
    assert "this config failed before" in run.train(more=(STOP,)).text

    # Nothing of the spike is in its checkpoint: it becomes the run that skipped from the start.
    ended = run.train(more=(SKIP,))
    assert ended.code == Exit.DONE, ended.text
    assert run.story() == uninterrupted.story()


def test_checkpoint_is_valid_after_a_launch_that_no_more_skips_its_spikes(make, tmp_path):
    run = make("accepting", 2)
    assert run.train(more=(STOP,)).code == Exit.FAILED
    ended = run.train(more=(STOP, "--train.spike_factor=1000"))
    assert ended.code == Exit.DONE, ended.text
    before = checkpoint(run, SPIKES[0] - 1)
    ended = forked.start(["validate", str(before), run.data], tmp_path / "validate.out").end()
    assert ended.code == Exit.DONE, ended.text
    assert f"not done: the update of step {SPIKES[0]} was skipped here and not" in ended.text


def test_resume_on_another_number_of_ranks_skips_the_same_steps(make, uninterrupted, tmp_path):
    run = make("fewer", 2, SKIP)
    ended = run.train(more=("--train.max_steps=18",))
    assert ended.code == Exit.DONE, ended.text
    alone = run.on(1)
    ended = alone.train(more=(f"--train.max_steps={SPIKES[0]}",))
    assert ended.code == Exit.DONE, ended.text
    assert skipped(run) == SPIKES[:1]
    before, after = (state_of(checkpoint(run, SPIKES[0] - earlier)) for earlier in (1, 0))
    assert all(before[name].equal(after[name]) for name in before)
