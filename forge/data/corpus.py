"""The input files of the corpus, and the documents in them, read in bounded memory."""

from __future__ import annotations

import codecs
import errno
import glob
import json
import os
import re
import tokenize as python_source
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, NamedTuple

import blake3
import orjson

from forge.core.errors import ConfigError, DataError
from forge.core.files import utf8_bytes
from forge.core.terminal import say, say_once
from forge.core.tokenize_settings import Tokenize
from forge.data import hub
from forge.data.input_bytes import CHUNK_BYTES, COMPRESSED, BytesRead, Consumed, open_bytes
from forge.data.not_text import HEAD_BYTES, require_characters, require_plain, require_text
from forge.data.parquet_pages import rows_per_batch

INPUTS = "tokenize.inputs"  # the key that errors name
STDLIB = "python:stdlib"
RULE = "rule:"  # before the path of a file that a rule of the user's own workflow makes
TOPICS = f"{STDLIB}#help-topics"  # pydoc's help texts: one document per topic, not a module
# Tests hold deliberately broken files; the others are not the standard library's own text.
STDLIB_SKIPPED = frozenset(
    # encodings: a tenth of all bytes and nothing but tables of character names
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
)

# In the path of a file in the cache of huggingface_hub, after the repository: `blobs` or `snapshots`,
# then the blob or the commit.
IN_HUB_CACHE = re.compile(r"(?:(?<=/)|^)(blobs|snapshots)/([^/]+)")

MAX_DOCUMENT_BYTES = 2**28

Warn = Callable[[str], None]


class InputFile(NamedTuple):
    """A file of the corpus. Plain strings: a `Path` takes longer to make than a small file to read."""

    name: str
    """The path as the config spells it, equal on every machine."""
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
    return list_texts(local_inputs(settings.inputs) + made_by_rules(settings.inputs), own)


def local_inputs(inputs: Sequence[str]) -> list[str]:
    """Of the names in `tokenize.inputs` those of local files that are there at the start."""
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


def list_texts(inputs: Sequence[str], own: str = "") -> list[InputFile]:
    """The files of a corpus, as `list_named`, each by one of its names. Raises DataError as that, and for
    files of a hub's cache that are there under two names."""
    files = list_named(inputs, own)
    _refuse_blobs(inputs, files)
    return _each_once(files)


def list_named(inputs: Sequence[str], own: str = "") -> list[InputFile]:
    """The files that files, directories and globs name, sorted by name, each path once.

    own: pattern of directories in which Forge writes (`Config.own_folders`), which are left out below a
    directory or a glob. Raises DataError that names the input which is missing or matches no files.
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
        for file in listed:
            files.setdefault(os.path.abspath(file.location), file)  # noqa: PTH100 (resolve is slow)
    return sorted(files.values(), key=lambda file: file.name)


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


def _refuse_blobs(inputs: Sequence[str], files: list[InputFile]) -> None:
    """DataError for a repository in the cache of huggingface_hub of which files are listed below `blobs`,
    where they have no endings, or of several commits. A file that is named by itself is right."""
    seen: dict[str, set[str]] = {}
    for file in files:
        for match in IN_HUB_CACHE.finditer(file.location):
            repo = file.location[: match.start()]
            if file.location in inputs or not _is_hub_cache(repo):
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
    if spec == STDLIB:
        yield from _stdlib_files()
    elif glob.has_magic(spec) and not Path(spec).exists():
        for name in glob.iglob(spec, recursive=True):  # noqa: PTH207 (shell rules, cheaper)
            if not _is_missing_or_folder(name) and not _is_own(os.path.dirname(name), own, spec):  # noqa: PTH120
                yield _input_file(os.path.normpath(name), name, spec)
    elif Path(spec).is_dir():
        for path in _walk(spec, own=own):
            yield _input_file(os.path.normpath(path), path, spec)
    else:
        yield _input_file(os.path.normpath(spec), spec, spec)


def _is_own(folder: str, own: re.Pattern[str] | None, spec: str) -> bool:
    """Whether Forge writes into this directory, below the one that `spec` names."""
    if own is None or not (match := own.match(os.path.abspath(folder))):  # noqa: PTH100
        return False
    first = re.split(r"[*?\[]", spec, maxsplit=1)[0]
    named = os.path.abspath(first if first == spec else os.path.dirname(first))  # noqa: PTH100, PTH120
    if named.startswith(match[0].rstrip("/") + "/"):
        return False  # it names a directory inside, such as that of downloads
    left_out = re.sub(r"/[0-9a-f]{12}$", "", os.path.relpath(match[0]))
    say_once(f"inputs: {spec!r} is read without {left_out}, where Forge itself writes")
    return True


def _is_missing_or_folder(path: str) -> bool:
    """Whether a glob's path is not a file: a directory, or a link to nothing or to itself."""
    try:
        return not S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 (thousands of them)
    except OSError as err:  # any other error is reported for the file
        return err.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


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


