"""Make the tokens of a statement again from its text files, and compare them: `forge verify --data`, and
`forge reproduce --data`, which trains on them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge.attestation.verify import Links, VerificationError, part
from forge.core.config import Config, Ids, ResolvedConfig, checked
from forge.core.errors import ForgeError
from forge.core.files import digest_file, plain_name
from forge.core.paths import MANIFEST, TOKENIZER, tokenizer_folder, tokens_folder
from forge.core.provenance import versions
from forge.core.scratch import scratch_directory
from forge.data import content_ids, corpus
from forge.data.corpus import STDLIB, InputFile
from forge.data.inputs import files_by_digest
from forge.data.shards import SPLITS, InputEntry, ShardManifest
from forge.data.sources import ListedTokens, SourcesManifest
from forge.data.tokenize import tokenize
from forge.data.tokenizer import build_tokenizer, load_tokenizer
from forge.plugins.attestation.chain import (
    TextFile,
    Texts,
    TokenizerMade,
    TokensMade,
    TokensOfSource,
)
from forge.plugins.attestation.reduce import HIDDEN, stated_values


def verify_texts(texts: str, links: Links, export: Path, keep: Path | None = None) -> None:
    """Print what was compared. texts: directory with the files that the statement lists, under whatever
    names, or `python:stdlib` for those of this Python. keep: a `data` directory, in which the tokenizer
    and the tokens stay under the ids and with the manifests of the statement.

    Raises VerificationError that names the file, tokenizer or shard that differs; DataError where a text
    cannot be read.
    """
    try:
        stated = Texts.model_validate(links["texts"]).files
        tokenizer = TokenizerMade.model_validate(links.get("tokenizer"))
        tokens = TokensMade.model_validate(links.get("tokens")).sources
    except ValidationError:
        raise VerificationError(
            "it has no tokens, or none that this Forge can make again"
        ) from None
    if stated is None or tokens is None or stated.keys() != tokens.keys():
        raise VerificationError(
            "the statement does not list the text files: they were gone before, or too many for it"
        )
    if keep and any(file.name.startswith(HIDDEN) for files in stated.values() for file in files):
        raise VerificationError(
            f"its text files have {HIDDEN} in place of their directories, and the tokens that the run was"
            " trained on name them in full: `forge verify --data` compares them; to train on them needs"
            " the statement of `forge export --full`"
        )
    _check_sources({*stated}, links)
    found = files_by_digest(
        texts, "--data", [(f.name, f.bytes, f.blake3) for files in stated.values() for f in files]
    )
    with scratch_directory("verify") as place:
        inputs = {
            # By number: the names are those of the statement.
            name: _links_to(place / "texts" / str(number), files, found)
            for number, (name, files) in enumerate(stated.items())
        }
        config = _config(place, inputs, links, tokenizer, export)
        made = _made_again(config)
        _compare(made, tokenizer, tokens, links)
        if keep:
            _keep(keep, config, made, links)
    shards = sum(len(shards) for source in tokens.values() for shards in source.splits.values())
    files = sum(map(len, stated.values()))
    print(
        f"  ok    data: {files:,} text files give the tokenizer and {shards} shards of the statement"
    )


def _check_sources(stated: set[str], links: Links) -> None:
    """Refused where the config names other sources than the texts."""
    sources = part(stated_values(links), "tokenize", dict).get("sources")
    in_config = {*sources} if isinstance(sources, dict) else {""}
    if not stated == in_config == {*(stated_ids(links).sources or [""])}:
        raise VerificationError("the config of the statement has other sources than its texts")


# --- the text files ---------------------------------------------------------------------------------


def _links_to(folder: Path, files: list[TextFile], found: dict[str, InputFile]) -> list[str]:
    """Values of `tokenize.inputs` for these files: links to them, in the order in which they were read,
    and with their endings, which tell the format. Of equal texts all but one are copies: two links to a
    file are read once."""
    of_python = [file.name.startswith(STDLIB) for file in files]
    if all(of_python):
        return [STDLIB]
    if any(of_python):
        raise VerificationError("files of Python's library beside others cannot be compared")
    folder.mkdir(parents=True)
    linked = set[str]()
    for number, file in enumerate(files):
        try:
            name = plain_name(os.path.basename(file.name)[-200:])  # noqa: PTH119 (not a path here)
        except ValueError as err:
            raise VerificationError(str(err)) from None
        text, link = found[file.blake3].path.absolute(), folder / f"{number:08d}-{name}"
        if file.blake3 in linked:
            shutil.copyfile(text, link)
        else:
            link.symlink_to(text)
            linked.add(file.blake3)
    return [str(path) for path in sorted(folder.iterdir())]


# --- the tokens -------------------------------------------------------------------------------------


def _config(
    place: Path, inputs: dict[str, list[str]], links: Links, tokenizer: TokenizerMade, export: Path
) -> ResolvedConfig:
    """The config that makes the tokens again. Of the statement it has numbers and names of formats, and
    no path."""
    values = stated_values(links)
    section = part(values, "tokenize", dict)
    sources = section.get("sources")
    if isinstance(sources, dict):
        changed = {
            name: {**sources.get(name, {}), "inputs": paths} for name, paths in inputs.items()
        }
        section = {**section, "sources": changed}
    else:
        section = {**section, "inputs": inputs[""]}
    made = {
        "tokenizer": _tokenizer_settings(part(values, "tokenizer", dict), tokenizer, export),
        "tokenize": section,
        "train": {"seq_len": part(values, "train", dict).get("seq_len")},  # of packed windows
        "data": str(place / "data"),
        "results": str(place / "results"),
    }
    try:
        config = checked(Config, made, "the statement")
        for settings in config.tokenize.corpora.values():
            corpus.import_plugin(settings)
        return content_ids.resolve(config)
    except ForgeError as err:
        raise VerificationError(f"this Forge cannot make the tokens again: {err.what}") from None


def _tokenizer_settings(
    stated: dict[str, Any], tokenizer: TokenizerMade, export: Path
) -> dict[str, Any]:
    """A trained tokenizer is retrained; of any other the export has the file, unless it was changed
    for transformers."""
    if stated.get("source") == "train":
        return {key: stated.get(key) for key in ("source", "vocab_size", "sample_mib", "eos_token")}
    if digest_file(export / TOKENIZER) != tokenizer.blake3:
        raise VerificationError(
            f"the tokens were made by another {TOKENIZER} than that of the export, whose special tokens"
            " were changed for transformers"
        )
    eos_token = (tokenizer.origin or {}).get("eos_token")
    return {"source": "path", "path": str(export / TOKENIZER), "eos_token": eos_token}


def _made_again(config: ResolvedConfig) -> dict[str, ShardManifest]:
    """The manifest of the tokens of each source."""
    load_tokenizer(build_tokenizer(config))
    manifests = {}
    for name, single in zip(
        config.ids.sources or [""], content_ids.single_corpora(config), strict=True
    ):
        tokenize(single, workers=os.cpu_count() or 1)
        folder = tokens_folder(single.data, single.ids.tokens)
        manifests[name] = ShardManifest.read(folder / MANIFEST)
    return manifests


def _compare(
    made: dict[str, ShardManifest],
    tokenizer: TokenizerMade,
    tokens: dict[str, TokensOfSource],
    links: Links,
) -> None:
    """Raises VerificationError for the first thing that differs."""
    here = versions()["tokenizers"]
    then = (links["environment"].get("versions") or {}).get("tokenizers")
    of_versions = "" if then == here else f" (tokenizers is {here} here, {then!r:.20} then)"
    for name, manifest in made.items():
        if manifest.tokenizer_digest != tokenizer.blake3:
            raise VerificationError(f"these texts give another tokenizer{of_versions}")
        for line in _different_shards(manifest, tokens[name]):
            raise VerificationError(f"{f'source {name}: ' if name else ''}{line}{of_versions}")


def _different_shards(made: ShardManifest, stated: TokensOfSource) -> Iterator[str]:
    for split in SPLITS:
        ours, theirs = made.splits[split], stated.splits.get(split, [])
        if len(ours) != len(theirs):
            yield f"these texts give {len(ours)} shards of {split}, the statement has {len(theirs)}"
        for one, other in zip(ours, theirs, strict=False):
            if one != other:
                yield (
                    f"{one.file} has {one.tokens:,} tokens and digest {one.digest[:12]}, the statement"
                    f" says {other.tokens:,} and {other.digest[:12]}"
                )


# --- tokens to train on -----------------------------------------------------------------------------


def stated_ids(links: Links) -> Ids:
    """The content ids in the config of a statement, which are safe as names of directories."""
    values = stated_values(links)
    try:
        return checked(Ids, part(values, "ids", dict), "the statement")
    except ForgeError as err:
        raise VerificationError(f"the statement has no content ids: {err.what}") from None


def _keep(
    data: Path, made_by: ResolvedConfig, made: dict[str, ShardManifest], links: Links
) -> None:
    """Move what was made to where a run of the statement's config looks for it. The manifests get the
    names that the author's files had: checkpoints are bound to the digests of these manifests."""
    ids, stated = stated_ids(links), TokensMade.model_validate(links["tokens"])
    names = Texts.model_validate(links["texts"]).files or {}
    of_tokenizer = tokenizer_folder(made_by.data, made_by.ids.tokenizer)
    shutil.copytree(of_tokenizer, tokenizer_folder(data, ids.tokenizer))
    for name, single in zip(made, content_ids.single_corpora(made_by), strict=True):
        folder = tokens_folder(data, ids.sources[name] if name else ids.tokens)
        if folder.exists():  # two sources with the same files
            continue
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(tokens_folder(single.data, single.ids.tokens), folder)
        inputs = [InputEntry(name=f.name, size=f.bytes, digest=f.blake3) for f in names[name]]
        own = {"id": folder.name, "tokenizer_id": ids.tokenizer, "inputs": inputs}
        made[name].model_copy(update=own).write(folder / MANIFEST)
        _check_manifest(folder, (stated.sources or {})[name].blake3)
    if ids.sources:
        folder = tokens_folder(data, ids.tokens)
        listed = {
            name: ListedTokens(id=i, digest=digest_file(tokens_folder(data, i) / MANIFEST))
            for name, i in sorted(ids.sources.items())
        }
        SourcesManifest(sources=listed).write(folder / MANIFEST)
        _check_manifest(folder, stated.blake3)


def _check_manifest(folder: Path, stated: str) -> None:
    digest = digest_file(folder / MANIFEST)
    if digest != stated:
        raise VerificationError(
            f"the manifest of tokens {folder.name}, made again, has digest {digest[:12]}, not"
            f" {stated:.12}: another version of Forge wrote it, or the statement contradicts itself"
        )
