"""Against a disk that is really full: the last checkpoint stays, the message says so, exit 69."""

from __future__ import annotations

import dataclasses
import os
import subprocess

import pytest
from injection import Fault
from plans import Plan
from runs import INTERVAL
from support import forked
from support.live_run import wait_until

from forge.checkpoint import directory, resume
from forge.core import events
from forge.core.errors import Exit
from forge.run import train
from forge.slurm import slurm
from forge.trainer import metrics

DISK_MIB = 16
PAUSE_SEC = 2.0  # between two launches of a job on a full disk
JOB = slurm.Job("42", "RUNNING", 0, ("here",), 1, "cpu", "x", True, None)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, DISK_MIB large."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("point", ["save.begin", "save.write", "commit.manifest"])
def test_disk_that_fills_up_ends_with_69_and_the_last_checkpoint(
    point, runs, uninterrupted, small_disk
):
    run = runs("full", 1, f"--results={small_disk}")
    run = dataclasses.replace(run, folder=small_disk / "full")
    ended = run.train(Fault("fill", point, step=2 * INTERVAL, target=str(small_disk / "filler")))
    assert ended.code == Exit.UNFIT, ended.text
    assert "Traceback" not in ended.text
    assert "free space" in ended.text
    newest = resume.latest(run.paths)
    assert newest.step == INTERVAL
    assert list(newest.bad_files()) == []

    still_full = run.train()
    assert still_full.code == Exit.UNFIT, still_full.text
    (small_disk / "filler").unlink()
    again = run.train()
    assert again.code == Exit.DONE, again.text
    assert run.story() == uninterrupted(1)
    run.assert_whole()


def in_a_job_with_short_pauses():
    slurm.this_job = lambda: JOB
    train.DISK_WAIT_SEC = (PAUSE_SEC, PAUSE_SEC)


@pytest.fixture
def in_job(runs, small_disk, tmp_path):
    """in_job(*faults): a run of two ranks in a Slurm job, on the small disk, and its command."""

    def start(*faults):
        run = dataclasses.replace(
            runs("full", 2, f"--results={small_disk}"), folder=small_disk / "full"
        )
        output = tmp_path / "train.out"
        return run, forked.start(
            run.arguments("train"), output, Plan(faults).arm, in_a_job_with_short_pauses
        )

    return start


def pauses_or_ended(command):
    said = command.output.read_text() if command.output.exists() else ""
    return "starting again in" in said or not command.process.is_alive()


@pytest.mark.parametrize(
    ("point", "rank"), [("save.begin", 0), ("save.write", 1), ("commit.manifest", 0)]
)
def test_job_waits_for_space_and_ends_with_the_weights_of_an_undisturbed_run(
    point, rank, in_job, small_disk, uninterrupted
):
    filler = small_disk / "filler"
    run, command = in_job(Fault("fill", point, step=2 * INTERVAL, rank=rank, target=str(filler)))
    wait_until(lambda: pauses_or_ended(command), "the pause")
    filler.unlink()
    ended = command.end()
    assert ended.code == Exit.DONE, ended.text
    assert "Traceback" not in ended.text
    assert run.story() == uninterrupted(2)
    run.assert_whole()


def test_job_on_a_disk_that_stays_full_ends_with_69_and_resumes_once_there_is_space(
    in_job, small_disk, uninterrupted
):
    filler = small_disk / "filler"
    run, command = in_job(Fault("fill", "commit.manifest", step=2 * INTERVAL, target=str(filler)))
    ended = command.end()
    assert ended.code == Exit.UNFIT, ended.text
    assert ended.text.count("starting again in") == 2 and "Traceback" not in ended.text
    assert "free space" in ended.text.partition("forge train: ")[2], ended.text
    newest = resume.latest(run.paths)
    assert newest.step == INTERVAL and list(newest.bad_files()) == []
    assert not list(
        run.paths.checkpoints.glob(f"{directory.TEMPORARY}step-*")
    )  # its bytes are free
    assert not run.paths.trained.exists()
    # Whatever could be written is read as far as it goes.
    assert max(line.step for line in metrics.read(run.paths.metrics)) >= INTERVAL
    assert not isinstance(events.read(run.paths.events)[-1], events.Completed)

    filler.unlink()
    again = run.train()
    assert again.code == Exit.DONE, again.text
    assert run.story() == uninterrupted(2)
    run.assert_whole()


def test_file_that_is_cut_before_its_digest_is_taken_is_not_committed(runs, uninterrupted):
    """Else its digest would be right, and every start would end in the load."""
    run = runs("cut", 1)
    ended = run.train(Fault("truncate", "save.sync", step=2 * INTERVAL))
    assert ended.code == Exit.UNFIT, ended.text
    assert "were written" in ended.text
    assert run.train().code == Exit.DONE
    assert run.story() == uninterrupted(1)


def test_rank_with_the_reason_tells_it_also_when_the_others_fail_first(runs, uninterrupted):
    """Else both ranks tell of each other only, and the command starts again on a full disk."""
    run = runs("slow", 2)
    full = Fault("enospc", "commit.rename", step=2 * INTERVAL)
    ended = run.train(plan=Plan((full,), poison="slow-to-fail"))
    assert ended.code == Exit.UNFIT, ended.text
    assert "No space left on device" in ended.text
    assert run.starts() == [0]
    assert run.train().code == Exit.DONE
    assert run.story() == uninterrupted(2)
