"""`forge tokenize`: worker processes encode parts of the corpus, then a manifest lists all shards."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import blake3
import numpy as np
from pydantic import ValidationError

from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.file_list import verify
from forge.core.files import (
    atomic_open,
    digest_file,
    disk_trouble,
    fsync_folder,
    grouped,
)
from forge.core.paths import MANIFEST, STATISTICS, tokenizer_folder, tokens_folder
from forge.core.records import RecordPart
from forge.core.terminal import say
from forge.core.text_formats import READINGS, TOKEN_FORMATS, UNRECORDED_DTYPE, new_readings
from forge.core.tokenize_settings import Tokenize
from forge.data import content_ids, corpus, lossy_tokenizer, token_files
from forge.data.corpus import InputFile
from forge.data.encoders import (
    BATCH_BYTES,
    Encode,
    Ids,
    NoFastEncoder,
    Unencodable,
    fast_encoder,
    reference_encoder,
    refuse_end,
)
from forge.data.input_bytes import Consumed
from forge.data.inputs import corpus_files
from forge.data.lost_text import LossCounter, Spelling, keeps_all_text
from forge.data.packing import packing
from forge.data.part_workers import made_by_workers
from forge.data.shards import (
    DTYPES,
    SPLITS,
    Bytes,
    EndInDocument,
    InputEntry,
    Shard,
    ShardEntry,
    ShardManifest,
    ShardSet,
    ShardWriter,
    Split,
    Total,
    dtype_name,
    refuse_reading,
    shard_list,
)
from forge.data.statistics import Statistics, TextCounts, equal_files, read_statistics
from forge.data.text_bytes import ByteCounter
from forge.data.tokenizer import LoadedTokenizer, load_tokenizer

PART_FORMAT: Literal[1] = 1


# --- the subcommand -----------------------------------------------------------------------------


def tokenize(config: ResolvedConfig, *, workers: int) -> Path:
    """Turn the corpus into shards, encoded by `workers` processes; their directory.

    Does nothing if the shards are current, and keeps the finished parts of a killed run. The bytes
    do not depend on the number of workers. The caller holds the directory's lock. Raises DataError
    (no tokenizer or one that loses text, bad or too little text, a text that gigatoken cannot encode) and
    UnfitError (disk, memory).
    """
    _no_threads()
    content_ids.require_current(config, "tokens")
    tokenizer_path = tokenizer_folder(config.data, config.ids.tokenizer)
    tokenizer = load_tokenizer(tokenizer_path)
    files = corpus_files(config)
    folder = tokens_folder(config.data, config.ids.tokens)
    listed = token_files.with_index(files, config.tokenize)
    if _is_current(folder, tokenizer, listed, threads=max(1, min(workers, os.cpu_count() or 1))):
        counts = (read_statistics(folder) or Statistics()).text
        lossy_tokenizer.check_existing(config, tokenizer, files, counts)
        limits = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
        token_files.refuse_other_readings(files, config.tokenize, **limits)
        say(f"tokens {folder.name}: nothing to do")
        return folder
    corpus.import_plugin(config.tokenize)
    if config.tokenize.is_packed:
        packing(tokenizer, config.tokenize)  # refused before workers start
    lossy_tokenizer.check_sample(config, tokenizer, files)
    if warning := token_files.warning(files, config.tokenize, tokenizer.vocab_size):
        say(warning)
    _clean(folder)
    fast = _can_be_fast(config.tokenize, tokenizer)
    job = _Job(folder, tokenizer_path, config.tokenize, fast)
    groups = list(grouped(files, lambda file: file.size, config.tokenize.part_mib * 2**20))
    try:
        parts = _encode_parts(job, groups, workers)
    except NoFastEncoder as err:
        raise _refusal(err, folder) from None
    finally:
        _clean(folder)  # a killed worker leaves the shard that it was writing
    manifest = _manifest(folder.name, config, tokenizer, parts)
    statistics = _statistics(parts)
    counts = statistics.text or TextCounts()
    _say_separator(counts, config.tokenize)
    _check_splits(manifest, config.tokenize)
    lossy_tokenizer.refuse(counts, "", config)
    statistics.write(folder / STATISTICS)
    with disk_trouble(folder):
        fsync_folder(folder)  # the names of all shards before that of the manifest
    manifest.write(folder / MANIFEST)
    _say_result(folder, manifest)
    for line in lossy_tokenizer.warnings(counts, folder.name):
        say(line)
    _say_equal_files(statistics, len(manifest.inputs))
    return folder


def _is_current(
    folder: Path, tokenizer: LoadedTokenizer, files: list[InputFile], threads: int
) -> bool:
    """Return whether complete shards exist that were made of these inputs, by digest, and this
    tokenizer."""
    if not (folder / MANIFEST).exists():
        return False
    try:
        shards = ShardSet.open(folder)
        shards.check_reading(shards.train + shards.val)
    except DataError as err:
        say(f"{err.what}: rebuilding the shards")
        return False
    manifest = shards.manifest
    if manifest.tokenizer_digest != tokenizer.digest:
        say(f"tokens {folder.name}: the tokenizer has changed, rebuilding the shards")
        return False
    changed = set(_input_entries(files, threads)) ^ set(manifest.inputs)
    for name in sorted({entry.name for entry in changed}):
        say(f"tokens {folder.name}: {name} has changed, rebuilding its shards")
    return not changed


def _input_entries(files: list[InputFile], threads: int = 1) -> list[InputEntry]:
    entries = []
    for file in files:
        try:
            digest = digest_file(file.path, threads=threads)
        except OSError as err:
            raise DataError(f"cannot read {file.path}: {err.strerror}") from None
        entries.append(InputEntry(name=file.name, size=file.size, digest=digest))
    return entries


def _clean(folder: Path) -> None:
    """Remove the manifest, which is out of date, and temporary files of a killed run."""
    with disk_trouble(folder):
        for name in (MANIFEST, STATISTICS):
            (folder / name).unlink(missing_ok=True)
        for leftover in [*folder.rglob(".*.b[iy]*.*"), *folder.rglob(".*.json.*")]:
            leftover.unlink()


def _manifest(
    tokens_id: str, config: ResolvedConfig, tokenizer: LoadedTokenizer, parts: list[FinishedPart]
) -> ShardManifest:
    splits = {split: [s for part in parts for s in part.splits[split]] for split in SPLITS}
    inputs = [entry for part in parts for entry in part.inputs]
    settings = content_ids.tokens_settings(config.tokenize)
    kind = config.tokenize.format
    if readings := {mark for entry in inputs for mark in new_readings(entry.name, kind)}:
        settings |= {READINGS: sorted(readings)}
    return ShardManifest(
        id=tokens_id,
        dtype=dtype_name(_num_ids(config.tokenize, tokenizer)),
        vocab_size=tokenizer.vocab_size,
        masked=config.tokenize.is_packed,
        eos_id=tokenizer.eos_id,
        tokenizer_id=tokenizer.id,
        tokenizer_digest=tokenizer.digest,
        settings=settings,
        inputs=inputs,
        splits=splits,
        totals={split: Total.of(shards) for split, shards in splits.items()},
    )


def _num_ids(settings: Tokenize, tokenizer: LoadedTokenizer) -> int:
    """Numbers that shards may have, as `ShardManifest.masked` says."""
    return tokenizer.vocab_size * (1 + settings.is_packed)


def _statistics(parts: list[FinishedPart]) -> Statistics:
    counts = [part.text for part in parts if part.text]
    return Statistics(
        text=sum(counts, TextCounts()) if counts else None,
        equal_files=equal_files([entry for part in parts for entry in part.inputs]),
    )


def _check_splits(manifest: ShardManifest, settings: Tokenize) -> None:
    num_train, num_val = (manifest.totals[split].documents for split in SPLITS)
    if num_train and num_val:
        return
    if not num_train and not num_val:
        raise DataError(
            f"{settings.shown_inputs} has no documents: {len(manifest.inputs)} files, "
            f"{sum(entry.size for entry in manifest.inputs)} bytes",
            cause="the files are empty or hold only white space",
            fix="correct these inputs",
        )
    empty, direction = ("val", "raise") if num_train else ("train", "lower")
    raise DataError(
        f"the {empty} split of {settings.shown_inputs} is empty: {num_train} documents for training, "
        f"{num_val} for validation (tokenize.val_fraction {settings.val_fraction})",
        cause="a document is never divided between the splits, and there are too few documents",
        fix="split text files into documents with `document_separator`, beside `inputs`, add documents,"
        f" or {direction} tokenize.val_fraction",
    )


def _say_separator(counts: TextCounts, settings: Tokenize) -> None:
    """Warn of a document_separator that divides no file, as one that is misspelled."""
    separator = settings.document_separator
    if separator is None or settings.format in TOKEN_FORMATS or counts.divided_files:
        return
    if counts.text_files:
        what = f"divides none of {counts.text_files:,} text files: each is one document"
    else:
        what = "divides nothing: no input is a text file"
    escape = r"; in YAML, \n is a line end in double quotes only" if "\\" in separator else ""
    say(f"warning: document_separator {separator!r} {what}{escape}")


def _say_result(folder: Path, manifest: ShardManifest) -> None:
    totals = manifest.totals
    counts = ", ".join(
        f"{split} {totals[split].tokens} tokens in {totals[split].documents} documents"
        for split in SPLITS
    )
    num_mb = sum(total.tokens for total in totals.values()) * DTYPES[manifest.dtype].itemsize / 1e6
    say(f"tokens {folder.name}: {counts}, {num_mb:.1f} MB in {folder}")


def _say_equal_files(statistics: Statistics, num_files: int) -> None:
    if groups := statistics.equal_files:
        more = sum(len(names) - 1 for names in groups)
        say(
            f"{more} of {num_files} input files equal another one, such as {groups[0][0]} and"
            f" {groups[0][1]}: their documents are there as often ({STATISTICS} lists them)"
        )


# --- which encoder ------------------------------------------------------------------------------


def _can_be_fast(settings: Tokenize, tokenizer: LoadedTokenizer) -> bool:
    """Return whether gigatoken encodes this corpus: what it cannot read at all is said before the first
    part."""
    if not settings.fast or settings.format in TOKEN_FORMATS or settings.is_packed:
        return False
    try:
        fast_encoder(tokenizer)
    except NoFastEncoder as err:
        say(f"{err}: encoding with tokenizers, the same ids but many times slower")
        return False
    return True


def _refusal(err: NoFastEncoder, folder: Path) -> DataError:
    """The error for a text in the middle of a corpus that gigatoken cannot encode.

    Where gigatoken gave other ids, the records of all finished parts are removed: only samples of them
    were compared.
    """
    parts = "finished parts are kept"
    if err.gives_other_ids:
        with disk_trouble(folder):
            for record in (folder / "parts").glob("part-*.json"):
                record.unlink()
        parts = "all parts are encoded again, since only samples of them were compared"
    return DataError(
        str(err),
        cause="a fault of gigatoken, the fast encoder; the tokenizers library would do",
        fix=f"set tokenize.fast: false and rerun: the same ids, many times slower ({parts})",
    )


# --- the pool of workers ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """Settings of all workers."""

    folder: Path
    tokenizer: Path
    settings: Tokenize
    fast: bool
    """Encode with gigatoken, and compare samples with tokenizers."""


def _no_threads() -> None:
    """The tokenizers library shall start no threads of its own: workers are one per core already, and
    are forked from this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode_parts(job: _Job, groups: list[list[InputFile]], workers: int) -> list[FinishedPart]:
    """Encode all parts; their records in order."""
    global _job  # noqa: PLW0603  the workers are forked from this process
    _job = job

    def receive(made: tuple[bytes, list[str]]) -> FinishedPart:
        record, warnings = made
        for warning in warnings:
            say(warning)
        return FinishedPart.model_validate_json(record)

    num_bytes = sum(file.size for group in groups for file in group)
    return made_by_workers("tokenize", groups, num_bytes, workers, make=_make_part, receive=receive)


