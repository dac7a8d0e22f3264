"""The format of an input file by its name, and which names earlier versions read otherwise."""

from __future__ import annotations

import re

from forge.core.tokenize_settings import TOKEN_FORMATS

COMPRESSED = (".gz", ".zst", ".zstd")  # in any case
ROWS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
TABLES = {".csv": "csv", ".tsv": "tsv"}
BY_ENDING = ROWS | TABLES
PLAIN = (".txt", ".text")  # of all names that are read as text, those that say so
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
    return BY_ENDING.get(ending(name), "text")


def new_readings(name: str, kind: str) -> list[str]:
    """Words for how a file is read that earlier versions read otherwise: part of the ids of what is made
    of the file. kind: `tokenize.format`."""
    marks: list[str] = []
    if kind in TOKEN_FORMATS:
        return marks
    if kind == "auto" and ending(name) in TABLES:
        marks.append("by column")  # once as text
    if is_compressed(name) and not name.endswith((".gz", ".zst")):
        marks.append("unpacked")  # once as bytes
    return marks


def misread(name: str, kind: str, readings: list[str]) -> str:
    """Trouble with tokens that were made of this file; "" where there is none. readings: those that
    their manifest names."""
    if missing := [mark for mark in new_readings(name, kind) if mark not in readings]:
        return f"was not read {' and '.join(missing)}"
    if kind in ("auto", "text") and PACKED.search(name):
        return "was read as text, as it is packed"
    if name.startswith("hf://") and "/." in name:
        return "is a file of the repository, and no text"
    return ""
