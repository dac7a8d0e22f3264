"""`forge validate`: check one checkpoint, or all of a run, in a fresh process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

from forge.checkpoint.checkpoints import RunCheckpoints, not_removed
from forge.core import events
from forge.core.errors import ConfigError, DataError, OtherFormat, UnfitError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths
from forge.core.records import Check, Damage, Trained, Validated, Validation, failed_checks
from forge.core.terminal import Table, duration, progress, say
from forge.hosts.lock import lock
from forge.launch.launcher import wait_for_orphans
from forge.validation.checkpoint_checks import OF_THE_CHECKPOINT, Checks, SavedRun
from forge.validation.replay import NOT_DONE, NOT_RECORDED


def validate(run: SavedRun) -> None:
    """Validate a run's latest checkpoint, or any one that the user has named.

    Of the run of a config writes validation.json, valid or not, and validated.json for a valid one, which
    an invalid one removes; else nothing. Raises DataError with the reasons for an invalid one, Pruned for
    one that training has removed meanwhile, and as `SavedRun.checks_of_last`.
    """
    started, paths = time.time(), run.paths
    with lock(paths.root, "validate") if run.is_of_config else nullcontext():
        place, checks = run.checks_of_last()
        with not_removed(place):
            checks.run_all()
            place.stat()  # what was missing would else be a failed check
        result = checks.result()
        if run.is_of_config:
            if result.reasons:  # so that the workflow validates again
                with disk_trouble(paths.validated):
                    paths.validated.unlink(missing_ok=True)
            result.write(paths.validation)
            seconds = round(time.time() - started, 3)
            event = events.Validate(seconds=seconds, status=result.status, step=result.step)
            events.record(paths.events, event)
        _print_result(place, result, checks.CAUSE)
        if run.is_of_config:
            result.short.write(paths.validated)


def _print_result(place: Path, result: Validation, cause: str) -> None:
    """Print all checks. Raises DataError for an invalid checkpoint, of which this is the likely cause."""
    for check in result.checks:
        say(f"  {check.status:4} {check.name}: {check.message}")
    if not result.checks:
        say(f"{place}: nothing to validate, no program.checkpoints and no program.validate")
        return
    say(f"{place}: {result.status}, step {result.step}")
    if result.reasons:
        if result.checkpoint_digest:
            what, fix = f"checkpoint {place} is invalid: ", _other_checkpoints(place)
        else:  # a program without checkpoints that Forge knows
            what, fix = f"{place} is invalid: ", result.checks[-1].fix
        raise DataError(what + "; ".join(result.reasons), cause=cause, fix=fix)


def _other_checkpoints(folder: Path) -> str:
    """Advice where this one is invalid."""
    run = RunPaths.of_checkpoint(folder)
    if run and run.config.exists():
        return f"check all checkpoints of the run: forge validate {run.root} --all"
    return "use another checkpoint"


# --- all checkpoints of a run ----------------------------------------------------------------------


@dataclass
class CheckpointRow:
    """One checkpoint in the table, with the results so far."""

    folder: Path
    size: int = 0
    age_sec: float = 0.0
    verdict: str = ""  # "" until all checks are done, or one has failed
    reasons: list[str] = field(default_factory=list)
    is_corrupt: bool = False  # the checkpoint itself is at fault, not `latest`, config or data
    checks: Checks | None = None
    step: int = 0  # unless it is in quarantine, where a step may be several times
    results: dict[str, Check] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, step: int = 0) -> CheckpointRow:
        row = cls(folder, step=step)
        with suppress(FileNotFoundError):  # pruned meanwhile by training
            paths = folder.rglob("*") if folder.is_dir() else [folder]
            files = [stat for path in paths if S_ISREG((stat := path.stat()).st_mode)]
            row.size = sum(stat.st_size for stat in files)
            row.age_sec = time.time() - min((s.st_mtime for s in files), default=time.time())
        return row

    def close(self, verdict: str, reasons: Sequence[str] = ()) -> None:
        self.verdict, self.reasons = verdict, list(reasons)
        if self.checks:
            self.results = {check.name: check for check in self.checks.checks}
        self.checks = None  # frees the model


def validate_all(run: SavedRun, *, fix: bool) -> None:
    """Check every checkpoint of a run, first the cheap checks of all, and print a table.

    fix: move corrupt ones to quarantine, under the run's lock; without it nothing is changed. Raises
    DataError if one is invalid, and UnfitError, with nothing moved, if the disk or this host kept the
    checks of one from completing.
    """
    checkpoints, paths = run.checkpoints, run.paths
    if not run.is_of_config and not paths.checkpoints.is_dir():
        raise ConfigError(
            f"{paths.root} is not a run's folder: it has no checkpoints/",
            fix="name one such as results/base, or leave out --all and --fix to validate one checkpoint",
        )
    with lock(paths.root, "validate") if fix else nullcontext():
        if fix:
            wait_for_orphans(paths)
            checkpoints.finish_launch()
        newest_first = reversed(checkpoints.by_step().items())
        rows = [CheckpointRow.of(folder, step) for step, folder in newest_first]
        if not rows:
            raise DataError(f"{paths.root} has no checkpoint", fix="train the run first")
        _check_all(rows, run)
        _print([*rows, *_quarantined(checkpoints)], run.columns)
        _conclude(rows, checkpoints, fix)


def _quarantined(checkpoints: RunCheckpoints) -> Iterator[CheckpointRow]:
    for folder, record in checkpoints.quarantined():
        row = CheckpointRow.of(folder)
        try:
            damage = Damage.read_if_there(record)
            row.close("in quarantine", damage.reasons if damage else [])
        except DataError as err:
            row.close("in quarantine", [err.what])
        yield row


def _check_all(rows: Sequence[CheckpointRow], run: SavedRun) -> None:
    """Fill in the rows: first the files of all checkpoints, then models are built."""
    goal = Trained.read_if_there(run.paths.trained)

    def check_files(row: CheckpointRow) -> None:
        row.checks = run.checks_of(row.folder, goal if goal and goal.step == row.step else None)
        row.checks.check_files()

    def check_content(row: CheckpointRow) -> None:
        assert row.checks
        row.checks.check_content()

    with progress("validate", 2 * len(rows), "checks") as report:
        for number, row in enumerate(rows):
            report(number, f"files of {row.folder.name}")
            _check(row, check_files)
        for number, row in enumerate(rows, start=len(rows)):
            report(number, f"tensors and losses of {row.folder.name}")
            if not row.verdict:
                _check(row, check_content)
            if not row.verdict:
                row.close("valid")


def _check(row: CheckpointRow, action: Callable[[CheckpointRow], None]) -> None:
    """Run a group of checks, and close the row if they decide the verdict."""
    try:
        with disk_trouble(row.folder, "read"):
            action(row)
    except OtherFormat as err:
        row.close("other format", [err.what])
    except UnfitError as err:
        row.close("unknown", [err.what])
    except DataError as err:
        row.is_corrupt = True
        row.close("invalid", [f"manifest: {err.what}"])
    except FileNotFoundError:
        if row.folder.exists():
            raise
    if row.checks and (check := row.checks.failed):
        row.is_corrupt = check.name in OF_THE_CHECKPOINT
        row.close("invalid", [f"{check.name}: {check.message}"])
    if not row.folder.exists():
        row.is_corrupt = False
        row.close("gone", ["pruned by training meanwhile"])


# --- after the table -------------------------------------------------------------------------------


def _conclude(rows: Sequence[CheckpointRow], checkpoints: RunCheckpoints, fix: bool) -> None:
    """Print the reasons, move corrupt checkpoints with `fix`, and raise the error, if any."""
    paths = checkpoints.paths
    for row in rows:
        for reason in row.reasons:
            say(f"{row.folder.name}: {row.verdict}: {reason}")
    unknown = [row.folder.name for row in rows if row.verdict == "unknown"]
    if unknown:
        raise UnfitError(
            f"checks did not complete: {', '.join(unknown)} in {paths.checkpoints}"
            + ("; nothing was moved" if fix else ""),
            cause="the disk or this host failed, which says nothing about the checkpoints",
            fix="repair it, or copy the run to another disk, and rerun the same command",
        )
    bad = [row for row in rows if row.verdict == "invalid"]
    corrupt = [row for row in bad if row.is_corrupt]
    trouble = checkpoints.trouble_of_latest()
    if not bad and not trouble:
        return
    names = ", ".join(row.folder.name for row in bad)
    what = f"{len(bad)} of {len(rows)} checkpoints of {paths.root} are invalid: {names}"
    what = "; ".join(filter(None, [what * bool(bad), trouble]))
    if not corrupt and not trouble:
        following = "restore the config or the data that the reason names: the files are valid"
    elif fix:
        following = _repair(checkpoints, corrupt)
    else:
        following = f"forge validate {paths.root} --fix moves corrupt ones to quarantine"
    raise DataError(what, fix=following)


def _repair(checkpoints: RunCheckpoints, corrupt: Sequence[CheckpointRow]) -> str:
    """Move corrupt checkpoints to quarantine, repair `latest`, remove records that name them; what to
    do next. Under the run's lock."""
    paths = checkpoints.paths
    for row in corrupt:
        checkpoints.quarantine(row.folder, row.reasons)
    moved = {row.step for row in corrupt}
    left = checkpoints.repaired_latest()
    with disk_trouble(paths.root):
        # Without these files the workflow trains and validates again.
        for path, kind in ((paths.trained, Trained), (paths.validated, Validated)):
            if path.exists() and _step_of(path, kind) in (None, *moved):
                path.unlink()
    done = f"{len(moved)} moved to {paths.quarantine}, `latest` is {left and left.folder.name}; "
    if paths.trained.exists():
        return f"{done}nothing else is left to do: the run is at its goal"
    start = f"resumes from step {left.step}" if left else "starts at step 0"
    return f"{done}rerun the command that trained the run: it {start}"