# --- in a worker --------------------------------------------------------------------------------

_job: _Job


@functools.cache
def _loaded(
    folder: Path, fast: bool
) -> tuple[LoadedTokenizer, Encode, Spelling | None, ByteCounter]:
    """The tokenizer, its encoder, what each id spells where text may be lost, and the counter of its
    bytes."""
    tokenizer = load_tokenizer(folder)
    encode = (fast_encoder if fast else reference_encoder)(tokenizer)
    spelling = Spelling(tokenizer)
    counter = ByteCounter(tokenizer, spelling)
    return tokenizer, encode, None if keeps_all_text(tokenizer) else spelling, counter


class FinishedPart(RecordPart):
    """The record of a finished part: some input files and the shards made of them."""

    format: Literal[1] = PART_FORMAT
    tokenizer_digest: str
    inputs: list[InputEntry]
    splits: dict[Split, list[ShardEntry]]
    text: TextCounts | None = None
    """None for files of ids, and in records of earlier versions."""


def _make_part(number: int, files: list[InputFile], consumed: Consumed) -> tuple[bytes, list[str]]:
    """Encode a part, or keep it if it is finished and valid; its record as JSON, and warnings."""
    tokenizer, encode, spelling, count_bytes = _loaded(_job.tokenizer, _job.fast)
    path = _job.folder / "parts" / f"part-{number:05d}.json"
    if path.exists():
        kept = _finished_part(path, files, tokenizer)
        if kept is not None:
            consumed(sum(file.size for file in files))
            return kept, []
    with disk_trouble(_job.folder):
        path.unlink(missing_ok=True)
        for stale in _job.folder.glob(f"*-{number:05d}-*.b[iy]*"):  # .bin and .bytes
            stale.unlink()
    warnings: list[str] = []
    text = None
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(_writer(split, number, tokenizer)) for split in SPLITS
        }
        if _job.settings.format in TOKEN_FORMATS:
            inputs = _input_entries(token_files.with_index(files, _job.settings))
            _write_tokens(writers, files, tokenizer, consumed)
        else:
            inputs = []
            divided: list[bool] = []
            documents = _documents(files, consumed, warnings, inputs, divided)
            counter = LossCounter(spelling)
            if _job.settings.is_packed:
                warning = _write_packed(writers, files, documents, tokenizer, counter)
                warnings += [warning] if warning else []
            else:
                _write_text(
                    writers,
                    files,
                    documents,
                    tokenizer=tokenizer,
                    encode=encode,
                    counter=counter,
                    count_bytes=count_bytes,
                )
            sizes = TextCounts(text_files=len(divided), divided_files=sum(divided))
            text = counter.counts() + sizes
    splits = {split: writer.entries for split, writer in writers.items()}
    part = FinishedPart(tokenizer_digest=tokenizer.digest, inputs=inputs, splits=splits, text=text)
    record = part.model_dump_json().encode()
    # Not fsynced: after a power failure the part is encoded again unless record and digests agree.
    with atomic_open(path, sync=False) as file:
        file.write(record)
    return record, warnings