def _walk(
    folder: str, skipped: frozenset[str] = frozenset(), own: re.Pattern[str] | None = None
) -> Iterator[str]:
    """Paths of all files below a directory except hidden ones and Forge's own; follows links, each
    directory once."""

    def fail(err: OSError) -> None:
        raise DataError(
            f"cannot list {err.filename}: {err.strerror}", fix="make the directory readable"
        ) from None

    seen = set()
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        status = os.stat(parent)  # noqa: PTH116
        # A link to a parent directory would never end.
        if (status.st_dev, status.st_ino) in seen or _is_own(parent, own, folder):
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in skipped)
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
    utf8 = _Utf8(file.location, settings.invalid_utf8, warn)
    with _read_trouble(file.location):
        for document in _documents(file, settings, utf8, BytesRead(consumed, hasher)):
            if document and not document.isspace():
                require_characters(document, file.location)
                yield document


def _documents(file: InputFile, settings: Tokenize, utf8: _Utf8, read: BytesRead) -> Iterator[str]:
    if file.name == TOPICS or file.name.startswith(f"{STDLIB}/"):
        yield from _stdlib_documents(file)
        read.digest(file.path)
        read.consumed(file.size)
        return
    kind = _format_of(file.location, settings)
    if kind == "parquet":
        read.digest(file.path)
        yield from _parquet(file, settings, utf8, read.consumed)
        return
    if (
        kind == "text"
        and file.size <= CHUNK_BYTES
        and not file.location.lower().endswith(COMPRESSED)
    ):
        yield from _small_text(file, settings.document_separator, utf8, read)
        return
    with open_bytes(file.path, read) as stream:
        head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
        require_text(head, file.location)
        require_plain(head, file.location, 0)
        if kind == "jsonl":
            yield from _jsonl(stream, settings, utf8)
        else:
            yield from _split_text(utf8.stream(stream), settings.document_separator, file.location)


def is_divisible(file: InputFile, settings: Tokenize) -> bool:
    """Whether `document_separator` divides the file: text, but no module of the standard library."""
    return not file.name.startswith(STDLIB) and _format_of(file.location, settings) == "text"


def _format_of(path: str, settings: Tokenize) -> str:
    return format_by_name(path) if settings.format == "auto" else settings.format


