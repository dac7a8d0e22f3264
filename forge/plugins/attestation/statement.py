"""`statement.json` beside exported weights: an in-toto statement of what made them, from text to scores.

Everything in it is read from the run, from `data/` and from the export, whose files are its subjects. The
same run and export give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import blake3

import forge
from forge.attestation import verify
from forge.checkpoint.checkpoints import SavedCheckpoint
from forge.checkpoint.export_folder import MANIFEST
from forge.checkpoint.resume import is_checkpoint, named
from forge.core.errors import ConfigError, DataError
from forge.core.files import (
    canonical,
    disk_trouble,
    json_text,
    read_object,
    read_object_or_empty,
    write_json,
)
from forge.core.scratch import scratch_directory
from forge.core.terminal import progress, say
from forge.plugins.attestation.chain import (
    ChainLink,
    ExportMade,
    LaunchesMade,
    MergeMade,
    Predicate,
    Texts,
)
from forge.plugins.attestation.of_run import links_of_run
from forge.plugins.attestation.reduce import absolute_paths, reduced
from forge.validation.checkpoint_checks import SavedRun


def write_statement(export: Path, saved: SavedRun, *, is_full: bool = False) -> Path:
    """Write the statement of an export of this run; its path. A signature of an older one is removed.
    is_full: with all that `reduce` leaves out. A full one that is there stays: certificates are of it.

    Raises DataError where the exported checkpoint is no longer there, UnfitError when the disk cannot be
    written.
    """
    facts = read_object(export / MANIFEST, "checkpoint_digest", "step")
    checkpoint = _exported(saved, facts)
    made = ExportMade(
        run=str(facts["run"]),
        step=checkpoint.step,
        checkpoint=checkpoint.digest,
        dtype=facts.get("dtype"),
        weights=facts.get("weights_digest"),
    )
    links, subjects = [*links_of_run(saved, checkpoint, made)], [*_subjects(export)]
    path = export / verify.STATEMENT
    statement = statement_of(links if is_full else reduced(links), subjects)
    if path.exists():
        there = read_object_or_empty(path)
        if there == statement:
            say(f"statement in {path}: nothing to do")
            return path
        if not is_full and there == statement_of(links, subjects):
            say(f"statement in {path}: it stays, with packages, times and full paths (--full)")
            return path
    with disk_trouble(path):
        for name in verify.SIGNATURES:
            (export / name).unlink(missing_ok=True)
        write_json(path, statement)
    say(f"statement {statement['predicate']['sha256'][:12]}: {path}")
    if note := _note(links, is_full):
        say(note)
    return path


def _note(links: Sequence[ChainLink], is_full: bool) -> str:
    """Note on the absolute paths that a reader of these links finds; "" without one."""
    stated = [link for link in links if is_full or not isinstance(link, LaunchesMade)]
    if not (absolute := sorted({*absolute_paths([one.model_dump(mode="json") for one in stated])})):
        return ""
    some = f"{len(absolute)} absolute paths, such as {absolute[0]}"
    if is_full:
        return f"note: it has {some}, which whoever gets the export can read"
    return (
        f"note: of {some}, it has the last names: whoever has the texts can verify them, and make the"
        " tokens of the run again only with the statement of --full, or of a config with relative paths"
    )


def statement_of(links: Sequence[ChainLink], subjects: list[dict[str, Any]]) -> dict[str, Any]:
    """The statement with these links, not chained yet. Where it would be larger than verifiers read, it
    is without the list of the text files, of which the manifest of the tokens has a digest.

    Raises DataError where it is too large even so.
    """
    statement = _statement(links, subjects)
    if (size := len(json_text(statement))) <= verify.MOST_BYTES:
        return statement
    say(
        f"note: the statement does not list the text files: with them it would have {size:,} bytes, and"
        f" verifiers read {verify.MOST_BYTES:,}; `forge verify --data` cannot compare them"
    )
    short = [
        link.model_copy(update={"files": None}) if isinstance(link, Texts) else link
        for link in links
    ]
    statement = _statement(short, subjects)
    if (size := len(json_text(statement))) > verify.MOST_BYTES:
        raise DataError(
            f"the statement would have {size:,} bytes, and verifiers read {verify.MOST_BYTES:,}",
            cause="the export has very many files, or the run very many checkpoints, launches or shards",
            fix="export fewer files (program.export), or use larger shards (tokenize.shard_tokens)",
        )
    return statement


def _statement(links: Iterable[ChainLink], subjects: list[dict[str, Any]]) -> dict[str, Any]:
    predicate = Predicate(forge=forge.__version__, chain=list(chained(links)))
    is_merge = any(isinstance(link, MergeMade) for link in predicate.chain)
    content = predicate.model_dump(mode="json")
    statement = {
        "_type": verify.IN_TOTO,
        "predicateType": verify.MERGE if is_merge else verify.PREDICATE,
        "subject": subjects,
        "predicate": content,
    }
    content["sha256"] = verify.statement_digest(statement)
    return statement


def different_files(export: Path, fresh: Path) -> list[str]:
    """Names of the files that only one of two exports has, or that differ, sorted; but for statements and
    signatures. Raises VerificationError for a link, a pipe or a device."""
    there, made = _sha256_of(export), _sha256_of(fresh)
    return sorted(name for name in there.keys() | made if there.get(name) != made.get(name))


def _sha256_of(export: Path) -> dict[str, str]:
    names = [name for name in verify.files_in(export, of_git=True) if name not in verify.OURS]
    return {name: verify.file_digest(export / name)[0] for name in names}


def refuse_planted(export: Path, saved: SavedRun, dtype: str) -> dict[str, str]:
    """SHA-256 of each file that an export of the run in this directory must have, by a new one in a
    private directory. ConfigError where the files there differ: others may have put them there."""
    say(f"comparing {export} with a new export of its checkpoint, before it is signed …")
    try:
        with scratch_directory("export") as scratch:
            fresh = saved.export(scratch / export.name, dtype)
            wrong, expected = different_files(export, fresh), _sha256_of(fresh)
    except verify.VerificationError as err:
        raise _not_signed(export, str(err)) from None
    if wrong:
        raise _not_signed(export, ", ".join(map(repr, wrong[: verify.MOST_NAMED])))
    return expected


def _not_signed(export: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{export} is not signed: other files than the export of its checkpoint: {what}",
        cause="somebody has changed or added them, the run was validated or evaluated since"
        " (README.md), or another version of Forge has made the export",
        fix=f"remove {export} and rerun the command, or name another directory with --to",
    )


def chained(links: Iterable[ChainLink]) -> Iterator[ChainLink]:
    """The links, each with the digest of the one before."""
    previous = ""
    for link in links:
        linked = link.model_copy(update={"previous": previous})
        yield linked
        previous = hashlib.sha256(canonical(linked.model_dump(mode="json"))).hexdigest()


def _exported(saved: SavedRun, facts: dict[str, Any]) -> SavedCheckpoint:
    """The checkpoint that these facts of an export name. Raises DataError where it was removed."""
    step = facts["step"]
    if is_checkpoint(saved.paths.root):
        checkpoint: SavedCheckpoint = named(saved.paths.root)
    else:
        folder = saved.checkpoints.by_step().get(step)
        if folder is None:
            raise DataError(
                f"the exported checkpoint of step {step} is no longer in {saved.paths.checkpoints}",
                cause="the run is training and keeps only its newest checkpoints",
                fix="export again, or raise train.keep_last",
            )
        checkpoint = saved.checkpoints.open_complete(folder)
    if checkpoint.digest != facts["checkpoint_digest"]:
        raise DataError(
            f"{checkpoint.folder} has digest {checkpoint.digest[:12]}, the export is of"
            f" {facts['checkpoint_digest'][:12]}",
            cause="the run was begun again since",
            fix="export to another directory: --to FOLDER",
        )
    return checkpoint


def _subjects(export: Path) -> Iterator[dict[str, Any]]:
    """Name and digests of each file of the export but for the statement and its signatures."""
    names = [name for name in verify.files_in(export) if name not in verify.OURS]
    sizes = {name: (export / name).stat().st_size for name in names}
    done = 0
    with progress("statement", sum(sizes.values()), "bytes") as update:
        for name, size in sizes.items():
            yield {"name": name, "digest": _digests(export / name)}
            done += size
            update(done, name)


def _digests(path: Path) -> dict[str, str]:
    """SHA-256, which every verifier knows, and blake3, by which Forge knows the file; in one read."""
    sha256, blake = hashlib.sha256(), blake3.blake3(max_threads=blake3.blake3.AUTO)
    with disk_trouble(path, "read"), open(path, "rb") as file:
        while block := file.read(2**23):
            sha256.update(block)
            blake.update(block)
    return {"sha256": sha256.hexdigest(), "blake3": blake.hexdigest()}
