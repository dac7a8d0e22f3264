"""Against a disk that is really full: the last checkpoint stays, the message says so, exit 69."""

from __future__ import annotations

import dataclasses
import os
import subprocess

import pytest
from injection import Fault
from plans import Plan
from runs import INTERVAL

from forge.checkpoint import resume
from forge.core.errors import Exit

DISK_MIB = 16


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