def format_by_name(path: str) -> str:
    """The format of a file with `tokenize.format: auto`."""
    name = path.lower().removesuffix(".gz").removesuffix(".zst").removesuffix(".zstd")
    if name.endswith((".jsonl", ".json", ".ndjson")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


@contextmanager
def _read_trouble(path: str) -> Iterator[None]:
    """Turn errors of a corrupt compressed file or an unreadable one into a DataError that names it."""
    try:
        yield
    except (EOFError, zlib.error) as err:
        raise _corrupt(path, err) from None
    except OSError as err:
        if err.errno is None:  # gzip and pyarrow raise it for corrupt contents
            raise _corrupt(path, err) from None
        raise DataError(f"cannot read {path}: {err.strerror}", fix="make it readable") from None


def _corrupt(path: str, err: Exception) -> DataError:
    return DataError(
        f"{path} is corrupt: {err}",
        cause="an interrupted download or copy, or a wrong file name extension",
        fix="fetch the file again",
    )


class _Utf8:
    """Bytes to text by the policy `tokenize.invalid_utf8`, for one file."""

    def __init__(self, path: str, policy: str, warn: Warn) -> None:
        self.path, self._policy, self._warn = path, policy, warn
        self._warned = False

    def decode(
        self, data: bytes, position: Callable[[int], str], final: bool = True
    ) -> tuple[str, int]:
        """The text and the number of bytes decoded; an incomplete last character is left if not final.

        position(i): the position of byte i of data, for messages.
        """
        try:
            return codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as err:
            text, used = codecs.utf_8_decode(data, "replace", final)
            what = f"is not UTF-8 at {position(err.start)} (0x{data[err.start]:02x})"
            self.invalid(what, is_rare=text.count("\ufffd") * 4 <= len(text))
            return text, used

    def invalid(self, what: str, is_rare: bool = True) -> None:
        """Raise DataError or, with the policy `replace`, warn the first time. is_rare: of a binary file
        U+FFFD would be all that is left."""
        if self._policy == "error":
            replace = ", or set tokenize.invalid_utf8: replace" if is_rare else ""
            raise DataError(
                f"{self.path} {what}",
                cause="another encoding (Latin-1, UTF-16), or a binary file among the inputs",
                fix="convert the file to UTF-8, leave it out of tokenize.inputs" + replace,
            )
        if not self._warned:
            self._warned = True
            self._warn(f"{self.path} {what}: replaced by U+FFFD, here and in the rest of the file")

    def stream(self, stream: IO[bytes]) -> Iterator[str]:
        """The text of a stream in pieces of about CHUNK_BYTES, without a byte order mark."""
        start, rest = 0, b""  # rest: the incomplete character at the end of a chunk
        while True:
            chunk = stream.read(CHUNK_BYTES)
            require_plain(chunk, self.path, start + len(rest))
            text, used = self.decode(rest + chunk, _offset_from(start), final=not chunk)
            yield text.removeprefix("\ufeff") if start == 0 else text
            if not chunk:
                return
            start, rest = start + used, (rest + chunk)[used:]


def _offset_from(start: int) -> Callable[[int], str]:
    return lambda index: f"byte offset {start + index}"


def _small_text(
    file: InputFile, separator: str | None, utf8: _Utf8, read: BytesRead
) -> Iterator[str]:
    """The documents of a small file, read at once: for thousands of them, each call counts."""
    data = _read_at_once(file)
    read.add(data)
    require_text(data, file.location)
    require_plain(data, file.location, 0)
    text = utf8.decode(data, _offset_from(0))[0].removeprefix("\ufeff")
    yield from text.split(separator) if separator else [text]


def _read_at_once(file: InputFile) -> bytes:
    """The bytes of a small file, by three system calls; `open` and `read` of Python make eight."""
    descriptor = os.open(file.location, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, file.size + 1)
        if len(data) != file.size:  # it has changed since it was listed
            while more := os.read(descriptor, CHUNK_BYTES):
                data += more
        return data
    finally:
        os.close(descriptor)


def _split_text(pieces: Iterator[str], separator: str | None, path: str) -> Iterator[str]:
    """The text of all pieces, split at each separator; one document without one."""
    held = ""
    held_bytes = 0
    for piece in pieces:
        # Only new text can complete a separator: a long document is not searched again.
        searched = max(0, len(held) - len(separator or "") + 1)
        held += piece
        held_bytes += utf8_bytes(piece)
        if separator and held.find(separator, searched) >= 0:
            *documents, held = held.split(separator)
            held_bytes = utf8_bytes(held)
            yield from documents
        _check_length(
            held_bytes,
            f"{path} has a document",
            "split the text into documents: set tokenize.document_separator",
        )
    yield held


def _check_length(length: int, what: str, fix: str) -> None:
    if length > MAX_DOCUMENT_BYTES:
        raise DataError(
            f"{what} of more than {MAX_DOCUMENT_BYTES // 2**20} MiB",
            cause="a document is held in memory as a whole",
            fix=fix,
        )


def _stdlib_documents(file: InputFile) -> Iterator[str]:
    if file.name == TOPICS:
        from pydoc_data.topics import topics

        yield from (topics[topic] for topic in sorted(topics))
        return
    try:
        with python_source.open(file.location) as source:  # honors the coding line (PEP 263)
            yield source.read()
    except (SyntaxError, UnicodeDecodeError):
        # The default corpus must work everywhere, also with a patched Python.
        yield file.path.read_text("latin-1")


# --- JSONL and parquet --------------------------------------------------------------------------


def _jsonl(stream: IO[bytes], settings: Tokenize, utf8: _Utf8) -> Iterator[str]:
    start = number = 0
    while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        document = _well_formed(line, settings.text_field)
        if document is None:
            yield from _json_line(line, number, start, settings.text_field, utf8)
        else:
            yield document
        start += len(line)


def _well_formed(line: bytes, field: str) -> str | None:
    """The text of a line, by a parser that is twice as fast as json's and stricter.

    None for a line that `_json_line` must judge: it knows the policy and words all errors.
    """
    try:
        record = orjson.loads(line) if len(line) <= MAX_DOCUMENT_BYTES else None
    except ValueError:
        return None
    text = record.get(field) if isinstance(record, dict) else None
    return text if isinstance(text, str) else None


def _json_line(line: bytes, number: int, start: int, field: str, utf8: _Utf8) -> Iterator[str]:
    """The document of a line, if it is not blank. start: the position of the line in the file."""
    place = f"line {number}"
    _check_length(len(line), f"{utf8.path} has at {place} a line", "write one object per line")
    text, _ = utf8.decode(line, _offset_from(start))
    if number == 1:
        text = text.removeprefix("\ufeff")
    if not text.isspace():
        yield _json_document(text, place, field, utf8)


def _json_document(line: str, place: str, field: str, utf8: _Utf8) -> str:
    where = f"{utf8.path}, {place}"
    try:
        record = json.loads(line.rstrip())  # of a cut line the newline would be said to be wrong
    except (ValueError, RecursionError) as err:  # ValueError: also numbers of over 4300 digits
        raise DataError(
            f"{where} is not JSON: {err}: {line.strip()[:60]!r}",
            cause="truncated, or indented JSON; each line must be one complete object",
            fix="correct the line, or set tokenize.format if the file is not JSONL",
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{where} is not an object: {line.strip()[:60]!r}",
            fix=f'each line must look like {{"{field}": "…"}}',
        )
    if field not in record:
        raise _no_text(where, field, "is missing", list(record))
    text = record[field]
    if not isinstance(text, str):
        raise _no_text(where, field, f"is {type(text).__name__}, not a string", list(record))
    return _without_surrogates(text, place, utf8)


def _without_surrogates(text: str, place: str, utf8: _Utf8) -> str:
    r"""Applies the policy for invalid bytes to a lone surrogate, which JSON can spell ("\ud83d")."""
    try:
        text.encode()
    except UnicodeEncodeError as err:
        utf8.invalid(f"has a lone surrogate \\u{ord(text[err.start]):x} at {place}")
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    return text


def _no_text(where: str, field: str, problem: str, fields: list[str]) -> DataError:
    return DataError(
        f"{where}: field {field!r} {problem}; fields found: {', '.join(fields) or 'none'}",
        fix="set tokenize.text_field to the field that holds the text, or correct the file",
    )


def _parquet(file: InputFile, settings: Tokenize, utf8: _Utf8, consumed: Consumed) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    with file.path.open("rb") as begin:
        head = begin.read(HEAD_BYTES)
    if not head.startswith(b"PAR1"):
        require_text(head, file.location)
    field, row = settings.text_field, 0
    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            _check_column(table.schema_arrow, file.location, field)
            num_rows = max(table.metadata.num_rows, 1)
            rows = rows_per_batch(file.path, table.metadata, field)
            for batch in table.iter_batches(rows, columns=[field], use_threads=False):
                # As bytes: pyarrow does not check that a string column is UTF-8.
                for value in batch.column(0).cast("large_string").cast("large_binary"):
                    row += 1
                    yield _parquet_document(value.as_py(), f"row {row}", field, utf8)
                consumed(file.size * row // num_rows - file.size * (row - len(batch)) // num_rows)
    except (pyarrow.lib.ArrowException, ValueError) as err:
        raise _corrupt(file.location, err) from None


def _check_column(schema: Any, path: str, field: str) -> None:
    import pyarrow

    count = schema.names.count(field)
    if count != 1:
        problem = "is missing" if count == 0 else f"exists {count} times"
        raise _no_text(path, field, problem, schema.names)
    kind = schema.field(field).type
    if isinstance(kind, pyarrow.DictionaryType):
        kind = kind.value_type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise _no_text(path, field, f"is {kind}, not a string", schema.names)


def _parquet_document(data: bytes | None, place: str, field: str, utf8: _Utf8) -> str:
    where = f"{utf8.path}, {place}"
    if data is None:
        raise _no_text(where, field, "is null, not a string", [field])
    _check_length(len(data), f"{where} has a text", "write one document per row")
    return utf8.decode(data, lambda index: f"{place}, byte {index} of its text")[0]
