"""Against ids of another width or byte order, and headers, that become tokens: most numbers are ids.

Files are written here by NumPy, and headers as the programs write them that are named beside each.
"""

import bz2
import csv
import gzip
import io
import lzma
import pickle
import struct
import zipfile
from dataclasses import dataclass

import numpy as np
import pytest
import zstandard
from support.each import hold_for_each

from forge.core.errors import DataError
from forge.core.tokenize_settings import TOKEN_DTYPES, Tokenize
from forge.data import token_files, token_readings
from forge.data.corpus import InputFile


@dataclass
class Tokens:
    """The documents of a corpus, and its tokenizer."""

    documents: list
    vocab: int = 50257
    eos: int = 50256

    @property
    def ids(self):
        """All of them in a row, each with its end."""
        parts = [[*document, self.eos] for document in self.documents]
        return np.array([one for part in parts for one in part], np.int64)


def read(path, tokens, **settings):
    """The documents of a file, as lists."""
    settings = Tokenize(**{"format": "nanogpt"} | settings)
    file = InputFile(path.name, str(path), path.stat().st_size)
    found = token_files.read_documents(file, settings, vocab_size=tokens.vocab, eos_id=tokens.eos)
    return [ids.tolist() for ids in found]


def natural(vocab, eos, *, seed=0, num=40, longest=80):
    """Documents whose small ids are frequent, as in those of a BPE."""
    random = np.random.default_rng(seed)
    documents = []
    for length in random.integers(1, longest, num):
        ids = (random.zipf(1.3, length) + random.integers(0, 200, length)) % vocab
        documents.append(np.where(ids == eos, (eos + 1) % vocab, ids).tolist())
    return Tokens(documents, vocab, eos)


def uniform(low, high, vocab, eos):
    ids = np.random.default_rng(1).integers(low, high, (20, 50))
    return Tokens(np.where(ids == eos, low + 1, ids).tolist(), vocab, eos)


def split(ids, vocab, eos):
    """Documents of any ids, by their ends."""
    documents, held = [], []
    for one in [*ids, eos]:
        if one == eos:
            documents += [held] if held else []
            held = []
        else:
            held.append(one)
    return Tokens(documents, vocab, eos)


# --- right files ----------------------------------------------------------------------------------


def plain(tokens, dtype="<u2"):
    return tokens.ids.astype(dtype).tobytes(), tokens


def rows(ids, vocab=1000, eos=0, dtype="<u2"):
    """A file of these very ids."""
    return np.array(ids, dtype).tobytes(), split(ids, vocab, eos)


