"""Bytes of text in the targets of validation windows, against decoded prefixes of each document."""

import json
import math
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import real_text
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forge.core.config import Config, ResolvedConfig
from forge.core.errors import DataError
from forge.core.paths import STATISTICS, tokens_folder
from forge.core.records import BitsPerByte, TextBytes
from forge.data import content_ids, text_bytes
from forge.data.sample_order import spread_evenly
from forge.data.shards import ShardSet
from forge.data.statistics import read_statistics
from forge.data.tokenize import split_of, tokenize
from forge.data.tokenizer import build_tokenizer, load_tokenizer
from forge.trainer.source_mix import MixAtStart, MixStage, bits_per_byte

EOS, UNK = "<|endoftext|>", "<unk>"
# Article 1 of the Universal Declaration of Human Rights, and code.
JAPANESE = "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"
HINDI = "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।"
CODE = "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)  # naïve 🙂"
DOCUMENTS = [f"{text} {7919 * n}" for n in range(40) for text in (JAPANESE, HINDI, CODE)]
SEQ_LEN, COUNT = 13, 9
SEPARATOR = "\n%%\n"


def bpe() -> Tokenizer:
    """Byte-level BPE, whose ids divide most Japanese characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram with a piece for every character that occurs."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=[UNK, EOS], unk_token=UNK, show_progress=False
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """BPE with pieces of ASCII and Hindi, and the bytes of all other characters."""
    pieces = [UNK, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted(
        {char for char in HINDI + CODE if char.isascii() or char > "\u0900"} - {"🙂", " "}
    )
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=UNK, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([EOS])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bpe": bpe,
    "unigram": unigram,
    "byte fallback": byte_fallback,
}


def tokens(
    folder: Path, tokenizer: Tokenizer, documents: list[str] = DOCUMENTS, eos: str = EOS
) -> ResolvedConfig:
    """Tokenize documents in several shards. The config."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(SEPARATOR.join(documents))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = content_ids.resolve(
        Config(
            data=str(folder / "data"),
            tokenizer={"source": "path", "path": str(folder / "tokenizer.json"), "eos_token": eos},
            tokenize={
                "inputs": [str(folder / "text.txt")],
                "document_separator": SEPARATOR,
                "val_fraction": 0.4,
                "shard_tokens": 1024,
                "max_lost": 1.0,
            },
        )
    )
    build_tokenizer(config)
    tokenize(config, workers=1)
    return config


def measured(config: ResolvedConfig, seq_len: int = SEQ_LEN, count: int = COUNT) -> TextBytes:
    shards = ShardSet.open(tokens_folder(config.data, config.ids.tokens))
    return text_bytes.by_source(shards, config.data, seq_len, count)[""]


def windows(config: ResolvedConfig, seq_len: int, count: int) -> Iterator[tuple[np.ndarray, int]]:
    """(ids of a shard, place of the first target) of the windows that an evaluation takes."""
    shards = ShardSet.open(tokens_folder(config.data, config.ids.tokens)).val
    places = [
        (np.array(shard.read()), start + 1)
        for shard in shards
        for start in range(0, shard.num_tokens - seq_len, seq_len)
    ]
    return (places[index] for index in spread_evenly(len(places), count))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_the_windows_are_those_of_decoded_prefixes(kind: str, tmp_path: Path) -> None:
    config = tokens(tmp_path, KINDS[kind]())
    tokenizer = load_tokenizer(Path(config.data) / "tokenizers" / config.ids.tokenizer)

    def prefix_bytes(ids: np.ndarray, end: int) -> int:
        """Bytes of the documents of a shard before an id, without a character that is not complete."""
        documents = np.split(ids[:end], np.flatnonzero(ids[:end] == tokenizer.eos_id) + 1)
        texts = [decoded([i for i in part if i != tokenizer.eos_id]) for part in documents]
        return sum(len(text.rstrip("\ufffd").encode()) for text in texts)

    def decoded(ids: list[int]) -> str:
        if kind != "byte fallback":
            return tokenizer.decode(ids)
        # Its decoder gives no character of a run of bytes of which one is not complete.
        pieces = [str(tokenizer.tokenizer.id_to_token(number)) for number in ids]
        spelled = (bytes([int(p[3:5], 16)]) if "<0x" in p else p.encode() for p in pieces)
        return b"".join(spelled).replace("▁".encode(), b" ").decode(errors="ignore")

    expected = sum(
        prefix_bytes(ids, first + SEQ_LEN) - prefix_bytes(ids, first)
        for ids, first in windows(config, SEQ_LEN, COUNT)
    )
    result = measured(config)
    assert result == TextBytes(targets=SEQ_LEN * COUNT, bytes=expected)
    assert expected > 0


