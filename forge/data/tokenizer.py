"""Build the tokenizer of a run: train one on the corpus, copy a file, or fetch one from a hub."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from forge.core.config import Config, ResolvedConfig
from forge.core.errors import ConfigError, DataError, UnfitError
from forge.core.file_list import FileEntry, FileList, verify
from forge.core.files import (
    atomic_open,
    digest_bytes,
    disk_trouble,
    read_json,
    write_json,
)
from forge.core.paths import MANIFEST, TOKENIZER, tokenizer_folder
from forge.core.records import validated
from forge.core.terminal import progress, say
from forge.core.tokenize_settings import Tokenizer as TokenizerSettings
from forge.data import content_ids, corpus, hub
from forge.data.end_token import (
    FILES,
    GUESS,
    TOKENIZER_CONFIG,
    TRAINED_EOS,
    EndToken,
    content,
    end_token,
    token_of_config,
)
from forge.data.inputs import corpus_files
from forge.data.plain_text import for_plain_text

if TYPE_CHECKING:
    import tokenizers


# --- loading and encoding -----------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer whose file has the digest of its manifest."""

    tokenizer: tokenizers.Tokenizer
    id: str
    digest: str
    vocab_size: int
    """Largest id plus one, including added tokens."""
    eos_token: str
    eos_id: int

    @functools.cached_property
    def text_parts(self) -> dict[str, Any]:
        """The tokenizer.json that encodes text, as changed by `for_plain_text`."""
        return for_plain_text(json.loads(self.tokenizer.to_str()), self.eos_token)

    @functools.cached_property
    def for_text(self) -> tokenizers.Tokenizer:
        """The tokenizer that encodes text: text that spells a special token does not get its id."""
        return _parse(json.dumps(self.text_parts).encode(), f"tokenizer {self.id}")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens. Raises DataError as `encoding` does."""
        return list(self.encoding(text).ids)

    def encoding(self, text: str) -> tokenizers.Encoding:
        """Ids of a text as in `encode`, with their offsets. DataError where it cannot be encoded."""
        try:
            return self.for_text.encode(text, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as err:  # the library raises plain Exception, and Rust panics
            raise DataError(
                f"tokenizer {self.id} cannot encode the text {text[:40]!r}: {err}",
                cause="its vocabulary has neither this text nor a token for unknown text",
                fix="choose another tokenizer, or leave this text out",
            ) from None

    def decode(self, ids: list[int]) -> str:
        """The text of ids, including special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def load_tokenizer(folder: Path) -> LoadedTokenizer:
    """Load a tokenizer that `build_tokenizer` wrote. DataError where it is incomplete or corrupt."""
    again = "run `forge tokenizer CONFIG` again"
    if not (folder / MANIFEST).exists():
        raise DataError(f"there is no tokenizer in {folder}", fix="run `forge tokenizer CONFIG`")
    facts = validated(_Facts, read_json(folder / MANIFEST), folder / MANIFEST, fix=again)
    path, entries = folder / TOKENIZER, {TOKENIZER: FileEntry(None, facts.digest)}
    verify([FileList(folder, entries, listed_in="its manifest", fix=again, follow_links=True)])
    tokenizer = _parse(path.read_bytes(), str(path))
    has = (_vocab_size(tokenizer), tokenizer.token_to_id(facts.eos_token))
    if has != (facts.vocab_size, facts.eos_id):
        raise DataError(
            f"{path} has {has[0]} ids and id {has[1]} for {facts.eos_token!r}; its manifest says "
            f"{facts.vocab_size} and {facts.eos_id}",
            cause="the manifest was edited by hand",
            fix=f"remove {folder / MANIFEST} and {again}",
        )
    return LoadedTokenizer(tokenizer, **facts.model_dump())


