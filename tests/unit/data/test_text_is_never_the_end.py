"""Text becomes the end-of-document id: every document after it is then learned as several.

Text that spells a special token is encoded as other text, whatever kind of tokenizer it is; where
the vocabulary has no other ids for it, the document is refused by file, number and place.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from forge.core.config import Config, ResolvedConfig
from forge.core.errors import DataError
from forge.data import encoders
from forge.data.content_ids import resolve
from forge.data.encoders import NoFastEncoder, fast_encoder, reference_encoder
from forge.data.shards import ShardSet
from forge.data.tokenize import tokenize
from forge.data.tokenizer import PROBE, LoadedTokenizer, build_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = [chr(number) for number in range(33, 127)]
CORPUS = ["the cat END sat on END", "END", "ENDED the END. </s> END"] * 20


# --- a tokenizer of each kind -------------------------------------------------------------------


def byte_level(eos: str = "END", **model: Any) -> Tokenizer:
    """As `tokenizer.source: train` makes it: merges spell the special token."""
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[eos], initial_alphabet=BYTES, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level_added(**flags: bool) -> Tokenizer:
    """A BPE from a file whose end token is an added one, beyond the model's vocabulary."""
    tokenizer = byte_level("<|other|>")
    tokenizer.add_tokens([AddedToken("</s>", **flags), AddedToken("cat", special=False)])
    return tokenizer


def whole_words() -> Tokenizer:
    """As Llama 3's: a word that the vocabulary has is taken without merges."""
    parts = json.loads(byte_level().to_str())
    parts["model"]["ignore_merges"] = True
    tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(parts))
    return tokenizer


def characters() -> Tokenizer:
    """As Llama 2's: characters, bytes for those that are unknown, and merges to "</s>"."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    pieces += ["</", "s>"]
    model = models.BPE(
        {piece: number for number, piece in enumerate(pieces)},
        [("<", "/"), ("s", ">"), ("</", "s>")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def unigram(byte_fallback: bool = False) -> Tokenizer:
    """As T5's: sentencepiece's control symbols are pieces like others, with the best score."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁the", -1.0)]
    pieces += [(letter, -3.0) for letter in LETTERS]
    if byte_fallback:
        pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def words(model: type, unknown: str = "[UNK]") -> Tokenizer:
    known = dict.fromkeys(["[UNK]", "</s>", "the", "cat", *PROBE.split(), *LETTERS])
    vocab = {word: number for number, word in enumerate(known)}
    tokenizer = Tokenizer(model(vocab, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def added_to(tokenizer: Tokenizer, *special: str) -> Tokenizer:
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def lower_case() -> Tokenizer:
    tokenizer = byte_level("end")
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def with_processor(processor: Callable[[int], Any]) -> Tokenizer:
    """As published files: begin and end tokens are put around each text."""
    tokenizer = byte_level("</s>")
    tokenizer.post_processor = processor(tokenizer.token_to_id("</s>"))
    return tokenizer


def template(eos_id: int) -> Any:
    return processors.TemplateProcessing(
        single="</s> $A </s>", pair="$A $B:1 </s>:1", special_tokens=[("</s>", eos_id)]
    )


# How each is made, and the token that ends its documents.
KINDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "byte-level": (byte_level, "END"),
    "byte-level, <|endoftext|>": (lambda: byte_level("<|endoftext|>"), "<|endoftext|>"),
    "byte-level, a word of merges": (byte_level, "Ġthe"),
    "byte-level, whole words": (whole_words, "END"),
    "added, special": (lambda: byte_level_added(special=True), "</s>"),
    "added, plain": (lambda: byte_level_added(special=False), "</s>"),
    "added, normalized": (lambda: byte_level_added(special=False, normalized=True), "</s>"),
    "added, raw": (lambda: byte_level_added(special=True, normalized=False), "</s>"),
    "added, single word": (lambda: byte_level_added(special=False, single_word=True), "</s>"),
    "added, stripping": (lambda: byte_level_added(special=False, lstrip=True, rstrip=True), "</s>"),
    "lower case": (lower_case, "end"),
    "characters": (characters, "</s>"),
    "unigram": (lambda: added_to(unigram(), "<unk>", "<s>", "</s>"), "</s>"),
    "unigram, bytes": (lambda: added_to(unigram(True), "<s>", "</s>"), "</s>"),
    "unigram, not added": (unigram, "</s>"),
    "WordLevel": (lambda: added_to(words(models.WordLevel), "[UNK]", "</s>"), "</s>"),
    "WordLevel, not added": (lambda: words(models.WordLevel), "</s>"),
    "WordPiece": (lambda: added_to(words(models.WordPiece), "[UNK]", "</s>"), "</s>"),
    "template": (lambda: with_processor(template), "</s>"),
    "bert": (
        lambda: with_processor(lambda n: processors.BertProcessing(*[("</s>", n)] * 2)),
        "</s>",
    ),
    "roberta": (
        lambda: with_processor(lambda n: processors.RobertaProcessing(*[("</s>", n)] * 2)),
        "</s>",
    ),
    "sequence": (
        lambda: with_processor(
            lambda n: processors.Sequence([processors.ByteLevel(), template(n)])
        ),
        "</s>",
    ),
}
# These have no other ids for some texts, which are refused.
NO_OTHER_IDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "one character": (byte_level, "a"),
    "a byte of others": (byte_level, "é"),  # ByteLevel's character for byte 0xe9
    "WordLevel, unknown words": (lambda: words(models.WordLevel, unknown="</s>"), "</s>"),
    "WordLevel, none for unknown words": (lambda: words(models.WordLevel, unknown="none"), "</s>"),
}