@pytest.mark.tools
@pytest.mark.parametrize(
    ("name", "eos"),
    [("qwen2_5", "<|endoftext|>"), ("gpt4o", "<|endoftext|>"), ("gemma2", "<eos>")],
)
def test_ids_and_bytes_of_help_in_four_languages_are_those_of_transformers(
    name: str, eos: str, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    file = real_text.tokenizer(name) / "tokenizer.json"
    pages = [
        page.read_text()
        for language in real_text.LANGUAGES
        for page in sorted(real_text.help_pages(language).iterdir())[:40]
    ]
    config = tokens(tmp_path, Tokenizer.from_file(str(file)), pages, eos)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=eos)
    of_character = {character: byte for byte, character in bytes_to_unicode().items()}

    def spelled(number: int) -> bytes:
        piece = theirs.convert_ids_to_tokens(int(number))
        if name != "gemma2":
            return bytes(of_character[character] for character in piece)
        is_byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        return bytes.fromhex(is_byte[1]) if is_byte else piece.replace("▁", " ").encode()

    documents = [text for text in pages if split_of(text, 0.4) == "val"]
    wanted = [theirs.encode(text, add_special_tokens=False) for text in documents]
    shards = ShardSet.open(tokens_folder(config.data, config.ids.tokens)).val
    ids = np.concatenate([shard.read() for shard in shards])
    found = np.split(ids, np.flatnonzero(ids == theirs.eos_token_id) + 1)[:-1]
    assert sorted(part[:-1].tolist() for part in found) == sorted(wanted)
    assert ids.max() > 2**16

    def prefix_bytes(ids: np.ndarray, end: int) -> int:
        """Bytes of the documents of a shard before an id, without a character that is not complete."""
        documents = np.split(ids[:end], np.flatnonzero(ids[:end] == theirs.eos_token_id) + 1)
        texts = [
            b"".join(spelled(i) for i in part if i != theirs.eos_token_id) for part in documents
        ]
        return sum(len(text.decode(errors="ignore").encode()) for text in texts)

    expected = sum(
        prefix_bytes(ids, first + SEQ_LEN) - prefix_bytes(ids, first)
        for ids, first in windows(config, SEQ_LEN, 200)
    )
    assert measured(config, count=200) == TextBytes(targets=SEQ_LEN * 200, bytes=expected)


@pytest.mark.parametrize("kind", KINDS)
def test_all_bytes_of_the_validation_documents_are_in_the_files(kind: str, tmp_path: Path) -> None:
    config = tokens(tmp_path, KINDS[kind]())
    folder = tokens_folder(config.data, config.ids.tokens)
    shards = ShardSet.open(folder).val
    assert len(shards) > 1
    sizes = [np.fromfile(shard.bytes_path, "<u4") for shard in shards]
    assert [len(size) for size in sizes] == [shard.num_tokens for shard in shards]
    documents = [text for text in DOCUMENTS if split_of(text, 0.4) == "val"]
    assert sum(int(size.sum()) for size in sizes) == sum(len(text.encode()) for text in documents)
    assert not list(folder.glob("train*.bytes"))


def test_text_that_a_tokenizer_loses_counts_its_bytes(tmp_path: Path) -> None:
    config = tokens(tmp_path, lossy())
    folder = tokens_folder(config.data, config.ids.tokens)
    sizes = [np.fromfile(shard.bytes_path, "<u4") for shard in ShardSet.open(folder).val]
    documents = [text for text in DOCUMENTS if split_of(text, 0.4) == "val"]
    assert sum(int(size.sum()) for size in sizes) == sum(len(text.encode()) for text in documents)


def test_text_of_which_the_ids_change_is_named_and_no_fault_of_gigatoken(tmp_path: Path) -> None:
    parts = json.loads(bpe().to_str())
    parts["model"]["dropout"] = 0.5
    parts["normalizer"] = {"type": "Lowercase"}
    documents = sorted(DOCUMENTS, key=lambda text: split_of(text, 0.4))
    number = 1 + sum(split_of(text, 0.4) == "train" for text in documents)
    with pytest.raises(DataError) as refused:
        tokens(tmp_path, Tokenizer.from_str(json.dumps(parts)), documents)
    assert f"text.txt, document {number}: the tokenizer gives other ids" in refused.value.what
    assert "dropout" in refused.value.cause
    assert "gigatoken" not in str(refused.value)


