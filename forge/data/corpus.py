"""The input files of the corpus, and the documents in them, read in bounded memory."""

from __future__ import annotations

import errno
import glob
import os
import re
import tokenize as python_source
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

import blake3

from forge.core import hooks, project_plugins
from forge.core.config import use_recorded
from forge.core.errors import ConfigError, DataError, ForgeError
from forge.core.terminal import say, say_once
from forge.core.text_formats import (
    AUTO,
    BY_ENDING,
    OF_PLUGIN,
    TEXT,
    TEXT_FORMATS,
    TextFormat,
    ending,
    format_by_name,
    is_compressed,
)
from forge.core.tokenize_settings import Tokenize
from forge.data import hub
from forge.data.decoding import Utf8, Warn, corrupt
from forge.data.input_bytes import Consumed, TextInput
from forge.data.not_text import require_characters

INPUTS = "tokenize.inputs"  # the key that errors name
STDLIB = "python:stdlib"
RULE = "rule:"  # before the path of a file that a rule of the user's own workflow makes
TOPICS = f"{STDLIB}#help-topics"  # pydoc's help texts: one document per topic, not a module
# Tests hold deliberately broken files; the others are not the standard library's own text.
STDLIB_SKIPPED = frozenset(
    # encodings: a tenth of all bytes and nothing but tables of character names
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
)

MOST_NAMED = 3  # files, in a message
LOST_AND_FOUND = "lost+found"  # at the root of a disk's file system, closed to all but root
# Of a path that is not there, or a link to nothing or to itself.
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
# Files that are rarely text of a corpus, though they may be.
ABOUT = re.compile(
    r"(?i)(^|/)((readme|licen[cs]e|copying|notice|citation|changelog)\b[^/]*|[^/]*\.html?)$"
)
# In the path of a file in the cache of huggingface_hub, after the repository: `blobs` or `snapshots`,
# then the blob or the commit.
IN_HUB_CACHE = re.compile(r"(?:(?<=/)|^)(blobs|snapshots)/([^/]+)")


class InputFile(NamedTuple):
    """A file of the corpus. Plain strings: a `Path` takes longer to make than a small file to read."""

    name: str
    """The path as the config spells it, equal on every machine. Its ending tells how the file is read."""
    location: str
    """Path of the file on this machine."""
    size: int
    """Bytes on disk."""
    inode: tuple[int, int] | None = None
    """Device and number of the file, by which names of one file are found."""

    @property
    def path(self) -> Path:
        return Path(self.location)


# --- which files --------------------------------------------------------------------------------


def list_files(settings: Tokenize, own: str = "") -> list[InputFile]:
    """The local files that `tokenize.inputs` names, as `list_texts`; `inputs.corpus_files` has those of a
    hub, too."""
    inputs = local_inputs(settings.inputs) + made_by_rules(settings.inputs)
    return list_texts(inputs, settings.format, own)


def local_inputs(inputs: Sequence[str]) -> list[str]:
    """Names in `tokenize.inputs` of local files that are there at the start."""
    return [name for name in inputs if not name.startswith((hub.SCHEME, RULE))]


def made_by_rules(inputs: Sequence[str]) -> list[str]:
    """Paths of the files in `tokenize.inputs` that rules of the user's own workflow make. Raises
    ConfigError for a pattern: which files fit is not known before they are there."""
    paths = [name.removeprefix(RULE) for name in inputs if name.startswith(RULE)]
    for path in paths:
        if not path or glob.has_magic(path):
            raise ConfigError(
                f"tokenize.inputs: {RULE + path!r} is not the path of one file",
                fix=f"name each file that your rules make: {RULE}corpus/clean.txt",
            )
    return paths


def of_key(error: DataError, key: str) -> DataError:
    """The error of a list of inputs, with the key of the config that has the list."""
    return DataError(
        error.what.replace(INPUTS, key), cause=error.cause, fix=error.fix.replace(INPUTS, key)
    )


def list_texts(inputs: Sequence[str], kind: str = AUTO, own: str = "") -> list[InputFile]:
    """The files of a corpus, as `list_named`, each by one of its names. Raises DataError as that, and
    where two names of a file tell different formats."""
    return _each_once(list_named(inputs, own, kind))


