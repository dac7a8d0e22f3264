"""`forge reproduce`: train parts of a run again by the statement of its export, and certify the result.

Nothing is fetched, installed or run because a statement names it. Trained is what it has of numbers and
names of choices; code is the installed Forge, or a checkout that the user names.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forge.attestation import verify
from forge.attestation.certificate import (
    MadeBy,
    Reproduction,
    TrainedAgain,
    envelope_path,
    write_certificate,
)
from forge.attestation.intervals import Coverage, Interval, coverage, drawn, seconds_of
from forge.attestation.judgement import TOLERANCE, code_differences, differences, judged
from forge.attestation.retokenize import stated_ids, verify_texts
from forge.attestation.retrain import Retrainer
from forge.attestation.verify import Links, VerificationError, printable
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Code
from forge.core import events
from forge.core.errors import ConfigError, DataError, ForgeError, UnfitError
from forge.core.files import digest_file, disk_trouble, read_object_or_empty
from forge.core.paths import MANIFEST, RunPaths, tokens_folder
from forge.core.process import hostname
from forge.core.provenance import code
from forge.core.records import Exported, Reproduced
from forge.core.terminal import duration, say, show
from forge.reporting.find_runs import results_folder

MOST_INTERVALS = 10_000
MOST_MINUTES = 10**7  # of max_minutes in machine.yaml
MACHINES = {
    "another": ["on another machine than those that have trained the run"],
    "the same": ["on a machine that has trained the run, too: its own faults would come again"],
    "unknown": [],
}
SLOWER = 2  # than the run was: an interval that took half of --minutes there has a good chance here
NOT_YET = "the command ended before"  # of an interval whose turn did not come


@dataclass(frozen=True)
class ReproduceOptions:
    """What the user asks for. run: the one whose last export it is, where the user has named that.
    texts: as for `verify_texts`; None: the tokens in `data`. checkpoints: the directory of a run; None:
    all runs of the project. intervals: how many are drawn, by `seed`; None for
    one that is chosen now. whole: all steps instead, from the first on. code: a checkout of Forge.
    minutes: that an interval may take. to: the certificate; None: beside the folder. sign: a private
    key."""

    folder: Path
    data: Path
    run: RunPaths | None = None
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


def find_export(named: Path) -> tuple[Path, RunPaths | None]:
    """The directory of an export, and its run where a user has named the directory of that instead.
    Raises DataError where the record of the run's last export is corrupt."""
    run = RunPaths(named)
    if (named / verify.STATEMENT).exists() or not run.exported.is_file():
        return named, None
    return named / Exported.read(run.exported).folder, run


def reproduce(request: ReproduceOptions) -> None:
    """Verify an export, train parts of its run again, and write the certificate; for a run also
    reproduced.json, if the result is that.

    The certificate is renewed after each interval, so that no end of this process loses what was trained.
    Raises DataError where the export fails its verification, or is not reproduced; ConfigError for what
    the user names; UnfitError where this machine is too small or too slow, also for one interval.
    """
    _check(request)
    key = _signing_key(request)
    if request.run:
        with disk_trouble(request.run.reproduced):
            request.run.reproduced.unlink(missing_ok=True)
    try:
        verify.verify(request.folder, request.key, request.digest, show)
        statement = verify.read_bytes(request.folder / verify.STATEMENT)
        with (
            _stopped_by_sigterm(),
            tempfile.TemporaryDirectory(prefix="forge-reproduce-") as scratch,
        ):
            draw = _Draw.of(request, statement, key)
            _train_again(draw, Path(scratch))
            _certify(draw)
    except VerificationError as err:
        raise DataError(f"{request.folder}: {err}") from None
    _refuse_bad(draw)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM, of Slurm or as Snakemake ends, stops the training and removes its files as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refuse_bad(draw: _Draw) -> None:
    """Raise what keeps the result from being `reproduced`."""
    folder, failed = draw.request.folder, [one for one in draw.results if _is_unchecked(one)]
    if draw.result == "not reproduced":
        wrong = [f"steps {one.first + 1} to {one.last}" for one in draw.results if _is_bad(one)]
        wrong += ["the weights in the export"] * (draw.export == "other")
        raise DataError(
            f"{folder} is not reproduced: {', '.join(wrong)}",
            cause="made otherwise than the statement says, or by other code (the notes name it)",
            fix="where code differs, --code CHECKOUT trains by that of the statement's commit",
        )
    if err := draw.trouble:
        raise type(err)(
            f"{folder}: {len(failed)} of {len(draw.chosen)} intervals could not be trained again:"
            f" {err.what}",
            cause=err.cause,
            fix=err.fix,
        )


