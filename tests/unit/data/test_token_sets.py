"""Against tokens that earlier versions made: they took the dtype of the settings for that of the file.

The versions before are this one without its two checks of a file; what they wrote was the same.
"""

import contextlib
import struct

import numpy as np
import pytest
from support.each import hold_for_each
from tokenizers import Tokenizer, models

from forge.core.config import Config, checked
from forge.core.errors import DataError
from forge.core.paths import tokens_folder
from forge.core.tokenize_settings import Tokenize
from forge.data import content_ids, token_files, token_headers, token_readings
from forge.data.content_ids import resolve
from forge.data.corpus import InputFile
from forge.data.shards import SPLITS, ShardSet
from forge.data.sources import list_sources, open_tokens
from forge.data.tokenize import tokenize
from forge.data.tokenizer import build_tokenizer

VOCAB, END = 70_000, 2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a tokenizer of VOCAB ids, which is made."""
    root = tmp_path_factory.mktemp("sets")
    words = {f"w{number}": number for number in range(VOCAB) if number != END}
    tokenizer = Tokenizer(models.WordLevel(words | {"<|endoftext|>": END}, unk_token="w1"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(root / "tokenizer.json"))
    with contextlib.chdir(root):
        (root / "none.bin").touch()
        build_tokenizer(config_of(["none.bin"]))
    return root


def config_of(inputs=(), **settings):
    tokenize = {"format": "nanogpt", "val_fraction": 0.3, **settings}
    tokenize |= {"inputs": list(inputs)} if inputs else {}
    values = {"tokenizer": {"source": "path", "path": "tokenizer.json"}, "tokenize": tokenize}
    content_ids._cached_listing_digest.cache_clear()
    return resolve(checked(Config, values, "config.yaml"))


def ids_of(end, largest=VOCAB):
    random = np.random.default_rng(0)
    documents = [(3 + random.zipf(1.2, 60) % (largest - 3)).tolist() for _ in range(120)]
    return np.array([one for document in documents for one in [*document, end]], np.int64)


@contextlib.contextmanager
def earlier_version():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(token_headers, "refuse_header", lambda path, size: False)
        patched.setattr(token_readings.PlainIds, "refuse_other", lambda *_, **__: None)
        yield


def in_numpy(path, ids):
    with open(path, "wb") as stream:
        np.save(stream, ids)


def with_header(path, ids):
    path.write_bytes(np.array([20240520, 1, len(ids), *[0] * 253], "<i4").tobytes() + ids.tobytes())


def lit_gpt(path, ids):
    path.write_bytes(b"LITPKDS" + struct.pack("<QBQ", 1, 8, len(ids)) + ids.tobytes())


# name: how the file is written, its dtype, and what tokenize.token_dtype said
WRONG = {
    "int64 as uint32": (None, "<i8", "uint32"),
    "int64 as uint16": (None, "<i8", "uint16"),
    "int64 as int32": (None, "<i8", "int32"),
    "uint32 as uint16": (None, "<u4", "uint16"),
    "big-endian uint16": (None, ">u2", "uint16"),
    "big-endian uint32 as uint16": (None, ">u4", "uint16"),
    "np.save": (in_numpy, "<u2", "uint16"),
    "llm.c": (with_header, "<u2", "uint16"),
    "LitGPT": (lit_gpt, "<u2", "uint16"),
}


def write(path, end, case):
    how, dtype, _ = case
    ids = ids_of(end, largest=VOCAB if np.dtype(dtype).itemsize > 2 else 65_000).astype(dtype)
    how(path, ids) if how else ids.tofile(path)


def made_by_an_earlier_version(folder, name):
    """The config of tokens that it has made silently, of a file in a new folder."""
    folder.mkdir()
    write(folder / "a.bin", END, WRONG[name])
    config = config_of([folder.name], token_dtype=WRONG[name][2])
    with earlier_version():
        tokenize(config, workers=1)
    return config


def read_by_an_earlier_version(path, end, dtype):
    """The ids of a shard that has all documents."""
    settings = Tokenize(format="nanogpt", token_dtype=dtype)
    file = InputFile(path.name, str(path), path.stat().st_size)
    with earlier_version():
        found = list(token_files.read_documents(file, settings, vocab_size=VOCAB, eos_id=end))
    return np.concatenate([np.append(document, end) for document in found])


@pytest.mark.parametrize("end", [0, 2])
def test_beginning_of_a_shard_shows_a_wrong_reading(tmp_path, end):
    def check(name):
        write(path := tmp_path / "a.bin", end, WRONG[name])
        dtype = WRONG[name][2]
        ids = read_by_an_earlier_version(path, end, dtype)
        limits = {"vocab_size": VOCAB, "eos_id": end}
        assert token_readings.wrong_shard(ids, np.dtype(dtype), **limits)
        right = ids_of(end)
        assert token_readings.wrong_shard(right, np.dtype(dtype), **limits) is None

    hold_for_each([(name, name) for name in WRONG], check)


def test_wrong_tokens_are_refused_by_name_until_they_are_made_again(root):
    with contextlib.chdir(root):
        config = made_by_an_earlier_version(root / "wide", "int64 as uint32")
        folder = tokens_folder(config.data, config.ids.tokens)
        with pytest.raises(
            DataError, match=r"train-00000-000\.bin has 0 or nearly 0 at every second id"
        ):
            open_tokens(folder)
        with pytest.raises(DataError, match=r"wide/a\.bin fits two readings"):
            tokenize(config, workers=1)

        config = made_by_an_earlier_version(root / "numpy", "np.save")
        folder = tokens_folder(config.data, config.ids.tokens)
        with pytest.raises(DataError, match=r"begins with the header of an \.npy file"):
            open_tokens(folder)
        tokenize(config, workers=1)
        assert rightly_read(folder) == np.count_nonzero(ids_of(END, 65_000) != END)


def rightly_read(folder):
    """The number of ids of all documents, without ends."""
    totals = ShardSet.open(folder).manifest.totals
    return sum(totals[split].tokens - totals[split].documents for split in SPLITS)


def test_each_shard_is_checked_by_the_rank_that_verifies_it(root, monkeypatch):
    """Also of sources, and where opening a set reads none."""
    monkeypatch.setattr("forge.data.shards.FIRST_SHARDS", 0)
    with contextlib.chdir(root):
        (root / "sources").mkdir()
        write(root / "sources/a.bin", END, WRONG["int64 as uint32"])
        source = {"inputs": ["sources"], "format": "nanogpt", "token_dtype": "uint32"}
        values = {
            "tokenizer": {"source": "path", "path": "tokenizer.json"},
            "tokenize": {"sources": {"ids": source}, "val_fraction": 0.3},
        }
        config = resolve(checked(Config, values, "config.yaml"))
        with earlier_version():
            for single in content_ids.single_corpora(config):
                tokenize(single, workers=1)
        tokens = open_tokens(list_sources(config))
        for share in (0, 2), (1, 2):
            with pytest.raises(DataError, match="as halves of wider ids have"):
                tokens.verify(share)
        with pytest.raises(DataError, match="fits two readings"):
            tokenize(content_ids.single_corpora(config)[0], workers=1)


def test_tokens_of_few_ids_are_checked_by_their_input_files(root):
    """Shards of a few ids do not show that these are halves."""
    with contextlib.chdir(root):
        (root / "few").mkdir()
        np.array([5, 6, END, 7, 8, 9, END, 10, 11, END], np.int64).tofile(root / "few/a.bin")
        config = config_of(["few"], token_dtype="uint32")
        with earlier_version():
            folder = tokenize(config, workers=1)
        ShardSet.open(folder).verify()
        with pytest.raises(DataError, match="token_dtype: int64"):
            tokenize(config, workers=1)
        assert (folder / "manifest.json").exists()


def test_finished_part_of_an_earlier_version_is_not_kept(root):
    with contextlib.chdir(root):
        (root / "killed").mkdir()
        write(root / "killed/a.bin", END, WRONG["np.save"])
        config = config_of(["killed"])
        with earlier_version():
            folder = tokenize(config, workers=1)
        (folder / "manifest.json").unlink()
        count = np.count_nonzero(ids_of(END, 65_000) != END)
        assert rightly_read(tokenize(config, workers=1)) == count


# --- beside other files -----------------------------------------------------------------------------


def test_compressed_ids_beside_plain_ones_are_not_left_out(root):
    with contextlib.chdir(root):
        (folder := root / "both").mkdir()
        for name in ("a.bin", "a.bin.gz", "b.bin"):
            write(folder / name, END, (None, "<u4", "uint32"))
        config = config_of(["both"], token_dtype="uint32")
        tokenize(config, workers=1)  # a.bin.gz is a.bin
        (folder / "b.bin").rename(folder / "b.bin.zst")
        with pytest.raises(DataError, match=r"b\.bin\.zst has compressed ids, which are not read"):
            tokenize(config_of(["both"], token_dtype="uint32"), workers=1)


def test_16_bits_for_a_larger_vocabulary_are_said(root, capsys):
    with contextlib.chdir(root):
        (root / "narrow").mkdir()
        write(root / "narrow/a.bin", END, (None, "<u2", "uint16"))
        tokenize(config_of(["narrow"]), workers=1)
    assert "a.bin has ids of 16 bits, and the tokenizer has 70000" in capsys.readouterr().err
