"""Samples by the statement of an export: without the run, from tokens that were made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge.attestation import verify
from forge.attestation.verify import Links, VerificationError, part
from forge.core.config import ResolvedConfig, as_recorded, checked
from forge.core.errors import DataError, ForgeError
from forge.core.files import canonical, digest_bytes, digest_file, disk_trouble
from forge.core.paths import TOKENIZER, tokenizer_folder, tokens_folder
from forge.core.terminal import progress
from forge.data import corpus
from forge.data.corpus import InputFile
from forge.data.sources import SourceSet, Tokens, open_tokens
from forge.plugins.samples.order import Stretch
from forge.trainer.source_mix import MixAtStart, SourceMix, num_windows


def stretch_of_export(export: Path, data: str) -> Stretch:
    """The steps of the run of an export, without those of its parents. data: with its tokens, as
    `forge verify --data TEXTS --keep` leaves them.

    The statement is verified, but for its signature. Raises DataError for a statement that is not right
    or lacks what the order needs, and for other tokens than it names.
    """
    try:
        links = verify.verify(export, say=lambda _: None)
        config, parent = _config(links, data), _parent(links)
        last = part(links["export"], "step", int)
        tokens = _tokens(links, config)
        after = part(parent, "step", int) if parent else 0
        launches = [
            (
                part(one, "resumed_from", int),
                part(one, "last_step", int),
                part(one, "world_size", int),
            )
            for one in part(links["launches"], "launches", list)
        ]
    except (VerificationError, ForgeError, FileNotFoundError) as err:
        raise DataError(f"{export}: {getattr(err, 'what', err)}") from None

    def ranks(step: int) -> int:
        """Number of ranks of the last launch that has trained it."""
        for begun, ended, world_size in reversed(launches):
            if begun < step <= ended:
                return world_size
        return 0

    return Stretch(str(export), after, last, config, tokens, _mix(config, tokens), ranks)


def _config(links: Links, data: str) -> ResolvedConfig:
    """The config of the statement, paths as it has them: none of them is opened."""
    stated = part(links, "config", dict)
    if "program" in links:
        raise VerificationError("it is of another program, which reads its inputs itself")
    values = stated.get("values") or part(stated, "without_folders", dict)
    if stated.get("values") and digest_bytes(canonical(values)) != stated.get("blake3"):
        raise VerificationError("the values of the config have another digest than it states")
    own = {"run": part(links["export"], "run", str), "data": data}
    return checked(ResolvedConfig, {**as_recorded(values), **own}, "the statement")


def _parent(links: Links) -> dict[str, Any] | None:
    """The checkpoint of another run that the run began with. Refused with sources: what the parent has
    drawn of each is in its own checkpoints alone."""
    parent: dict[str, Any] | None = links["parents"].get("checkpoint")
    if parent and {*part(links["tokens"], "sources", dict)} != {""}:
        raise VerificationError(
            f"the run began with {parent.get('run')}@{parent.get('step')}, and the statement does not say"
            " how many samples of each source that had drawn"
        )
    return parent


def _tokens(links: Links, config: ResolvedConfig) -> Tokens:
    tokens = open_tokens(tokens_folder(config.data, config.ids.tokens))
    stated = part(links["tokens"], "blake3", str)
    if tokens.digest != stated:
        raise DataError(
            f"the tokens in {tokens.folder} have digest {tokens.digest[:12]}, the statement says"
            f" {stated:.12}",
        )
    tokenizer = part(links["tokenizer"], "blake3", str)
    if tokens.tokenizer_digest != tokenizer or _tokenizer_digest(config) != tokenizer:
        raise DataError(f"the tokenizer in {config.data} is not the one of the statement")
    tokens.verify()
    return tokens


def _tokenizer_digest(config: ResolvedConfig) -> str:
    return digest_file(tokenizer_folder(config.data, config.ids.tokenizer) / TOKENIZER)


def _mix(config: ResolvedConfig, tokens: Tokens) -> SourceMix | None:
    if not isinstance(tokens, SourceSet):
        return None
    windows = num_windows(tokens, config.train.seq_len)
    return SourceMix(tokens, config.train, MixAtStart.of(config, windows, None, None))


def texts_in(texts: str) -> dict[str, InputFile]:
    """The text files in a directory, or `python:stdlib`, by digest. Raises DataError."""
    try:
        there = corpus.list_named([texts])
    except DataError as err:
        raise DataError(corpus.of_key(err, "--texts").what) from None
    found = {}
    with progress("text files", len(there), "files") as update:
        for number, file in enumerate(there, 1):
            with disk_trouble(file.path, "read"):
                found[digest_file(file.path)] = file
            update(number)
    return found
