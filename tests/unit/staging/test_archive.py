"""A pack must hold every byte, be made once, and never be taken for whole when it is not."""

import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from forge.core.process import hostname
from forge.staging import archive, environment, on_node
from forge.staging.archive import Member, Pack, make_pack


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
    monkeypatch.setattr(archive, "MIN_PART_BYTES", 4000)


def unpack(pack, folder):
    """As a node does it."""
    folder.parent.mkdir(exist_ok=True)
    on_node.begin(temporary=str(folder))
    for name in pack.parts:
        if name.endswith((".tar", ".zst")):
            (folder / "parts" / name).write_bytes((pack.folder / name).read_bytes())
            on_node.unpack(temporary=str(folder), part=name)


@pytest.mark.parametrize("compress", [False, True])
def test_all_files_arrive_whole(tmp_path, members, small_parts, compress):
    pack = make_pack(tmp_path / "packs" / "abc", members, compress=compress)
    assert len(pack.parts) == 3
    assert pack.content_bytes == 15910
    assert (pack.num_bytes < 15910) == compress
    unpack(pack, tmp_path / "node")
    for member in members:
        assert (tmp_path / "node" / member.name).read_bytes() == member.path.read_bytes()
    assert list((tmp_path / "node" / "parts").iterdir()) == []


def test_pack_is_made_once(tmp_path, members):
    folder = tmp_path / "packs" / "abc"
    first = make_pack(folder, members)
    before = (folder / "000.tar").stat()
    assert make_pack(folder, []) == first
    assert (folder / "000.tar").stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("damage", ["cut", "missing", "no list"])
def test_damaged_pack_is_made_again(tmp_path, members, damage):
    folder = tmp_path / "packs" / "abc"
    first = make_pack(folder, members)
    if damage == "cut":
        os.truncate(folder / "000.tar", 10)
    else:
        (folder / ("000.tar" if damage == "missing" else "pack.json")).unlink()
    assert Pack.open(folder) is None
    assert make_pack(folder, members) == first


def test_failed_packing_leaves_nothing(tmp_path, members):
    members[3].path.unlink()
    with pytest.raises(FileNotFoundError):
        make_pack(tmp_path / "packs" / "abc", members)
    assert list((tmp_path / "packs").iterdir()) == []


def test_leftovers_of_killed_commands_are_removed_and_those_of_living_ones_stay(tmp_path, members):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folders = [
        tmp_path / "packs" / f".writing.{pid}.{host}.abc"
        for pid, host in ((dead.pid, hostname()), (os.getppid(), hostname()), (1, "elsewhere"))
    ]
    for folder in folders:
        folder.mkdir(parents=True)
    make_pack(tmp_path / "packs" / "abc", members)
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_sums_are_what_sha256sum_checks(tmp_path, members, small_parts):
    pack = make_pack(tmp_path / "packs" / "abc", members, tree=True)
    check = ["sha256sum", "--check", "--quiet", archive.SUMS]
    assert subprocess.run(check, cwd=pack.folder, check=False).returncode == 0
    (pack.folder / "001.tar").write_bytes(b"x")
    done = subprocess.run(check, cwd=pack.folder, check=False, capture_output=True, text=True)
    assert (done.returncode, "001.tar: FAILED" in done.stdout) == (1, True)


def test_parts_of_one_tree_are_unpacked_by_the_shell_at_once(tmp_path, monkeypatch):
    """Each directory has a file in each of four parts: every tar wants to make every directory."""
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    names = [f"env/{number}/lib/{part}" for part in range(4) for number in range(60)]
    monkeypatch.setattr(archive, "MIN_PART_BYTES", 60 * 100)
    pack = make_pack(tmp_path / "packs" / "abc", [Member(file, n, 100) for n in names], tree=True)
    assert len(pack.parts) == 1 + 4 + 1  # directories, files, sums
    for attempt in range(3):
        arrived = tmp_path / f"node-{attempt}"
        shutil.copytree(pack.folder, arrived / "parts", ignore=lambda *_: ["pack.json"])
        done = subprocess.run(
            ["sh", "-c", environment.UNPACK, "sh", arrived],
            check=False,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        found = [str(p.relative_to(arrived)) for p in arrived.rglob("*") if p.is_file()]
        assert sorted(found) == sorted(names)


def test_part_that_reaches_out_of_its_folder_is_refused(tmp_path):
    evil = tmp_path / "evil"
    evil.write_text("x")
    pack = make_pack(tmp_path / "packs" / "abc", [Member(evil, "../../evil.txt", 1)])
    with pytest.raises(tarfile.OutsideDestinationError):
        unpack(pack, tmp_path / "a" / "node")
    assert not list(tmp_path.rglob("evil.txt"))