def parse_tokenizer(data: bytes, beside: dict[str, bytes], where: str) -> LoadedTokenizer:
    """The tokenizer in the bytes of a tokenizer.json, and of files beside it that name its end-of-text
    token, which the caller has verified. where: their directory, for errors. Raises DataError."""
    tokenizer = _parse(data, where)
    found = end_token(tokenizer.get_vocab(), beside)
    eos_id = tokenizer.token_to_id(found.token) if found else None
    if found is None or eos_id is None:
        raise DataError(
            f"the tokenizer in {where} has no end-of-text token {found.token!r}"
            if found
            else f"the tokenizer in {where} does not say which token ends a text",
            cause=f"{TOKENIZER_CONFIG} was edited",
        )
    return LoadedTokenizer(
        tokenizer, where, digest_bytes(data), _vocab_size(tokenizer), found.token, eos_id
    )


class _Facts(BaseModel):
    """Required keys of a tokenizer's manifest; the others record where the tokenizer came from."""

    model_config = ConfigDict(strict=True)

    id: str
    digest: str
    vocab_size: int
    eos_token: str
    eos_id: int


def _parse(data: bytes, where: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as err:  # the library raises plain Exception for any unreadable file
        raise DataError(
            f"{where} is not a tokenizer that can be loaded: {err}",
            cause="not a tokenizer.json of the tokenizers library, or of a newer version of it",
            fix="choose another file, or install the newest tokenizers",
        ) from None
    # Some published files truncate or pad every text to a model's context length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A text that spells "<|endoftext|>" must not end its document. This setting keeps only added
    # tokens from being found in text; plain_text takes care of the model's vocabulary.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


# --- building -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TokenizerSource:
    """Contents of the tokenizer.json and of the files beside it that may name its end-of-text token, and
    facts for the manifest."""

    tokenizer: bytes
    beside: dict[str, bytes] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def build_tokenizer(config: ResolvedConfig) -> Path:
    """Build the tokenizer of a config and test that it loads; its directory.

    Does nothing if it exists. Raises ConfigError, DataError, and UnfitError (no answer of the hub).
    """
    folder = tokenizer_folder(config.data, config.ids.tokenizer)
    if _is_valid(folder):
        say(f"tokenizer {folder.name}: nothing to do")
        return folder
    content_ids.require_current(config, "tokenizer")
    sources: dict[str, Callable[[ResolvedConfig], _TokenizerSource]] = {
        "train": _train,
        "path": _copy,
        "hub": _fetch,
    }
    _write(folder, config, sources[config.tokenizer.source](config))
    return folder


def _is_valid(folder: Path) -> bool:
    """Return whether the tokenizer is built and valid; removes the manifest of an invalid one."""
    if not (folder / MANIFEST).exists():
        return False
    try:
        load_tokenizer(folder)
    except DataError as err:
        say(f"{err.what}: rebuilding the tokenizer")
        with disk_trouble(folder):
            (folder / MANIFEST).unlink()
        return False
    return True


def _write(folder: Path, config: Config, source: _TokenizerSource) -> None:
    tokenizer = _parse(source.tokenizer, f"the {config.tokenizer.source} tokenizer")
    eos_token, named_by = _find_eos(tokenizer, config.tokenizer, source.beside)
    eos_id = tokenizer.token_to_id(eos_token)
    assert eos_id is not None, eos_token
    files = {TOKENIZER: source.tokenizer}
    files |= {name: data for name, data in source.beside.items() if name == TOKENIZER_CONFIG}
    for name, data in files.items():
        with atomic_open(folder / name) as file:
            file.write(data)
    _test_offline(folder / TOKENIZER, eos_token, eos_id)
    vocab_size = _vocab_size(tokenizer)
    manifest = {
        "id": folder.name,
        "digest": digest_bytes(source.tokenizer),
        "vocab_size": vocab_size,
        "eos_token": eos_token,
        "eos_id": eos_id,
        "settings": content_ids.tokenizer_recipe(config),
        **({"eos_token_from": named_by} if named_by else {}),
        **source.facts,
    }
    write_json(folder / MANIFEST, manifest)
    if named_by == GUESS:
        say(
            "warning: no file of the tokenizer names the token that ends a document: taking"
            f" {eos_token}, a guess; tokenizer.eos_token names it"
        )
    say(f"tokenizer {folder.name}: {vocab_size} ids, {eos_token} ends a document, in {folder}")


def _find_eos(
    tokenizer: tokenizers.Tokenizer, settings: TokenizerSettings, beside: dict[str, bytes]
) -> tuple[str, str]:
    """The end-of-text token, and what names it where that is neither the config nor
    tokenizer_config.json. ConfigError where there is none."""
    asked = settings.eos_token or (TRAINED_EOS if settings.source == "train" else None)
    found = EndToken(asked, "") if asked else end_token(tokenizer.get_vocab(), beside)
    if found:
        _require_utf8(found.token, "tokenizer.eos_token" if asked else found.named_by)
        if tokenizer.token_to_id(found.token) is not None:
            return found.token, "" if found.named_by == TOKENIZER_CONFIG else found.named_by
    added = tokenizer.get_added_tokens_decoder().values()
    special = ", ".join(token.content for token in added if token.special) or "none"
    raise ConfigError(
        f"the tokenizer has no end-of-text token {found.token!r}"
        if found
        else "cannot tell which token ends a document",
        cause=f"its special tokens are: {special}",
        fix="set tokenizer.eos_token to the token that ends a document",
    )


def _require_utf8(token: str, where: str) -> None:
    """ConfigError for a lone surrogate, which JSON and YAML can spell and a tokenizer cannot."""
    try:
        token.encode()
    except UnicodeEncodeError as err:
        raise ConfigError(
            f"{where}: the end-of-text token {token!r} is not UTF-8: {err.reason}",
            fix="set tokenizer.eos_token to the token that ends a document",
        ) from None


# --- source: train ------------------------------------------------------------------------------


def _train(config: ResolvedConfig) -> _TokenizerSource:
    """Train a byte-level BPE, which decodes any text exactly: its alphabet has all 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    settings = config.tokenizer
    if settings.eos_token:
        _require_utf8(settings.eos_token, "tokenizer.eos_token")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[settings.eos_token or TRAINED_EOS, *_special_tokens(config)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(config), trainer)
    if _vocab_size(tokenizer) < settings.vocab_size:
        say(
            f"the corpus gives only {_vocab_size(tokenizer)} of {settings.vocab_size} ids: "
            "every word in it is one token already"
        )
    return _TokenizerSource(tokenizer.to_str(pretty=True).encode())


def _special_tokens(config: ResolvedConfig) -> list[str]:
    """Special tokens of the formats of all sources, sorted."""
    packed = (one.format for one in config.tokenize.corpora.values() if one.is_packed)
    return sorted({token for kind in packed for token in corpus.text_format(kind).special_tokens})


def _sample(config: ResolvedConfig) -> Iterator[str]:
    """At most sample_mib of text: the beginning of every file of all sources, in proportion to its
    size."""
    files = [
        (file, single.tokenize)
        for single in content_ids.single_corpora(config)
        for file in corpus_files(single)
    ]
    limit = config.tokenizer.sample_mib * 2**20
    total = sum(file.size for file, _ in files)
    taken_total = 0
    with progress("reading the sample", min(limit, total) / 2**20, "MiB") as update:
        for file, settings in files:
            share = int(limit * file.size / max(total, 1))
            taken = 0
            for document in corpus.read_documents(file, settings):
                text = _first_bytes(document, share - taken)
                taken += len(text.encode())
                yield text
                if taken >= share - 3:  # the rest may be less than one character
                    break
            taken_total += taken
            update(taken_total / 2**20, file.name)
    if not taken_total:
        raise DataError(
            f"the corpus has no text to train a tokenizer on ({len(files)} files, {total} bytes)",
            cause="the input files are empty or hold only white space",
            fix="correct the inputs in tokenize",
        )


def _first_bytes(text: str, num_bytes: int) -> str:
    """The longest beginning of a text with at most this many bytes of UTF-8."""
    data = text.encode()
    return text if len(data) <= num_bytes else data[:num_bytes].decode(errors="ignore")


# --- source: path -------------------------------------------------------------------------------


def _copy(config: Config) -> _TokenizerSource:
    path, beside = content_ids.tokenizer_files(str(config.tokenizer.path))
    with disk_trouble(path, "read"):
        return _TokenizerSource(content(path), {file.name: content(file) for file in beside})


# --- source: hub --------------------------------------------------------------------------------


def _fetch(config: Config) -> _TokenizerSource:
    """The tokenizer's files at one revision; from the local cache where there is no network."""
    name, revision = str(config.tokenizer.hub).split("@", 1)
    options = f"--tokenizer.source=hub --tokenizer.hub={name}@{revision}"
    command = f"forge tokenizer CONFIG {options}"
    repo = hub.Repo(name, revision, key="tokenizer.hub", command=command)
    with disk_trouble(Path(config.data)):
        path = hub.download(repo, TOKENIZER)
        if path is None:
            raise ConfigError(
                f"{repo} has no {TOKENIZER}",
                cause="its tokenizer exists only in another format (sentencepiece, vocab.json)",
                fix="choose a repository with a tokenizer.json, "
                "or convert it and use tokenizer.source: path",
            )
        commit = hub.commit_of(path, TOKENIZER)
        beside = _beside_on_hub(replace(repo, revision=commit))
        return _TokenizerSource(content(path), beside, {"commit": commit})


def _beside_on_hub(repo: hub.Repo) -> dict[str, bytes]:
    """The files up to the first that names an end-of-text token."""
    beside: dict[str, bytes] = {}
    for name in FILES:
        if token_of_config(beside.get(TOKENIZER_CONFIG)):
            break
        if path := hub.download(repo, name):
            beside[name] = content(path)
    return beside


# --- offline test -------------------------------------------------------------------------------

OFFLINE_SEC = 300.0  # two seconds of work; imports from a cold file system may take minutes
PROBE = 'def naïve(x):\n\treturn "Grüße, 世界 🙂"  # 2 + 2\n'

# As on compute nodes: without network or cache, and with the tokenizers library only.
_OFFLINE_TEST = """
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
from tokenizers import Tokenizer
ask = json.load(sys.stdin)
tokenizer = Tokenizer.from_file(ask["path"])
tokenizer.no_truncation()
ids = tokenizer.encode(ask["probe"], add_special_tokens=False).ids
text = tokenizer.decode(ids, skip_special_tokens=False)
print(json.dumps({"num_ids": len(ids), "text": text, "eos_id": tokenizer.token_to_id(ask["eos"])}))
"""


def _test_offline(path: Path, eos_token: str, eos_id: int) -> None:
    """Load, encode and decode in a fresh, offline process. DataError where that fails, UnfitError where
    it hangs."""
    ask = json.dumps({"path": str(path), "probe": PROBE, "eos": eos_token})
    command = [sys.executable, "-c", _OFFLINE_TEST]
    try:
        done = subprocess.run(
            command, input=ask, capture_output=True, text=True, check=False, timeout=OFFLINE_SEC
        )
    except subprocess.TimeoutExpired:
        raise UnfitError(
            f"the test of {path} in a fresh, offline process has not ended after {OFFLINE_SEC:g} s",
            cause="the file system of the Python packages hangs, or this tokenizer does on a short text",
            fix="run the command again; if it takes that long again, choose another tokenizer",
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise DataError(
            f"{path} cannot be loaded in a fresh, offline process: {last}",
            fix="choose another tokenizer",
        )
    answer = json.loads(done.stdout)
    if answer["eos_id"] != eos_id or not answer["num_ids"]:
        raise DataError(
            f"{path} in a fresh process gives {answer['num_ids']} ids for a test text and "
            f"id {answer['eos_id']} for {eos_token} (here {eos_id})",
            fix="choose another tokenizer",
        )
    # A tokenizer with add_prefix_space prepends one space.
    if _is_lossless(path) and answer["text"].removeprefix(" ") != PROBE:
        raise DataError(
            f"{path} is byte-level but turns {PROBE!r} into {answer['text']!r}",
            fix="choose another tokenizer",
        )


def _is_lossless(path: Path) -> bool:
    """Return whether a tokenizer.json is byte-level, without a normalizer that changes the probe."""
    parts = json.loads(path.read_text())
    decoder = parts.get("decoder") or {}
    kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))}
    normalizer = parts.get("normalizer") or {"type": "NFC"}
    return "ByteLevel" in kinds and normalizer["type"] == "NFC"  # the probe is in NFC
