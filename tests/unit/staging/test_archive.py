"""An archive must hold every byte, be written once, and never be used while it is incomplete."""

import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from forge.core.errors import DataError
from forge.core.files import digest_file
from forge.core.process import hostname
from forge.data.shards import Member
from forge.staging import archive, environment, on_node
from forge.staging.archive import Archive, make_archive


@pytest.fixture
def members(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    made = []
    for number, size in enumerate((3000, 5000, 0, 900, 7000, 10)):
        path = folder / f"{number}.bin"
        path.write_bytes(bytes([number]) * size)
        made.append(Member(path, f"deep/{number}.bin", size))
    return made


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(archive, "MIN_CHUNK_BYTES", 4000)


def unpack(made, folder):
    """As a node does it."""
    folder.parent.mkdir(exist_ok=True)
    on_node.begin(temporary=str(folder))
    for name in made.chunks:
        if name.endswith((".tar", ".zst")):
            (folder / "chunks" / name).write_bytes((made.folder / name).read_bytes())
            digest = digest_file(made.folder / name)
            on_node.unpack(temporary=str(folder), chunk=name, digest=digest)


@pytest.mark.parametrize("compress", [False, True])
def test_all_files_arrive_complete(tmp_path, members, small_parts, compress):
    made = make_archive(tmp_path / "archives" / "abc", members, compress=compress)
    assert len(made.chunks) == 3
    assert made.content_bytes == 15910
    assert (made.num_bytes < 15910) == compress
    unpack(made, tmp_path / "node")
    for member in members:
        assert (tmp_path / "node" / member.name).read_bytes() == member.path.read_bytes()
    assert list((tmp_path / "node" / "chunks").iterdir()) == []


def test_pack_is_made_once(tmp_path, members):
    folder = tmp_path / "archives" / "abc"
    first = make_archive(folder, members)
    before = (folder / "000.tar").stat()
    assert make_archive(folder, []) == first
    assert (folder / "000.tar").stat().st_mtime_ns == before.st_mtime_ns


DAMAGES = {
    "cut": lambda folder: os.truncate(folder / "000.tar", 10),
    "missing": lambda folder: (folder / "000.tar").unlink(),
    "no list": lambda folder: (folder / "archive.json").unlink(),
    "another size": lambda folder: (folder / "000.tar").write_bytes(b"not mine"),
    "another file": lambda folder: shutil.copy2(folder / "000.tar", folder / "001.tar"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_corrupt_archive_is_written_again(tmp_path, members, damage):
    folder = tmp_path / "archives" / "abc"
    first = make_archive(folder, members)
    DAMAGES[damage](folder)
    assert Archive.open(folder) is None
    assert make_archive(folder, members) == first


@pytest.mark.parametrize("tree", [False, True])
def test_content_that_was_changed_without_a_trace_is_noticed(tmp_path, members, monkeypatch, tree):
    folder = tmp_path / "archives" / "abc"
    monkeypatch.setattr(archive, "_states", lambda _: {"000.tar": [1, 2, 3]})
    make_archive(folder, members, tree=tree)
    path = folder / "000.tar"
    right = path.read_bytes()
    path.write_bytes(right.replace(b"0.bin", b"1.bin") + b"\0")
    assert Archive.open(folder) is None
    made = make_archive(folder, members, tree=tree)
    assert Archive.open(folder) == made, "written again, not kept"


def test_archive_that_another_run_finishes_in_the_same_moment_is_used(
    tmp_path, members, monkeypatch
):
    """As on a network file system, which shows its directory late."""
    folder = tmp_path / "archives" / "abc"
    write_chunks, rmtree = archive._write_chunks, shutil.rmtree

    def meanwhile(*arguments, **keys):
        monkeypatch.setattr(archive, "_write_chunks", write_chunks)
        make_archive(folder.with_name("other"), members).folder.rename(folder)
        write_chunks(*arguments, **keys)
        opened, late = Archive.open, [None]
        monkeypatch.setattr(
            Archive, "open", lambda *a, **k: late.pop() if late else opened(*a, **k)
        )
        monkeypatch.setattr(
            shutil, "rmtree", lambda path, **k: None if path == folder else rmtree(path, **k)
        )

    monkeypatch.setattr(archive, "_write_chunks", meanwhile)
    made = make_archive(folder, members)
    assert made.folder == folder and made.content_bytes == 15910
    assert [path.name for path in folder.parent.iterdir()] == ["abc"]


def test_archive_of_somebody_else_is_not_used_whatever_it_says(tmp_path, members):
    """It was copied or unpacked here: the same names and times, another inode and ctime."""
    make_archive(tmp_path / "theirs" / "abc", members[:1])
    shutil.copytree(tmp_path / "theirs", tmp_path / "archives", copy_function=shutil.copy2)
    assert Archive.open(tmp_path / "archives" / "abc") is None
    made = make_archive(tmp_path / "archives" / "abc", members)
    assert made.content_bytes == 15910


def test_chunk_with_another_digest_is_not_unpacked(tmp_path, members):
    made = make_archive(tmp_path / "archives" / "abc", members)
    on_node.begin(temporary=str(tmp_path / "node"))
    shutil.copy(made.folder / "000.tar", tmp_path / "node/chunks")
    with pytest.raises(DataError, match=r"000\.tar is not the chunk that was sent"):
        on_node.unpack(temporary=str(tmp_path / "node"), chunk="000.tar", digest="0" * 64)
    assert not (tmp_path / "node/deep").exists()


def test_failed_packing_leaves_nothing(tmp_path, members):
    members[3].path.unlink()
    with pytest.raises(FileNotFoundError):
        make_archive(tmp_path / "archives" / "abc", members)
    assert list((tmp_path / "archives").iterdir()) == []


def test_leftovers_of_killed_commands_are_removed_and_those_of_living_ones_stay(tmp_path, members):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folders = [
        tmp_path / "archives" / f".writing.{pid}.{host}.abc"
        for pid, host in ((dead.pid, hostname()), (os.getppid(), hostname()), (1, "elsewhere"))
    ]
    for folder in folders:
        folder.mkdir(parents=True)
    make_archive(tmp_path / "archives" / "abc", members)
    assert [folder.exists() for folder in folders] == [False, True, True]


def unpack_tree(made, arrived, sums):
    """As a node without Python does it."""
    shutil.copytree(made.folder, arrived / "chunks", ignore=lambda *_: ["archive.json"])
    line = ["sh", "-c", environment.UNPACK, "sh", arrived, *4 * [""], sums]
    return subprocess.run(line, check=False, capture_output=True, text=True)


def test_node_verifies_the_digests_that_the_sender_knows(tmp_path, members, small_parts):
    made = make_archive(tmp_path / "archives" / "abc", members, tree=True)
    assert unpack_tree(made, tmp_path / "good", made.sums).returncode == 0
    (made.folder / "001.tar").write_bytes(b"x")
    done = unpack_tree(made, tmp_path / "bad", made.sums)
    assert (done.returncode, "001.tar: FAILED" in done.stdout) == (1, True)
    assert [path.name for path in (tmp_path / "bad").iterdir()] == ["chunks"]


def test_parts_of_one_tree_are_unpacked_by_the_shell_at_once(tmp_path, monkeypatch):
    """Each directory has a file in each of four parts: every tar wants to make every directory."""
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    names = [f"env/{number}/lib/{part}" for part in range(4) for number in range(60)]
    monkeypatch.setattr(archive, "MIN_CHUNK_BYTES", 60 * 100)
    made = make_archive(
        tmp_path / "archives" / "abc", [Member(file, n, 100) for n in names], tree=True
    )
    assert len(made.chunks) == 1 + 4  # directories, files
    for attempt in range(3):
        arrived = tmp_path / f"node-{attempt}"
        done = unpack_tree(made, arrived, made.sums)
        assert (done.returncode, done.stderr) == (0, "")
        found = [str(p.relative_to(arrived)) for p in arrived.rglob("*") if p.is_file()]
        assert sorted(found) == sorted(names)


def test_part_that_reaches_out_of_its_folder_is_refused(tmp_path):
    evil = tmp_path / "evil"
    evil.write_text("x")
    made = make_archive(tmp_path / "archives" / "abc", [Member(evil, "../../evil.txt", 1)])
    with pytest.raises(DataError, match=r"has '\.\./\.\./evil\.txt', which is not a file inside"):
        unpack(made, tmp_path / "a" / "node")
    assert not list(tmp_path.rglob("evil.txt"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_part_with_anything_but_files_is_refused(tmp_path, members, kind):
    made = make_archive(tmp_path / "archives" / "abc", members)
    with tarfile.open(made.folder / "000.tar", "w") as tar:
        entry = tarfile.TarInfo("deep/0.bin")
        entry.type, entry.linkname = kind, "/etc/passwd"
        tar.addfile(entry)
    with pytest.raises(DataError, match=r"000\.tar has 'deep/0\.bin', which is not a file inside"):
        unpack(made, tmp_path / "node")
    assert not (tmp_path / "node/deep/0.bin").is_symlink()


def test_programs_of_an_archive_stay_executable_and_nobody_else_may_write(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o4777)
    made = make_archive(tmp_path / "archives" / "abc", [Member(path, "bin/run.sh", 10)])
    unpack(made, tmp_path / "node")
    assert (tmp_path / "node/bin/run.sh").stat().st_mode & 0o7777 == 0o755