def list_named(inputs: Sequence[str], own: str = "", kind: str = "") -> list[InputFile]:
    """The files that files, directories and globs name, sorted by name, each path once.

    own: pattern of directories in which Forge writes (`Config.own_folders`), which are left out below a
    directory or a glob. kind: `tokenize.format` of a corpus. Raises DataError that names the input which
    is missing or matches no files, and of a corpus for the cache of a hub, and as `check_kinds`.
    """
    files: dict[str, InputFile] = {}  # by path: a directory and a file in it may both be named
    for spec in inputs:
        listed = list(_files_of(spec, re.compile(own) if own else None))
        if not listed:
            raise DataError(
                f"tokenize.inputs: {spec!r} matches no files",
                cause="a glob that matches nothing, or an empty directory (hidden files, and what Forge"
                " itself writes into results and data, do not count)",
                fix="correct tokenize.inputs; `**` in a glob matches nested directories",
            )
        if kind and spec != STDLIB and listed[0].location != spec:  # a directory or a glob
            _refuse_blobs(listed)
            if kind == AUTO:
                check_kinds(spec, [file.name for file in listed])
        for file in listed:
            files.setdefault(os.path.abspath(file.location), file)  # noqa: PTH100 (resolve is slow)
    return sorted(files.values(), key=lambda file: file.name)


def check_kinds(spec: str, names: Sequence[str]) -> None:
    """DataError where a directory or glob has files of rows (JSONL, CSV, parquet) and others that would
    be read as text without saying so: README.md, LICENSE and scripts of a data set are not its text.

    Without rows a line names those that are usually about a corpus, and pages of HTML.
    """
    kinds = [(name, BY_ENDING.get(ending(name))) for name in names]
    with_rows = [name for name, kind in kinds if kind not in (None, TEXT)]
    others = [name for name, kind in kinds if kind is None or (kind == TEXT and ABOUT.search(name))]
    if with_rows and others:
        raise DataError(
            f"{INPUTS}: {spec!r} has {_few(with_rows)}, and {_few(others)}, which would be read as text",
            cause="a data set has files about its data, too",
            fix="to read all of them as they are, set tokenize.format: text; else name what is text of"
            f" the corpus, by its endings: {_by_ending(spec, with_rows)}",
        )
    if about := [name for name in others if ABOUT.search(name)]:
        say_once(f"inputs: {spec!r}: {_few(about)} read as text of the corpus, as all other files")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _by_ending(spec: str, names: list[str]) -> str:
    """Globs for the files of rows that an input has, for an advice."""
    folder = spec.rpartition("/")[0] if glob.has_magic(spec) else spec.rstrip("/")
    star = "*" if spec.startswith(hub.SCHEME) else "**/*"
    found = {"".join(Path(n).suffixes[-2 if is_compressed(n) else -1 :]) for n in names}
    return ", ".join(f"{folder or '.'}/{star}{end}" for end in sorted(found))


def _each_once(files: list[InputFile]) -> list[InputFile]:
    """Each file by one name: of links and what they lead to by the latter's, else by the first. Raises
    DataError where two names tell different formats."""
    by_inode: dict[object, list[InputFile]] = {}
    for file in files:
        by_inode.setdefault(file.inode or file.name, []).append(file)
    left_out = set()
    for names in by_inode.values():
        if len(names) > 1:
            left_out |= _further_names(names)
    return [file for file in files if file.name not in left_out] if left_out else files


def _further_names(files: list[InputFile]) -> set[str]:
    """Names, but for one, of the files that are the same. Some file systems number files anew: without
    hard links only links count."""
    left_out = set[str]()
    same: dict[str, list[InputFile]] = {}
    for file in files:
        is_hard = os.stat(file.location).st_nlink > 1  # noqa: PTH116
        same.setdefault("" if is_hard else os.path.realpath(file.location), []).append(file)
    for names in same.values():
        kept, *others = sorted(names, key=lambda file: file.path.is_symlink())
        formats = {format_by_name(file.name) for file in names}
        if others and len(formats) > 1:
            raise DataError(
                f"{INPUTS}: {kept.name} and {others[0].name} are one file, which would be read as"
                f" {' and as '.join(sorted(formats))}",
                cause="a link, or a second name of the file",
                fix=f"name one of them in {INPUTS}",
            )
        for other in others:
            say_once(f"inputs: {other.name} is the file {kept.name} by another name: read once")
        left_out |= {other.name for other in others}
    return left_out


