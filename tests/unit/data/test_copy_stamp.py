"""Threat: a copy on a node is taken for verified when its bytes may be others: after a change that keeps
size and time, a reboot, by another job, or where another user could write."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from support.shards import make

from forge.core import files
from forge.data import copy_stamp
from forge.data.copy_stamp import CopyStamp
from forge.data.shards import ShardSet

SHARD = "train-00000-001.bin"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy that ranks of job 7 have verified."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    folder = tmp_path / f"forge-{os.getuid()}" / "job-7" / "copy"
    folder.mkdir(parents=True)
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o700)
    copy = make(folder)
    stamp_of(copy).write()
    time.sleep(0.02)  # times of files count in ticks of the kernel, of at most 10 ms
    return copy


def stamp_of(copy: ShardSet) -> CopyStamp | None:
    return CopyStamp.of_job(ShardSet.open(copy.folder), Path("shared"))


def is_verified(copy: ShardSet) -> bool:
    """As ranks decide."""
    stamp = stamp_of(copy)
    return stamp is not None and stamp.is_there


def test_unchanged_copy_is_verified_also_for_forge_stage_which_asks_for_no_job(copy, monkeypatch):
    assert is_verified(copy) and CopyStamp.of(copy).is_there
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert not is_verified(copy) and CopyStamp.of(copy).is_there


def test_verification_by_forge_stage_is_none_by_ranks(copy):
    CopyStamp.of(copy).write()
    assert CopyStamp.of(copy).is_there and not is_verified(copy)


def test_stamp_of_an_earlier_forge_holds_for_stage_alone(copy):
    assert set(CopyStamp.of(copy).state) == {"digest", "boot", "files"}
    files.write_json(copy.folder / ".stamp.json", CopyStamp.of(copy).state)
    assert CopyStamp.of(copy).is_there and not is_verified(copy)


def flip(path: Path) -> None:
    """Change a byte, and keep inode, size and time."""
    before = path.stat()
    with open(path, "r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def replace(path: Path) -> None:
    """Another file with the same content and time."""
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def lead_elsewhere(path: Path) -> None:
    """A link to the same file or directory in its place."""
    path.rename(path.parents[3] / "elsewhere")
    path.symlink_to(path.parents[3] / "elsewhere")


CHANGES = {
    "a byte, size and time kept": lambda folder: flip(folder / SHARD),
    "a file replaced by an equal one": lambda folder: replace(folder / SHARD),
    "the manifest replaced by an equal one": lambda folder: replace(folder / "manifest.json"),
    "the manifest touched": lambda folder: (folder / "manifest.json").touch(),
    "a shard is a link": lambda folder: lead_elsewhere(folder / SHARD),
    "the directory is a link": lead_elsewhere,
    "others may read the copy": lambda folder: folder.chmod(0o755),
    "others may read the directory of the job": lambda folder: folder.parent.chmod(0o755),
    "others may write into the root": lambda folder: folder.parents[1].chmod(0o770),
    "no stamp": lambda folder: (folder / ".stamp.json").unlink(),
    "half a stamp": lambda folder: os.truncate(folder / ".stamp.json", 100),
    "another kind of stamp": lambda folder: (folder / ".stamp.json").write_text("[]"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_copy_that_has_changed_or_that_others_could_change_is_not_verified(copy, change):
    CHANGES[change](copy.folder)
    assert not is_verified(copy)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a file to another user")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_copy_in_a_directory_of_another_user_is_not_verified(copy, level):
    os.chown([copy.folder, *copy.folder.parents][level], 1234, -1)
    assert not is_verified(copy)


def test_copy_after_a_reboot_is_not_verified(copy, monkeypatch):
    monkeypatch.setattr(copy_stamp, "boot_id", lambda: "of the next boot")
    assert not is_verified(copy) and not CopyStamp.of(copy).is_there


def test_nothing_is_verified_outside_of_a_job(copy, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID")
    assert stamp_of(copy) is None


def test_directory_that_is_not_in_a_private_root_has_no_stamp_of_ranks(copy):
    folder = copy.folder.rename(copy.folder.parents[2] / "copy")
    assert stamp_of(ShardSet.open(folder)) is None


def test_shared_directory_has_no_stamp_of_ranks_wherever_it_is(copy, monkeypatch):
    assert CopyStamp.of_job(copy, copy.folder) is None
    device = copy.folder.stat().st_dev
    monkeypatch.setattr(files, "_shared_file_systems", lambda: {device: "nfs4 nas:/data"})
    assert stamp_of(copy) is None


def test_file_that_changes_while_it_is_verified_is_not_verified(copy):
    stamp = stamp_of(copy)
    flip(copy.folder / SHARD)
    stamp.write()
    assert not is_verified(copy)
