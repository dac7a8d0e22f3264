"""`forge validate`: check one checkpoint, or all of a run, in a fresh process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.checkpoint import directory, resume
from forge.checkpoint.compatibility import check_compatible
from forge.cluster.lock import lock
from forge.core import events
from forge.core.config import ResolvedConfig, apply_overrides, checked
from forge.core.errors import ConfigError, DataError, OtherFormat, UnfitError
from forge.core.files import disk_trouble
from forge.core.paths import CHECKPOINT_PREFIX, RunPaths, by_step, checkpoint_name, checkpoint_step
from forge.core.records import Damage, Trained, Validated, Validation, failed_checks
from forge.core.terminal import Table, duration, progress, say
from forge.launch.launcher import wait_for_orphans
from forge.validation.checkpoint_checks import OF_THE_CHECKPOINT, CheckpointChecks
from forge.validation.replay import NOT_DONE, NOT_RECORDED
from forge.validation.run_data import Data


def validate(config: ResolvedConfig) -> Path:
    """Validate a run's latest checkpoint; the path of validated.json.

    Writes validation.json, valid or not. Raises DataError with the reasons for an invalid one, and
    ConfigError, with nothing written, where the config does not fit the checkpoint.
    """
    started = time.time()
    paths = RunPaths.of(config)
    with lock(paths.root, "validate"):
        checkpoint = resume.required(paths)
        check_compatible(config, checkpoint)  # an edited config says nothing of the checkpoint
        goal = Trained.read_if_there(paths.trained)
        result = _run(CheckpointChecks(checkpoint, config, Data(config), goal=goal, paths=paths))
        result.write(paths.validation)
        seconds = round(time.time() - started, 3)
        event = events.Validate(seconds=seconds, status=result.status, step=result.step)
        events.record(paths.events, event)
        _print_result(checkpoint.folder, result, paths.root)
        result.short.write(paths.validated)
    return paths.validated


def validate_folder(folder: Path, overrides: dict[str, Any]) -> None:
    """Validate any checkpoint directory, or the latest checkpoint of a run's directory; writes nothing.

    The config is that in the checkpoint. overrides: config keys, such as the current path of `data`.
    """
    checkpoint = resume.named(folder)
    config = _own_config(checkpoint, overrides)
    paths = RunPaths(checkpoint.folder.parent.parent)
    of_a_run = paths.checkpoints == checkpoint.folder.parent and paths.metrics.exists()
    checks = CheckpointChecks(checkpoint, config, Data(config), paths=paths if of_a_run else None)
    _print_result(checkpoint.folder, _run(checks), paths.root if of_a_run else None)


def _own_config(checkpoint: directory.Checkpoint, overrides: dict[str, Any]) -> ResolvedConfig:
    """The config that made the checkpoint, with overrides."""
    values = apply_overrides(checkpoint.manifest.lineage.config.to_json(), overrides)
    return checked(ResolvedConfig, values, str(checkpoint.folder))


def _run(checks: CheckpointChecks) -> Validation:
    """Run all checks of validate.depth; the content of validation.json."""
    checks.check_files()
    checks.check_state()
    checks.check_losses()
    checks.check_outputs()
    return checks.result()


def _print_result(folder: Path, result: Validation, run: Path | None) -> None:
    """Print all checks. Raises DataError for an invalid checkpoint."""
    for check in result.checks:
        say(f"  {check.status:4} {check.name}: {check.message}")
    say(f"{folder}: {result.status}, step {result.step}")
    if result.reasons:
        others = f"check all checkpoints of the run: forge validate {run} --all" if run else ""
        raise DataError(
            f"checkpoint {folder} is invalid: " + "; ".join(result.reasons),
            cause="a corrupt file, or a checkpoint of another run",
            fix=others or "use another checkpoint",
        )


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
    checks: CheckpointChecks | None = None
    cells: tuple[str, ...] = ("", "", "", "")

    def close(self, verdict: str, reasons: Sequence[str] = ()) -> None:
        self.verdict, self.reasons = verdict, list(reasons)
        if self.checks:
            self.cells = _cells_of_checks(self.checks)
        self.checks = None  # frees the model


def validate_all(run: Path | ResolvedConfig, overrides: dict[str, Any], *, fix: bool) -> None:
    """Check every committed checkpoint of a run, first the cheap checks of all, and print a table.

    run: a config, which every checkpoint must fit; or a run's directory, where each checkpoint is
    checked with the config that made it and overrides. fix: move corrupt ones to quarantine, under the
    run's lock; without it nothing is changed. Raises DataError if one is invalid, and UnfitError, with
    nothing moved, if the disk or this host kept the checks of one from completing.
    """
    paths, config = _run_at(run)
    with lock(paths.root, "validate") if fix else nullcontext():
        if fix:
            wait_for_orphans(paths)
            directory.finish_commit(paths)
        folders = _folders(paths.checkpoints)
        rows = [_row(folder) for folder in folders if checkpoint_step(folder.name) is not None]
        if not rows:
            raise DataError(f"{paths.root} has no checkpoint", fix="train the run first")
        _check_all(rows, paths, config, overrides)
        _print([*rows, *_quarantined(paths)])
        _conclude(rows, paths, fix)


def _run_at(run: Path | ResolvedConfig) -> tuple[RunPaths, ResolvedConfig | None]:
    if isinstance(run, ResolvedConfig):
        return RunPaths.of(run), run
    if not (run / "checkpoints").is_dir():
        raise ConfigError(
            f"{run} is not a run's folder: it has no checkpoints/",
            fix="name one such as results/base, or leave out --all and --fix to validate one checkpoint",
        )
    return RunPaths(run), None


def _folders(parent: Path) -> list[Path]:
    """Checkpoint directories, newest first, with or without a manifest."""
    there = parent.glob(f"{CHECKPOINT_PREFIX}*")
    folders = (path for path in there if path.is_dir() and not path.is_symlink())
    return sorted(folders, key=by_step, reverse=True)


def _row(folder: Path) -> CheckpointRow:
    row = CheckpointRow(folder)
    with suppress(FileNotFoundError):  # pruned meanwhile by training
        files = [path.stat() for path in folder.iterdir()]
        row.size = sum(stat.st_size for stat in files)
        row.age_sec = time.time() - min((stat.st_mtime for stat in files), default=time.time())
    return row


def _quarantined(paths: RunPaths) -> Iterator[CheckpointRow]:
    for folder in _folders(paths.quarantine):
        row = _row(folder)
        try:
            damage = Damage.read_if_there(folder / directory.DAMAGE)
            row.close("in quarantine", damage.reasons if damage else [])
        except DataError as err:
            row.close("in quarantine", [err.what])
        yield row


def _check_all(
    rows: Sequence[CheckpointRow],
    paths: RunPaths,
    config: ResolvedConfig | None,
    overrides: dict[str, Any],
) -> None:
    """Fill in the rows: first the files of all checkpoints, then models are built."""
    goal = Trained.read_if_there(paths.trained)
    all_data: dict[str, Data] = {}

    def check_files(row: CheckpointRow) -> None:
        checkpoint = directory.Checkpoint.open(row.folder)
        checkpoint.file_list.check_sizes()
        its_config = config or _own_config(checkpoint, overrides)
        data = all_data.setdefault(str(its_config.ids), Data(its_config))
        its_goal = goal if goal and goal.step == checkpoint.step else None
        row.checks = CheckpointChecks(checkpoint, its_config, data, goal=its_goal, paths=paths)
        row.checks.check_files()

    def check_state_and_losses(row: CheckpointRow) -> None:
        assert row.checks
        row.checks.check_state()
        row.checks.check_losses()

    with progress("validate", 2 * len(rows), "checks") as report:
        for number, row in enumerate(rows):
            report(number, f"files of {row.folder.name}")
            _check(row, check_files)
        for number, row in enumerate(rows, start=len(rows)):
            report(number, f"tensors and losses of {row.folder.name}")
            if not row.verdict:
                _check(row, check_state_and_losses)
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


def _conclude(rows: Sequence[CheckpointRow], paths: RunPaths, fix: bool) -> None:
    """Print the reasons, move corrupt checkpoints with `fix`, and raise the error, if any."""
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
    trouble = _trouble_of_latest(paths)
    if not bad and not trouble:
        return
    names = ", ".join(row.folder.name for row in bad)
    what = f"{len(bad)} of {len(rows)} checkpoints of {paths.root} are invalid: {names}"
    what = "; ".join([what] * bool(bad) + trouble)
    if not corrupt and not trouble:
        following = "restore the config or the data that the reason names: the files are valid"
    elif fix:
        following = _repair(paths, corrupt)
    else:
        following = f"forge validate {paths.root} --fix moves corrupt ones to quarantine"
    raise DataError(what, fix=following)


def _trouble_of_latest(paths: RunPaths) -> list[str]:
    try:
        directory.latest_folder(paths)
    except DataError as err:
        return [err.what]
    return []


def _repair(paths: RunPaths, corrupt: Sequence[CheckpointRow]) -> str:
    """Move corrupt checkpoints to quarantine, repair `latest`, remove records that name them; what to
    do next. Under the run's lock."""
    for row in corrupt:
        directory.quarantine(paths, row.folder, row.reasons)
    moved = {row.folder.name for row in corrupt}
    left = resume.repaired_latest(paths)
    with disk_trouble(paths.root):
        # Without these files the workflow trains and validates again.
        for path, kind in ((paths.trained, Trained), (paths.validated, Validated)):
            if path.exists() and _checkpoint_of(path, kind) in (None, *moved):
                path.unlink()
    done = f"{len(moved)} moved to {paths.quarantine}, `latest` is {left and left.folder.name}; "
    if paths.trained.exists():
        return f"{done}nothing else is left to do: the run is at its goal"
    start = f"resumes from step {left.step}" if left else "starts at step 0"
    return f"{done}rerun the command that trained the run: it {start}"