def _refuse_blobs(files: list[InputFile]) -> None:
    """DataError for a repository in the cache of huggingface_hub of which files are listed below `blobs`,
    where they have no endings, or of several commits."""
    seen: dict[str, set[str]] = {}
    for file in files:
        for match in IN_HUB_CACHE.finditer(file.location):
            repo = file.location[: match.start()]
            if not _is_hub_cache(repo):
                continue
            commits = seen.setdefault(repo, set())
            commits.add(match[2] if match[1] == "snapshots" else "")
            if "" in commits or len(commits) > 1:
                raise DataError(
                    f"{INPUTS}: {file.name} is in the cache of the Hugging Face hub, which has a file in"
                    " blobs and, for each commit, in snapshots",
                    cause="an input is the directory of the cache, or of a repository in it",
                    fix=f"name one commit: {repo}snapshots/{_newest_commit(Path(repo))}",
                )


def _is_hub_cache(repo: str) -> bool:
    return Path(repo, "blobs").is_dir() and Path(repo, "snapshots").is_dir()


def _newest_commit(repo: Path) -> str:
    """The commit of the main branch as of its last download; without that any one."""
    main = repo / "refs/main"
    there = sorted(path.name for path in (repo / "snapshots").iterdir())
    return main.read_text(errors="replace").strip() if main.is_file() else "".join(there[-1:])


def _files_of(spec: str, own: re.Pattern[str] | None) -> Iterator[InputFile]:
    # By os.path, which answers False in a directory that is closed: `_input_file` words the error.
    if spec == STDLIB:
        yield from _stdlib_files()
    elif glob.has_magic(spec) and not os.path.exists(spec):  # noqa: PTH110
        is_left_out = partial(_is_left_out, own=own, spec=spec)
        for name in _matches(spec.split("/"), is_left_out):
            if not _is_missing_or_folder(name) and not _is_own(os.path.dirname(name), own, spec):  # noqa: PTH120
                yield _input_file(os.path.normpath(name), name, spec)
    elif os.path.isdir(spec):  # noqa: PTH112
        for path in _walk(spec, own=own):
            yield _input_file(os.path.normpath(path), path, spec)
    else:
        yield _input_file(os.path.normpath(spec), spec, spec)


def _is_left_out(folder: str, own: re.Pattern[str] | None, spec: str) -> bool:
    """Return whether a directory that `spec` does not name is not entered: one of Forge's own, which may
    be closed, or a closed `lost+found`, which a disk's file system has."""
    is_of_disk = folder.rpartition("/")[2] == LOST_AND_FOUND
    if is_of_disk and not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        return True
    return _is_own(folder, own, spec)


def _is_own(folder: str, own: re.Pattern[str] | None, spec: str) -> bool:
    """Return whether Forge writes into this directory, below the one that `spec` names, and say so
    once."""
    if own is None or not (match := own.match(os.path.abspath(folder))):  # noqa: PTH100
        return False
    first = re.split(r"[*?\[]", spec, maxsplit=1)[0]
    named = os.path.abspath(first if first == spec else os.path.dirname(first))  # noqa: PTH100, PTH120
    if named.startswith(match[0].rstrip("/") + "/"):
        return False  # it names a directory inside, such as that of downloads
    left_out = re.sub(r"/([0-9a-f]{12}|forge-\d+)$", "", os.path.relpath(match[0]))
    say_once(f"inputs: {spec!r} is read without {left_out}, where Forge itself writes")
    return True


def _is_missing_or_folder(path: str) -> bool:
    """Return whether a glob's path is no regular file: a directory, or a link to nothing or to itself."""
    try:
        return not S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 (thousands of them)
    except OSError as err:  # any other error is reported for the file
        return err.errno in NOT_THERE


def _input_file(name: str, path: str, spec: str) -> InputFile:
    try:
        status = os.stat(path)  # noqa: PTH116 (thousands of them)
        if not S_ISREG(status.st_mode):
            raise DataError(
                f"tokenize.inputs: {spec!r}: {path} is not a regular file",
                cause="a pipe, a socket or a device: it cannot be read twice",
                fix="write its text into a file, or leave it out of tokenize.inputs",
            )
        name.encode()
        # Equal modules of Python are one file where an installer stores them so; elsewhere they are not.
        inode = None if spec == STDLIB else (status.st_dev, status.st_ino)
        return InputFile(name, path, status.st_size, inode)
    except OSError as err:
        raise DataError(
            f"tokenize.inputs: {spec!r}: cannot read {path}: {err.strerror}",
            cause=f"paths are relative to {Path.cwd()}",
            fix="correct tokenize.inputs, or put the file there; a file that a rule of your own makes is"
            f" named {RULE}FILE",
        ) from None
    except UnicodeEncodeError:
        raise DataError(
            f"tokenize.inputs: {spec!r}: the name of {os.fsencode(name)!r} is not UTF-8",
            cause="the file was named on a system with another encoding, as Latin-1; manifests hold names"
            " as UTF-8",
            fix="rename it (convmv -f latin1 -t utf8 --notest FILE), or leave it out of tokenize.inputs",
        ) from None