def _check(request: ReproduceOptions) -> None:
    """ConfigError for a path or a number of the command line that cannot be right."""
    for path in filter(None, (request.folder, request.key, request.checkpoints, request.code)):
        if not path.exists():
            fix = "name the directory of an export, or of a run, such as results/base"
            raise ConfigError(f"{path} does not exist", fix=fix if path == request.folder else "")
    if not (request.folder / verify.STATEMENT).is_file():
        is_run = RunPaths(request.folder).checkpoints.is_dir()
        first = f"forge export {request.folder}, and rerun this command; or " if is_run else ""
        raise ConfigError(
            f"{request.folder} has no {verify.STATEMENT}",
            cause="a run that was not exported"
            if is_run
            else "it is no export, or one of an older Forge",
            fix=f"{first}name the directory that `forge export` has made, such as my-model",
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


@dataclass
class _Draw:
    """The intervals that were drawn, and what is known of them until now."""

    request: ReproduceOptions
    statement: bytes
    key: Any
    links: Links
    covers: Coverage
    seed: int
    chosen: list[Interval]
    results: list[TrainedAgain] = field(default_factory=list)
    last: Checkpoint | None = None  # that was made
    export: Literal["same", "other", "unchecked"] = "unchecked"
    is_complete: bool = False  # all intervals had their turn, the export too
    trouble: ForgeError | None = None  # the first

    @classmethod
    def of(cls, request: ReproduceOptions, statement: bytes, key: Any) -> _Draw:
        """Raises VerificationError, and DataError where nothing can be trained again."""
        links = verify.check_chain(verify.read_statement(statement))
        if "program" in links:
            raise VerificationError(
                "it is of another training program, and only Forge's own trainer is run: nothing was run"
            )
        covers = coverage(links, _runs(request), 60 * request.minutes / SLOWER)
        if covers.too_long and not request.whole:
            _print_notes([_not_drawn(covers, links)])
        seed = secrets.randbits(32) if request.seed is None else request.seed
        return cls(request, statement, key, links, covers, seed, _chosen(request, covers, seed))

    def add(self, interval: Interval, trainer: Retrainer) -> None:
        """Train an interval again. What keeps this one from that does not keep others."""
        try:
            made = trainer.train(interval)
            result = judged(interval, made, trainer.weights_digest, self.links)
        except (ForgeError, VerificationError) as err:
            if isinstance(err, VerificationError):
                err = DataError(str(err))
            self.trouble = self.trouble or err
            self.results.append(TrainedAgain.unchecked(interval, err.what.splitlines()[0]))
        else:
            self.last = made
            self.results.append(result)

    @property
    def trained(self) -> list[Interval]:
        pairs = zip(self.chosen, self.results, strict=False)  # which are fewer while it trains
        return [interval for interval, one in pairs if not _is_unchecked(one)]

    @property
    def result(self) -> Literal["reproduced", "not reproduced", "incomplete"]:
        """One difference outweighs all that could not be checked."""
        if self.export == "other" or any(map(_is_bad, self.results)):
            return "not reproduced"
        is_all = self.is_complete and not any(map(_is_unchecked, self.results))
        return "reproduced" if is_all else "incomplete"

    @property
    def made(self) -> Reproduction:
        """The predicate of the certificate, once an interval was trained."""
        assert self.last is not None
        request, covers, trained = self.request, self.covers, self.trained
        waiting = self.chosen[len(self.results) :]
        not_yet = [TrainedAgain.unchecked(one, NOT_YET) for one in waiting]
        coverable = self.chosen if request.whole else covers.intervals
        return Reproduction(
            statement=verify.read_statement(self.statement)["predicate"]["sha256"],
            result=self.result,
            seed=None if request.whole else self.seed,
            steps=covers.steps,
            steps_coverable=_steps(coverable),
            steps_checked=_steps(trained),
            parts=len(covers.saved),
            parts_coverable=covers.parts_in(coverable),
            chance=covers.parts_in(trained) / len(covers.saved)
            if request.whole
            else covers.chance(len(trained)),
            texts="made again" if request.texts else "by digest",
            export=self.export,
            tolerance=TOLERANCE,
            differences=[*differences(self.links, self.last.manifest.lineage)],
            by=MadeBy.of(self.last.manifest.lineage, _machine(request)),
            intervals=self.results + not_yet,
        )

    def write(self) -> str:
        """Write the certificate; its digest."""
        return write_certificate(self.request.certificate, self.made, self.statement, self.key)


def _train_again(draw: _Draw, scratch: Path) -> None:
    """Train what was drawn, and renew the certificate after each interval. Raises the first error where
    nothing of it could be trained."""
    request, links = draw.request, draw.links
    trainer = _trainer(request, links, scratch)
    if not request.code:  # said before hours of training; that of a checkout is known afterwards
        _print_notes(code_differences(links, Code(**code())))
    try:
        for interval in draw.chosen:
            draw.add(interval, trainer)
            _print_interval(draw.results[-1])
            if draw.last:
                draw.write()
        if draw.last is None:
            assert draw.trouble is not None
            raise draw.trouble
        draw.export = _compared_export(draw, trainer)
    except KeyboardInterrupt:
        if draw.last:
            again = "" if request.whole else f"; --seed={draw.seed} draws the same"
            say(f"{request.certificate} has what was trained so far{again}")
        raise
    draw.is_complete = True


def _certify(draw: _Draw) -> None:
    """Print what is known in the end, write the certificate, and record a positive one of a run."""
    request, made = draw.request, draw.made
    known = [] if request.code else [*code_differences(draw.links, made.by.code)]  # printed before
    _print_notes(note for note in made.differences if note not in known)
    _print_notes(MACHINES[made.by.machine])
    _print_summary(made)
    digest = draw.write()
    say(f"certificate {digest[:12]}: {request.certificate}")
    if draw.key:
        from forge.attestation.signing import fingerprint

        say(f"signed by {fingerprint(draw.key)}: {envelope_path(request.certificate)}")
    if request.run and draw.result == "reproduced":
        _record(draw, request.run, digest)


def _record(draw: _Draw, run: RunPaths, certificate: str) -> None:
    """Write reproduced.json. certificate: its digest."""
    made = draw.made
    Reproduced(
        step=draw.covers.last,
        statement=made.statement,
        certificate=certificate,
        file=os.path.relpath(draw.request.certificate, run.root),
        steps=made.steps,
        steps_checked=made.steps_checked,
    ).write(run.reproduced)


def _machine(request: ReproduceOptions) -> Literal["another", "the same", "unknown"]:
    """Whether this machine has trained the run, too, as far as the run is here."""
    there = (
        events.trained_nodes(RunPaths(request.checkpoints).events) if request.checkpoints else ()
    )
    if not there:
        return "unknown"
    here = {hostname(), os.environ.get("SLURMD_NODENAME")}
    return "the same" if here & there else "another"


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
    if covers.too_long and not covers.intervals:
        raise UnfitError(
            f"none of the {len(covers.saved)} parts of the run can be trained again in"
            f" {request.minutes:g} minutes",
            cause="its checkpoints that are here are too far apart (train.keep_pairs keeps closer ones)",
            fix="give more time: --minutes N; in the workflow runtime in set-resources of reproduce_run",
        )
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
    ids, data = stated_ids(links), request.data
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


def _compared_export(draw: _Draw, trainer: Retrainer) -> Literal["same", "other", "unchecked"]:
    """Whether the weights in the export are those of the exported checkpoint, which is at hand, or was
    made again just now."""
    covers, result, folder = draw.covers, draw.results[-1], draw.request.folder
    is_made = result.last == covers.last and result.outcome == "bitwise"
    checkpoint = covers.exported or (draw.last if is_made else None)
    if checkpoint is None:
        show(f"  note  export: the checkpoint of step {covers.last} is not here, weights unchecked")
        return "unchecked"
    if _weights_files(trainer.export(checkpoint)) == _weights_files(folder):
        show(f"  ok    export: its weights are those of step {covers.last}")
        return "same"
    show(f"  FAIL  export: its weights are not those of step {covers.last}")
    return "other"


def _weights_files(folder: Path) -> dict[str, str]:
    """SHA-256 by name."""
    names = [name for name in verify.files_in(folder) if name.endswith(".safetensors")]
    return {name: verify.file_digest(folder / name)[0] for name in names}


# --- what people read -------------------------------------------------------------------------------


def _is_bad(result: TrainedAgain) -> bool:
    return result.outcome == "other"


def _is_unchecked(result: TrainedAgain) -> bool:
    return result.outcome == "unchecked"


def _steps(intervals: Iterable[Interval]) -> int:
    return sum(one.last - one.first for one in intervals)


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        show(f"  note  {printable(note)}")


def _not_drawn(covers: Coverage, links: Links) -> str:
    number, least = len(covers.too_long), min(seconds_of(one, links) for one in covers.too_long)
    return (
        f"{number} of {number + len(covers.intervals)} intervals are not drawn: they took"
        f" {duration(least, precise=True)} and more in the run, which should be half of --minutes"
    )


def _print_interval(result: TrainedAgain) -> None:
    line, mark = (
        f"steps {result.first + 1} to {result.last}: ",
        "FAIL" if _is_bad(result) else "ok  ",
    )
    if _is_unchecked(result):
        mark, line = "note", f"{line}unchecked ({'; '.join(result.why)})"
    elif result.outcome == "bitwise":
        line += "bitwise equal"
    else:
        line += "within the tolerance" if result.outcome == "within tolerance" else "other weights"
        if result.weights is not None:
            line += f", {result.weights:.2g} of the way apart, losses {result.loss or 0:.2g}"
        line += f" ({'; '.join(result.why) or 'the same kind of CPU, torch and ranks'})"
    show(f"  {mark}  {printable(line)}")


def _print_summary(made: Reproduction) -> None:
    show(
        f"{made.result}: {made.steps_checked} of {made.steps} steps trained again"
        f" ({made.steps_coverable} could be)"
    )
    number = sum(not _is_unchecked(one) for one in made.intervals)
    intervals = f"{number} interval{'s' * (number > 1)}, drawn by seed {made.seed}"
    show(
        f"chance that one bad part of {made.parts} is found: {made.chance:.0%}"
        f" ({'all steps' if made.seed is None else intervals})"
    )
