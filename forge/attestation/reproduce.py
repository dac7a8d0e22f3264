"""`forge reproduce`: train parts of a run again by the statement of its export, and certify the result.

Nothing is fetched, installed or run because a statement names it. Trained is what it has of numbers and
names of choices; code is the installed Forge, or a checkout that the user names.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge.attestation import verify
from forge.attestation.certificate import MadeBy, Reproduction, TrainedAgain, write_certificate
from forge.attestation.intervals import Coverage, Interval, coverage, drawn
from forge.attestation.judgement import TOLERANCE, code_differences, differences, judged
from forge.attestation.retokenize import stated_ids, verify_texts
from forge.attestation.retrain import Retrainer
from forge.attestation.verify import Links, VerificationError, printable
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Code
from forge.core.errors import ConfigError, DataError
from forge.core.files import digest_file, read_object_or_empty
from forge.core.paths import MANIFEST, RunPaths, tokens_folder
from forge.core.provenance import code
from forge.reporting.find_runs import project_folder, results_folder

MOST_INTERVALS = 10_000
MOST_MINUTES = 10**7  # of max_minutes in machine.yaml


@dataclass(frozen=True)
class ReproduceOptions:
    """What the user asks for. texts: as for `verify_texts`; None: the project's tokens. checkpoints: the
    directory of a run; None: all runs of the project. intervals: how many are drawn, by `seed`; None for
    one that is chosen now. whole: all steps instead, from the first on. code: a checkout of Forge.
    minutes: that an interval may take. to: the certificate; None: beside the folder. sign: a private
    key."""

    folder: Path
    texts: str | None = None
    checkpoints: Path | None = None
    intervals: int = 3
    whole: bool = False
    seed: int | None = None
    code: Path | None = None
    minutes: float = 60.0
    key: Path | None = None
    digest: str | None = None
    to: Path | None = None
    sign: Path | None = None

    @property
    def certificate(self) -> Path:
        folder = self.folder.absolute()
        return self.to or folder.with_name(f"{folder.name}.certificate.json")


def reproduce(request: ReproduceOptions) -> None:
    """Verify an export, train parts of its run again, and write the certificate.

    Raises DataError where the export fails its verification, or is not reproduced; ConfigError for what
    the user names; UnfitError where this machine is too small or too slow.
    """
    _check(request)
    key = _signing_key(request)
    try:
        verify.verify(request.folder, request.key, request.digest)
        statement = verify.read_bytes(request.folder / verify.STATEMENT)
        with tempfile.TemporaryDirectory(prefix="forge-reproduce-") as scratch:
            made = _reproduced(request, statement, Path(scratch))
    except VerificationError as err:
        raise DataError(f"{request.folder}: {err}") from None
    _print_summary(made)
    write_certificate(request.certificate, made, statement, key)
    if made.result != "reproduced":
        wrong = [f"steps {one.first + 1} to {one.last}" for one in made.intervals if _is_bad(one)]
        wrong += ["the weights in the export"] * (made.export == "other")
        raise DataError(
            f"{request.folder} is not reproduced: {', '.join(wrong)}",
            cause="made otherwise than the statement says, or by other code (the notes name it)",
            fix="where code differs, --code CHECKOUT trains by that of the statement's commit",
        )


def _check(request: ReproduceOptions) -> None:
    """ConfigError for a path or a number of the command line that cannot be right."""
    for path in filter(None, (request.folder, request.key, request.checkpoints, request.code)):
        if not path.exists():
            raise ConfigError(f"{path} does not exist")
    if not (request.folder / verify.STATEMENT).is_file():
        raise ConfigError(
            f"{request.folder} has no {verify.STATEMENT}",
            cause="it is no export, or one of an older Forge",
            fix="name the directory that `forge export` has made, such as my-model",
        )
    if not 1 <= request.intervals <= MOST_INTERVALS:
        raise ConfigError(
            f"--intervals is {request.intervals}, but must be from 1 to {MOST_INTERVALS:,}",
            fix="--whole trains all steps again",
        )
    if not 0 < request.minutes <= MOST_MINUTES:
        raise ConfigError(
            f"--minutes is {request.minutes:g}, but must be more than 0, and at most {MOST_MINUTES:,}"
        )
    if request.code and not (request.code / "forge/__init__.py").is_file():
        raise ConfigError(
            f"--code is {request.code}, which is no checkout of Forge: it has no forge/__init__.py",
            fix="git worktree add ../forge-then COMMIT, in a clone of Forge, and name that directory",
        )
    _check_target(request.certificate, request.folder)


def _check_target(path: Path, folder: Path) -> None:
    """ConfigError where the certificate cannot or must not be written, before hours of training."""
    why = ""
    if path.resolve().is_relative_to(folder.resolve()):
        why = "is in the directory that is certified, and would make its verification fail"
    elif not os.access(path.parent, os.W_OK):
        why = "cannot be written: its directory is not there, or you may not write in it"
    elif path.exists() and read_object_or_empty(path).get("predicateType") != verify.REPRODUCTION:
        why = "is there, and is no certificate"
    if why:
        raise ConfigError(f"the certificate {path} {why}", fix="name another file: --to FILE")


def _signing_key(request: ReproduceOptions) -> Any:
    if not request.sign:
        return None
    from forge.attestation.signing import load_key

    return load_key(request.sign)


# --- what is trained --------------------------------------------------------------------------------


def _reproduced(request: ReproduceOptions, statement: bytes, scratch: Path) -> Reproduction:
    content = verify.read_statement(statement)
    links = verify.check_chain(content)
    if "program" in links:
        raise VerificationError(
            "it is of another training program, and only Forge's own trainer is run: nothing was run"
        )
    covers = coverage(links, _runs(request))
    seed = secrets.randbits(32) if request.seed is None else request.seed
    chosen = _chosen(request, covers, seed)
    trainer = _trainer(request, links, scratch)
    if not request.code:  # said before hours of training; that of a checkout is known afterwards
        _print_notes(code_differences(links, Code(**code())))
    results = []
    for interval in chosen:
        made = trainer.train(interval)
        results.append(judged(interval, made, trainer.weights_digest, links))
        _print_interval(results[-1])
    export = _compared_export(request.folder, trainer, covers, made, results[-1])
    here = made.manifest.lineage
    notes = [*differences(links, here)]
    _print_notes(
        note for note in notes if request.code or note not in code_differences(links, here.code)
    )
    return Reproduction(
        statement=content["predicate"]["sha256"],
        result="not reproduced"
        if export == "other" or any(map(_is_bad, results))
        else "reproduced",
        seed=None if request.whole else seed,
        steps=covers.steps,
        steps_coverable=_steps(chosen if request.whole else covers.intervals),
        steps_checked=_steps(chosen),
        parts=len(covers.saved),
        parts_coverable=covers.parts_in(chosen if request.whole else covers.intervals),
        chance=1.0 if request.whole else covers.chance(len(chosen)),
        texts="made again" if request.texts else "by digest",
        export=export,
        tolerance=TOLERANCE,
        differences=notes,
        by=MadeBy.of(here),
        intervals=results,
    )


def _runs(request: ReproduceOptions) -> list[RunPaths]:
    if request.checkpoints:
        return [RunPaths(request.checkpoints)]
    return [RunPaths(path.parent) for path in sorted(results_folder().glob("*/checkpoints"))]


def _chosen(request: ReproduceOptions, covers: Coverage, seed: int) -> list[Interval]:
    """The intervals to train. VerificationError where there is none."""
    if request.whole:
        if not covers.can_start:
            raise VerificationError(
                f"its run began at step {covers.first} from another run, or from pretrained weights,"
                " which are not trained again: leave --whole out"
            )
        return [Interval(0, covers.last, None, covers.exported)]
    if not covers.intervals:
        raise DataError(
            f"none of the {len(covers.saved)} parts of the run can be trained again: no checkpoint that"
            f" the statement lists is in {request.checkpoints or results_folder()}",
            cause="they were pruned (train.keep_every keeps some), or they are elsewhere",
            fix="name the directory of the run: --checkpoints RUN; or train all of it: --whole",
        )
    return drawn(covers.intervals, request.intervals, seed)


def _trainer(request: ReproduceOptions, links: Links, scratch: Path) -> Retrainer:
    """Raises VerificationError where the texts give other tokens, ConfigError without both."""
    ids, data = stated_ids(links), Path(project_folder("data"))
    if request.texts:
        data = scratch / "data"
        verify_texts(request.texts, links, request.folder, keep=data)
    else:
        manifest = tokens_folder(data, ids.tokens) / MANIFEST
        if not manifest.is_file() or digest_file(manifest) != links["tokens"].get("blake3"):
            raise ConfigError(
                f"the tokens of the statement are not in {data}",
                cause="this is another project than that of the run, or they were removed",
                fix="name the texts, of which they are made again: --data TEXTS (or python:stdlib)",
            )
    place = scratch / "training"
    place.mkdir()
    code_folder = request.code.resolve() if request.code else None
    return Retrainer(links, data.resolve(), place, code_folder, request.minutes)


def _compared_export(
    folder: Path, trainer: Retrainer, covers: Coverage, made: Checkpoint, result: TrainedAgain
) -> Literal["same", "other", "unchecked"]:
    """Whether the weights in the export are those of the exported checkpoint, which is at hand, or was
    made again just now."""
    is_made = result.last == covers.last and result.outcome == "bitwise"
    checkpoint = covers.exported or (made if is_made else None)
    if checkpoint is None:
        print(
            f"  note  export: the checkpoint of step {covers.last} is not here, weights unchecked"
        )
        return "unchecked"
    if _weights_files(trainer.export(checkpoint)) == _weights_files(folder):
        print(f"  ok    export: its weights are those of step {covers.last}")
        return "same"
    print(f"  FAIL  export: its weights are not those of step {covers.last}")
    return "other"


def _weights_files(folder: Path) -> dict[str, str]:
    """SHA-256 by name."""
    names = [name for name in verify.files_in(folder) if name.endswith(".safetensors")]
    return {name: verify.file_digest(folder / name)[0] for name in names}


# --- what people read -------------------------------------------------------------------------------


def _is_bad(result: TrainedAgain) -> bool:
    return result.outcome == "other"


def _steps(intervals: Iterable[Interval]) -> int:
    return sum(one.last - one.first for one in intervals)


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"  note  {printable(note)}")


def _print_interval(result: TrainedAgain) -> None:
    line = f"steps {result.first + 1} to {result.last}: "
    if result.outcome == "bitwise":
        line += "bitwise equal"
    else:
        line += "within the tolerance" if result.outcome == "within tolerance" else "other weights"
        if result.weights is not None:
            line += f", {result.weights:.2g} of the way apart, losses {result.loss or 0:.2g}"
        line += f" ({'; '.join(result.why) or 'the same kind of CPU, torch and ranks'})"
    # At once, also into a file: the next interval may take an hour.
    print(f"  {'FAIL' if _is_bad(result) else 'ok  '}  {printable(line)}", flush=True)


def _print_summary(made: Reproduction) -> None:
    print(
        f"{made.result}: {made.steps_checked} of {made.steps} steps trained again"
        f" ({made.steps_coverable} could be)"
    )
    number = len(made.intervals)
    intervals = f"{number} interval{'s' * (number > 1)}, drawn by seed {made.seed}"
    print(
        f"chance that one bad part of {made.parts} is found: {made.chance:.0%}"
        f" ({'all steps' if made.seed is None else intervals})"
    )
