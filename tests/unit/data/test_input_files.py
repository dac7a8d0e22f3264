"""A file that is listed twice trains twice; a file that Forge writes is no text of the corpus."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forge.core.config import Config
from forge.core.errors import DataError
from forge.core.paths import tokens_folder
from forge.core.tokenize_settings import Tokenize
from forge.data import content_ids, corpus
from forge.data.inputs import list_inputs

ROWS = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(12))


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: str, text: str = "text") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def names(*inputs: str, own: str = "") -> list[str]:
    return [file.name for file in corpus.list_files(Tokenize(inputs=list(inputs)), own)]


# --- one file by two names ------------------------------------------------------------------------


def test_a_link_beside_its_file_is_read_once_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("in/c.jsonl", ROWS)
    Path("in/a.jsonl").symlink_to("c.jsonl")
    assert names(f"{tmp_path}/in") == [f"{tmp_path}/in/c.jsonl"]
    said = capsys.readouterr().err
    assert f"{tmp_path}/in/a.jsonl is the file {tmp_path}/in/c.jsonl by another name" in said


def test_a_second_hard_link_is_read_once() -> None:
    os.link(write("in/b.txt"), "in/a.txt")
    write("in/c.txt")  # equal, and another file
    assert names("in") == ["in/a.txt", "in/c.txt"]


def test_a_file_by_the_names_of_two_directories_is_read_once() -> None:
    write("in/b.txt")
    Path("also").symlink_to("in")
    assert names("also", "in") == ["also/b.txt"]


def test_two_names_that_tell_two_formats_are_refused() -> None:
    write("in/c.jsonl", ROWS)
    Path("in/latest.txt").symlink_to("c.jsonl")
    with pytest.raises(
        DataError, match=r"in/c\.jsonl and in/latest\.txt are one file, .* jsonl and as text"
    ):
        names("in")


def test_links_to_files_elsewhere_keep_their_names() -> None:
    write("store/1.txt")
    write("in/b.txt")
    Path("in/a.txt").symlink_to("../store/1.txt")
    assert names("in") == ["in/a.txt", "in/b.txt"]


def test_a_program_has_all_its_names() -> None:
    write("in/b.txt")
    Path("in/a.txt").symlink_to("b.txt")
    assert len(list_inputs(["in"])) == 2


# --- the cache of a hub -----------------------------------------------------------------------------


def hub_cache(commits: int = 1) -> str:
    repo = "hub/datasets--ada--texts"
    for number in range(commits):
        write(f"{repo}/blobs/b10b{number}", ROWS + "\n" * number)
        Path(f"{repo}/snapshots/c0ff{number}").mkdir(parents=True)
        Path(f"{repo}/snapshots/c0ff{number}/train.jsonl").symlink_to(f"../../blobs/b10b{number}")
    write(f"{repo}/refs/main", "c0ff0")
    return repo


@pytest.mark.parametrize("inputs", ["hub", "hub/*/*/*", "hub/**", "{repo}", "{repo}/blobs"])
def test_blobs_of_a_cache_are_refused_with_the_path_to_give(inputs: str) -> None:
    repo = hub_cache()
    with pytest.raises(DataError) as caught:
        names(inputs.format(repo=repo))
    assert caught.value.fix == f"name one commit: {repo}/snapshots/c0ff0"
    assert names(f"{repo}/snapshots/c0ff0") == names("hub/**/*.jsonl")


def test_several_commits_of_a_repository_are_refused() -> None:
    repo = hub_cache(commits=2)
    with pytest.raises(DataError, match="name one commit"):
        names(f"{repo}/snapshots")
    assert names(f"{repo}/snapshots/c0ff1") == [f"{repo}/snapshots/c0ff1/train.jsonl"]


# --- Forge's own directories ------------------------------------------------------------------------


def own_files() -> None:
    for name in ("tokens", "tokenizers", "inputs", "models"):
        write(f"data/{name}/0123456789ab/manifest.json", "{}")
    write("data/archives/forge-1000/chunk.txt")
    write("results/base/config.json", "{}")


@pytest.mark.parametrize("inputs", ["data", ".", "data/**", "**/*.txt", "./data/"])
def test_what_forge_writes_is_no_text_of_the_corpus(inputs: str) -> None:
    texts = [str(write("data/a.txt")), str(write("data/tokens/mine.txt"))]
    before = content_ids.resolve_ids(Config(tokenize=Tokenize(inputs=[inputs])))
    own_files()
    config = Config(tokenize=Tokenize(inputs=[inputs]))
    assert names(inputs, own=config.own_folders) == texts
    content_ids._cached_listing_digest.cache_clear()
    assert content_ids.resolve_ids(config) == before


def test_directories_that_are_left_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("data/a.txt")
    own_files()
    names(f"{tmp_path}/data", own=Config().own_folders)
    assert f"'{tmp_path}/data' is read without data/tokens, where" in capsys.readouterr().err


@pytest.mark.parametrize("inputs", ["results", "data/tokens", "results/*/config.json"])
def test_nothing_but_files_of_forge_is_refused(inputs: str) -> None:
    own_files()
    with pytest.raises(DataError, match=re.escape(f"{inputs!r} matches no files")):
        names(inputs, own=Config().own_folders)


def test_a_directory_inside_of_forges_own_may_be_named() -> None:
    folder = tokens_folder("data", "0123456789ab") / "hub"
    write(f"{folder}/a.txt")
    assert names(str(folder), own=Config().own_folders) == [f"{folder}/a.txt"]


def test_a_project_whose_results_are_around_it_reads_its_corpus() -> None:
    write("a.txt")
    write("base/config.json")
    own = Config(results=".", data=".").own_folders
    assert names("*.txt", own=own) == names(".", own=own) == ["a.txt"]


def test_files_of_forge_are_none_of_a_programs_inputs_either() -> None:
    write("data/a.txt")
    own_files()
    assert [file.name for file in list_inputs(["data"], Config().own_folders)] == ["data/a.txt"]


# --- directories that cannot be listed, and globs -----------------------------------------------------


@contextmanager
def bound_by_modes() -> Iterator[None]:
    """The rights of another user, where the tests run as root, whom no mode of a file binds."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("in", "cannot list in/closed: Permission denied"),
        ("in/**/*.jsonl", "cannot list in/closed: Permission denied"),
        ("in/**", "cannot list in/closed: Permission denied"),
        ("in/*/*.jsonl", "cannot list in/closed: Permission denied"),
        ("in/*/b.jsonl", "cannot read in/closed/b.jsonl: Permission denied"),
        ("in/closed/*.jsonl", "cannot list in/closed: Permission denied"),
        ("in/closed/b.jsonl", "cannot read in/closed/b.jsonl: Permission denied"),
        ("linked/*/*.jsonl", "cannot list linked/here: Permission denied"),
    ],
)
def test_text_in_a_directory_that_is_closed_is_never_left_out_without_a_word(
    tmp_path: Path, spec: str, message: str
) -> None:
    write("in/open/a.jsonl", ROWS)
    closed = write("in/closed/b.jsonl", ROWS + ROWS).parent
    Path("linked").mkdir()
    Path("linked/here").symlink_to("../in/closed")
    for folder in (tmp_path, Path("in"), Path("in/open"), Path("linked")):
        folder.chmod(0o755)
    closed.chmod(0)
    with bound_by_modes(), pytest.raises(DataError, match=re.escape(message)):
        names(spec)
    closed.chmod(0o755)


