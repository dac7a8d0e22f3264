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
from support.live_run import TINY, wait_until
from support.saved import state_of

from forge.checkpoint import resume
from forge.core.errors import Exit
from forge.reporting.summary import summarize

GOAL, INTERVAL = 33, 3
SPIKES = [22, 32]
SKIP, STOP, REWIND = (f"--train.spike={policy}" for policy in ("skip", "stop", "rewind"))


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
    assert f"parent: stopped@{SPIKES[0] - 1}" in ended.text
    assert "train.spike=skip" in ended.text and "Traceback" not in ended.text
    assert resume.latest(run.paths).step == SPIKES[0] - 1
    assert "this config failed before" in run.train(more=(STOP,)).text

    # Nothing of the spike is in its checkpoint: it becomes the run that skipped from the start.
    ended = run.train(more=(SKIP,))
    assert ended.code == Exit.DONE, ended.text
    assert run.story() == uninterrupted.story()


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


# --- rewinds --------------------------------------------------------------------------------------

EVERY, END = "--train.checkpoint_every=4", 31
# (from, batches): the spikes are in the batches 21 and 31, the second of which now comes two steps
# earlier, and beyond END in 35, 38 and 40.
LEFT_OUT = [(20, 2), (28, 2)]


@pytest.fixture(scope="module")
def rewound(make: Callable[..., FaultyRun]) -> FaultyRun:
    """A run of two ranks that nobody disturbed, which rewinds from both spikes."""
    run = make("rewound", 2, REWIND, EVERY, f"--train.max_steps={END}")
    ended = run.train()
    assert ended.code == Exit.DONE, ended.text
    assert "back to step 20, without the 2 batches from there to the spike" in ended.text
    return run


def decided(run: FaultyRun) -> list[tuple[int, int]]:
    return [(event["to_step"], event["batches"]) for event in run.events("rewind")]


def test_run_rewinds_before_each_spike_and_leaves_out_the_batches_up_to_it(rewound, tmp_path):
    assert decided(rewound) == LEFT_OUT
    assert [event["spike"] for event in rewound.events("rewind")] == [22, 30]
    assert rewound.starts() == [0, 20, 28] and skipped(rewound) == []
    assert (
        len({event["launch"] for event in rewound.events("init")}) == 3
    )  # of one process, in a second
    manifest = resume.latest(rewound.paths).manifest
    assert [(one.step, one.batches) for one in manifest.left_out] == LEFT_OUT
    left_out = {20, 21, 30, 31}
    batches = [number for number in range(END + 4) if number not in left_out]
    size = TINY["train"]["batch_size"]
    assert manifest.next_sample == (END + 4) * size
    assert [sorted(number for number, _ in pairs) for pairs in rewound.samples().values()] == [
        list(range(batch * size, (batch + 1) * size)) for batch in batches
    ]
    assert ("batches left out", "4") in summarize(rewound.paths).lineage

    # Validation trains on the batches that training has trained on: after a rewind, and before one, where
    # those of the launch that saved the checkpoint count.
    for step in (20, 24):
        out = tmp_path / f"{step}.out"
        ended = forked.start(["validate", str(checkpoint(rewound, step)), rewound.data], out).end()
        assert ended.code == Exit.DONE, ended.text
        assert "bitwise equal" in ended.text


def test_run_killed_when_it_has_decided_to_rewind_ends_with_the_same_bits(make, rewound):
    """Up to the kill its results are read a step late, as on GPUs."""
    run = make("killed-rewound", 2, REWIND, EVERY, f"--train.max_steps={END}")
    command = run.start_train(plan=Plan(ahead=True))
    wait_until(lambda: run.events("rewind"), "the first rewind")
    command.kill()
    ended = run.train()
    assert ended.code == Exit.DONE, ended.text
    assert decided(run) == LEFT_OUT
    assert run.samples() == rewound.samples()
    assert run.weights_digest() == rewound.weights_digest()


def test_resume_on_another_number_of_ranks_leaves_out_what_was_decided(make, rewound):
    run = make("rewound-on-fewer", 2, REWIND, EVERY)
    ended = run.train(more=("--train.max_steps=26",))
    assert ended.code == Exit.DONE, ended.text
    ended = run.on(1).train(more=(f"--train.max_steps={END}",))
    assert ended.code == Exit.DONE, ended.text
    assert decided(run) == LEFT_OUT
    numbers = [
        {step: sorted(number for number, _ in pairs) for step, pairs in one.samples().items()}
        for one in (run, rewound)
    ]
    assert numbers[0] == numbers[1]


def test_child_of_a_checkpoint_continues_after_the_batches_that_its_parent_left_out(make, rewound):
    child = make("child", 1, "--parent=rewound@24", "--train.max_steps=26")
    ended = child.train()
    assert ended.code == Exit.DONE, ended.text
    assert {step: child.samples()[step] for step in (25, 26)} == {
        step: sorted(pairs) for step, pairs in rewound.samples().items() if step in (25, 26)
    }
    assert (
        resume.latest(child.paths).manifest.left_out
        == resume.latest(rewound.paths).manifest.left_out[:1]
    )


def test_batches_that_are_spikes_wherever_they_come_end_the_run(make):
    run = make("hopeless", 1, REWIND, EVERY)
    ended = run.train()
    assert ended.code == Exit.FAILED, ended.text
    assert decided(run) == [*LEFT_OUT, (28, 4), (28, 3)]
    assert (
        "is a spike, above " in ended.text and "; 3 rewinds to step 28 did not help" in ended.text
    )
    assert "parent: hopeless@28" in ended.text and "Traceback" not in ended.text
    assert "this config failed before" in run.train().text
