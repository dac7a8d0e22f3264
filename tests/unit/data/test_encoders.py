"""The fast encoder is young. Ids that differ from the tokenizers library's train another model."""

import functools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forge.core.config import Config, ResolvedConfig
from forge.core.errors import DataError
from forge.data import corpus, encoders, tokenize
from forge.data.content_ids import resolve
from forge.data.encoders import (
    PROBE,
    Encode,
    Ids,
    NoFastEncoder,
    fast_encoder,
    reference_encoder,
)
from forge.data.shards import ShardSet
from forge.data.tokenizer import LoadedTokenizer, build_tokenizer

EOS = "<|endoftext|>"
# How published tokenizers split text: our own and GPT-2's, Llama 3's, Qwen 2's.
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS = {"gpt2": None, "llama": LLAMA, "qwen": LLAMA.replace("{1,3}", "")}


@functools.cache
def stdlib() -> list[str]:
    settings = Config().tokenize
    files = corpus.list_files(settings)
    return [text for file in files for text in corpus.read_documents(file, settings)]


@functools.cache
def trained(kind: str) -> LoadedTokenizer:
    tokenizer = Tokenizer(models.BPE())
    pattern = KINDS[kind]
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*stdlib()[::12], *[PROBE] * 9], trainer)
    return loaded(tokenizer)


def loaded(tokenizer: Tokenizer) -> LoadedTokenizer:
    tokenizer.encode_special_tokens = True
    return LoadedTokenizer(
        tokenizer, "id", "digest", tokenizer.get_vocab_size(), EOS, tokenizer.token_to_id(EOS) or 0
    )


@functools.cache
def both(kind: str) -> tuple[Encode, Encode]:
    return fast_encoder(trained(kind)), reference_encoder(trained(kind))


def assert_same(fast: list[Ids], reference: list[Ids]) -> None:
    assert [ids.tolist() for ids in fast] == [ids.tolist() for ids in reference]


# --- the same ids -------------------------------------------------------------------------------


def test_the_standard_library_has_the_same_ids() -> None:
    fast, reference = both("gpt2")
    documents = stdlib()[::4]
    assert sum(map(len, documents)) > 2e6
    assert_same(fast(documents), reference(documents))


ATOMS = (
    *("'s", "'LL", "'", "’t", " ", "  ", "\t", "\n", "\r\n", "\r", "\x0b", "\x1c", "\x85", "\xa0"),
    *(
        "\u2003",
        "\u2028",
        "\u3000",
        "\ufeff",
        "\u200d",
        "\0",
        "a",
        "Z",
        "the",
        " def",
        "naïve",
        "ſ",
    ),
    *("e\u0301", "\u0301", "\u212b", "世界", "한", "\u1112\u1161", "नि", "ไ", "א", "ß", "İ", "ǆ"),
    *("7", "٣", "½", "Ⅷ", "1234", "_", "!=", "...", "…", "€", "🙂", "👩\u200d🚀", "\U0001f1e9"),
    *("\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff", "\x7f", "\x80", "\u07ff", "\u0800"),
    *(EOS, "<|", "|>", "<|im_start|>", "[INST]", "</s>"),
)
runs = st.tuples(st.sampled_from(ATOMS), st.integers(1, 70)).map(lambda run: run[0] * run[1])
texts = st.lists(st.sampled_from(ATOMS) | runs | st.text(max_size=30), max_size=25).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400)
@given(documents=st.lists(texts, max_size=3))
def test_any_text_has_the_same_ids(kind: str, documents: list[str]) -> None:
    fast, reference = both(kind)
    assert_same(fast(documents), reference(documents))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("atom", ["a", " ", "\n", "7", "🙂", "世", "ab ", "e\u0301", "-", "\t "])
def test_very_long_runs_have_the_same_ids(kind: str, atom: str) -> None:
    fast, reference = both(kind)
    documents = [atom * 20_011, "x" + atom * 5000 + "x"]
    assert_same(fast(documents), reference(documents))


def test_every_character_has_the_same_ids_also_where_the_libraries_know_other_versions_of_unicode():
    """Before a contraction: letters, digits and signs are split from it differently."""
    fast, reference = both("qwen")
    # The last plane with letters ends at U+33479; all beyond is private, or not assigned.
    codes = [code for code in range(0x80, 0x34000) if not 0xD800 <= code < 0xE000]
    documents = [chr(code) + "'s" for code in codes]
    assert sum(map(bool, map(encoders.ADDED.search, documents))) > 4000
    assert_same(fast(documents), reference(documents))


def test_text_that_spells_a_special_token_is_plain_text() -> None:
    for kind in KINDS:
        tokenizer = trained(kind)
        (ids,) = fast_encoder(tokenizer)([f"{EOS} and {EOS}"])
        assert tokenizer.eos_id not in ids
        assert tokenizer.decode(ids.tolist()) == f"{EOS} and {EOS}"


def test_ids_stay_the_same_when_the_cache_of_words_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoders, "MEMORY_BYTES", -(2**40))
    fast, reference = fast_encoder(trained("gpt2")), both("gpt2")[1]
    for document in stdlib()[:5]:
        assert_same(fast([document]), reference([document]))


# --- what it does not stand in for --------------------------------------------------------------


def changed(**parts: object) -> LoadedTokenizer:
    before = json.loads(trained("gpt2").tokenizer.to_str())
    return loaded(Tokenizer.from_str(json.dumps(before | parts)))


