"""Records of a ladder: its rows, results/ladder.json, and forecasts in the logs of runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from forge.core import json_lines
from forge.core.config import Config
from forge.core.events import Event, Launch, parse
from forge.core.paths import RunPaths
from forge.core.records import Record, RecordPart
from forge.core.sample_sheet import shared_folders
from forge.plugins.ladder.settings import Ladder, parameters_of, tokens_per_step

WIDE = 0.05  # of an interval, as a part of the loss: about what a run of twice the size gains


class LadderForecast(Event):
    """A loss was forecast, in bits per byte: the middle, and the ends of an interval that contains the
    outcome with probability `level`. points: digest of those in ladder.json."""

    run: str
    parameters: int
    tokens: int
    bpb: float
    low: float
    high: float
    level: float
    points: str


class LadderPlace(RecordPart):
    """A row's place. trunk: the run with the weights that it starts from; "" for none."""

    trunk: str
    step: int
    parameters: int
    tokens: int


class LadderRows(Record):
    """The rows of a ladder, as the workflow hands them on. floors: of all rows."""

    results: str
    floors: list[float | None]
    rungs: dict[str, LadderPlace]
    forecasts: dict[str, LadderPlace]

    def paths(self, run: str) -> RunPaths:
        return RunPaths(Path(self.results) / run)

    def to_json(self) -> dict[str, Any]:
        return {"format": self.FORMAT, **self.model_dump(mode="json")}


class RungPoint(RecordPart):
    """A point of the fit. checkpoint: digest of what was validated."""

    run: str
    trunk: str
    parameters: int
    tokens: int
    bpb: float
    checkpoint: str


class WithheldSize(RecordPart):
    """Runs of the largest size at one length, by their mean, and the interval in which the smaller sizes
    alone forecast one of these."""

    parameters: int
    tokens: int
    bpb: float
    low: float
    high: float


class LadderFit(Record):
    """results/ladder.json. left_out: rungs that failed. digest: of the points, and of the floor where
    there is one. forecasts: run -> those by this fit; the one that counts is in the run's log. withheld:
    the largest size by the smaller ones; [] where these are too few. versions: of what computed them."""

    rows: LadderRows
    points: list[RungPoint]
    left_out: list[str]
    digest: str
    curve: dict[str, float]
    level: float
    draws: int
    seed: int
    forecasts: dict[str, dict[str, float]]
    withheld: list[WithheldSize]
    versions: dict[str, str]

    @property
    def doubts(self) -> list[str]:
        """Why the forecasts of this fit may miss, or say little."""
        found = [
            f"{run}: an interval that is {width:.1%} wide says little; add seeds, or larger sizes"
            for run, told in self.forecasts.items()
            if (width := (told["high"] - told["low"]) / told["bpb"]) > WIDE
        ]
        missed = [one for one in self.withheld if not one.low <= one.bpb <= one.high]
        if missed:
            told = "; ".join(
                f"{one.low:.4f} to {one.high:.4f} at {one.tokens:,} tokens, and {one.bpb:.4f} came"
                for one in missed
            )
            side = "high" if missed[-1].bpb < missed[-1].low else "low"
            found.append(
                f"the smaller sizes do not forecast the largest, {missed[0].parameters:,} parameters:"
                f" {told}. The curve does not follow these sizes, and forecasts are probably too {side};"
                " add larger sizes, and leave out the smallest"
            )
        return found


def rows_of(runs: Mapping[str, Config]) -> LadderRows:
    """The rows of a sheet that are of its ladder."""
    roles = {name: config.of(Ladder).role for name, config in runs.items()}
    return LadderRows(
        results=shared_folders(runs)[0],
        floors=sorted({c.of(Ladder).floor for c in runs.values() if c.of(Ladder).role}, key=str),
        rungs={name: _place(runs[name]) for name, role in roles.items() if role == "rung"},
        forecasts={name: _place(runs[name]) for name, role in roles.items() if role == "forecast"},
    )


def _place(config: Config) -> LadderPlace:
    step, trunk = config.train.max_steps, (config.parent or "").partition("@")[0]
    tokens = step * tokens_per_step(config)
    return LadderPlace(trunk=trunk, step=step, parameters=parameters_of(config), tokens=tokens)


class ForecastLog(NamedTuple):
    """Forecasts in the log of a run, oldest first, and whether each came after its first launch."""

    made: list[tuple[LadderForecast, bool]]
    is_launched: bool

    def standing(self, place: LadderPlace | None = None) -> tuple[LadderForecast, bool] | None:
        """The forecast that counts, and whether it is late: the last one before the first launch, else
        the first one. place: the row as it is; None for the row of the newest forecast."""
        row = place or (self.made[-1][0] if self.made else None)
        same = [
            (event, is_late)
            for event, is_late in self.made
            if row and (event.parameters, event.tokens) == (row.parameters, row.tokens)
        ]
        in_time = [one for one in same if not one[1]]
        return in_time[-1] if in_time else same[0] if same else None


def read_forecasts(log: Path) -> ForecastLog:
    """The forecasts in a run's log, which may not be there. Raises DataError as `events.read`."""
    made: list[tuple[LadderForecast, bool]] = []
    is_launched = False
    for line in json_lines.lines(log):
        if '"ladderforecast"' in line and (value := json_lines.parse(line)):
            with suppress(ValidationError):  # edited by hand
                value.pop("event", None)
                made.append((LadderForecast.model_validate(value), is_launched))
        elif not is_launched and '"launch"' in line:
            is_launched = isinstance(parse(line, log), Launch)
    return ForecastLog(made, is_launched)
