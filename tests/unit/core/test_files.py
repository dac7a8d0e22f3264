"""Against files that look complete and are not: cut by a full disk, a kill or a power failure."""

import errno
import math
import os
import subprocess
from pathlib import Path

import blake3
import pytest

from forge.core import files
from forge.core.errors import DataError, UnfitError


@pytest.fixture
def tiny_disk(tmp_path):
    """A real file system of 64 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"may not mount a tmpfs here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- atomic files ---------------------------------------------------------------------------------


def test_file_appears_only_when_complete(tmp_path):
    path = tmp_path / "new" / "a.json"
    with files.atomic_open(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        file.write(b" whole")
    assert path.read_bytes() == b"half whole"
    assert names(path.parent) == ["a.json"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(error), files.atomic_open(path, "w") as file:
        file.write("new")
        raise error
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_full_disk_is_unfit_names_the_path_and_leaves_the_old_file(tiny_disk):
    path = tiny_disk / "a"
    files.write_json(path, {"old": 1})
    with pytest.raises(UnfitError, match="No space left on device") as caught:
        files.write_json(path, {"new": "x" * 100_000})
    assert str(path) in caught.value.what
    assert "free space" in caught.value.fix
    assert files.read_json(path) == {"old": 1}
    assert names(tiny_disk) == ["a"]


def test_read_only_disk_is_unfit_and_leaves_the_old_file(tiny_disk):
    path = tiny_disk / "a"
    files.write_json(path, {"old": 1})
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(UnfitError, match="Read-only file system") as caught:
        files.write_json(path, {"new": 1})
    assert str(tiny_disk) in caught.value.what
    assert files.read_json(path) == {"old": 1}


def test_content_is_on_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, Path.replace

    def seen_fsync(fd):
        order.append("fsync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "fsync file")  # noqa: PTH112
        fsync(fd)

    def seen_replace(self, target):
        order.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Path, "replace", seen_replace)
    files.write_json(tmp_path / "a", 1)
    assert order == ["fsync file", "rename", "fsync folder"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_mode_follows_the_users_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        files.write_json(tmp_path / "a", 1)
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode


# --- disk errors ----------------------------------------------------------------------------------


def test_device_that_is_full_is_unfit():
    with (
        pytest.raises(UnfitError, match="cannot write /dev/full: No space left"),
        files.disk_trouble(Path("/dev/full")),
        open("/dev/full", "w") as file,
    ):
        file.write("x")


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        ("ENOSPC", "free space"),
        ("EDQUOT", "quota"),
        ("EROFS", "read-only"),
        ("EACCES", "owner and mode"),
        ("EPERM", "owner and mode"),
        ("EIO", "reports an error"),
        ("ENOTDIR", "a file is where a directory is expected"),
        ("EEXIST", "a file is where a directory is expected"),
    ],
)
def test_trouble_of_a_disk_tells_path_and_fix(number, fix):
    code = getattr(errno, number)
    with pytest.raises(UnfitError) as caught, files.disk_trouble(Path("/some/file")):
        raise OSError(code, os.strerror(code))
    assert caught.value.what == f"cannot write /some/file: {os.strerror(code)}"
    assert fix in caught.value.fix


def test_a_file_where_a_folder_should_be_is_reported(tmp_path):
    (tmp_path / "results").write_text("a file")
    for path in (tmp_path / "results" / "a", tmp_path / "results" / "run" / "a"):
        with pytest.raises(UnfitError, match="results"):
            files.write_json(path, 1)


def test_other_errors_stay_what_they_are():
    with pytest.raises(OSError, match="a bug"), files.disk_trouble(Path("x")):
        raise OSError(errno.EBADF, "a bug of ours")


# --- JSON and digests -----------------------------------------------------------------------------


def test_equal_values_have_equal_bytes_and_ids():
    one, two = {"b": [1, 2.5], "a": None}, {"a": None, "b": [1, 2.5]}
    assert files.canonical(one) == files.canonical(two) == b'{"a":null,"b":[1,2.5]}'
    assert files.short_id(one) == files.short_id(two)
    assert files.short_id(one) != files.short_id({**one, "a": 0})
    assert len(files.short_id(one)) == 12


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_no_json_are_refused(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.canonical({"loss": number})
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a", {"loss": number})
    assert names(tmp_path) == []


@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_digest_of_a_file_is_that_of_its_bytes(tmp_path, size):
    data = bytes(n % 251 for n in range(size))
    (tmp_path / "a").write_bytes(data)
    expected = blake3.blake3(data).hexdigest()
    assert files.digest_bytes(data) == expected
    assert files.digest_file(tmp_path / "a") == expected
    assert files.digest_file(tmp_path / "a", threads=2) == expected


def test_missing_and_cut_json_are_bad_data_that_names_the_file(tmp_path):
    with pytest.raises(DataError, match=r"a\.json does not exist"):
        files.read_json(tmp_path / "a.json")
    for content in (b'{"a": ', b"\xff\xfe"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.json is not JSON"):
            files.read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    "text", ["[]", "7", "null", "{}", '{"step": 1}', '{"step": ', "9" * 5000, "[" * 9999]
)
def test_record_that_is_no_object_or_half_a_file_is_bad_data(tmp_path, text):
    """Half a trained.json ended `forge export` and `forge validate` with a traceback."""
    path = tmp_path / "trained.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        files.read_object(path, "step", "weights_digest")
    assert str(path) in str(caught.value)
    assert "remove it" in caught.value.fix
    path.write_text('{"step": 1, "weights_digest": "x"}')
    assert files.read_object(path, "step", "weights_digest")["step"] == 1


def test_directory_where_a_record_is_expected_is_reported(tmp_path):
    with pytest.raises(UnfitError, match="a directory is where a file is expected"):
        files.read_object(tmp_path)


# --- names from elsewhere -------------------------------------------------------------------------

NOT_PLAIN = (
    "",
    ".",
    "..",
    "/",
    "/etc",
    "a/b",
    "../a",
    "a/",
    "a\0",
    "a\nb",
    "\x1b[2J",
    "\x85",
    "a" * 256,
)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_name_that_could_lead_out_or_write_into_a_terminal_is_not_plain(name):
    with pytest.raises(ValueError, match="is not the plain name of a file"):
        files.plain_name(name)


@pytest.mark.parametrize(
    "name", ["a", "__0_0.distcp", "..a", "a..", "...", "Grüße 1", "a\\b", "é" * 127]
)
def test_any_other_name_is_plain(name):
    assert files.plain_name(name) == files.relative_path(name) == name
    assert files.relative_path(f"{name}/{name}") == f"{name}/{name}"


@pytest.mark.parametrize(
    "name", [*(n for n in NOT_PLAIN if n != "a/b"), "a//b", "a/./b", "a/../b", "./a"]
)
def test_path_that_could_lead_out_is_not_below_the_directory(name):
    with pytest.raises(ValueError, match="is not a path below the directory"):
        files.relative_path(name)


def test_file_below_a_directory_is_one_once_links_are_followed(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "folder.txt"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/file").write_text("")
    outside.write_text("")
    for link, to in {"in": "deep/file", "out": outside, "up": "..", "loop": "loop"}.items():
        (folder / link).symlink_to(to)
    os.mkfifo(folder / "pipe")
    there = (
        "deep/file",
        "in",
        "out",
        "up/folder.txt",
        "deep",
        "loop",
        "pipe",
        "gone",
        "../folder.txt",
    )
    found = [name for name in there if files.is_file_below(folder / name, folder)]
    assert found == ["deep/file", "in"]
    (tmp_path / "link").symlink_to(folder)
    assert files.is_file_below(tmp_path / "link/in", tmp_path / "link")


def test_json_of_terabytes_is_refused_unread(tmp_path):
    (tmp_path / "x.json").touch()
    os.truncate(tmp_path / "x.json", 2**42)  # sparse
    with pytest.raises(DataError, match=f"x.json has {2**42} bytes, at most"):
        files.read_json(tmp_path / "x.json")
