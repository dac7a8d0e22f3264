"""Headers of token files: NumPy's, by which a file is read, and others, which are refused.

Files of nanoGPT and dolma have ids and no header; another one would become tokens.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from forge.core.errors import DataError

HEAD_BYTES = 2**10  # the longest header that is recognized: llm.c's
MAX_ID = 2**24  # of all vocabularies
MIN_COUNT = 256  # ids; a smaller number may be a right first id, with padding behind


@dataclass(frozen=True)
class Header:
    """A header of another format. num_bytes: its length, with ids of `dtype` behind it; 0: no plain ids
    follow."""

    name: str
    num_bytes: int = 0
    dtype: str = ""


NUMPY = b"\x93NUMPY"
# llm.c (dev/data/data_common.py, hellaswag.py) and modded-nanogpt (data/fineweb.py): 256 numbers of 32
# bits, of which the first are this one, a version and the number of ids.
LLM_C = {20240520: "uint16", 20240522: "uint16", 20240801: "uint32"}
LLM_C_BYTES = 1024
# LitGPT and TinyLlama (packed_dataset.py): magic, version, code of the dtype, ids in a chunk.
LIT_GPT = struct.Struct("<7sQBQ")
LIT_GPT_DTYPES = {3: "uint16", 4: "int32", 5: "int64", 8: "uint16"}
MAGICS = {
    b"MMIDIDX\0\0": "an index of Megatron-LM",
    b"TNTIDX\0\0": "an index of Megatron-LM's first format",
    b"\x1f\x8b\x08": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\xfd7zXZ\0": "an xz file",
    b"BZh91AY&SY": "a bzip2 file",
    b"\x04\x22\x4d\x18": "an lz4 file",
    b"PK\x03\x04": "a zip file (also .npz, .pt)",
    b"PAR1": "a parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF\r\n": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"\x80\x04\x95": "a pickle",
    b"\x80\x05\x95": "a pickle",
    b"version https://git-lfs": "a pointer of Git LFS, in place of the file",
}


def header_of(head: bytes, size: int = 0) -> Header | None:
    """The header of another format at the beginning of a file; None for plain ids and NumPy's header.

    head: the first HEAD_BYTES. size: bytes of the file; 0 if unknown, as in shards that were made of it.
    """
    if head.startswith(b"LITPKDS") and len(head) >= LIT_GPT.size:
        dtype = LIT_GPT_DTYPES.get(LIT_GPT.unpack_from(head)[2], "")
        return Header("LitGPT's PackedDataset", LIT_GPT.size, dtype)
    for magic, name in MAGICS.items():
        if head.startswith(magic):
            return Header(name)
    return _llm_c(head, size) or _litdata(head, size) or _count(head, size)


def _llm_c(head: bytes, size: int) -> Header | None:
    """By the magic number and a version below 2^16; those of forks by the number of ids, and zeros."""
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<u4")
    if len(numbers) < 2 or not 0 < numbers[1] < 2**16:
        return None
    if dtype := LLM_C.get(int(numbers[0])):
        return Header("llm.c and modded-nanogpt", LLM_C_BYTES, dtype)
    least = 1 if numbers[0] > MAX_ID else MIN_COUNT
    if len(numbers) < 256 or numbers[2] < least or numbers[3:].any():
        return None
    for dtype in ("uint16", "uint32", "int64"):
        if int(numbers[2]) * np.dtype(dtype).itemsize == size - LLM_C_BYTES:
            return Header("llm.c's kind (256 numbers)", LLM_C_BYTES, dtype)
    return None


def _litdata(head: bytes, size: int) -> Header | None:
    """A chunk of litdata (LitGPT's prepare_data): number of items, where each begins, and their bytes."""
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<u4")
    if len(numbers) < 3 or not numbers[0] or int(numbers[1]) != 4 * (int(numbers[0]) + 2):
        return None
    starts = numbers[1 : int(numbers[0]) + 2]
    rises = (np.diff(starts.astype(np.int64)) >= 0).all() and int(starts[-1]) <= size
    ends = int(starts[-1]) == size or len(starts) < int(numbers[0]) + 1
    return Header("a chunk of litdata") if rises and ends else None


def _count(head: bytes, size: int) -> Header | None:
    """A number of 64 bits that counts the ids behind it."""
    number = int.from_bytes(head[:8], "little")
    for dtype in ("uint16", "uint32", "int64"):
        if number >= MIN_COUNT and number * np.dtype(dtype).itemsize == size - 8:
            return Header("a count of 64 bits", 8, dtype)
    return None


def refuse_header(path: Path, size: int) -> bool:
    """Return whether the file begins with NumPy's header. DataError where it begins with another
    format's."""
    with open(path, "rb") as stream:
        head = stream.read(HEAD_BYTES)
    if head.startswith(NUMPY):
        return True
    if (header := header_of(head, size)) is None:
        return False
    if not header.num_bytes:
        raise DataError(
            f"{path} is {header.name}, and has no plain ids",
            cause="compressed, not downloaded, or of another format than tokenize.format says",
            fix="give files that have ids and nothing else",
        )
    plain = f"tail -c +{header.num_bytes + 1} {path.name} > plain/{path.name}"
    raise DataError(
        f"{path} begins with the header of {header.name}, which would become ids",
        cause="tokenize.format says that the file has ids and nothing else",
        fix=f"cut it off: {plain}" + (header.dtype and f", tokenize.token_dtype: {header.dtype}"),
    )


def numpy_header(path: Path, size: int) -> tuple[np.dtype[Any], int]:
    """Dtype of the ids in a file of `np.save`, and the byte at which they begin; nothing is unpickled.
    DataError for what is no row of integers, and for another size."""
    try:
        with open(path, "rb") as stream:
            shape, dtype = _numpy_array(stream)
            start = stream.tell()
    except (ValueError, EOFError) as err:
        raise _bad_array(path, f"has a header of NumPy that cannot be read: {err}") from None
    if dtype.kind not in "iu":
        raise _bad_array(path, f"has an array of {dtype}, not of integers")
    if len(shape) != 1:
        raise _bad_array(path, f"has an array of shape {shape}, not one row of ids")
    if start + shape[0] * dtype.itemsize != size:
        raise _bad_array(path, f"has {size} bytes, its header says {shape[0]} ids of {dtype}")
    return dtype, start


def _numpy_array(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version}, which integers do not need")
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, _, dtype = read[version](stream)
    return shape, dtype


def _bad_array(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} {what}",
        cause="an interrupted copy, or an array of something else",
        fix="write ids in one row: np.save(path, np.concatenate(documents).astype('uint32'))",
    )
