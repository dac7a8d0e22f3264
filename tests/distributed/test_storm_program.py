"""The program of bench.storm on two Gloo ranks: resumed, its chain is that of an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import psutil
import pytest

from bench.storm import chain, record
from bench.storm.contender import PACED
from bench.storm.raw import Steps
from tools.slurm_cluster.machines import wait_until

pytestmark = pytest.mark.tools

RANKS = 2
OPTIONS = ("--step-sec=0.05", "--save-every-sec=0.25", "--mib=1", "--timeout-sec=60")


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [*torchrun, *where, str(PACED), f"--folder={folder}", *OPTIONS, *more]
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )


def launches(folder: Path) -> list[Steps]:
    return record.launches(folder / "steps.jsonl", RANKS, begin=0.0)


def train_to(folder: Path, steps: int, *more: str) -> None:
    process = start(folder, f"--steps={steps}", *more)
    try:
        assert process.wait(120) == 0
    finally:
        kill_all(process)


def end_after_steps(folder: Path, how: signal.Signals, *more: str) -> None:
    """A run whose torchrun gets SIGTERM, or every process SIGKILL, after more than one interval."""
    process = start(folder, *more)
    log = folder / "steps.jsonl"
    try:
        wait_until(lambda: log.exists() and log.read_text().count("chain") > 12, 120, "12 steps")
        if how is signal.SIGTERM:
            process.send_signal(how)
            process.wait(60)
    finally:
        kill_all(process)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Also its ranks, of which torchrun makes sessions of their own."""
    if process.poll() is None:
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        psutil.wait_procs(ranks, 30)
        process.wait(30)


def test_killed_program_resumes_from_its_newest_checkpoint_with_the_same_chain(
    tmp_path: Path,
) -> None:
    end_after_steps(tmp_path, signal.SIGKILL)
    [killed] = launches(tmp_path)
    goal = killed.start + len(killed.times) + 20
    # A checkpoint that lacks the file of a rank is not one.
    (tmp_path / "checkpoints/checkpoint-9999").mkdir()
    (tmp_path / "checkpoints/checkpoint-9999/rank0.pt").touch()
    train_to(tmp_path, goal)
    [_, again] = launches(tmp_path)
    assert 0 < again.start <= len(killed.times)
    assert again.start % 5 == 0  # a step at which it saved
    assert (again.wrong_from, again.corrupt) == (None, False)
    assert again.start + len(again.times) == goal


def test_program_that_saves_at_sigterm_loses_no_step(tmp_path: Path) -> None:
    end_after_steps(tmp_path, signal.SIGTERM, "--save-on-sigterm")
    [stopped] = launches(tmp_path)
    train_to(tmp_path, len(stopped.times) + 5)
    [_, again] = launches(tmp_path)
    assert again.start == len(stopped.times)


def test_wrong_resume_is_seen(tmp_path: Path) -> None:
    """The score can fail: a position in the data, and a value, that are not what was saved."""
    import torch

    train_to(tmp_path, 10)
    for path in (tmp_path / "checkpoints/checkpoint-10").glob("rank*.pt"):
        values = torch.load(path)
        torch.save(
            values | {"position": values["position"] + 8, "payload": values["payload"] + 1}, path
        )
    train_to(tmp_path, 15)
    [_, again] = launches(tmp_path)
    assert (again.start, again.wrong_from, again.corrupt) == (10, 11, True)


def test_chain_depends_on_the_number_and_order_of_samples() -> None:
    first = list(islice(chain.undisturbed(2), 3))
    assert first == list(islice(chain.undisturbed(2), 3))
    assert first[0] != next(chain.undisturbed(1))
    assert chain.link(chain.START, 1, [1, 2]) != chain.link(chain.START, 1, [2, 1])