SMALL = natural(1000, 0)
RIGHT = {
    # name: (bytes, tokens), token_dtype
    "GPT-2": (plain(natural(50257, 50256)), "uint16"),
    "Llama 2, end id 2": (plain(natural(32000, 2)), "uint16"),
    "NeoX, end id 0": (plain(natural(50277, 0)), "uint16"),
    "RWKV, 65,529 ids and end id 0": (plain(natural(65529, 0)), "uint16"),
    "vocabulary 256, end id 0": (plain(natural(256, 0)), "uint16"),
    "vocabulary 256, end id 255": (plain(natural(256, 255)), "uint16"),
    "vocabulary 257, end id 256": (plain(natural(257, 256)), "uint16"),
    "vocabulary 3": (plain(natural(3, 0)), "uint16"),
    "cl100k": (plain(natural(100277, 100257), "<u4"), "uint32"),
    "Llama 3": (plain(natural(128256, 128001), "<u4"), "uint32"),
    "Mistral-Nemo, end id 2": (plain(natural(131072, 2), "<u4"), "uint32"),
    "Gemma, end id 1": (plain(natural(262144, 1), "<u4"), "uint32"),
    "32 bits, end id 0, few ids": (plain(SMALL, "<u4"), "uint32"),
    "int32": (plain(natural(50257, 50256), "<i4"), "int32"),
    "int64": (plain(natural(50257, 50256), "<i8"), "int64"),
    "int64, end id 0": (plain(SMALL, "<i8"), "int64"),
    "16 bits of a vocabulary of 131,072": (plain(natural(60000, 2)), "uint16"),
    "uniform ids of 65,536": (plain(uniform(0, 65536, 65536, 0)), "uint16"),
    "uniform ids from 1000 on": (plain(uniform(1000, 60000, 65536, 2)), "uint16"),
    "all ids once": (rows([*range(1, 65536), 0], 65536, 0), "uint16"),
    "no id": (rows([]), "uint16"),
    "an end": (rows([0]), "uint16"),
    "ends": (rows([0] * 64), "uint16"),
    "an id and its end": (rows([5, 0]), "uint16"),
    "an end and an id": (rows([0, 5]), "uint16"),
    "two ids": (rows([5, 6, 0]), "uint16"),
    "three ids": (rows([1, 2, 3, 0]), "uint16"),
    "an id of a vocabulary of 262,144": (rows([7, 1], 262144, 1), "uint16"),
    "an id, padded": (rows([5, 0, 0, 0]), "uint16"),
    "an id of 32 bits, padded": (rows([5, 0, 0, 0], dtype="<u4"), "uint32"),
    "two documents of an id, padded": (rows([5, 0, 0, 6, 0, 0]), "uint16"),
    "padding behind": (rows(([5, 6, 7] + [0] * 997) * 20), "uint16"),
    "padding before": (rows([0] * 5000 + [5, 6, 7, 0]), "uint16"),
    "padding of 32 bits": (rows(([5, 6, 7] + [0] * 997) * 20, dtype="<u4"), "uint32"),
    "padding that is no end": (rows(([5, 6, 7, 2] + [0] * 996) * 20, 32000, 2), "uint16"),
    "padding with 256": (rows(([5, 6, 7, 0] + [256] * 900) * 20, 65536, 0), "uint16"),
    "padding with 512, end id 2": (
        rows(([5, 6, 7, 2] + [512] * 900) * 9 + [2], 65536, 2),
        "uint16",
    ),
    "256 ids, padded": (rows([5, 6] + [0] * 254, dtype="<u4"), "uint32"),
    "512 ids, padded": (rows([5, 6, 7] + [0] * 509), "uint16"),
    "documents of one id": (rows([7, 2, 8, 2, 9, 2] * 50, 1000, 2), "uint16"),
    "one id": (rows([9] * 1000 + [0]), "uint16"),
    "two ids in turn": (rows([7, 9] * 500 + [0]), "uint16"),
    "end in the middle": (rows([5, 6, 0, 7, 8, 9]), "uint16"),
    "first ids of NumPy's magic": (rows([0x4E93, 0x4D55, 7, 0], 65536), "uint16"),
    "first id of llm.c's magic": (rows([55432, 7, 8, 0], 65536), "uint16"),
    "first id of gzip's magic": (rows([0x8B1F, 7, 8, 0], 65536), "uint16"),
}


def test_right_files_are_read_and_their_shards_open(tmp_path):
    def check(case):
        (data, tokens), dtype = case
        (tmp_path / "a.bin").write_bytes(data)
        assert read(tmp_path / "a.bin", tokens, token_dtype=dtype) == tokens.documents
        limits = {"vocab_size": tokens.vocab, "eos_id": tokens.eos}
        assert token_readings.wrong_shard(tokens.ids, np.dtype(dtype), **limits) is None

    assert len(RIGHT) >= 30
    hold_for_each(RIGHT.items(), check)


NUMPY_DTYPES = ("u1", "<u2", ">u2", "<i2", "<u4", ">u4", "<i4", "<i8", ">i8", "<u8")