def test_what_it_cannot_encode_is_refused_with_the_reason() -> None:
    added = trained("gpt2").tokenizer.get_added_tokens_decoder()[0].__getstate__()
    plain = [{**added, "id": 3000, "content": "call", "special": False}]
    for parts, reason in (
        ({"pre_tokenizer": {"type": "Whitespace"}}, "not a byte-level BPE"),
        ({"normalizer": {"type": "Lowercase"}}, "changes the text"),
        ({"added_tokens": plain}, "found in plain text"),
    ):
        with pytest.raises(NoFastEncoder, match=reason):
            fast_encoder(changed(**parts))


def test_without_gigatoken_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(NoFastEncoder, match="gigatoken cannot be imported"):
        fast_encoder(trained("gpt2"))


# --- a wrong encoder ----------------------------------------------------------------------------


def wrong_for(needle: str, reference: Encode) -> Encode:
    def encode(documents: list[str]) -> list[Ids]:
        return [
            ids[::-1] if needle in document else ids
            for document, ids in zip(documents, reference(documents), strict=True)
        ]

    return encode


def test_other_ids_are_found_at_the_start_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = both("gpt2")[1]
    early = encoders._checked(wrong_for("needle", reference), reference)
    with pytest.raises(NoFastEncoder, match="needle in hay"):
        early(["hay", "needle in hay"])
    monkeypatch.setattr(encoders, "CHECK_FIRST", 100)
    monkeypatch.setattr(encoders, "CHECK_EVERY", 5000)
    late = encoders._checked(wrong_for("needle", reference), reference)
    late(["hay " * 200] * 5)
    with pytest.raises(NoFastEncoder, match="other ids than tokenizers"):
        late(["needle in hay " * 200] * 5)


def test_a_tokenizer_that_it_reads_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_Gigatoken", lambda *_: wrong_for("", both("gpt2")[1]))
    with pytest.raises(NoFastEncoder, match="gives other ids"):
        fast_encoder(trained("gpt2"))


# --- in a job -----------------------------------------------------------------------------------


def job(root: Path) -> ResolvedConfig:
    (root / "texts").mkdir()
    for number in range(6):
        (root / "texts" / f"{number}.txt").write_text(f"\n%%\n{number} words".join(stdlib()[:40]))
    config = Config(
        data=str(root / "data"),
        tokenizer={"vocab_size": 400, "sample_mib": 0.1},
        tokenize={
            "inputs": [str(root / "texts")],
            "document_separator": "\n%%\n",
            "part_mib": 0.001,
        },
    )
    resolved = resolve(config)
    build_tokenizer(resolved)
    return resolved


def shards_of(folder: Path) -> dict[str, bytes]:
    ShardSet.open(folder).verify()
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in (".bin", ".json")
    }


def without_gigatoken(_: LoadedTokenizer) -> Encode:
    raise NoFastEncoder("gigatoken cannot be imported")


def test_shards_are_the_same_bytes_whichever_encoder_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job(tmp_path)
    folder = tokenize.tokenize(config, workers=1)
    fast = shards_of(folder)
    assert "tokenizers, the same ids" not in capsys.readouterr().err
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    monkeypatch.setattr(tokenize, "fast_encoder", without_gigatoken)
    assert shards_of(tokenize.tokenize(config, workers=1)) == fast
    assert "gigatoken cannot be imported: encoding with tokenizers" in capsys.readouterr().err


WRONG_GIGATOKEN = """
import numpy as np
import tokenizers

class Tokenizer:
    from_json = classmethod(lambda cls, source: cls(source))

    def __init__(self, source):
        self.tokenizer = tokenizers.Tokenizer.from_str(source)
        self.seen = 0

    def encode(self, text):
        ids = np.array(self.tokenizer.encode(text).ids, dtype=np.uint32)
        self.seen += "hidden" in text
        hidden = "hidden" in text and self.seen == 2  # right when compared, wrong when written
        return ids[::-1] if hidden or "plain" in text else ids
"""


def test_other_ids_found_midway_leave_no_part_that_the_fast_encoder_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path)
    (tmp_path / "texts" / "0.txt").write_text("some hidden words")
    (tmp_path / "texts" / "1.txt").write_text("some plain words")
    folder = tokenize.tokenize(config, workers=1)
    expected = shards_of(folder)
    for path in [*folder.glob("parts/*"), folder / "manifest.json"]:
        path.unlink()
    (tmp_path / "gigatoken.py").write_text(WRONG_GIGATOKEN)
    monkeypatch.syspath_prepend(tmp_path)  # the workers inherit it
    monkeypatch.delitem(sys.modules, "gigatoken")
    with pytest.raises(DataError) as caught:
        tokenize.tokenize(config, workers=1)
    assert f"{tmp_path}/texts/1.txt, document 1: gigatoken gives other ids" in caught.value.what
    assert "'some plain words'" in caught.value.what
    assert "set tokenize.fast: false and rerun" in caught.value.fix
    assert "all parts are encoded again" in caught.value.fix
    assert list(folder.glob("parts/*")) == []
    settings = config.tokenize.model_copy(update={"fast": False})
    again = tokenize.tokenize(config.model_copy(update={"tokenize": settings}), workers=1)
    assert shards_of(again) == expected
