"""Forecasts in the log of a run. Threat: one that came after a launch counts as if it came before, or a
plan trains a run that has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.core import events, hooks
from forge.core.config import Config, checked
from forge.core.errors import ConfigError
from forge.core.files import canonical, digest_bytes
from forge.core.paths import RunPaths
from forge.plugins.ladder import forecast as forecast_of_rungs
from forge.plugins.ladder.forecast import check_rows
from forge.plugins.ladder.records import (
    LadderForecast,
    LadderPlace,
    LadderRows,
    RungPoint,
    read_forecasts,
    rows_of,
)

PLACE = LadderPlace(trunk="", step=10, parameters=1000, tokens=20_000)


def forecast(points: str, tokens: int = 20_000) -> LadderForecast:
    size = {"parameters": 1000, "tokens": tokens}
    return LadderForecast(run="r", bpb=1.5, low=1.4, high=1.6, level=0.9, points=points, **size)


def launch() -> events.Launch:
    where = {"launcher": "single", "host": "a", "nodes": ["a"]}
    return events.Launch(launch="1", world_size=1, step=0, **where)


STANDING = {
    "none": ([], None),
    "one": (["a"], ("a", False)),
    "the last one before the launch": (["a", "b", None, "c"], ("b", False)),
    "the first one, late": ([None, "a", None, "b"], ("a", True)),
}


@pytest.mark.parametrize("name", sorted(STANDING))
def test_last_forecast_before_the_first_launch_counts_else_the_first_which_is_late(
    name: str, tmp_path: Path
) -> None:
    told, expected = STANDING[name]
    log = tmp_path / "run/events.jsonl"
    for points in told:
        events.record(log, launch() if points is None else forecast(points))
    found = read_forecasts(log)
    assert found.is_launched == (None in told)
    standing = found.standing(PLACE)
    assert (standing and (standing[0].points, standing[1])) == expected
    assert found.standing(LadderPlace(trunk="", step=9, parameters=1000, tokens=18_000)) is None


def test_forecast_is_made_again_for_another_floor_and_stays_after_the_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast_of_rungs, "DRAWS", 10)
    log = tmp_path / "r/events.jsonl"
    points = [
        RungPoint(
            run=f"{size}-{seed}-{k}",
            trunk=f"{size}-{seed}",
            parameters=size,
            tokens=20 * k * size,
            bpb=(8 / size**0.3 + 30 / (20 * k * size) ** 0.35 + 0.9) * (1 + 0.002 * seed),
            checkpoint="c",
        )
        for size in (10_000, 20_000, 40_000, 80_000, 160_000)
        for seed in (-1, 1)
        for k in (1, 2, 4)
    ]

    def told(floor: float | None) -> int:
        rows = LadderRows(results=str(tmp_path), floors=[floor], rungs={}, forecasts={"r": PLACE})
        forecast_of_rungs._append(rows, "r", forecast_of_rungs._fit(rows, points, []))
        return len(read_forecasts(log).made)

    assert [told(floor) for floor in (None, None, 0.8, 0.8, 0.7)] == [1, 1, 2, 2, 3]
    without = digest_bytes(canonical([point.model_dump() for point in points]))
    assert [event.points == without for event, _ in read_forecasts(log).made] == [
        True,
        False,
        False,
    ]
    events.record(log, launch())
    assert told(0.6) == 3
    assert "r: other points or another floor than at its forecast" in capsys.readouterr().err


def test_forecast_disturbs_no_reader_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "run/events.jsonl"
    events.record(log, forecast("a"))
    assert events.read(log) == []
    events.record(log, launch())
    assert [type(event) for event in events.read(log)] == [events.Launch]
    log.write_text('{"event": "ladderforecast", "format": 1, "bpb": "low"}\n' + log.read_text())
    assert len(read_forecasts(log).made) == 1


def config(run: str, tmp_path: Path, **values: object) -> Config:
    return checked(Config, {"run": run, "results": str(tmp_path), **values}, "the test")


def test_plan_with_a_larger_run_is_refused_until_it_has_a_forecast_or_was_launched(
    tmp_path: Path,
) -> None:
    train = {"max_steps": 10, "batch_size": 16, "seq_len": 128}
    row = config("r", tmp_path, train=train, ladder={"role": "forecast"})
    runs, due = {"r": row, "other": config("other", tmp_path)}, {"train_run": ["other", "r"]}
    log, place = RunPaths.of(row).events, rows_of(runs).forecasts["r"]
    size = {"parameters": place.parameters, "tokens": place.tokens}
    for rules in ({}, {"validate_run": ["r"]}, {"train_run": ["other"]}):
        hooks.check_plan(runs, rules)
    with pytest.raises(ConfigError, match=r"no forecast of .* and 20,480 tokens"):
        hooks.check_plan(runs, due)
    events.record(log, forecast("a", tokens=10_240))  # of the row as it was
    with pytest.raises(ConfigError) as refused:
        hooks.check_plan(runs, due)
    assert "its log has one of 10,240 tokens" in str(refused.value)
    events.record(log, forecast("a").model_copy(update=size))
    hooks.check_plan(runs, due)
    log.unlink()
    events.record(log, launch())
    hooks.check_plan(runs, due)


def test_rows_that_cannot_be_fitted_are_refused_before_any_is_trained(tmp_path: Path) -> None:
    def rung(size: int, k: int, seed: int, floor: float | None = None) -> Config:
        own = {"parent": f"t{size}-{seed}@{k}", "ladder": {"role": "rung", "floor": floor}}
        model, train = {"layers": size}, {"max_steps": 10 * k}
        return config(f"r{size}-{seed}-{k}", tmp_path, model=model, train=train, **own)

    def rows(sizes: int, lengths: int, seeds: int, floor: float | None = None) -> dict[str, Config]:
        found = [
            rung(size, k, seed, floor)
            for size in range(1, sizes + 1)
            for k in range(1, lengths + 1)
            for seed in range(seeds)
        ]
        larger = config("l", tmp_path, ladder={"role": "forecast", "floor": floor})
        return {one.run: one for one in (*found, larger)}

    check_rows(rows_of(rows(4, 3, 2)))
    check_rows(rows_of(rows(5, 3, 1, floor=0.5)))
    few = "the rungs have 3 sizes with 3 lengths or more, and a fit needs 4"
    for refused, message in (
        (rows(3, 3, 2), few),
        (rows(4, 2, 2), few.replace("have 3", "have 0")),
        (rows(4, 3, 1), "the rungs have 4 trunks, and an interval needs 6"),
        ({"b": config("b", tmp_path)}, "the sample sheet has 0 rows with ladder.role rung"),
        ({**rows(4, 3, 2), "x": rung(9, 1, 1, floor=0.5)}, "several ladder.floor: 0.5, None"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_rows(rows_of(refused))
