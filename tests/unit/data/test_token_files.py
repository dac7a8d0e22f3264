"""Against ids that are taken over wrongly: another dtype, tokenizer or index gives numbers, too.

The files are written here as the formats' own programs write them; nothing of Forge reads them back.
"""

import contextlib
import csv
import gzip
import json
import struct

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from forge.core.config import Config, checked
from forge.core.errors import ConfigError, DataError
from forge.core.tokenize_settings import Tokenize
from forge.data import content_ids, token_files
from forge.data.content_ids import resolve
from forge.data.corpus import InputFile
from forge.data.shards import ShardSet
from forge.data.tokenize import tokenize
from forge.data.tokenizer import build_tokenizer

EOS, VOCAB = 0, 1000
# Equal lengths do not hide an end that is off by one; none has the end of text.
DOCUMENTS = [np.arange(1 + number, 4 + 2 * number) for number in range(40)]


def with_end(document):
    return np.append(document, EOS)


def nanogpt(path, documents, dtype="uint16"):
    """As data/openwebtext/prepare.py: ids of all documents, each with eot, through np.memmap."""
    ids = np.concatenate([with_end(document) for document in documents])
    array = np.memmap(path, dtype=dtype, mode="w+", shape=ids.shape)
    array[:] = ids
    array.flush()
    return path


def megatron(path, documents, *, code=8, ends=False, sequences=1):
    """As IndexedDatasetBuilder and _IndexWriter. ends: as with --append-eod. sequences: of a document."""
    dtype = {4: np.int32, 8: np.uint16}[code]
    ids = [with_end(document) if ends else document for document in documents]
    parts = [part for one in ids for part in np.array_split(one, sequences)]
    path.write_bytes(b"".join(part.astype(dtype).tobytes(order="C") for part in parts))
    lengths = np.array([len(part) for part in parts])
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    firsts = np.arange(len(documents) + 1) * sequences
    with open(path.with_suffix(".idx"), "wb") as index:
        index.write(b"MMIDIDX\x00\x00")
        index.write(struct.pack("<Q", 1))
        index.write(struct.pack("<B", code))
        index.write(struct.pack("<Q", len(lengths)))
        index.write(struct.pack("<Q", len(firsts)))
        index.write(lengths.astype(np.int32).tobytes(order="C"))
        index.write(pointers.astype(np.int64).tobytes(order="C"))
        index.write(firsts.astype(np.int64).tobytes(order="C"))
    return path


def dolma(path, documents, dtype="uint16", *, ends=True):
    """As MemmapWriter, with MemmapMetadata in the rows."""
    ids = [with_end(document) if ends else document for document in documents]
    array = np.memmap(path, mode="w+", dtype=dtype, shape=(sum(map(len, ids)),))
    array[:] = np.concatenate(ids)
    array.flush()
    with gzip.open(path.with_suffix(".csv.gz"), "wt") as stream:
        rows, start = csv.writer(stream), 0
        for number, one in enumerate(ids):
            rows.writerow([start, start + len(one), f"id-{number}", "docs/a,b.jsonl.gz", number])
            start += len(one)
    return path


def read(path, **settings):
    """The documents of a file, as lists."""
    settings = Tokenize(format=settings.pop("format"), **settings)
    file = InputFile(path.name, str(path), path.stat().st_size)
    found = token_files.read_documents(file, settings, vocab_size=VOCAB, eos_id=EOS)
    return [ids.tolist() for ids in found]


EXPECTED = [document.tolist() for document in DOCUMENTS]
MADE = {
    "nanogpt": lambda folder: (nanogpt(folder / "train.bin", DOCUMENTS), {}),
    "nanogpt 32": lambda folder: (
        nanogpt(folder / "train.bin", DOCUMENTS, "uint32"),
        {"token_dtype": "uint32"},
    ),
    "megatron": lambda folder: (megatron(folder / "a.bin", DOCUMENTS), {}),
    "megatron 32": lambda folder: (megatron(folder / "a.bin", DOCUMENTS, code=4), {}),
    "megatron eod": lambda folder: (megatron(folder / "a.bin", DOCUMENTS, ends=True), {}),
    "megatron sentences": lambda folder: (megatron(folder / "a.bin", DOCUMENTS, sequences=3), {}),
    "dolma": lambda folder: (dolma(folder / "part-0-00000.npy", DOCUMENTS), {}),
    "dolma without eos": lambda folder: (dolma(folder / "p.npy", DOCUMENTS, ends=False), {}),
    "dolma 32": lambda folder: (
        dolma(folder / "p.npy", DOCUMENTS, "uint32"),
        {"token_dtype": "uint32"},
    ),
}