@functools.cache
def loaded(name: str) -> LoadedTokenizer:
    make, eos = (KINDS | NO_OTHER_IDS)[name]
    tokenizer = make()
    tokenizer.encode_special_tokens = True
    eos_id = tokenizer.token_to_id(eos)
    size = max(tokenizer.get_vocab().values()) + 1
    return LoadedTokenizer(tokenizer, "id", "digest", size, eos, eos_id)


@functools.cache
def encoders_of(name: str) -> list[encoders.Encode]:
    tokenizer = loaded(name)
    try:
        return [reference_encoder(tokenizer), fast_encoder(tokenizer)]
    except NoFastEncoder:
        return [reference_encoder(tokenizer)]


# --- one text -----------------------------------------------------------------------------------

SPECIAL = ("END", "end", "</s>", "<s>", "<unk>", "[UNK]", "<|endoftext|>", "<|other|>", " the")
PLAIN = ("the", "cat", "ED", "</", "s>", " ", "\n", "é", "世", "ab", "<0x41>", ".")
texts = st.lists(st.sampled_from(SPECIAL + PLAIN) | st.text(max_size=5), max_size=12).map("".join)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=150)
@given(text=texts)
def test_no_text_becomes_the_end_of_its_document(name: str, text: str) -> None:
    for encode in encoders_of(name):
        (ids,) = encode([text])
        assert loaded(name).eos_id not in ids
    assert loaded(name).encode(text) == ids.tolist()  # prompts are encoded in the same way


@pytest.mark.parametrize("name", KINDS)
def test_the_text_of_the_end_token_alone_becomes_other_ids(name: str) -> None:
    tokenizer = loaded(name)
    _, eos = KINDS[name]
    text = eos.replace("Ġ", " ")
    (ids,) = encoders_of(name)[0]([f"{text}{text} {text}"])
    assert len(ids) > 0
    assert tokenizer.eos_id not in ids


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith(("byte", "added"))])
@settings(max_examples=100)
@given(text=texts)
def test_text_that_spells_special_tokens_is_decoded_exactly(name: str, text: str) -> None:
    tokenizer = loaded(name)
    for encode in encoders_of(name):
        assert tokenizer.decode(encode([text])[0].tolist()) == text


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=100)
@given(text=st.lists(st.sampled_from(PLAIN), max_size=12).map("".join))
def test_text_that_spells_no_special_token_keeps_its_ids(name: str, text: str) -> None:
    tokenizer = loaded(name)
    before = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special} | {tokenizer.eos_id}
    unknown = {tokenizer.tokenizer.token_to_id(token) for token in ("[UNK]", "<unk>")}
    if special.isdisjoint(set(before) - unknown):
        assert encoders_of(name)[0]([text])[0].tolist() == before