def _checkpoint_of(path: Path, kind: type[Trained] | type[Validated]) -> str | None:
    """The name of the checkpoint in a record; None where the record cannot be read."""
    try:
        return checkpoint_name(kind.read(path).step)
    except DataError:
        return None


# --- the table -------------------------------------------------------------------------------------

_HEADS = ("step", "size", "age", "digests", "loads", "probe", "next loss", "verdict")
_TONES = {"valid": "green", "invalid": "red", "unknown": "red"}


def _cells_of_checks(checks: CheckpointChecks) -> tuple[str, ...]:
    """Cells of digests, loads, probe, next loss."""
    by_name = {check.name: check for check in checks.checks}

    def cell(*names: str) -> str:
        if failed_checks(by_name[name] for name in names if name in by_name):
            return "FAIL"
        if names[-1] not in by_name:
            return ""
        message = by_name[names[-1]].message
        return next((note for note in (NOT_RECORDED, NOT_DONE) if message.startswith(note)), "ok")

    loads = ("config", "data", "tensors", "finite", "weights", "world size")
    return cell("goal", "digests"), cell(*loads), cell("probe"), cell("next loss")


def _cells(row: CheckpointRow) -> list[str]:
    step = row.folder.name.removeprefix(CHECKPOINT_PREFIX).lstrip("0") or "0"
    size = f"{row.size / 2**20:,.1f} MiB"
    return [step, size, duration(row.age_sec), *row.cells, row.verdict]


def _print(rows: Sequence[CheckpointRow]) -> None:
    table = Table(_HEADS, numbers=_HEADS[:3], wrapped=_HEADS[-1:])
    for row in rows:
        table.add(_cells(row), {"verdict": _TONES.get(row.verdict, "yellow")})
    table.print()