def _matches(
    parts: Sequence[str], is_left_out: Callable[[str], bool], folder: str = ""
) -> Iterator[str]:
    """Paths that a glob, divided at its slashes, matches in a directory, as `glob.iglob` gives them.
    `glob.iglob` silently skips a directory that cannot be listed; here that is a DataError.

    is_left_out: whether not to enter a directory that the glob matches. folder: ends with a slash; "" for
    the working directory.
    """
    part, *rest = parts
    if not glob.has_magic(part):
        yield from _matches(rest, is_left_out, f"{folder}{part}/") if rest else [f"{folder}{part}"]
        return
    if part == "**" and rest:
        yield from _matches(rest, is_left_out, folder)
    for name, may_be_folder in _entries(folder or "."):
        if name.startswith(".") and not part.startswith("."):
            continue
        path = f"{folder}{name}"
        if part == "**":
            if not rest:
                yield path
            if may_be_folder and not is_left_out(path):
                yield from _matches(parts, is_left_out, f"{path}/")
        elif fnmatchcase(name, part):
            if not rest:
                yield path
            elif may_be_folder and not is_left_out(path):
                yield from _matches(rest, is_left_out, f"{path}/")


def _entries(folder: str) -> list[tuple[str, bool]]:
    """Names in a directory, each with whether it may be a directory, as a link may; [] where `folder` is
    none. Raises DataError."""
    try:
        with os.scandir(folder) as entries:
            return [(e.name, e.is_symlink() or e.is_dir(follow_symlinks=False)) for e in entries]
    except OSError as err:
        if err.errno in NOT_THERE:
            return []
        raise _unlisted(folder, err) from None


def _unlisted(folder: str, err: OSError) -> DataError:
    return DataError(
        f"cannot list {os.path.normpath(folder)}: {err.strerror}",
        cause="text of the corpus may be in it",
        fix="make the directory readable, or name what is beside it",
    )


def _walk(
    folder: str, skipped: frozenset[str] = frozenset(), own: re.Pattern[str] | None = None
) -> Iterator[str]:
    """Paths of all files below a directory except hidden ones and those of directories that are left
    out; follows links, each directory once."""

    def fail(err: OSError) -> None:
        raise _unlisted(err.filename, err) from None

    if _is_own(folder, own, folder):
        return
    seen = set()
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        status = os.stat(parent)  # noqa: PTH116
        # A link to a parent directory would never end.
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in skipped
            and not _is_left_out(f"{parent}/{name}", own, folder)
        )
        yield from (f"{parent}/{name}" for name in names if not name.startswith("."))


def _stdlib_files() -> Iterator[InputFile]:
    """The standard library's own modules and help topics. Debian's packages lack some of them."""
    root = os.path.dirname(os.__file__)  # noqa: PTH120 (called at every start of the workflow)
    topics = f"{root}/pydoc_data/topics.py"
    for path in _walk(root, STDLIB_SKIPPED):
        if path == topics:
            yield _input_file(TOPICS, path, STDLIB)
        # _sysconfigdata is a dump of how this one Python was built, full of machine paths.
        elif path.endswith(".py") and "/_sysconfigdata" not in path:
            yield _input_file(f"{STDLIB}/{path[len(root) + 1 :]}", path, STDLIB)


# --- documents ----------------------------------------------------------------------------------


def read_documents(
    file: InputFile,
    settings: Tokenize,
    *,
    warn: Warn = say,
    consumed: Consumed = lambda _: None,
    hasher: blake3.blake3 | None = None,
) -> Iterator[str]:
    """The documents in a file, in order, without those of white space only.

    warn: called once per file where bytes are not UTF-8 and `tokenize.invalid_utf8` is `replace`.
    consumed: called with the number of bytes read from disk since its last call. hasher: has all bytes
    of the file after the last document. Raises DataError that names the file and the position that
    cannot be read.
    """
    path, kind = file.location, _kind_of(file.name, settings)
    utf8 = Utf8(path, settings.invalid_utf8, warn)
    opened = TextInput(file.name, path, file.size, kind, settings, utf8, consumed, hasher)
    with _read_trouble(path, kind):
        for document in _documents(opened, file.name):
            if document and not document.isspace():
                require_characters(document, path)
                yield document