def _finished_part(path: Path, files: list[InputFile], tokenizer: LoadedTokenizer) -> bytes | None:
    """The record of a part that was made of these files, if its shards are valid; else None."""
    inputs = _input_entries(token_files.with_index(files, _job.settings))
    try:
        with disk_trouble(path, "read"):
            record = path.read_bytes()
        part = FinishedPart.model_validate_json(record)
        if part.inputs != inputs or part.tokenizer_digest != tokenizer.digest:
            return None
        dtype = np.dtype(dtype_name(_num_ids(_job.settings, tokenizer)))
        if part.text is None and _job.settings.format not in TOKEN_FORMATS:
            return None  # of an earlier version, which did not count
        verify([shard_list(_job.folder, part.splits, dtype)])
        _check_reading(part, dtype, tokenizer)
    except (DataError, ValidationError):
        return None
    return record


def _check_reading(part: FinishedPart, dtype: np.dtype[Any], tokenizer: LoadedTokenizer) -> None:
    """DataError as `ShardSet.check_reading`: an earlier version may have made the part."""
    if _job.settings.format in UNRECORDED_DTYPE:
        settings = content_ids.tokens_settings(_job.settings)
        for entry in (entry for entries in part.splits.values() for entry in entries):
            shard = Shard(_job.folder / entry.file, entry.tokens, dtype)
            refuse_reading(shard, settings, tokenizer.vocab_size, tokenizer.eos_id)


