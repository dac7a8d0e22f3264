"""Against one bad batch that ends a run of weeks, and against a run that goes on with broken weights.

The embedding of one token has grown so large that the loss of samples with it is finite and their
gradients are not. So which steps are bad is a matter of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from plans import Plan
from runs import FaultyRun
from support import forked
from support.saved import make_digests_right, state_of

from forge.checkpoint import resume, storage
from forge.core.config import load_config
from forge.core.errors import Exit
from forge.data.loader import Loader
from forge.data.shards import ShardSet
from forge.data.windows import Windows
from forge.reporting.summary import summarize

FIRST, GOAL = 2, 16
LARGE = 3e38
SETTINGS = (
    # Tied, the bad row would be in the logits of every token.
    *("--model.tie_embeddings=false", "--train.checkpoint_every=1", "--train.keep_last=20"),
    f"--train.decay_steps={GOAL}",
)
SKIP = "--train.on_nonfinite=skip"


def until(step: int) -> str:
    return f"--train.max_steps={step}"


def steps_of_tokens(run: FaultyRun) -> list[list[int]]:
    """For each token, the steps (from 1) whose inputs have it."""
    train = load_config(run.paths.config).train
    shards = ShardSet.open(next((run.config.parent / "data" / "tokens").iterdir()))
    windows = Windows(shards.train, train.seq_len)
    loader = Loader(windows, seed=train.seed, batch_size=train.batch_size, rank=0, world_size=1)
    inputs = [loader.batch(step)[0] for step in range(GOAL)]
    return [
        [step for step, tokens in enumerate(inputs, 1) if (tokens == token).any()]
        for token in range(shards.vocab_size)
    ]


@pytest.fixture(scope="module")
def begun(session_runs: Callable[..., FaultyRun]) -> FaultyRun:
    """A run of two ranks at step FIRST."""
    run = session_runs("begun", 2, *SETTINGS)
    ended = run.train(more=(until(FIRST),))
    assert ended.code == Exit.DONE, ended.text
    return run


# DCP warns that it runs in one process.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")


@pytest.fixture
def poisoned(
    begun: FaultyRun, tmp_path: Path
) -> Callable[[str, Callable[[list[int]], bool]], tuple[FaultyRun, list[int]]]:
    """poisoned(name, choose): a copy with a bad token, and its bad steps, which `choose` accepts."""

    def make(name: str, choose: Callable[[list[int]], bool]) -> tuple[FaultyRun, list[int]]:
        run = begun.copy(tmp_path / name)
        run.paths.trained.unlink()
        token, steps = next(
            (token, steps)
            for token, steps in enumerate(steps_of_tokens(run))
            if steps and min(steps) > FIRST and choose(steps)
        )
        last = resume.latest(run.paths)
        assert last is not None
        state = state_of(last.folder)
        state["model.model.embed_tokens.weight"][token] = LARGE
        for path in last.folder.glob("*.distcp"):
            path.unlink()
        writer = storage.TensorWriter(last.folder, 1)
        dcp.save(state, storage_writer=writer, no_dist=True)
        make_digests_right(last.folder)
        return run, steps

    return make


def skipped(run: FaultyRun) -> list[int]:
    return [event["step"] for event in run.events("skipped")]


def longest_row(steps: list[int]) -> int:
    longest = row = 1
    for before, after in pairwise(steps):
        row = row + 1 if after == before + 1 else 1
        longest = max(longest, row)
    return longest


def test_run_that_diverged_skips_its_bad_steps_under_its_own_name_and_reaches_the_goal(
    poisoned, tmp_path
):
    run, steps = poisoned("diverged", lambda steps: len(steps) > 1 and longest_row(steps) == 1)
    ended = run.train(more=(until(GOAL),))
    assert ended.code == Exit.FAILED, ended.text
    assert f"step {steps[0]}: loss " in ended.text and "not finite" in ended.text
    assert "train.lr is 0.003, this step's rate was" in ended.text
    assert "train.on_nonfinite=skip" in ended.text

    whole = run.copy(run.folder.parent / "whole")
    limit = "--train.max_skipped_steps=1"
    ended = whole.train(more=(until(GOAL), SKIP, limit))
    assert ended.code == Exit.DONE, ended.text
    assert f"the update of step {steps[0]} is skipped" in ended.text
    assert skipped(whole) == steps
    assert resume.latest(whole.paths).manifest.skipped.steps == len(steps)
    assert ("skipped steps", str(len(steps))) in summarize(whole.paths).lineage

    # Stopped where a step has just been skipped, and resumed there: the same run, bit by bit.
    for goal in (steps[0], steps[1], GOAL):
        ended = run.train(more=(until(goal), SKIP, limit))
        assert ended.code == Exit.DONE, ended.text
    assert skipped(run) == steps
    assert run.story() == whole.story()

    # The steps after a checkpoint are retrained by validation: the bad one is skipped there too.
    before = whole.paths.checkpoints / f"step-{steps[1] - 1:08d}"
    ended = forked.start(["validate", str(before), whole.data], tmp_path / "validate.out").end()
    assert ended.code == Exit.DONE, ended.text
    assert f"step {steps[1]} bitwise equal" in ended.text


def test_weights_and_optimizer_state_stay_as_they_were_in_a_skipped_step(poisoned):
    run, steps = poisoned("unchanged", lambda steps: steps[0] < GOAL)
    ended = run.train(more=(until(steps[0]), SKIP))
    assert ended.code == Exit.DONE, ended.text
    before, after = (
        state_of(run.paths.checkpoints / f"step-{step:08d}") for step in (steps[0] - 1, steps[0])
    )
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_limit_of_skipped_steps_ends_the_run_also_when_a_resume_lies_in_between(poisoned):
    run, steps = poisoned("limited", lambda steps: longest_row(steps) == len(steps) == 3)
    limit = "--train.max_skipped_steps=2"
    ended = run.train(more=(until(GOAL), SKIP, limit))
    assert ended.code == Exit.FAILED, ended.text
    assert "the 2 steps before it were skipped already (train.max_skipped_steps is 2)" in ended.text
    assert "Traceback" not in ended.text
    assert skipped(run) == steps[:2]
    assert resume.latest(run.paths).step == steps[1]
    assert "failed before" in run.train(more=(until(GOAL), SKIP, limit)).text

    again = run.train(more=(until(GOAL), SKIP, limit, "--train.eval_every=99"))
    assert again.code == Exit.FAILED, again.text
    assert "the 2 steps before it were skipped already" in again.text
    assert skipped(run) == steps[:2]

    ended = run.train(more=(until(GOAL), SKIP, "--train.max_skipped_steps=3"))
    assert ended.code == Exit.DONE, ended.text
    assert skipped(run) == steps


def test_first_update_of_a_run_can_be_skipped(runs):
    """AdamW's state is made before that, so that a checkpoint can hold it."""
    run = runs("first", 1)
    ended = run.train(plan=Plan(poison="nan-gradient", poison_step=1), more=(SKIP, until(1)))
    assert ended.code == Exit.DONE, ended.text
    ended = run.train(more=(SKIP, until(GOAL)))
    assert ended.code == Exit.DONE, ended.text
    assert (skipped(run), resume.latest(run.paths).step) == ([1], GOAL)