def lossy() -> Tokenizer:
    """A word-level vocabulary of a few words, in lower case without accents: most text is unknown."""
    words = ["def", "values", "return", "(", ")", "naive"]
    vocab = {piece: number for number, piece in enumerate([UNK, EOS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


def test_bits_per_byte_of_a_tokenizer_of_bytes_leave_out_the_ends_of_documents(
    tmp_path: Path,
) -> None:
    tokenizer = bpe()
    parts = json.loads(tokenizer.to_str())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts["model"] |= {"vocab": {c: n for n, c in enumerate([*alphabet, EOS])}, "merges": []}
    parts["added_tokens"][0]["id"] = len(alphabet)
    config = tokens(tmp_path, Tokenizer.from_str(json.dumps(parts)), [c * 30 for c in "abcdefghij"])
    separators = sum(
        int((ids[first : first + SEQ_LEN] == len(alphabet)).sum())
        for ids, first in windows(config, SEQ_LEN, COUNT)
    )
    size, loss = measured(config), 1.7
    assert separators
    bits = bits_per_byte({"": loss}, {"": size}, None, 10)
    assert bits == BitsPerByte(
        pytest.approx(loss * size.targets / ((size.targets - separators) * math.log(2)), rel=1e-9),
        estimated=False,
    )


def test_over_sources_nats_and_bytes_are_summed_by_their_shares() -> None:
    sizes = {
        "code": TextBytes(targets=100, bytes=300),
        "web": TextBytes(targets=50, bytes=250, estimated=True),
        "unused": TextBytes(targets=1, bytes=0),
    }
    mix = MixAtStart([MixStage(0, {"code": 1, "web": 3, "unused": 0})], {})
    bits = bits_per_byte({"code": 2.0, "web": 3.0, "unused": 9.0}, sizes, mix, 5)
    assert bits == BitsPerByte(
        pytest.approx((0.25 * 2 + 0.75 * 3) / (math.log(2) * (0.25 * 3 + 0.75 * 5)), rel=1e-12),
        True,
    )
    assert str(bits).startswith("~")
    assert bits_per_byte({"code": 2.0, "web": 3.0}, {"code": sizes["code"]}, mix, 5) is None


def test_tokens_without_these_files_are_estimated_and_what_was_measured_is_kept(
    tmp_path: Path,
) -> None:
    config = tokens(tmp_path, bpe())
    exact = measured(config, count=1000)
    folder = tokens_folder(config.data, config.ids.tokens)
    for path in folder.glob("*.bytes"):
        path.unlink()
    assert measured(config, count=1000) == exact, "kept in statistics.json"
    statistics: Any = read_statistics(folder)
    assert statistics.validation == {f"1000x{SEQ_LEN}": exact}
    assert statistics.text, "what was there stays"
    (folder / STATISTICS).unlink()
    estimated = measured(config, count=1000)
    assert estimated.estimated
    assert estimated.bytes == pytest.approx(exact.bytes, rel=0.02)
    # Estimates of earlier versions, which counted the names of special tokens, are made again.
    statistics = read_statistics(folder)
    assert statistics.validation == {f"1000x{SEQ_LEN}~": estimated}
    before = estimated.model_copy(update={"bytes": 10 * estimated.bytes})
    statistics.model_copy(update={"validation": {f"1000x{SEQ_LEN}": before}}).write(
        folder / STATISTICS
    )
    assert measured(config, count=1000) == estimated


def test_special_tokens_in_files_of_ids_are_no_text(tmp_path: Path) -> None:
    """As of a tokenizer that begins each document with a token, whose name is in no text."""
    tokenizer = bpe()
    tokenizer.add_special_tokens(["<|begin_of_text|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    begin, end = map(tokenizer.token_to_id, ("<|begin_of_text|>", EOS))
    ids = [[begin, *tokenizer.encode(text).ids, end] for text in DOCUMENTS]
    np.concatenate(ids).astype("<u2").tofile(tmp_path / "train.bin")
    path = {"source": "path", "path": str(tmp_path / "tokenizer.json"), "eos_token": EOS}
    inputs = {"format": "nanogpt", "inputs": [str(tmp_path / "train.bin")], "val_fraction": 0.4}
    config = content_ids.resolve(
        Config(data=str(tmp_path / "data"), tokenizer=path, tokenize=inputs)
    )
    build_tokenizer(config)
    tokenize(config, workers=1)
    found = measured(config, count=1000)
    targets = [
        number
        for ids, first in windows(config, SEQ_LEN, 1000)
        for number in ids[first : first + SEQ_LEN].tolist()
    ]
    assert begin in targets and end in targets and found.targets == len(targets)
    spelled = (tokenizer.id_to_token(number) for number in targets if number not in (begin, end))
    assert found.bytes == sum(map(len, spelled)), "a character of the vocabulary is a byte"


def test_more_shards_than_files_may_be_open_are_measured(tmp_path: Path) -> None:
    many = [f"{text} {n}" for n in range(400) for text in (JAPANESE, HINDI, CODE)]
    config = tokens(tmp_path, bpe(), many)
    expected = measured(config)
    shards = ShardSet.open(tokens_folder(config.data, config.ids.tokens))
    (shards.folder / STATISTICS).unlink()
    used = len([*Path("/proc/self/fd").iterdir()])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
    try:
        found = measured(config)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(shards.val) > 10 and found == expected