def _documents(
    files: list[InputFile],
    consumed: Consumed,
    warnings: list[str],
    inputs: list[InputEntry],
    divided: list[bool],
) -> Iterator[str]:
    """The documents of all files. Adds to `inputs` the entry of each file that has been read, and to
    `divided` whether a text file has several documents."""
    for file in files:
        hasher, num_documents = blake3.blake3(), 0
        for document in corpus.read_documents(
            file, _job.settings, warn=warnings.append, consumed=consumed, hasher=hasher
        ):
            num_documents += 1
            yield document
        if corpus.is_divisible(file, _job.settings):
            divided.append(num_documents > 1)
        inputs.append(InputEntry(name=file.name, size=file.size, digest=hasher.hexdigest()))


def _writer(split: Split, number: int, tokenizer: LoadedTokenizer) -> ShardWriter:
    prefix = f"{split}-{number:05d}"
    settings = _job.settings
    # The last target of a window is the first token of the next one.
    tail = [tokenizer.vocab_size + tokenizer.eos_id] if settings.is_packed else []
    return ShardWriter(
        _job.folder, prefix, _num_ids(settings, tokenizer), settings.shard_tokens, tail
    )


def _write_tokens(
    writers: dict[Split, ShardWriter],
    files: list[InputFile],
    tokenizer: LoadedTokenizer,
    consumed: Consumed,
) -> None:
    """Write documents of ids that exist already."""
    eos, settings = np.array([tokenizer.eos_id], dtype=np.uint32), _job.settings
    for file in files:
        for ids in token_files.read_documents(
            file,
            settings,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            consumed=consumed,
        ):
            split = split_of(ids.tobytes(), settings.val_fraction)
            writers[split].extend([ids], eos)