@pytest.mark.parametrize("chunk", [7, 2**20])
@pytest.mark.parametrize("case", MADE)
def test_documents_of_a_file_are_those_that_were_written(tmp_path, monkeypatch, case, chunk):
    monkeypatch.setattr(token_files, "CHUNK_TOKENS", chunk)
    path, settings = MADE[case](tmp_path)
    assert read(path, format=case.split()[0], **settings) == EXPECTED


def test_dolma_without_its_index_is_cut_at_the_end_of_text(tmp_path):
    path = dolma(tmp_path / "p.npy", DOCUMENTS)
    path.with_suffix(".csv.gz").unlink()
    assert read(path, format="dolma") == EXPECTED


def test_end_of_text_before_a_document_and_twice_makes_no_empty_one(tmp_path):
    path = tmp_path / "a.bin"
    np.array([EOS, 5, 6, EOS, EOS, 7], "uint16").tofile(path)
    assert read(path, format="nanogpt") == [[5, 6], [7]]


WRONG_IDS = {
    "id": ([*DOCUMENTS[0], VOCAB], "uint16"),
    "negative": ([5, -1, EOS], "int32"),
    "no end": (np.arange(1, 100), "uint16"),
    "too long": ([EOS, *[1] * 200], "uint16"),
    "size": (np.ones(3), "uint8"),
    "16 as 32": ([1, 2, 3, 4, EOS, 5], "uint16"),
    "32 as 16": ([1, 2, 3, 4, EOS, 5], "uint32"),
}
READ_AS = {"negative": "int32", "16 as 32": "uint32"}


def break_index(path, what):
    """Break the index of a file of Megatron-LM, or the file."""
    index = path.with_suffix(".idx")
    data = bytearray(index.read_bytes())
    match what:
        case "no index":
            index.unlink()
        case "magic":
            index.write_bytes(b"PK" + data[2:])
        case "short index":
            index.write_bytes(data[:-8])
        case "code":
            data[17] = 7
            index.write_bytes(data)
        case "other index":
            path.write_bytes(path.read_bytes()[:-4])
        case "gap":  # sequence 2 begins a token later
            lengths = 34 + 4 * 40
            data[lengths + 16 : lengths + 24] = struct.pack(
                "<q", 2 + struct.unpack_from("<q", data, lengths + 16)[0]
            )
            index.write_bytes(data)
        case "negative length":
            data[34:38] = struct.pack("<i", -1)
            index.write_bytes(data)
        case "order":  # documents 1 and 2 begin at each other's sequences
            firsts = len(data) - 8 * 41
            data[firsts + 8 : firsts + 24] = struct.pack("<qq", 2, 1)
            index.write_bytes(data)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("id", r"a\.bin: token 3 is id 1000, and the tokenizer has 1000 ids"),
        ("negative", "token 1 is id -1,"),
        ("16 as 32", "token 0 is id 131073,"),
        ("32 as 16", r"two readings: 12 ids of uint16 \(58% of them 0, .* 6 ids of uint32"),
        ("size", "has 3 bytes, no multiple of 2"),
        ("no end", "has 99 tokens, and none is id 0, which ends a document"),
        ("too long", "has a document of more than 64 tokens without id 0"),
        ("no index", r"has no index a\.idx"),
        ("magic", r"begins with b'PKIDIDX\\x00\\x00'"),
        ("short index", "is too short for 40 sequences, 41 documents"),
        ("code", "has version 1 and dtype code 7"),
        ("other index", "has 898 tokens, the documents of its index end at 900"),
        (
            "gap",
            r"a\.idx has sequence 2 with \d+ tokens from byte \d+ on; the one before it ends at byte",
        ),
        ("negative length", "has sequence 0 with -1 tokens"),
        ("order", "has document 2 from sequence 1 on: documents must be in order, within 40"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_value(tmp_path, monkeypatch, what, message):
    if what == "too long":
        monkeypatch.setattr(token_files, "MAX_DOCUMENT_TOKENS", 64)
    path, settings = tmp_path / "a.bin", {"format": "megatron"}
    if what in WRONG_IDS:
        ids, dtype = WRONG_IDS[what]
        np.array(ids, dtype).tofile(path)
        settings = {"format": "nanogpt", "token_dtype": READ_AS.get(what, "uint16")}
    else:
        break_index(megatron(path, DOCUMENTS), what)
    with pytest.raises(DataError, match=message):
        read(path, **settings)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [(0, 5), (6, 10)],
            "has in row 2 a document from token 6 to 10; the one before it ends at 5",
        ),
        ([(0, 5), (4, 10)], "has in row 2 a document from token 4 to 10"),
        ([(2, 10)], "has in row 1 a document from token 2 to 10; the one before it ends at 0"),
        ([(0, 12), (12, 10)], "has in row 2 a document from token 12 to 10"),
        ([(0, 5)], "has 10 tokens, the documents of its index end at 5"),
        ([("start", "end")], "cannot be read: invalid literal"),
    ],
)
def test_index_of_dolma_that_leaves_tokens_out_or_repeats_them_is_refused(tmp_path, rows, message):
    np.arange(1, 11, dtype="uint16").tofile(path := tmp_path / "p.npy")
    with gzip.open(tmp_path / "p.csv.gz", "wt") as stream:
        csv.writer(stream).writerows(rows)
    with pytest.raises(DataError, match=message):
        read(path, format="dolma")


