"""Outcome of a forecast, in words for people."""

from __future__ import annotations

from typing import NamedTuple

from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths
from forge.core.records import Validated
from forge.plugins.ladder.records import LadderForecast, LadderPlace, read_forecasts


class Outcome(NamedTuple):
    """The forecast of a run that counts. bpb: the run's own at these tokens; None without a result."""

    forecast: LadderForecast
    is_late: bool
    bpb: float | None

    @property
    def is_inside(self) -> bool:
        return self.bpb is not None and self.forecast.low <= self.bpb <= self.forecast.high

    @property
    def text(self) -> str:
        told = self.forecast
        words = (
            f"{told.bpb:.4f} bits per byte at {told.tokens:,} tokens, {told.level:.0%} interval"
            f" {told.low:.4f} to {told.high:.4f}, "
            + (
                "late: made after the first launch"
                if self.is_late
                else "made before its first launch"
            )
        )
        if self.bpb is None:
            return words
        return f"{words}; outcome {self.bpb:.4f}, {'inside' if self.is_inside else 'outside'}"


def outcome_of(paths: RunPaths, place: LadderPlace | None = None) -> Outcome | None:
    """The outcome of a run; None for one without a forecast. place: as for `ForecastLog.standing`. Raises
    DataError for a log or a record that cannot be read."""
    standing = read_forecasts(paths.events).standing(place)
    if standing is None:
        return None
    record, train = Validated.read_if_there(paths.validated), {}
    if record:
        train = read_object_or_empty(paths.config).get("train", {})
    tokens = record.step * train.get("batch_size", 0) * train.get("seq_len", 0) if record else 0
    return Outcome(*standing, record.bpb if record and tokens == standing[0].tokens else None)
