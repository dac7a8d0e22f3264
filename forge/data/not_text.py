"""Files that hold no text: known by their first bytes, and by NUL characters, whatever their names."""

from __future__ import annotations

import re

from forge.core.errors import DataError

HEAD_BYTES = 512  # a header of tar; all other signatures are shorter
FROM_UTF8 = "leave it out of tokenize.inputs, or write its text into a file of UTF-8"
UNPACK = "unpack it, and name the directory with its files in tokenize.inputs"
DECOMPRESS = "decompress it: {} FILE; .gz and .zst are read as they are"
# Encodings by which bytes of four are those of high digits.
WIDE: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "UTF-32LE",
    (True, True, True, False): "UTF-32BE",
    (False, True, False, True): "UTF-16LE",
    (True, False, True, False): "UTF-16BE",
}
# Signature (without groups), kind of file in words, what to do about the file. Signatures: those of the
# `file` command; of Git LFS its docs/spec.md, of git-annex its pointer files.
KINDS: tuple[tuple[bytes, str, str], ...] = (
    (rb"\x1f\x8b", "data compressed by gzip", "give it a name that ends in .gz"),
    (
        rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
        "data compressed by zstd",
        "give it a name that ends in .zst",
    ),
    (rb"\xfd7zXZ\0", "data compressed by xz", DECOMPRESS.format("xz -d")),
    (
        rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)",
        "data compressed by bzip2",
        DECOMPRESS.format("bunzip2"),
    ),
    (
        rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18",
        "data compressed by lz4",
        DECOMPRESS.format("lz4 -d"),
    ),
    (rb"\x1f[\x9d\xa0]", "data compressed by compress", DECOMPRESS.format("gzip -d")),
    (rb"\xff\x06\0\0sNaPpY", "data compressed by snappy", DECOMPRESS.format("snzip -d")),
    (
        rb"PK(?:\x03\x04|\x05\x06|\x07\x08)",
        "a zip archive (or a document of Word, Excel …)",
        UNPACK,
    ),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (rb"Rar!\x1a\x07", "a rar archive", UNPACK),
    (rb"(?s:.{257}ustar)", "a tar archive", UNPACK),
    (rb"!<arch>\n", "an ar archive", UNPACK),
    (rb"%PDF-", "a PDF document", FROM_UTF8),
    (rb"\{\\rtf", "an RTF document", FROM_UTF8),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of Microsoft Office", FROM_UTF8),
    (
        rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*|RIFF.{4}WEBP",
        "an image",
        "leave it out of tokenize.inputs",
    ),
    (
        rb"\x7fELF|\xca\xfe\xba\xbe|\xfe\xed\xfa|MZ.\0",
        "a program",
        "leave it out of tokenize.inputs",
    ),
    (rb"SQLite format 3\0", "a database of SQLite", FROM_UTF8),
    (
        rb"PAR1[\0-\x1f]",
        "a parquet file",
        "give it a name that ends in .parquet, or set tokenize.format: parquet",
    ),
    (
        rb"ARROW1\0\0|FEA1\0|\xff{4}.{3}\0\x10\0\0\0",
        "a file of Arrow",
        "convert it to parquet: datasets.load_from_disk(DIRECTORY).to_parquet(FILE)",
    ),
    (
        rb"\x89HDF\r\n|\x93NUMPY|Obj\x01|\x80[\x02-\x05][\x8c\x95}\](cX]",
        "a file of numbers or objects (HDF5, NumPy, Avro, pickle)",
        FROM_UTF8,
    ),
    (
        rb"\xff\xfe\0\0|\0\0\xfe\xff",
        "text in UTF-32",
        "convert it: iconv -f UTF-32 -t UTF-8 FILE",
    ),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE"),
    (
        rb"version https://git-lfs\.github\.com/spec/[^\n]*\r?\n(?:ext-[^\n]*\n)*oid ",
        "a pointer of Git LFS, in place of the file",
        "fetch the file: git lfs pull",
    ),
    (
        rb"# xet version ",
        "a pointer of git-xet, in place of the file",
        "fetch the file: git xet",
    ),
    (
        rb"/annex/objects/[^\n]*\n?\Z",
        "a pointer of git-annex, in place of the file",
        "fetch the file: git annex get FILE",
    ),
)
SIGNATURES = re.compile(b"|".join(b"(%b)" % signature for signature, *_ in KINDS), re.DOTALL)


def require_text(head: bytes, path: str) -> None:
    """DataError where a file or stream begins as one that holds no text, whatever its name. head: its
    first HEAD_BYTES or more, or all."""
    if match := SIGNATURES.match(head):
        _, kind, fix = KINDS[(match.lastindex or 1) - 1]
        raise DataError(
            f"{path} is {kind}", cause="its first bytes say so, whatever its name", fix=fix
        )


def require_plain(data: bytes, path: str, start: int) -> None:
    """DataError where bytes that are read as text have a NUL, or an escape sequence of ISO-2022: both are
    valid UTF-8. start: their offset in the text."""
    if (index := data.find(b"\0")) >= 0:
        cause, fix = _of_nul(data[max(0, index - 64) & ~3 :][:256], path)
        what = f"{path} has a NUL character at byte offset {start + index}"
        raise DataError(what, cause=cause, fix=fix)
    if (index := data.find(b"\x1b$")) >= 0:
        raise DataError(
            f"{path} has an escape sequence of ISO-2022 at byte offset {start + index}",
            cause="text in ISO-2022-JP or another encoding with 7 bits",
            fix="convert it: iconv -f ISO-2022-JP -t UTF-8 FILE",
        )


def _of_nul(around: bytes, path: str) -> tuple[str, str]:
    """The likely cause of a NUL character, and what to do. around: begins at a multiple of four bytes."""
    if re.search(r"\.(tar|tgz)\b", path.lower()):
        return "a tar archive", UNPACK
    # The high bytes of Latin, Greek, Cyrillic, Hebrew and Arabic letters are 0 to 6.
    high = [sum(byte < 9 for byte in around[n::4]) * 8 > len(around) for n in range(4)]
    if encoding := WIDE.get(tuple(high)):
        return (
            f"text in {encoding} without a byte order mark",
            f"convert it: iconv -f {encoding} -t UTF-8 FILE",
        )
    return (
        "a binary file, or a text that was damaged by a crash or a full disk",
        "leave it out of tokenize.inputs, or remove the characters: tr -d '\\000'",
    )


def require_characters(document: str, path: str) -> None:
    """DataError for a document, of JSON or a table, of which a quarter is NUL: bytes of UTF-16 that were
    taken for characters. A few are text that JSON can spell."""
    if "\0" in document and 4 * document.count("\0") >= len(document):
        raise DataError(
            f"{path} has a document with {document.count(chr(0))} NUL characters of {len(document)}:"
            f" {document[:20]!r}",
            cause="text in UTF-16, whose bytes were taken for characters when the file was made",
            fix="make the file again from text that was decoded rightly",
        )