# --- a job --------------------------------------------------------------------------------------


def config_of(root: Path, tokenizer: dict[str, Any], documents: list[str]) -> ResolvedConfig:
    """A job of two files with half of the documents each, one a line."""
    half = len(documents) // 2
    for file, part in (("a.txt", documents[:half]), ("b.txt", documents[half:])):
        (root / file).write_text("\n".join(part))
    config = Config(
        data=str(root / "data"),
        tokenizer=tokenizer,
        tokenize={
            "inputs": [str(root / "*.txt")],
            "document_separator": "\n",
            "val_fraction": 0.3,
            "max_lost": 1,  # a word that spells the end is an unknown one for WordLevel
        },
    )
    return resolve(config)


def taken(root: Path, name: str, documents: list[str]) -> ResolvedConfig:
    make, eos = (KINDS | NO_OTHER_IDS)[name]
    path = root / "tokenizer.json"
    make().save(str(path))
    source = {"source": "path", "path": str(path), "eos_token": eos}
    return config_of(root, source, documents)


def ends_and_documents(config: ResolvedConfig) -> tuple[int, int]:
    """How often the end-of-document id is in the shards of a finished job, and its documents."""
    build_tokenizer(config)
    shards = ShardSet.open(tokenize(config, workers=1))
    ends = (int((s.read() == shards.manifest.eos_id).sum()) for s in shards.train + shards.val)
    return sum(ends), sum(total.documents for total in shards.manifest.totals.values())


@pytest.mark.parametrize(
    "name",
    ["byte-level", "added, plain", "characters", "unigram, not added", "WordLevel", "template"],
)
def test_shards_have_one_end_a_document(tmp_path: Path, name: str) -> None:
    _, eos = KINDS[name]
    documents = [f"{number} {eos} the {eos}{eos}" for number in range(60)]
    assert ends_and_documents(taken(tmp_path, name, documents)) == (60, 60)


def test_a_trained_tokenizer_whose_end_token_is_a_word_of_the_text(tmp_path: Path) -> None:
    settings = {"vocab_size": 300, "eos_token": "END"}
    documents = [f"END {number}" if number % 3 else "END" for number in range(60)]
    assert ends_and_documents(config_of(tmp_path, settings, documents)) == (60, 60)


@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [
        ("one character", "see: an a", "text 'a' at character 5 becomes id 65 (a), which ends"),
        (
            "a byte of others",
            "is 世通 that",
            "text '通' at character 4 becomes id 166 (é), which ends",
        ),
        ("WordLevel, unknown words", "the unheard", "'unheard' at character 4 becomes id 1 (</s>)"),
        ("WordLevel, none for unknown words", "the unheard", "cannot encode the text"),
    ],
)
def test_text_without_other_ids_is_refused_by_file_and_position(
    tmp_path: Path, name: str, bad: str, reason: str
) -> None:
    good = "the" if name.startswith("WordLevel") else "in the"
    config = taken(tmp_path, name, [*[good] * 37, bad, *[good] * 2])
    build_tokenizer(config)
    with pytest.raises(DataError) as caught:
        tokenize(config, workers=1)
    assert f"{tmp_path / 'b.txt'}, document 18: " in caught.value.what
    assert reason in caught.value.what
    assert "tokenizer.eos_token" in caught.value.fix
    assert not list((tmp_path / "data" / "tokens").rglob("manifest.json"))
