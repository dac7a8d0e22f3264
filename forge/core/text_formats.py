"""The table of formats of input files: which names they have, and what reads them. And the format of a
file by its name, and which names earlier versions read otherwise."""

from __future__ import annotations

import re
from typing import NamedTuple


class TextFormat(NamedTuple):
    """Files of text. Their reader is in `data/text_formats`, in a module of the format's name."""

    endings: tuple[str, ...] = ()
    """Ends of the names by which `auto` finds it: in lower case, without .gz or .zst."""
    module: str = ""
    """The module with `documents`, imported where text is read; "" for that of Forge."""
    is_divisible: bool = False
    """`tokenize.document_separator` cuts its files."""
    mark: str = ""
    """Word in the ids of what is made of its files; only of a format whose files `auto` once took for
    text."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens of its documents. Where there are some, documents are packed whole into windows of
    tokenize.seq_len tokens, and only some of their tokens are learned (`data.packing`)."""

    def check_of_plugin(self, name: str) -> None:
        """Raise ValueError for what a plugin of a project cannot have. What `auto` reads does not depend
        on the project that reads it."""
        refused = self.endings or self.mark or self.special_tokens
        if refused or not self.module or not re.fullmatch(NAME, name):
            raise ValueError(
                f"text_formats: {name} is {self!r:.200}: a plugin's has a module, neither endings nor a"
                " mark nor special tokens, and a name of small letters, digits and _"
            )


class TokenFormat(NamedTuple):
    """Files that hold ids in place of text, which `data.token_files` reads."""

    ending: str
    beside: str = ""
    """End of the name of the file beside it that says where documents end; "" without any."""
    records_dtype: bool = False
    """Its files record the dtype of the ids; else tokenize.token_dtype says it."""


AUTO = "auto"  # the value of tokenize.format by which the name of each file decides
TEXT = "text"  # what `auto` reads where no ending fits
FORMATS: dict[str, TextFormat | TokenFormat] = {
    TEXT: TextFormat((".txt", ".text"), is_divisible=True),
    "jsonl": TextFormat((".jsonl", ".json", ".ndjson")),
    "csv": TextFormat((".csv",), "forge.data.text_formats.tables", mark="by column"),
    "tsv": TextFormat((".tsv",), "forge.data.text_formats.tables", mark="by column"),
    "parquet": TextFormat((".parquet",)),
    "nanogpt": TokenFormat(".bin"),
    "megatron": TokenFormat(".bin", ".idx", records_dtype=True),
    "dolma": TokenFormat(".npy", ".csv.gz"),
}
TEXT_FORMATS = {name: one for name, one in FORMATS.items() if isinstance(one, TextFormat)}
TOKEN_FORMATS = {name: one for name, one in FORMATS.items() if isinstance(one, TokenFormat)}
UNRECORDED_DTYPE = [name for name, one in TOKEN_FORMATS.items() if not one.records_dtype]
BY_ENDING = {end: name for name, one in TEXT_FORMATS.items() for end in one.endings}

NAME = "[a-z][a-z0-9_]{0,39}"  # of a plugin, and of a key or a format of one
# `FORMAT@PLUGIN:DIGEST`, the value of tokenize.format for a plugin's in a config that was read, and so in
# content ids, manifests and statements.
OF_PLUGIN = re.compile(f"({NAME})@({NAME}):([0-9a-f]{{64}})")
COMPRESSED = (".gz", ".zst", ".zstd")  # in any case
READINGS = "readings"  # key in the settings of a manifest of tokens: all words of `new_readings`
# Read as text by earlier versions: archives, and what is compressed.
PACKED = re.compile(r"\.(tar|tgz|zip|xz|bz2|lz4)(\.gz|\.zst)?$", re.IGNORECASE)


def is_compressed(name: str) -> bool:
    """Return whether a file of this name is unpacked as it is read."""
    return name.lower().endswith(COMPRESSED)


def ending(name: str) -> str:
    """The end of a file's name that tells its format, in lower case: `.jsonl` of `a.JSONL.gz`."""
    name = name.lower().rpartition("/")[2]
    while is_compressed(name):
        name = name.rpartition(".")[0]
    return name[name.rfind(".") :] if "." in name else ""


def format_by_name(name: str) -> str:
    """The format of a file with `tokenize.format: auto`."""
    return BY_ENDING.get(ending(name), TEXT)


def new_readings(name: str, kind: str) -> list[str]:
    """Words for how a file is read that earlier versions read otherwise: part of the ids of what is made
    of the file. kind: `tokenize.format`."""
    if kind in TOKEN_FORMATS:
        return []
    mark = TEXT_FORMATS[format_by_name(name)].mark if kind == AUTO else ""
    marks = [mark] if mark else []
    if is_compressed(name) and not name.endswith((".gz", ".zst")):
        marks.append("unpacked")  # once as bytes
    return marks


def misread(name: str, kind: str, readings: list[str]) -> str:
    """Trouble with tokens that were made of this file; "" where there is none. readings: those that
    their manifest names."""
    if missing := [mark for mark in new_readings(name, kind) if mark not in readings]:
        return f"was not read {' and '.join(missing)}"
    if kind in (AUTO, TEXT) and PACKED.search(name):
        return "was read as text, as it is packed"
    if name.startswith("hf://") and "/." in name:
        return "is a file of the repository, and no text"
    return ""
