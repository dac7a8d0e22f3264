"""Readings of a token file without a header: the dtypes whose ids fit its bytes.

Ids of another width or byte order are numbers, too, and often below the size of the vocabulary. They are
told apart by size, largest id, zeros at a stride, and where documents end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge.core.errors import DataError
from forge.data.token_headers import NUMPY, header_of

Ids = np.ndarray[Any, np.dtype[Any]]
Dtype = np.dtype[Any]

HEAD_BYTES = 2**10  # in which nearly every wrong dtype has an id beyond the vocabulary
BLOCK = 2**22  # bytes
SAMPLE_IDS = 2**20  # of a file, by which the order of its bytes is judged
MIN_IDS = 16  # wider ids, other than 0, which narrower ones hardly ever make by chance
SET_SAMPLE_IDS = 2**14  # of a shard
# Readings that a file may have. Wider ones come first: where they fit, narrower ones fit, too.
DTYPES = [np.dtype(name) for name in ("<i8", ">i8", "<u4", ">u4", "<u2", ">u2", "u1")]


# --- which readings fit -------------------------------------------------------------------------


@dataclass
class Fit:
    """Ids of a file as read by a dtype, from byte `skip` on."""

    dtype: Dtype
    skip: int = 0
    num_ids: int = 0
    largest: int = 0
    zeros: int = 0
    has_end: bool = False
    has_neighbors: bool = False  # two ids that are not 0, one after the other
    last: int = 0

    def __str__(self) -> str:
        zeros = self.zeros / max(self.num_ids, 1)
        cut = f", the first {self.skip} bytes left out" if self.skip else ""
        return (
            f"{self.num_ids} ids of {name_of(self.dtype)} ({zeros:.0%} of them 0, the largest"
            f" {self.largest}{cut})"
        )

    def add(self, ids: Ids, vocab_size: int, eos_id: int) -> bool:
        """Count the ids of the next block; whether all are in the vocabulary."""
        if not len(ids):
            return True
        largest = int(ids.max())
        if largest >= vocab_size or int(ids.min()) < 0:
            return False
        is_id = ids != 0
        self.has_neighbors |= bool(self.last and is_id[0]) or bool((is_id[1:] & is_id[:-1]).any())
        self.num_ids += len(ids)
        self.zeros += len(ids) - int(np.count_nonzero(is_id))
        self.largest = max(self.largest, largest)
        self.has_end |= bool((ids == eos_id).any())
        self.last = int(ids[-1])
        return True

    def differs(self, narrow: Dtype, eos_id: int) -> bool:
        """Return whether a narrower dtype, of which the ids are numbers, too, gives other documents. Its
        zeros between ids are padding where 0 ends a document and each has one id."""
        fits_narrow = self.largest < 2 ** (8 * narrow.itemsize)
        if eos_id == 0 and fits_narrow and not self.has_neighbors:
            return False
        # A few ids show it only where these begin with the file and a document ends.
        return (self.has_end and not self.skip) or self.num_ids - self.zeros >= MIN_IDS


@dataclass(frozen=True)
class PlainIds:
    """A file that has no header, and the vocabulary in which its ids must be."""

    path: Path
    size: int  # bytes
    vocab_size: int
    eos_id: int

    def fits(self, dtypes: Iterable[Dtype], skip: int = 0) -> list[Fit]:
        """The dtypes by which all ids are in the vocabulary; a last one that is cut off does not count.
        Reads until none is left."""
        left = [Fit(dtype, skip) for dtype in dtypes if self._may_fit(dtype, skip)]
        for block in _blocks(self.path, skip) if left else ():
            left = [
                fit for fit in left if fit.add(_ids(block, fit.dtype), self.vocab_size, self.eos_id)
            ]
            if not left:
                break
        return left

    def _may_fit(self, dtype: Dtype, skip: int) -> bool:
        ids = _ids(self._head[skip:], dtype)
        return len(ids) > 0 and Fit(dtype).add(ids, self.vocab_size, self.eos_id)

    @functools.cached_property
    def _head(self) -> bytes:
        """Wrong readings end here: files of right ids are opened once."""
        with open(self.path, "rb") as stream:
            return stream.read(HEAD_BYTES)

    def refuse_other(self, dtype: Dtype, *, has_index: bool) -> None:
        """DataError for ids that are rather of another dtype than `dtype`.

        Wider ids are also numbers of `dtype`, most of them 0. The other way round hardly ever: two ids in
        a row make one beyond every vocabulary. Where both give the same documents nothing is refused.
        has_index: the number of ids is known, so that only their byte order may be another one.
        """
        if not has_index and (wider := self._wider(dtype)):
            why = "wider ids become numbers with zeros between them"
            self._refuse(dtype, wider[0], why)
        if why := self._looks_swapped(dtype):
            for swapped in self.fits([dtype.newbyteorder()]):
                self._refuse(dtype, swapped, why)

    def _wider(self, dtype: Dtype) -> list[Fit]:
        """Wider ids that fit and give other documents, also where the file begins inside of an id."""
        wider = [one for one in DTYPES if one.itemsize > dtype.itemsize]
        found = []
        for skip in range(0, DTYPES[0].itemsize, dtype.itemsize):
            found += self.fits([one for one in wider if one.itemsize > skip], skip)
        return [fit for fit in found if fit.differs(dtype, self.eos_id)]

    def _looks_swapped(self, dtype: Dtype) -> str:
        """Why the bytes of each id are rather in the other order; "" for ids that may be right."""
        if not self._may_fit(dtype.newbyteorder(), 0):
            return ""
        with open(self.path, "rb") as stream:
            ids = np.fromfile(stream, dtype, SAMPLE_IDS)
            stream.seek(max(0, self.size - dtype.itemsize))
            last = np.fromfile(stream, dtype, 1)
        if not _fits_swapped(ids, self.vocab_size):
            return ""
        if last[0] != self.eos_id and last.byteswap()[0] == self.eos_id:
            return "only so does the file end with the end of text"
        many = "only so are many ids below 256 (or a byte is missing before them)"
        return many if _is_swapped(ids) else ""

    def _refuse(self, dtype: Dtype, other: Fit, why: str) -> None:
        name = name_of(other.dtype)
        for mine in self.fits([dtype]):  # none: its reader names the id beyond the vocabulary
            raise DataError(
                f"{self.path} fits two readings: {mine}, and {other}",
                cause=f"its ids are of {name}, and tokenize.token_dtype is {dtype.name}: {why}",
                fix=how_to_read([other.dtype], self.path),
            )

    def others(self, num_ids: int | None) -> list[Dtype]:
        """The widest dtypes of either byte order by which all ids are in the vocabulary, and a document
        ends or the file has the `num_ids` ids of its index. Reads the file; for errors."""
        found = [
            fit.dtype
            for fit in self.fits(DTYPES)
            if self.size % fit.dtype.itemsize == 0
            and (fit.has_end if num_ids is None else fit.num_ids == num_ids)
            and fit.has_neighbors  # else these are halves of wider ids, some of which are missing
            # Every file is one of bytes: only a vocabulary of about 256 has files of them.
            and (fit.dtype.itemsize > 1 or self.vocab_size <= 512)
        ]
        widest = max((dtype.itemsize for dtype in found), default=0)
        return [dtype for dtype in found if dtype.itemsize == widest]


def _ids(block: bytes, dtype: Dtype) -> Ids:
    return np.frombuffer(block, dtype, len(block) // dtype.itemsize)


def _blocks(path: Path, skip: int) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        stream.seek(skip)
        while block := stream.read(BLOCK):
            yield block


def _fits_swapped(ids: Ids, vocab_size: int) -> bool:
    return Fit(ids.dtype).add(ids.byteswap(), vocab_size, 0) and len(ids) > 0


def _is_swapped(ids: Ids) -> bool:
    """Return whether ids of 16 bits have many zeros in their lower byte and few in the upper one: in
    natural text ids below 256 are frequent, and of all numbers only one of 256 is a multiple of 256.
    Without the most frequent multiple, which may be padding."""
    if ids.dtype.itemsize != 2:
        return False
    counts = np.bincount(ids.astype(np.int64) & 0xFFFF, minlength=2**16)
    upper, lower = int(counts[1:256].sum()), counts[256::256]
    multiples, others = int(lower.sum() - lower.max()), int(len(ids) - counts[0] - lower.max())
    return multiples >= 16 and multiples > 8 * upper and multiples > others / 32


# --- what to set --------------------------------------------------------------------------------


def name_of(dtype: Dtype) -> str:
    """`uint16`; `big-endian uint16`."""
    is_big = dtype.itemsize > 1 and dtype.newbyteorder(">") == dtype
    return f"big-endian {dtype.name}" if is_big else dtype.name


def how_to_read(dtypes: list[Dtype], path: Path) -> str:
    """Advice for a file that has ids of one of these dtypes."""
    return ", or ".join(_how_to_read(dtype, path) for dtype in dtypes)


def _how_to_read(dtype: Dtype, path: Path) -> str:
    target = {1: "uint16", 2: "uint16", 4: "uint32", 8: "int64"}[dtype.itemsize]
    setting = f"set tokenize.token_dtype: {target}"
    if dtype.itemsize > 1 and dtype.newbyteorder("<") == dtype:
        return setting
    return (
        f"write its {name_of(dtype)} ids as little-endian {target} (NumPy: np.fromfile({path.name!r},"
        f" {dtype.str!r}).astype({np.dtype(target).str!r}).tofile(…)) and {setting}"
    )


# --- shards made by earlier versions ------------------------------------------------------------


def wrong_shard(ids: Ids, dtype: Dtype, *, vocab_size: int, eos_id: int) -> str | None:
    """Evidence in the beginning of a shard that the file it was made of was read by a wrong dtype, or
    with its header; None where there is none. ids: the first SET_SAMPLE_IDS. dtype: that of the
    reading."""
    head = ids[:HEAD_BYTES].astype(dtype).tobytes()[:HEAD_BYTES]
    if head.startswith(NUMPY):
        return "begins with the header of an .npy file"
    if header := header_of(head):
        return f"begins with the header of {header.name}"
    if _are_halves(ids, -(-vocab_size // 2 ** (8 * dtype.itemsize)), eos_id):
        return "has 0 or nearly 0 at every second id, as halves of wider ids have"
    narrow = ids.astype(dtype)
    if dtype.itemsize == 2 and _fits_swapped(narrow, vocab_size) and _is_swapped(narrow):
        return "has ids whose bytes are swapped"
    return None


def _are_halves(ids: Ids, below: int, eos_id: int) -> bool:
    """Return whether no two ids in a row are above the upper halves of wider ids, which are less than
    `below`. That holds of documents of one id, too: these have no halves, unless they end with 0."""
    is_half, is_end = ids < below, ids == eos_id
    is_id = ~is_half & ~is_end
    num_ids, num_halves = int(is_id.sum()), int((is_half & ~is_end).sum())
    has_halves = eos_id == 0 or num_halves >= num_ids / 2
    return num_ids >= 2 * MIN_IDS and has_halves and not (is_id[1:] & is_id[:-1]).any()