def _step_of(path: Path, kind: type[Trained] | type[Validated]) -> int | None:
    """The step of the checkpoint in a record; None where the record cannot be read."""
    try:
        return kind.read(path).step
    except DataError:
        return None


# --- the table -------------------------------------------------------------------------------------

_TONES = {"valid": "green", "invalid": "red", "unknown": "red"}


def _result(row: CheckpointRow, names: Sequence[str]) -> str:
    """The cell of these checks, the last of which decides whether all were made."""
    results = [row.results[name] for name in names if name in row.results]
    if failed_checks(results):
        return "FAIL"
    if names[-1] not in row.results:
        return ""
    message = row.results[names[-1]].message
    return next((note for note in (NOT_RECORDED, NOT_DONE) if message.startswith(note)), "ok")


def _print(rows: Sequence[CheckpointRow], columns: dict[str, tuple[str, ...]]) -> None:
    heads = ("step", "size", "age", *columns, "verdict")
    table = Table(heads, numbers=heads[:3], wrapped=heads[-1:])
    for row in rows:
        # The name without what all checkpoints of the run have before their step.
        step = re.sub(r"^\D*0*(?=\d)", "", row.folder.name)
        cells = [_result(row, names) for names in columns.values()]
        size = f"{row.size / 2**20:,.1f} MiB"
        shown = [step, size, duration(row.age_sec), *cells, row.verdict]
        table.add(shown, {"verdict": _TONES.get(row.verdict, "yellow")})
    table.print()