# --- the subcommand -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A directory with a tokenizer of VOCAB ids, whose files have no ids of text."""
    root = tmp_path_factory.mktemp("ids")
    words = {"<|endoftext|>": EOS} | {f"w{number}": number for number in range(1, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(root / "tokenizer.json"))
    return root


def config_of(inputs, **settings):
    values = {
        "tokenizer": {"source": "path", "path": "tokenizer.json"},
        "tokenize": {"inputs": inputs, "val_fraction": 0.2} | settings,
    }
    content_ids._cached_listing_digest.cache_clear()
    return resolve(checked(Config, values, "config.yaml"))


def documents_in(folder):
    """All documents of the shards, without their ends, by split."""
    shards = ShardSet.open(folder)
    shards.verify()
    return {
        split: sorted(
            part[:-1].tolist()
            for shard in found
            for part in np.split(shard.read(), np.flatnonzero(shard.read() == EOS) + 1)
            if len(part)
        )
        for split, found in (("train", shards.train), ("val", shards.val))
    }


def test_every_format_gives_the_same_splits_and_another_index_makes_them_again(project, capsys):
    with contextlib.chdir(project):
        for name in ("n", "m", "d"):
            (project / name).mkdir()
        nanogpt(project / "n/train.bin", DOCUMENTS)
        (project / "n/meta.pkl").write_bytes(b"of nanoGPT's examples of characters")
        megatron(project / "m/a.bin", DOCUMENTS)
        dolma(project / "d/p.npy", DOCUMENTS, "uint32")
        configs = {
            "n": config_of(["n"], format="nanogpt"),
            "m": config_of(["m"], format="megatron"),
            "d": config_of(["d"], format="dolma", token_dtype="uint32"),
        }
        build_tokenizer(configs["n"])
        found = {name: documents_in(tokenize(made, workers=1)) for name, made in configs.items()}
        assert found["n"] == found["m"] == found["d"]
        assert found["n"]["train"] and found["n"]["val"]
        assert sorted([*found["n"]["train"], *found["n"]["val"]]) == sorted(EXPECTED)

        capsys.readouterr()
        tokenize(configs["m"], workers=1)
        assert "nothing to do" in capsys.readouterr().err
        # Same sizes, two documents cut elsewhere.
        other = [*DOCUMENTS[:-2], *np.split(np.concatenate(DOCUMENTS[-2:]), [60])]
        megatron(project / "m/a.bin", other)
        folder = tokenize(configs["m"], workers=1)
        assert "m/a.idx has changed" in capsys.readouterr().err
        assert sum(map(len, documents_in(folder).values())) == 40
        assert documents_in(folder) != found["m"]
        listed = json.loads((folder / "manifest.json").read_text())["inputs"]
        assert [entry["name"] for entry in listed] == ["m/a.bin", "m/a.idx"]


def test_files_of_another_format_are_refused(project):
    with contextlib.chdir(project):
        (project / "other").mkdir(exist_ok=True)
        (project / "other/a.npy").write_bytes(b"\0\0")
        config = config_of(["other"], format="nanogpt")
        build_tokenizer(config)
        with pytest.raises(DataError, match=r"of 1 files none ends in \.bin"):
            tokenize(config, workers=1)


def test_trained_tokenizer_is_refused_by_key():
    values = {"tokenize": {"format": "megatron", "inputs": ["a.bin"]}}
    with pytest.raises(
        ConfigError, match=r"tokenizer\.source is train: set tokenizer\.source to path"
    ):
        checked(Config, values, "config.yaml")


def test_dtype_of_ids_changes_the_content_id_of_ids_only():
    text, wide = Tokenize(), Tokenize(token_dtype="uint32")
    assert content_ids.tokens_settings(text) == content_ids.tokens_settings(wide)
    ids = [Tokenize(format="dolma", token_dtype=dtype) for dtype in ("uint16", "uint32")]
    assert content_ids.tokens_settings(ids[0]) != content_ids.tokens_settings(ids[1])