def test_file_of_np_save_is_read_by_its_header(tmp_path):
    """Whatever token_dtype says; with an index of dolma, too."""
    tokens = natural(120, 3)
    ends = np.cumsum([len(document) + 1 for document in tokens.documents]).tolist()

    def check(dtype):
        np.save(path := tmp_path / "a.npy", tokens.ids.astype(dtype))
        assert read(path, tokens, format="dolma") == tokens.documents
        with gzip.open(index := tmp_path / "a.csv.gz", "wt") as stream:
            csv.writer(stream).writerows(zip([0, *ends], ends, strict=False))
        assert read(path, tokens, format="dolma", token_dtype="uint32") == tokens.documents
        index.unlink()
        path.rename(tmp_path / "a.bin")
        assert read(tmp_path / "a.bin", tokens) == tokens.documents

    hold_for_each([(dtype, dtype) for dtype in NUMPY_DTYPES], check)


# --- wrong files ----------------------------------------------------------------------------------


def saved(array, **options):
    np.save(stream := io.BytesIO(), array, **options)
    return stream.getvalue()


def llm_c(tokens, magic=20240520, version=1, dtype="<u2"):
    """llm.c dev/data/data_common.py, write_datafile; modded-nanogpt data/fineweb.py."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens.ids)
    return header.tobytes() + tokens.ids.astype(dtype).tobytes()


def lit_gpt(tokens, dtype="<u2", code=8):
    """LitGPT's packed_dataset.py, PackedDatasetBuilder._write_chunk."""
    header = b"LITPKDS" + struct.pack("<QBQ", 1, code, len(tokens.ids))
    return header + tokens.ids.astype(dtype).tobytes()


def litdata(tokens, dtype="<i4"):
    """litdata's BinaryWriter: number of items, their offsets, their bytes."""
    items = [np.array(document, dtype).tobytes() for document in tokens.documents]
    starts = np.cumsum([4 * (len(items) + 2), *map(len, items)]).astype(np.uint32)
    return np.uint32(len(items)).tobytes() + starts.tobytes() + b"".join(items)


def zipped(data):
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as archive:
        archive.writestr("ids", data)
    return stream.getvalue()