def _documents(file: TextInput, name: str) -> Iterator[str]:
    """name: of the file in the config."""
    if name == TOPICS or name.startswith(f"{STDLIB}/"):
        file.digest()
        yield from _stdlib_documents(name, Path(file.location))
        file.consumed(file.size)
    else:
        yield from reader(file.kind)(file)


def is_divisible(file: InputFile, settings: Tokenize) -> bool:
    """Return whether `document_separator` divides the file: text, but no module of the standard
    library."""
    kind = _kind_of(file.name, settings)
    return text_format(kind).is_divisible and not file.name.startswith(STDLIB)


def _kind_of(name: str, settings: Tokenize) -> str:
    return format_by_name(name) if settings.format == AUTO else settings.format


def text_format(kind: str) -> TextFormat:
    """The entry of a format other than `auto`. Imports the plugin that has it. Raises ConfigError where
    the project does not have that plugin, with that digest."""
    match = OF_PLUGIN.fullmatch(kind)
    if match is None:
        return TEXT_FORMATS.get(kind) or hooks.own_text_formats()[kind]
    name, plugin, digest = match.groups()
    if project_plugins.used().get(plugin) != digest:
        use_recorded({plugin: digest}, f"the format {name}")
    has_it, found = hooks.text_formats().get(name, ("", None))
    if has_it != plugin or found is None:
        raise ConfigError(f"the plugin {plugin} (digest {digest[:12]}) has no text format {name}")
    return found


def reader(kind: str) -> Callable[[TextInput], Iterator[str]]:
    """The function `documents` of a format other than `auto`. Raises ConfigError as `text_format`, and
    for a module of a plugin that cannot be imported."""
    module = text_format(kind).module or f"forge.data.text_formats.{kind}"
    try:
        documents: Callable[[TextInput], Iterator[str]] = import_module(module).documents
    except (Exception, SystemExit) as err:
        if not OF_PLUGIN.fullmatch(kind):
            raise
        raise ConfigError(
            f"the reader of the format {kind} cannot be imported: {type(err).__name__}: {err}"
            f"{project_plugins.place(err)}",
            fix="correct the code of the plugin; docs/plugins/own.md has what it needs",
        ) from None
    return documents


def import_plugin(settings: Tokenize) -> None:
    """Import the reader of a plugin, before anything is made with it and before processes are forked.
    Raises ConfigError as `reader`."""
    if OF_PLUGIN.fullmatch(settings.format):
        reader(settings.format)


@contextmanager
def _read_trouble(path: str, kind: str) -> Iterator[None]:
    """Turn errors of a corrupt compressed file or an unreadable one, and of a plugin's reader, into a
    DataError that names the file."""
    try:
        yield
    except (EOFError, zlib.error) as err:
        raise corrupt(path, err) from None
    except OSError as err:
        if err.errno is None and "too much memory" in str(err):
            raise DataError(
                f"cannot decompress {path}: {err}",
                cause="it is compressed with a window of more than 128 MiB (zstd --long=28 or more)",
                fix=f"decompress it, zstd -d --long=31 {path}, or compress the text without --long",
            ) from None
        if err.errno is None:  # gzip and pyarrow raise it for corrupt contents
            raise corrupt(path, err) from None
        raise DataError(f"cannot read {path}: {err.strerror}", fix="make it readable") from None
    except Exception as err:
        if isinstance(err, ForgeError) or not OF_PLUGIN.fullmatch(kind):
            raise
        raise DataError(
            f"cannot read {path} as {kind.partition('@')[0]}: {type(err).__name__}: {err}"
            f"{project_plugins.place(err)}",
            cause="a fault of the plugin that has the format, or a file that it did not expect",
            fix="correct the code of the plugin, which gives other tokens, or the file",
        ) from None


def _stdlib_documents(name: str, path: Path) -> Iterator[str]:
    if name == TOPICS:
        from pydoc_data.topics import topics

        yield from (topics[topic] for topic in sorted(topics))
        return
    try:
        with python_source.open(path) as source:  # honors the coding line (PEP 263)
            yield source.read()
    except (SyntaxError, UnicodeDecodeError):
        # The default corpus must work everywhere, also with a patched Python.
        yield path.read_text("latin-1")
