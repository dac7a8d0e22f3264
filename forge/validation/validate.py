"""`forge validate`: check checkpoints independently, in a fresh process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint import directory, resume
from forge.cluster.lock import lock
from forge.core import events
from forge.core.config import ResolvedConfig, apply_overrides, checked
from forge.core.errors import ConfigError, DataError, OtherFormat, UnfitError
from forge.core.files import disk_trouble
from forge.core.paths import CHECKPOINT_PREFIX, RunPaths, by_step, checkpoint_name, checkpoint_step
from forge.core.records import Damage, Trained, Validated, Validation
from forge.core.terminal import Table, duration, progress, say
from forge.launch.launcher import wait_for_orphans
from forge.trainer.numerics import prepare
from forge.validation.checkpoint_checks import OF_THE_CHECKPOINT, Data, Examination
from forge.validation.replay import NOT_DONE, NOT_RECORDED


def validate(config: ResolvedConfig) -> Path:
    """Validate the checkpoint behind a run's `latest`; the path of validated.json.

    Writes validation.json either way. Raises DataError that lists the reasons when it is invalid.
    """
    started = time.time()
    paths = RunPaths.of(config)
    with lock(paths.root, "validate"):
        checkpoint = resume.required(paths)
        result = _examine(
            Examination(
                *(checkpoint, config, Data(config)),
                goal=Trained.read_if_there(paths.trained),
                paths=paths,
            )
        )
        result.write(paths.validation)
        seconds = round(time.time() - started, 3)
        event = events.Validate(seconds=seconds, status=result.status, step=result.step)
        events.record(paths.events, event)
        _tell(checkpoint.folder, result, paths.root)
        result.short.write(paths.validated)
    return paths.validated


def validate_folder(folder: Path, overrides: dict[str, Any]) -> None:
    """Validate any checkpoint folder, or the latest one of a run's folder; writes nothing.

    The config is the one in the checkpoint; overrides may say where `data` lies now.
    """
    checkpoint = resume.named(folder)
    config = _own_config(checkpoint, overrides)
    paths = RunPaths(checkpoint.folder.parent.parent)
    of_a_run = paths.checkpoints == checkpoint.folder.parent and paths.metrics.exists()
    examination = Examination(checkpoint, config, Data(config), paths=paths if of_a_run else None)
    _tell(checkpoint.folder, _examine(examination), paths.root if of_a_run else None)


def _own_config(checkpoint: directory.Checkpoint, overrides: dict[str, Any]) -> ResolvedConfig:
    """The config that made it, with overrides."""
    values = apply_overrides(checkpoint.manifest.lineage.config.to_json(), overrides)
    return checked(ResolvedConfig, values, str(checkpoint.folder))


def _examine(examination: Examination) -> Validation:
    """All checks of validate.depth, as the content of validation.json."""
    prepare(torch.device("cpu"))
    examination.look_at_files()
    examination.look_at_state()
    examination.look_at_losses()
    examination.show_to_people()
    return examination.result()


def _tell(folder: Path, result: Validation, run: Path | None) -> None:
    for check in result.checks:
        say(f"  {check.status:4} {check.name}: {check.message}")
    say(f"{folder}: {result.status}, step {result.step}")
    if result.reasons:
        others = f"look at all of this run: forge validate {run} --all" if run else ""
        raise DataError(
            f"checkpoint {folder} is invalid: " + "; ".join(result.reasons),
            cause="a damaged file, or a checkpoint of another run",
            fix=others or "use another one",
        )


# --- all checkpoints of a run ----------------------------------------------------------------------


@dataclass
class Row:
    """One checkpoint in the table, with what is known of it so far."""

    folder: Path
    size: int = 0
    age_sec: float = 0.0
    verdict: str = ""  # "" while checks are to come
    reasons: list[str] = field(default_factory=list)
    is_damaged: bool = False  # the checkpoint itself, not what lies around it
    examination: Examination | None = None
    cells: tuple[str, ...] = ("", "", "", "")

    def close(self, verdict: str, reasons: Sequence[str] = ()) -> None:
        self.verdict, self.reasons = verdict, list(reasons)
        if self.examination:
            self.cells = _cells_of_checks(self.examination)
        self.examination = None  # and with it the model


def validate_all(place: Path | ResolvedConfig, overrides: dict[str, Any], *, fix: bool) -> None:
    """Examine every committed checkpoint of a run, the cheap checks of all first, and print a table.

    place: a run's config, then each must fit it; or a run's folder, then each is examined by the
    config that made it, with overrides. fix: move damaged ones to quarantine, under the run's lock;
    without it nothing is changed. Raises DataError if one is invalid, and UnfitError, with nothing
    moved, if the disk or this host kept one from being examined.
    """
    paths, config = _run_at(place)
    prepare(torch.device("cpu"))
    with lock(paths.root, "validate") if fix else nullcontext():
        if fix:
            wait_for_orphans(paths)
            directory.finish_commit(paths)
        there = _folders(paths.checkpoints)
        rows = [_row(folder) for folder in there if checkpoint_step(folder.name) is not None]
        if not rows:
            raise DataError(f"{paths.root} has no checkpoint", fix="train the run first")
        _examine_all(rows, paths, config, overrides)
        _print([*rows, *_quarantined(paths)])
        _conclude(rows, paths, fix)


def _run_at(place: Path | ResolvedConfig) -> tuple[RunPaths, ResolvedConfig | None]:
    if isinstance(place, ResolvedConfig):
        return RunPaths.of(place), place
    if not (place / "checkpoints").is_dir():
        raise ConfigError(
            f"{place} is not a run's folder: it has no checkpoints/",
            fix="name one such as results/base, or leave out --all and --fix to validate one checkpoint",
        )
    return RunPaths(place), None


def _folders(place: Path) -> Iterator[Path]:
    """Checkpoints, newest first, also those whose manifest is lost."""
    found = filter(Path.is_dir, place.glob(f"{CHECKPOINT_PREFIX}*"))
    return iter(sorted(found, key=by_step, reverse=True))


def _row(folder: Path) -> Row:
    row = Row(folder)
    with suppress(FileNotFoundError):  # training prunes meanwhile
        files = [path.stat() for path in folder.iterdir()]
        row.size = sum(stat.st_size for stat in files)
        row.age_sec = time.time() - min((stat.st_mtime for stat in files), default=time.time())
    return row


def _quarantined(paths: RunPaths) -> Iterator[Row]:
    for folder in _folders(paths.quarantine):
        row = _row(folder)
        try:
            damage = Damage.read_if_there(folder / directory.DAMAGE)
            row.close("in quarantine", damage.reasons if damage else [])
        except DataError as err:
            row.close("in quarantine", [err.what])
        yield row


def _examine_all(
    rows: Sequence[Row], paths: RunPaths, config: ResolvedConfig | None, overrides: dict[str, Any]
) -> None:
    """Fill in the rows. What is damaged on the disk is known before the first model is built."""
    goal = Trained.read_if_there(paths.trained)
    all_data: dict[str, Data] = {}

    def look_at_files(row: Row) -> None:
        checkpoint = directory.Checkpoint.open(row.folder)
        checkpoint.check_sizes()
        its_config = config or _own_config(checkpoint, overrides)
        data = all_data.setdefault(str(its_config.ids), Data(its_config))
        its_goal = goal if goal and goal.step == checkpoint.step else None
        row.examination = Examination(checkpoint, its_config, data, goal=its_goal, paths=paths)
        row.examination.look_at_files()

    def look_at_the_rest(row: Row) -> None:
        assert row.examination
        row.examination.look_at_state()
        row.examination.look_at_losses()

    with progress("validate", 2 * len(rows), "looks") as report:
        for number, row in enumerate(rows):
            report(number, f"at files of {row.folder.name}")
            _look(row, look_at_files)
        for number, row in enumerate(rows, start=len(rows)):
            report(number, f"at tensors and losses of {row.folder.name}")
            if not row.verdict:
                _look(row, look_at_the_rest)
            if not row.verdict:
                row.close("valid")


def _look(row: Row, look: Callable[[Row], None]) -> None:
    """One part of the checks, and the verdict if it is known after it."""
    try:
        with disk_trouble(row.folder, "read"):
            look(row)
    except OtherFormat as err:
        row.close("other format", [err.what])
    except UnfitError as err:
        row.close("unknown", [err.what])
    except DataError as err:
        row.is_damaged = True
        row.close("invalid", [f"manifest: {err.what}"])
    except FileNotFoundError:
        if row.folder.exists():
            raise
    if row.examination and (failed := row.examination.failed):
        row.is_damaged = failed.name in OF_THE_CHECKPOINT
        row.close("invalid", [f"{failed.name}: {failed.message}"])
    if not row.folder.exists():
        row.is_damaged = False
        row.close("gone", ["pruned by training meanwhile"])


# --- what follows ----------------------------------------------------------------------------------


def _conclude(rows: Sequence[Row], paths: RunPaths, fix: bool) -> None:
    """The reasons, the repair, and the error that the table stands for."""
    for row in rows:
        for reason in row.reasons:
            say(f"{row.folder.name}: {row.verdict}: {reason}")
    unknown = [row.folder.name for row in rows if row.verdict == "unknown"]
    if unknown:
        raise UnfitError(
            f"not examined to the end: {', '.join(unknown)} in {paths.checkpoints}"
            + ("; nothing was moved" if fix else ""),
            cause="the disk or this host failed, which says nothing about the checkpoints",
            fix="mend it, or copy the run to another disk, and rerun the same command",
        )
    bad = [row for row in rows if row.verdict == "invalid"]
    damaged = [row for row in bad if row.is_damaged]
    trouble = _trouble_of_latest(paths)
    if not bad and not trouble:
        return
    names = ", ".join(row.folder.name for row in bad)
    what = f"{len(bad)} of {len(rows)} checkpoints of {paths.root} are invalid: {names}"
    what = "; ".join([what] * bool(bad) + trouble)
    if not damaged and not trouble:
        following = "restore the config or the data that the reason names: the files are whole"
    elif fix:
        following = _repair(paths, damaged)
    else:
        following = f"forge validate {paths.root} --fix moves what is damaged to quarantine"
    raise DataError(what, fix=following)


def _trouble_of_latest(paths: RunPaths) -> list[str]:
    try:
        directory.latest_folder(paths)
    except DataError as err:
        return [err.what]
    return []


def _repair(paths: RunPaths, damaged: Sequence[Row]) -> str:
    """Move these away, mend `latest`, take back what was said of them; what to do next.

    Under the run's lock.
    """
    for row in damaged:
        directory.quarantine(paths, row.folder, row.reasons)
    moved = {row.folder.name for row in damaged}
    left = resume.repaired_latest(paths)
    with disk_trouble(paths.root):
        # Without these files the workflow knows that there is something to do.
        for path, kind in ((paths.trained, Trained), (paths.validated, Validated)):
            # None: a record that cannot be read says nothing of what is left.
            if path.exists() and _checkpoint_of(path, kind) in (None, *moved):
                path.unlink()
    done = f"{len(moved)} moved to {paths.quarantine}, `latest` is {left and left.folder.name}; "
    if paths.trained.exists():
        return f"{done}nothing else is left to do: the run is at its goal"
    start = f"resumes from step {left.step}" if left else "starts at step 0"
    return f"{done}rerun the command that trained the run: it {start}"


def _checkpoint_of(path: Path, kind: type[Trained] | type[Validated]) -> str | None:
    """The name of the checkpoint that a record is of; None where the record cannot be read."""
    try:
        return checkpoint_name(kind.read(path).step)
    except DataError:
        return None


# --- for people ------------------------------------------------------------------------------------

_HEADS = ("step", "size", "age", "digests", "loads", "probe", "next loss", "verdict")
_TONES = {"valid": "green", "invalid": "red", "unknown": "red"}


def _cells_of_checks(examination: Examination) -> tuple[str, ...]:
    """Cells of digests, loads, probe, next loss."""
    checks = {check.name: check for check in examination.checks}

    def cell(*names: str) -> str:
        found = [checks[name] for name in names if name in checks]
        if any(check.status == "fail" for check in found):
            return "FAIL"
        if names[-1] not in checks:
            return ""
        notes = (NOT_RECORDED, NOT_DONE)
        return next((note for note in notes if checks[names[-1]].message.startswith(note)), "ok")

    loads = ("config", "data", "tensors", "finite", "weights", "world size")
    return cell("goal", "digests"), cell(*loads), cell("probe"), cell("next loss")


def _cells(row: Row) -> list[str]:
    step = row.folder.name.removeprefix(CHECKPOINT_PREFIX).lstrip("0") or "0"
    size = f"{row.size / 2**20:,.1f} MiB"
    return [step, size, duration(row.age_sec), *row.cells, row.verdict]


def _print(rows: Sequence[Row]) -> None:
    table = Table(_HEADS, numbers=_HEADS[:3])
    for row in rows:
        table.add(_cells(row), {"verdict": _TONES.get(row.verdict, "yellow")})
    table.print()
