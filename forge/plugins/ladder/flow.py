"""Rules of a ladder: what it needs, and whether a larger run may be submitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.core.config import ResolvedConfig
from forge.core.errors import ConfigError
from forge.core.files import read_object_or_empty
from forge.flow.rule_inputs import RuleSettings
from forge.plugins.ladder.records import LadderRows, read_forecasts, rows_of
from forge.slurm.jobs import TRAIN_RULE


def rungs(flow: Any) -> list[str]:
    """Results of the rungs that have not failed before, nor their trunks. flow: the `Flow`."""
    places = rows_of(flow.runs).rungs.items()
    names = [run for run, place in places if not {run, place.trunk} & flow.failed.keys()]
    return flow.files_of(names, "validated.json")


def outcomes(flow: Any) -> list[str]:
    """Results that larger runs have already: nothing here trains one."""
    files = flow.files_of(rows_of(flow.runs).forecasts, "validated.json")
    return [file for file in files if Path(file).exists()]


def forecasts(flow: Any) -> list[str]:
    """Marks beside the logs with forecasts, which are gone with a directory that is moved aside."""
    return [f"{flow.results}/{run}/.forecast" for run in rows_of(flow.runs).forecasts]


def rule_settings(runs: Mapping[str, ResolvedConfig]) -> dict[str, RuleSettings]:
    """ladder.json -> the rows by which it is made; {} for a sheet without a ladder."""
    rows = rows_of(runs)
    if not rows.rungs:
        return {}
    output = Path(rows.results) / "ladder.json"
    made_with = {"format": LadderRows.FORMAT, **read_object_or_empty(output).get("rows", {})}
    return {str(output): RuleSettings.of("ladder", rows.to_json(), output, made_with)}


def check_plan(runs: Mapping[str, ResolvedConfig], rules: Mapping[str, Sequence[str]]) -> None:
    """ConfigError where a larger run would be trained for the first time without a forecast."""
    due = rules.get(TRAIN_RULE, ())
    if not due:
        return
    rows = rows_of(runs)
    for run in sorted(rows.forecasts.keys() & {*due}):
        place, log = rows.forecasts[run], read_forecasts(rows.paths(run).events)
        if log.is_launched or log.standing(place):
            continue
        cause = f"its log has one of {log.made[-1][0].tokens:,} tokens" if log.made else ""
        raise ConfigError(
            f"run {run} has ladder.role forecast, and no forecast of {place.parameters:,} parameters and"
            f" {place.tokens:,} tokens: a forecast comes before the first launch",
            cause=cause,
            fix="run the target ladder first; or take the role out of the sample sheet",
        )