@pytest.mark.parametrize("spec", [".", "data", "**/*.txt", "data/**", "data/*/*.txt", "*/*/*.txt"])
def test_closed_directories_of_forge_and_of_a_disk_are_not_entered(
    tmp_path: Path, spec: str
) -> None:
    text = str(write("data/in/a.txt"))
    own_files()
    own = Config().own_folders
    kept = [Path("data/archives/forge-1000"), Path("results/base"), Path("data/lost+found")]
    kept[-1].mkdir()
    for folder in (tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    for folder in kept:
        folder.chmod(0)
    with bound_by_modes():
        listed = names(spec, own=own)
    for folder in kept:
        folder.chmod(0o755)
    assert listed == [text]


def test_a_closed_directory_of_a_disk_that_is_named_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write("lost+found/a.txt").parent.chmod(0)
    with bound_by_modes(), pytest.raises(DataError, match=r"cannot list lost\+found"):
        names("lost+found/*.txt")
    Path("lost+found").chmod(0o755)


@pytest.mark.parametrize(
    "spec",
    [
        *("*.txt", "./*.txt", "*", "**", "**/*.txt", "a*/**/*.txt", "*/**/b/*", "**/b/**"),
        *("*/b/c.txt", "*/*/", "*/x.txt/", "a//*.txt", ".h*/*", "*/.h*", "[!a]/*", "**/**/c.*"),
        "{here}/*/x.txt",
    ],
)
def test_a_glob_matches_what_globs_of_python_do(tmp_path: Path, spec: str) -> None:
    here = (
        "x.txt",
        "a/x.txt",
        "a/b/c.txt",
        "a/.hidden/x.txt",
        ".h/x.txt",
        "z/x.txt",
        "z/b/b/c.txt",
    )
    for name in (*here, "a/.h.txt", "z/b/c[1].txt"):
        write(name, name)
    Path("z/up").symlink_to("../a")
    Path("dangling.txt").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    spec = spec.format(here=tmp_path)
    files = {path for path in glob.glob(spec, recursive=True) if os.path.isfile(path)}  # noqa: PTH113, PTH207
    if not files:
        with pytest.raises(DataError, match="matches no files"):
            names(spec)
        return
    listed = [file.name for file in corpus.list_named([spec])]
    assert listed == sorted(map(os.path.normpath, files))
