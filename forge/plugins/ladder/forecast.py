"""`forge forecast`: the fit of a ladder, and forecasts in the logs of its larger runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

from forge.core import events
from forge.core.errors import ConfigError
from forge.core.files import canonical, digest_bytes
from forge.core.paths import RunPaths
from forge.core.records import Validated
from forge.core.terminal import say
from forge.plugins.ladder.records import (
    LadderFit,
    LadderForecast,
    LadderPlace,
    LadderRows,
    RungPoint,
    read_forecasts,
)
from forge.plugins.ladder.settings import MIN_BUDGETS, MIN_SIZES, MIN_TRUNKS
from forge.reporting.run_files import RunFiles
from forge.reporting.run_rows import MEASURED_BY, measured_by, validation_text
from forge.reporting.run_state import ask_slurm, judge

LEVEL, DRAWS, SEED = 0.9, 1000, 0


def check_rows(rows: LadderRows) -> None:
    """ConfigError for rows that cannot be fitted, before any is trained."""
    if not rows.rungs or not rows.forecasts:
        raise ConfigError(
            f"the sample sheet has {len(rows.rungs)} rows with ladder.role rung, and"
            f" {len(rows.forecasts)} with ladder.role forecast",
            fix="forge ladder --forecast 10 writes them",
        )
    if len(rows.floors) > 1:
        raise ConfigError(
            f"rows of the ladder have several ladder.floor: {', '.join(map(str, rows.floors))}",
            fix="set it in config.yaml, and not in the sample sheet",
        )
    _check_enough(rows, rows.rungs.values(), [])


def _check_enough(
    rows: LadderRows, points: Collection[LadderPlace | RungPoint], failed: Sequence[str]
) -> None:
    left_out = f"; left out: {', '.join(failed)}" if failed else ""
    trunks = len({point.trunk for point in points})
    if trunks < (needed := MIN_TRUNKS - (rows.floors[0] is not None)):
        raise ConfigError(
            f"the rungs have {trunks} trunks, and an interval needs {needed}{left_out}",
            cause="they must be more than the constants of the curve",
            fix="add seeds (forge ladder --seeds), or mend the runs that failed",
        )
    lengths: dict[int, set[int]] = {}
    for point in points:
        lengths.setdefault(point.parameters, set()).add(point.tokens)
    whole = [size for size, own in lengths.items() if len(own) >= MIN_BUDGETS]
    if len(whole) < MIN_SIZES:
        told = ", ".join(f"{size:,}: {len(own)}" for size, own in sorted(lengths.items()))
        raise ConfigError(
            f"the rungs have {len(whole)} sizes with {MIN_BUDGETS} lengths or more, and a fit needs"
            f" {MIN_SIZES} (parameters: lengths: {told}{left_out})",
            fix="add rows (forge ladder), or mend the runs that failed",
        )


def write_forecasts(rows: LadderRows) -> None:
    """Fit the rungs, write results/ladder.json and ladder.html, and append the forecasts to the logs of
    rows that were not launched; to that of a launched one where it has none, which is late.

    Raises ConfigError for rungs that have no result, or none that compares, and UnfitError on a full
    disk.
    """
    from forge.plugins.ladder.page import write_page

    check_rows(rows)
    points, left_out = _points(rows)
    _check_enough(rows, points, left_out)
    done = [run for run, place in rows.forecasts.items() if _result(rows.paths(run), place)]
    _check_same_text(rows, [*(point.run for point in points), *done])
    fit = _fit(rows, points, left_out)
    for run in rows.forecasts:
        _append(rows, run, fit)
    for doubt in fit.doubts:
        say(f"doubtful: {doubt}")
    fit.write(Path(rows.results) / "ladder.json")
    write_page(Path(rows.results) / "ladder.html", fit)
    say(f"ladder: {rows.results}/ladder.html")


def _points(rows: LadderRows) -> tuple[list[RungPoint], list[str]]:
    """The points of rungs, and names of those that failed. Raises ConfigError for others without a
    result."""
    points, left_out = [], []
    queue, _ = ask_slurm([rows.paths(run) for run in rows.rungs])
    for run, place in rows.rungs.items():
        paths = rows.paths(run)
        if found := _result(paths, place):
            keys = place.model_dump(exclude={"step"})
            points.append(RungPoint(run=run, bpb=found[0], checkpoint=found[1], **keys))
            continue
        states = [judge(RunFiles(one), queue) for one in (paths, rows.paths(place.trunk))]
        if not any(state.state in ("failed", "invalid") for state in states):
            raise ConfigError(
                f"run {run} has no validation loss in bits per byte at step {place.step}: it is"
                f" {states[0].headline}",
                cause="it is not trained and validated; or validate.depth is not probe, or the bytes of"
                " its tokens are not known",
                fix="the target ladder trains and validates all rungs",
            )
        left_out.append(run)
        say(f"left out: {run}, {states[0].headline}")
    return points, left_out


def _result(paths: RunPaths, place: LadderPlace) -> tuple[float, str] | None:
    """Bits per byte at the end of a run, and the digest of its checkpoint; None without."""
    record = Validated.read_if_there(paths.validated)
    if record is None or record.step != place.step or record.bpb is None:
        return None
    return (record.bpb, record.checkpoint_digest) if isfinite(record.bpb) else None


def _check_same_text(rows: LadderRows, runs: Sequence[str]) -> None:
    measured = {run: _measured(rows, run) for run in runs}
    first, *others = measured
    if other := [run for run in others if measured[run] != measured[first]]:
        raise ConfigError(
            f"runs {first} and {', '.join(other)} were not validated on the same text: bits per byte do"
            " not compare",
            cause=f"other validation documents, or another train.{', '.join(MEASURED_BY)} (at the end)",
            fix="leave out the rows that differ, or train all with the same",
        )
    if not measured[first][0]:
        raise ConfigError(
            f"the tokens of run {first} are not here, so that its validation text is not known",
            fix="bring them back: data/tokens, of config.yaml",
        )


def _measured(rows: LadderRows, run: str) -> tuple[str, dict[str, object]]:
    paths, place = rows.paths(run), (rows.rungs | rows.forecasts)[run]
    return validation_text(paths), measured_by(RunFiles(paths), place.step)


def _fit(rows: LadderRows, points: list[RungPoint], left_out: list[str]) -> LadderFit:
    from forge.plugins.ladder.fit import Point, forecast, withheld

    fitted = [Point(p.trunk, p.parameters, p.tokens, p.bpb) for p in points]
    options: dict[str, Any] = {"level": LEVEL, "draws": DRAWS, "seed": SEED}
    floor, targets = rows.floors[0], rows.forecasts.values()
    curve, told = forecast(
        fitted, [(place.parameters, place.tokens) for place in targets], floor=floor, **options
    )
    return LadderFit(
        rows=rows,
        points=points,
        left_out=left_out,
        digest=_digest(points, floor),
        curve=curve._asdict(),
        **options,
        forecasts={run: one._asdict() for run, one in zip(rows.forecasts, told, strict=True)},
        withheld=withheld(fitted, floor, **options),
        versions={name: version(name) for name in ("forge", "numpy")},
    )


def _digest(points: Sequence[RungPoint], floor: float | None) -> str:
    """Digest of what the forecasts are made of; without a floor it is that of the points alone."""
    of_fit: list[Any] = [point.model_dump() for point in points]
    if floor is not None:
        of_fit.append({"floor": floor})
    return digest_bytes(canonical(of_fit))


def _append(rows: LadderRows, run: str, fit: LadderFit) -> None:
    """Append the forecast to a run's log, where it has none of the same points and floor."""
    place, log = rows.forecasts[run], rows.paths(run).events
    before = read_forecasts(log)
    standing = before.standing(place)
    if standing and standing[0].points == fit.digest:
        return
    if standing and before.is_launched:
        say(
            f"{run}: other points or another floor than at its forecast, which stays, since the run was"
            " launched"
        )
        return
    size = {"run": run, "parameters": place.parameters, "tokens": place.tokens}
    of_fit = {**fit.forecasts[run], "level": fit.level, "points": fit.digest}
    told = LadderForecast.model_validate({**size, **of_fit})
    events.record(log, told)
    late = ", late: the run was launched before" if before.is_launched else ""
    say(f"{run}: {told.bpb:.4f} bits per byte, {told.low:.4f} to {told.high:.4f}{late}")