LARGE, GPT2 = natural(65536, 0), natural(50257, 50256)
NEMO, GEMMA = natural(131072, 2, num=400), natural(262144, 1, num=400)
FEW = Tokens([[5, 6], [7, 8, 9]], 1000, 0)
RWKV = natural(65536, 0)
WRONG = {
    # name: bytes, tokens, token_dtype, part of the message
    "int64 as uint32": (GPT2.ids.astype("<i8").tobytes(), GPT2, "uint32", "token_dtype: int64"),
    "int64 as int32": (GPT2.ids.astype("<i8").tobytes(), GPT2, "int32", "token_dtype: int64"),
    "int64 as uint16": (SMALL.ids.astype("<i8").tobytes(), SMALL, "uint16", "token_dtype: int64"),
    "int64, Gemma": (GEMMA.ids.astype("<i8").tobytes(), GEMMA, "uint16", "token_dtype: int64"),
    "few of int64": (FEW.ids.astype("<i8").tobytes(), FEW, "uint32", "token_dtype: int64"),
    "uint32 as uint16": (SMALL.ids.astype("<u4").tobytes(), SMALL, "uint16", "token_dtype: uint32"),
    "few of uint32": (FEW.ids.astype("<u4").tobytes(), FEW, "uint16", "token_dtype: uint32"),
    "uint32, Mistral-Nemo": (NEMO.ids.astype("<u4").tobytes(), NEMO, "uint16", "uint32"),
    "uint32, Gemma": (GEMMA.ids.astype("<u4").tobytes(), GEMMA, "uint16", "token_dtype: uint32"),
    "uint16 as uint32": (GPT2.ids.astype("<u2").tobytes(), GPT2, "uint32", "token_dtype: uint16"),
    "uint16 as int64": (
        GPT2.ids[:-1].astype("<u2").tobytes(),
        GPT2,
        "int64",
        "token_dtype: uint16",
    ),
    "uint32 as int64": (GPT2.ids.astype("<u4").tobytes(), GPT2, "int64", "token_dtype: uint32"),
    "uint8": (natural(256, 0).ids.astype("u1").tobytes(), natural(256, 0), "uint16", "uint8 ids"),
    "big-endian 16": (GPT2.ids.astype(">u2").tobytes(), GPT2, "uint16", "big-endian uint16"),
    "big-endian 16, all ids": (
        RWKV.ids.astype(">u2").tobytes(),
        RWKV,
        "uint16",
        "big-endian uint16",
    ),
    "big-endian 16, cut": (RWKV.ids[:-1].astype(">u2").tobytes(), RWKV, "uint16", "big-endian"),
    "big-endian 32": (GPT2.ids.astype(">u4").tobytes(), GPT2, "uint32", "big-endian uint32"),
    "big-endian 32 as uint16": (
        RWKV.ids.astype(">u4").tobytes(),
        RWKV,
        "uint16",
        "big-endian uint32",
    ),
    "big-endian 64": (RWKV.ids.astype(">i8").tobytes(), RWKV, "uint16", "big-endian int64"),
    "a byte is missing": (
        GPT2.ids.astype("<u2").tobytes()[:-1],
        GPT2,
        "uint16",
        "no multiple of 2",
    ),
    "half an id is missing": (
        SMALL.ids.astype("<u4").tobytes()[2:],
        SMALL,
        "uint32",
        "no multiple",
    ),
    "half an id is missing, as uint16": (
        SMALL.ids.astype("<u4").tobytes()[:-2],
        SMALL,
        "uint16",
        "token_dtype: uint32",
    ),
    "shifted by a byte": (RWKV.ids.astype("<u2").tobytes()[1:-1], RWKV, "uint16", "two readings"),
    "NumPy, floats": (saved(RWKV.ids.astype("f4")), RWKV, "uint16", "array of float32"),
    "NumPy, rows": (saved(RWKV.ids[:64].reshape(8, 8)), RWKV, "uint16", r"shape \(8, 8\)"),
    "NumPy, objects": (
        saved(np.array([[1], [2, 3]], object), allow_pickle=True),
        RWKV,
        "uint16",
        "array of object",
    ),
    "NumPy, cut": (saved(RWKV.ids)[:-2], RWKV, "uint16", "its header says"),
    "NumPy, header alone": (saved(RWKV.ids)[:30], RWKV, "uint16", "cannot be read"),
    "NumPy, beyond the vocabulary": (
        saved(GPT2.ids),
        SMALL,
        "uint16",
        "the tokenizer has 1000 ids",
    ),
    "llm.c": (llm_c(LARGE), LARGE, "uint16", "llm.c and modded-nanogpt"),
    "llm.c, GPT-2": (llm_c(GPT2), GPT2, "uint16", r"tail -c \+1025"),
    "llm.c, Llama 3": (
        llm_c(NEMO, 20240801, 7, "<u4"),
        NEMO,
        "uint32",
        "llm.c and modded-nanogpt.*token_dtype: uint32",
    ),
    "a fork of llm.c": (llm_c(LARGE, 20251111, 3), LARGE, "uint16", "llm.c's kind"),
    "LitGPT": (lit_gpt(LARGE), LARGE, "uint16", "LitGPT's PackedDataset"),
    "LitGPT, int32": (
        lit_gpt(LARGE, "<i4", 4),
        LARGE,
        "uint16",
        r"tail -c \+25.*token_dtype: int32",
    ),
    "litdata": (litdata(LARGE), LARGE, "uint16", "a chunk of litdata"),
    "index of Megatron-LM": (
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + bytes(28),
        LARGE,
        "uint16",
        "an index of Megatron-LM",
    ),
    "gzip": (gzip.compress(LARGE.ids.astype("<u2").tobytes()), LARGE, "uint16", "a gzip file"),
    "zstd": (zstandard.compress(LARGE.ids.tobytes()), LARGE, "uint16", "a zstd file"),
    "xz": (lzma.compress(LARGE.ids.tobytes()), LARGE, "uint16", "an xz file"),
    "bzip2": (bz2.compress(LARGE.ids.tobytes()), LARGE, "uint16", "a bzip2 file"),
    "zip": (zipped(LARGE.ids.tobytes()), LARGE, "uint16", "a zip file"),
    "pickle": (pickle.dumps(LARGE.ids.tolist()), LARGE, "uint16", "a pickle"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", LARGE, "uint16", "Git LFS"),
}


def test_wrong_files_are_refused_with_what_they_are(tmp_path):
    def check(case):
        data, tokens, dtype, message = case
        (tmp_path / "a.bin").write_bytes(data)
        with pytest.raises(DataError, match=f"(?s){message}"):
            read(tmp_path / "a.bin", tokens, token_dtype=dtype)

    hold_for_each(WRONG.items(), check)


# --- mutated files ---------------------------------------------------------------------------------

NUM_MUTATED = 200
VOCABULARIES = (
    (256, 0),
    (1000, 0),
    (32000, 2),
    (50257, 50256),
    (65536, 0),
    (131072, 2),
    (262144, 1),
)


@dataclass
class Mutated:
    """A file of ids, and what has become of it. data: its bytes."""

    tokens: Tokens
    ids: np.ndarray
    data: bytes

    def is_read_right_as(self, dtype):
        """Whether nothing but the setting says what the file is, and that is right."""
        is_as_written = (
            self.data == self.ids.tobytes() and self.ids.dtype.newbyteorder("<") == self.ids.dtype
        )
        return is_as_written and np.dtype(dtype).itemsize == self.ids.itemsize


def mutated(seed):
    """A file of some vocabulary and dtype, in two of three cases with a header, cut or compressed."""
    random = np.random.default_rng(seed)
    vocab, eos = VOCABULARIES[random.integers(len(VOCABULARIES))]
    num, longest = ((3, 4), (30, 60), (90, 60))[random.integers(3)]
    tokens = natural(vocab, eos, seed=seed, num=num, longest=longest)
    kinds = [kind for kind in ("u1", "u2", "u4", "i4", "i8") if np.iinfo(kind).max >= vocab - 1]
    ids = tokens.ids.astype("<>"[random.random() < 0.3] + kinds[random.integers(len(kinds))])
    data = ids.tobytes()
    match random.integers(10):
        case 0:
            data = saved(ids)
        case 1:
            data = llm_c(tokens, (20240520, 20240801, 20260101)[seed % 3], dtype=ids.dtype)
        case 2:
            data = lit_gpt(tokens, ids.dtype, (1, 8, 4, 5)[seed % 4])
        case 3:
            data = data[: -int(random.integers(1, 9))]
            ids = np.frombuffer(data[: len(data) // ids.itemsize * ids.itemsize], ids.dtype)
        case 4 if num > 3:  # a few halves of ids may be ids
            data = data[ids.itemsize // 2 :]
        case 5:
            data = gzip.compress(data)
        case 6 if num > 3:
            data = np.array([len(ids)], "<i8").tobytes() + data
    return Mutated(tokens, ids, data)


def test_mutated_files_end_right_or_refused(tmp_path):
    """By every dtype that the setting takes: 800 readings."""
    ends = {"right": 0, "refused": 0}

    def check(seed):
        file = mutated(seed)
        (tmp_path / "a.bin").write_bytes(file.data)
        for dtype in TOKEN_DTYPES:
            try:
                found = read(tmp_path / "a.bin", file.tokens, token_dtype=dtype)
            except DataError as err:
                assert not file.is_read_right_as(dtype), f"{dtype}: {err}"
                ends["refused"] += 1
                continue
            expected = split(file.ids.tolist(), file.tokens.vocab, file.tokens.eos).documents
            assert found == expected, f"{file.ids.dtype.str} as {dtype}"
            ends["right"] += 1

    hold_for_each([(str(seed), seed) for seed in range(NUM_MUTATED)], check)
    assert min(ends.values()) > NUM_MUTATED / 2, ends
