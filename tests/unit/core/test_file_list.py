"""Threat: a missing, truncated or changed file that is taken for a valid one, or a link in a directory
from elsewhere that leads a reader to any file."""

import os
from pathlib import Path

import pytest

from forge.core import file_list
from forge.core.errors import DataError, UnfitError
from forge.core.file_list import FileEntry, FileList, described, verify
from forge.core.files import digest_bytes

CONTENT = {"a": b"weights", "deep/b": b"state", "deep/c": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    return folder


def listed(folder: Path, **options) -> FileList:
    """The list of the files as they were written."""
    entries = {name: FileEntry(len(c), digest_bytes(c)) for name, c in CONTENT.items()}
    return FileList(folder, entries, **options)


def test_described_files_are_valid(folder):
    files = list(described(folder, CONTENT, sync=True))
    assert files == [(name, len(c), digest_bytes(c)) for name, c in CONTENT.items()]
    entries = {name: FileEntry(size, digest) for name, size, digest in files}
    assert entries == listed(folder).entries
    listed(folder).check_sizes()
    verify([listed(folder)])
    assert list(listed(folder).bad_files()) == list(listed(folder).extra(CONTENT)) == []


def outside(path: Path) -> None:
    """Replace the file by a link to an equal one elsewhere."""
    elsewhere = path.parents[1] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("harm", "problem", "cause"),
    [
        (Path.unlink, "is missing", "removed"),
        (pipe, "is not a regular file", "replaced"),
        (outside, "is a link out of its directory", "came from elsewhere"),
        (lambda path: path.write_bytes(b"weight"), "has 6 bytes, its seal says 7", "full disk"),
        (
            lambda path: path.write_bytes(b"Weights"),
            f"has digest {digest_bytes(b'Weights')[:12]},"
            f" its seal says {digest_bytes(b'weights')[:12]}",
            "disk or copy error",
        ),
    ],
)
def test_a_bad_file_is_named_with_cause_and_fix(folder, harm, problem, cause):
    files = listed(folder, listed_in="its seal", fix="restore it")
    harm(folder / "a")
    assert list(files.bad_files()) == [f"a {problem}"]
    with pytest.raises(DataError) as caught:
        verify([files])
    assert caught.value.what == f"{folder / 'a'} {problem}"
    assert cause in caught.value.cause and caught.value.fix == "restore it"
    is_seen_without_reading = "digest" not in problem
    assert list(files.bad_files(content=False)) == [f"a {problem}"] * is_seen_without_reading
    if is_seen_without_reading:
        with pytest.raises(DataError):
            files.check_sizes()
    else:
        files.check_sizes()


def test_a_file_of_another_size_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(file_list, "digest_file", lambda _: pytest.fail("the file was read"))
    for name in CONTENT:
        os.truncate(folder / name, 2**40)
    assert len(list(listed(folder).bad_files())) == len(CONTENT)


def test_a_directory_that_is_a_link_out_is_not_followed(folder, tmp_path):
    (folder / "deep").rename(tmp_path / "elsewhere")
    (folder / "deep").symlink_to(tmp_path / "elsewhere")
    problem = "is a link out of its directory"
    assert list(listed(folder).bad_files()) == [f"deep/{name} {problem}" for name in "bc"]


def test_links_are_followed_where_files_may_be_elsewhere(folder):
    outside(folder / "a")
    assert list(listed(folder, follow_links=True).bad_files()) == []
    (folder / "a").resolve().write_bytes(b"Weights")
    (bad,) = listed(folder, follow_links=True).bad_files()
    assert bad.startswith("a has digest ")


def test_a_list_without_sizes_has_digests(folder):
    entries = {name: entry._replace(size=None) for name, entry in listed(folder).entries.items()}
    assert list(FileList(folder, entries).bad_files()) == []
    (folder / "a").write_bytes(b"")
    (bad,) = FileList(folder, entries).bad_files()
    assert bad.startswith("a has digest ")


def test_extra_files_are_named_in_order(folder):
    extra = list(listed(folder).extra(["z", "deep/y", *CONTENT]))
    assert extra == ["deep/y is not in the manifest", "z is not in the manifest"]


def test_the_directory_may_be_a_file(tmp_path):
    file = tmp_path / "1.pt"
    file.write_bytes(b"weights")
    ((name, size, digest),) = described(file, [""])
    files = FileList(file, {name: FileEntry(size, digest)})
    assert list(files.bad_files()) == []
    file.write_bytes(b"weight")
    assert list(files.bad_files()) == ["1.pt has 6 bytes, the manifest says 7"]
    assert list(FileList(file, {}).extra([""])) == ["1.pt is not in the manifest"]


def test_readers_share_the_files_and_together_see_all(folder):
    for name in CONTENT:
        (folder / name).unlink()
    shares = [list(listed(folder).bad_files((reader, 2))) for reader in (0, 1)]
    assert shares == [["a is missing", "deep/c is missing"], ["deep/b is missing"]]


def test_readers_share_the_files_of_several_lists(folder):
    last = FileList(folder, {"gone": FileEntry(1, "")})
    for reader in (0, 1, 2):
        verify([listed(folder), last], (reader, 4))
    with pytest.raises(DataError, match="gone is missing"):
        verify([listed(folder), last], (3, 4))


def test_a_disk_error_says_nothing_about_the_content(folder, monkeypatch):
    def broken(path: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(file_list, "digest_file", broken)
    for read in (
        lambda: verify([listed(folder)]),
        lambda: list(listed(folder).bad_files()),
        lambda: list(described(folder, CONTENT)),
    ):
        with pytest.raises(UnfitError, match=f"cannot read {folder}/.*: Input/output error"):
            read()
    listed(folder).check_sizes()


# --- verified while it is read --------------------------------------------------------------------


def test_what_is_read_is_what_was_verified(folder):
    assert {name: listed(folder).read(name) for name in CONTENT} == CONTENT
    with listed(folder).verified("a") as file:
        file.seek(2)
        buffer = bytearray(3)
        assert file.readinto(buffer) == 3 and bytes(buffer) == b"igh"


def test_change_between_the_check_of_a_file_and_its_reading_is_refused(folder):
    """Also where what was read of it is not what has changed."""
    for place in (0, 6):
        (folder / "a").write_bytes(CONTENT["a"])
        changed = bytearray(CONTENT["a"])
        changed[place] ^= 1
        with (
            pytest.raises(DataError, match=f"{folder}/a has digest .*, its seal says"),
            listed(folder, listed_in="its seal").verified("a") as file,
        ):
            (folder / "a").write_bytes(changed)
            file.seek(3)
            file.readinto(bytearray(2))


def test_file_that_is_not_in_the_list_or_too_large_is_not_read(folder):
    (folder / "b").write_bytes(b"unlisted")
    with pytest.raises(DataError, match=f"{folder}/b is not in its seal"):
        listed(folder, listed_in="its seal").read("b")
    with pytest.raises(DataError, match="has 7 bytes, at most 6 are read"):
        listed(folder).read("a", most=6)


def test_verified_file_is_read_forward_only(folder):
    with (
        pytest.raises(EOFError, match="is read at byte 1 after byte 4"),
        listed(folder).verified("a") as file,
    ):
        file.seek(4)
        file.seek(1)


@pytest.mark.parametrize("harm", [Path.unlink, pipe, outside])
def test_file_that_is_none_is_not_opened(folder, harm):
    harm(folder / "a")
    with pytest.raises(DataError, match=f"{folder}/a is"):
        listed(folder).read("a")
