"""A results directory on a disk that is full for a while: the allocation is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from forge.checkpoint.directory import SPARE_BYTES
from tools.slurm_cluster.machines import wait_until

from .job_run import JobRun, Uninterrupted

DISK_MIB = 64


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[str]:
    """A block device: mounted in several machines, which have mount namespaces of their own, it is one
    file system. (A tmpfs would be another one in each.)"""
    image = tmp_path / "disk"
    with open(image, "wb") as file:
        file.truncate(DISK_MIB * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
    attached = subprocess.run(
        ["losetup", "--find", "--show", image], capture_output=True, text=True, check=False
    )
    if attached.returncode:
        pytest.skip(f"no loop device here: {attached.stderr.strip()}")
    yield attached.stdout.strip()
    subprocess.run(["losetup", "--detach", attached.stdout.strip()], check=True)


def mount(device: str, run: JobRun, after: ExitStack) -> None:
    """Make the run's directory a disk of its own, here and in the nodes of the case."""
    run.folder.mkdir(parents=True)
    subprocess.run(["mount", device, run.folder], check=True)
    after.callback(subprocess.run, ["umount", "--lazy", run.folder], check=True)
    for name in run.names:
        run.cluster.run("mount", device, run.folder, machine=name)
        after.callback(run.cluster.run, "umount", "--lazy", run.folder, machine=name)


@pytest.mark.weekly
def test_disk_that_is_full_for_a_while_costs_no_allocation(
    new_run: Callable[..., JobRun], uninterrupted: Uninterrupted, small_disk: str
) -> None:
    run = new_run("srun")
    with ExitStack() as after:
        mount(small_disk, run, after)
        job = run.submit()
        run.wait_for_pause()
        filler = run.folder / "filler"
        with open(filler, "wb") as file:  # too little for a checkpoint, enough for logs and metrics
            free = shutil.disk_usage(run.folder).free
            os.posix_fallocate(file.fileno(), 0, free - SPARE_BYTES // 2)
        run.end_pause()
        wait_until(
            lambda: "; starting again in 30 s" in run.output.read_text(), 90, "the pause", run.said
        )
        filler.unlink()
        ended = run.wait_for_end(job)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), run.said()
        assert len(run.events("launch")) == 2
        assert not run.paths.bad_nodes.exists()
        uninterrupted.equals(run)