def _write_text(
    writers: dict[Split, ShardWriter],
    files: list[InputFile],
    documents: Iterator[str],
    *,
    tokenizer: LoadedTokenizer,
    encode: Encode,
    counter: LossCounter,
    count_bytes: ByteCounter,
) -> None:
    """Encode the documents of some files, write their ids, and count both."""
    eos = np.array([tokenizer.eos_id], dtype=np.uint32)
    val_fraction = _job.settings.val_fraction
    num_documents = 0
    for batch in grouped(documents, counter.num_bytes, BATCH_BYTES):
        try:
            encoded = encode(batch)
            parts: dict[Split, list[Ids]] = {split: [] for split in SPLITS}
            sizes: list[Bytes] = []
            for number, (document, ids) in enumerate(zip(batch, encoded, strict=True)):
                split = split_of(document, val_fraction)
                parts[split].append(ids)
                if split == "val":
                    try:
                        sizes.append(count_bytes(document, ids))
                    except NoFastEncoder as err:
                        err.number = number
                        raise
            try:
                writers["train"].extend(parts["train"], eos)
                writers["val"].extend(parts["val"], eos, sizes)
            except EndInDocument:
                refuse_end(tokenizer, batch, encoded)
        except Unencodable as err:
            document = _document_name(files, num_documents + err.number)
            raise _unencodable(document, err.reason) from None
        except NoFastEncoder as err:
            document = _document_name(files, num_documents + err.number)
            if not _job.fast:
                raise _changing_ids(document) from None
            err.args = (f"{document}: {err}",)
            raise
        num_documents += len(batch)
        counter.add(batch, encoded)


def _write_packed(
    writers: dict[Split, ShardWriter],
    files: list[InputFile],
    documents: Iterator[str],
    tokenizer: LoadedTokenizer,
    counter: LossCounter,
) -> str:
    """Encode the documents of some files, write their ids in whole windows, and count both; a warning of
    those that are not whole, "" for none."""
    settings = _job.settings
    pack = packing(tokenizer, settings)
    num_documents = 0
    for batch in grouped(documents, counter.num_bytes, BATCH_BYTES):
        encoded: list[Ids] = []
        packed: dict[Split, list[Ids]] = {split: [] for split in SPLITS}
        for document in batch:
            try:
                ids, of_shard = pack(document)
            except DataError as err:
                name = _document_name(files, num_documents)
                raise DataError(f"{name}: {err.what}", cause=err.cause, fix=err.fix) from None
            num_documents += 1
            encoded.append(ids)
            if of_shard is not None:
                packed[split_of(document, settings.val_fraction)].append(of_shard)
        for split, of_split in packed.items():
            for block, held in pack.blocks(of_split):
                writers[split].add_block(block, held)
        counter.add(batch, encoded)
    names = files[0].name if len(files) == 1 else f"{files[0].name} … {files[-1].name}"
    return pack.warning(names, num_documents)


def _document_name(files: list[InputFile], index: int) -> str:
    """File and number of the index-th document of some files, which are read again."""
    for file in files:
        documents = corpus.read_documents(file, _job.settings, warn=lambda _: None)
        for number, _ in enumerate(documents, start=1):
            if index == 0:
                return f"{file.path}, document {number}"
            index -= 1
    return "a document"


def _unencodable(document: str, reason: str) -> DataError:
    return DataError(
        f"{document}: {reason}",
        cause="the tokenizer's vocabulary has no other ids for this text",
        fix="remove the text from the document, choose another tokenizer, "
        "or a tokenizer.eos_token that no text contains",
    )


def _changing_ids(document: str) -> DataError:
    return DataError(
        f"{document}: the tokenizer gives other ids when it encodes this text again",
        cause="such as by `dropout` in its model: each time others are drawn",
        fix="set dropout to null in its tokenizer.json, or choose another tokenizer",
    )


def split_of(document: str | bytes, val_fraction: float) -> Split:
    """The split of a document, by the digest of its text or ids: equal ones are always in the same."""
    data = document.encode() if isinstance(document, str) else document
    number = int.from_bytes(blake3.blake3(data).digest(8), "little")
    return "val" if number / 2**64 < val_fraction else "train"
