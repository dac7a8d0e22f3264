"""What a killed command left in TMPDIR goes with the next one; what somebody uses stays."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forge.core.files import read_json, write_json
from forge.core.scratch import OWNER, scratch_directory


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


CHILD = """
import sys
from forge.core.scratch import scratch_directory
with scratch_directory("reproduce") as files:
    (files / "weights").write_bytes(b"1")
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def in_a_child(temporary: Path) -> Iterator[None]:
    """A process that has entered such a directory, and written a file into it. Killed afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout and child.stdout.readline() == "ready\n"
            yield
        finally:
            child.kill()


def test_directory_is_empty_and_goes_with_the_command(temporary):
    with scratch_directory("reproduce") as files:
        assert list(files.iterdir()) == []
        assert {path.name for path in files.parent.iterdir()} == {OWNER, "files"}
    assert list(temporary.iterdir()) == []


def test_directory_of_a_killed_command_goes_with_the_next_one_of_its_kind(temporary):
    with in_a_child(temporary):
        pass
    [left] = temporary.iterdir()
    with scratch_directory("export"):
        assert left.exists()
    with scratch_directory("reproduce"):
        assert not left.exists()


def test_directory_of_a_living_command_stays(temporary):
    with in_a_child(temporary), scratch_directory("reproduce") as files:
        [other] = [path for path in temporary.iterdir() if path != files.parent]
        assert (other / "files/weights").exists()


@pytest.mark.parametrize("change", [{"host": "another"}, {"pid": "x"}, None])
def test_directory_of_nobody_knows_whom_stays(temporary, change):
    with in_a_child(temporary):
        pass
    [left] = temporary.iterdir()
    if change is None:
        (left / OWNER).unlink()
    else:
        write_json(left / OWNER, {**read_json(left / OWNER), **change})
    with scratch_directory("reproduce"):
        assert left.exists()


def test_what_cannot_be_removed_fails_no_command_and_goes_with_the_next(temporary, monkeypatch):
    def rmdir(path, **_):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as patch, scratch_directory("reproduce") as files:
        (files / "again").mkdir()
        patch.setattr(os, "rmdir", rmdir)
        owner = files.with_name(OWNER)
        gone = 2**22 + 1  # above what a process can have: as after the end of this one
        write_json(owner, {**read_json(owner), "pid": gone})
    assert files.exists()
    with scratch_directory("reproduce"):
        assert not files.exists()


def test_link_is_not_followed(temporary, tmp_path_factory):
    with in_a_child(temporary):
        pass
    [left] = temporary.iterdir()
    elsewhere = left.rename(tmp_path_factory.mktemp("elsewhere") / "kept")
    left.symlink_to(elsewhere)
    with scratch_directory("reproduce"):
        assert elsewhere.exists() and left.is_symlink()
