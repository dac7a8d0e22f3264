"""Against a resume on a node with other cores, whose threads add in another order, silently."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.live_run import TWO_RANKS, Run
from support.processes import Outcome
from support.repository import REPOSITORY

from forge.checkpoint.resume import latest
from forge.hosts.network import available_cores

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(available_cores() < 2, reason="needs two cores"),
]
HALF, GOAL = 4, 8
SIZES = ("--train.batch_size=8", "--train.seq_len=64", "--train.decay_steps=8")
GPT2 = ("--model.architecture=gpt2", "--model.positions=64", *SIZES)


def train(run: Run, steps: int, cores: int, threads: str = "") -> Outcome:
    """`forge train` up to a step on so many cores. threads: OMP_NUM_THREADS."""
    everyone = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(everyone)[:cores])
    try:
        started = run.start("train", f"--train.max_steps={steps}", OMP_NUM_THREADS=threads)
    finally:
        os.sched_setaffinity(0, everyone)
    ended = started.end()
    assert ended.code == 0, ended.text
    return ended


def threads_of(run: Run) -> list[int]:
    """Threads a rank of each launch."""
    return [event["numerics"]["threads"] for event in run.events("init")]


def test_resume_on_more_cores_is_bitwise_equal_to_the_run_on_few(
    runs: Callable[..., Run], tmp_path
) -> None:
    few = runs("few", *GPT2)
    train(few, HALF, cores=1)
    more, chosen = few.copy(tmp_path / "more"), few.copy(tmp_path / "chosen")
    assert "threads" not in train(few, GOAL, cores=1).text
    assert "threads a rank: 1 of 2 cores, as in the checkpoint" in train(more, GOAL, cores=2).text
    assert more.weights_digest() == few.weights_digest()
    assert threads_of(more) == [1, 1]
    # Who exports a number gets it.
    text = train(chosen, GOAL, cores=2, threads="2").text
    assert (
        "warning: threads a rank: 2, the checkpoint was made with 1: OMP_NUM_THREADS is 2" in text
    )
    assert threads_of(chosen) == [1, 2]


def test_resume_on_fewer_cores_says_that_bits_may_differ(runs: Callable[..., Run]) -> None:
    run = runs("many", *GPT2)
    assert "threads" not in train(run, HALF, cores=2).text
    text = train(run, GOAL, cores=1).text
    assert "warning: threads a rank: 1, the checkpoint was made with 2" in text
    assert threads_of(run) == [2, 1]


def test_ranks_on_other_processors_leave_a_checkpoint_that_is_valid(
    runs: Callable[..., Run], tmp_path: Path
) -> None:
    """As on nodes of two kinds: equal bits are asked for on no host."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n"
        "    os.environ['ATEN_CPU_CAPABILITY'] = 'default'\n"
    )
    run = runs("mixed", *GPT2, *TWO_RANKS, "--train.max_steps=4", "--train.checkpoint_every=4")
    ended = run.start("train", PYTHONPATH=f"{tmp_path}:{REPOSITORY}").end()
    assert ended.code == 0, ended.text
    cpu = latest(run.paths).manifest.lineage.hardware.cpu
    assert "DEFAULT" in cpu and cpu.count(" threads") == 2, cpu
    checked = run.launch(["validate", str(run.folder), run.data]).end()
    assert checked.code == 0, checked.text
