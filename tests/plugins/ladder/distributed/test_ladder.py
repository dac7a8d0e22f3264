"""A ladder from its rows to the outcome of a larger run. Threats: a forecast that was made when the
outcome was known and counts all the same; a log that nobody can read without the plugin; rungs that do
not compare."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
from support.clone import DEADLINE_SEC, Project, make_project, started_rules
from support.planted_ladder import ROWS, plant, planted_bpb
from support.repository import REPOSITORY

from forge.core import events, hooks
from forge.core.files import read_json, write_json
from forge.core.paths import RunPaths

pytestmark = pytest.mark.all
LARGE, LAUNCHED = "ladder-d5-k0_07", "ladder-d5-k0_08"
REAL = ("ladder-d1-s1", "ladder-d1-s1-k0_1")
TRAIN = {"batch_size": 16, "max_steps": 4, "lr": 4e-3, "log_every": 50, "eval_every": 1000}


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The rows of a ladder beside one of a user's own. One rung is trained, the others are planted."""
    project = make_project(tmp_path_factory.mktemp("ladder"))
    project.one_rank()
    kept = {"checkpoint_every": 1000, "keep_every": None, "eval_samples": 64}
    project.write_config(train={**TRAIN, **kept}, validate={"depth": "probe"})
    done = project.forge("ladder", *ROWS)
    assert done.returncode == 0, done.stderr
    return project


def log_of(project: Project, run: str) -> list[dict[str, object]]:
    path = project.path("events.jsonl", run)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def forecasts(project: Project, run: str) -> list[dict[str, object]]:
    return [line for line in log_of(project, run) if line["event"] == "ladderforecast"]


def launched() -> events.Launch:
    where = {"launcher": "single", "host": "a", "nodes": ["a"]}
    return events.Launch(launch="1", world_size=1, step=0, **where)


def test_larger_run_is_trained_after_its_forecast_alone_and_the_page_has_the_outcome(
    ladder: Project,
) -> None:
    code, output = ladder.snakemake("train")
    assert code and f"run {LARGE} has ladder.role forecast, and no forecast of 109,200" in output
    assert "run the target ladder first" in output
    code, output = ladder.snakemake("--dry-run", "train")
    assert code == 0 and f"without -n this is refused: run {LARGE} has ladder.role" in output
    code, output = ladder.snakemake(f"results/{REAL[1]}/validated.json")
    assert code == 0, output
    plant(ladder, but=REAL)
    events.record(ladder.path("events.jsonl", LAUNCHED), launched())  # that failed

    code, output = ladder.snakemake("ladder")
    assert code == 0, output
    assert started_rules(output) == ["ladder_forecast", "ladder"]
    assert f"{LAUNCHED}: " in output and "late: the run was launched before" in output
    [told], [late] = forecasts(ladder, LARGE), forecasts(ladder, LAUNCHED)
    assert [line["event"] for line in log_of(ladder, LAUNCHED)] == ["launch", "ladderforecast"]
    assert told["low"] < told["bpb"] < told["high"] and told["level"] == late["level"] == 0.9
    assert told["bpb"] == pytest.approx(planted_bpb(109_200, int(told["tokens"])), rel=0.05)
    fit = read_json(ladder.root / "results/ladder.json")
    assert fit["digest"] == told["points"] and len(fit["points"]) == 24 and fit["left_out"] == []
    real = next(point for point in fit["points"] if point["run"] == REAL[1])
    validated = ladder.read("validated.json", REAL[1])
    assert (real["bpb"], real["checkpoint"]) == (validated["bpb"], validated["checkpoint_digest"])
    assert [line for line in log_of(ladder, LARGE) if line["event"] == "launch"] == []

    code, output = ladder.snakemake("ladder")
    assert code == 0 and "Nothing to be done" in output, output
    ladder.path("", LARGE).rename(ladder.root / "aside")
    code, output = ladder.snakemake(f"results/{LARGE}/validated.json")
    assert code and "run the target ladder first" in output
    code, output = ladder.snakemake("ladder")
    assert code == 0 and started_rules(output) == ["ladder_forecast", "ladder"], output
    assert forecasts(ladder, LARGE)[0]["points"] == told["points"]

    code, output = ladder.snakemake(f"results/{LARGE}/validated.json")
    assert code == 0, output
    names = [line["event"] for line in log_of(ladder, LARGE)]
    assert names.index("ladderforecast") < names.index("launch") and names.count("launch") == 1
    outcome = ladder.read("validated.json", LARGE)["bpb"]
    code, output = ladder.snakemake("ladder")
    assert code == 0 and started_rules(output) == ["ladder_forecast", "ladder"], output
    page = (ladder.root / "results/ladder.html").read_text()
    words = "inside" if told["low"] <= outcome <= told["high"] else "outside"
    assert f"made before its first launch; outcome {outcome:.4f}, {words}" in page
    assert "late: made after the first launch" in page and "<svg" in page
    code, output = ladder.snakemake("ladder")
    assert code == 0 and "Nothing to be done" in output, output
    shown = ladder.forge("show", LARGE)
    assert f"outcome {outcome:.4f}, {words}" in shown.stdout, shown.stderr


def test_forecast_after_a_launch_is_said_to_be_late(ladder: Project) -> None:
    with chdir(ladder.root):
        late, in_time = (RunPaths(Path("results") / run) for run in (LAUNCHED, LARGE))
        assert "its forecast is late" in [one.text for one in hooks.findings(late)]
        assert hooks.findings(in_time) == []
        [line] = hooks.run_lines(late)["ladder"]
        assert line.endswith("late: made after the first launch")


def test_other_points_after_the_launch_leave_the_forecast_as_it_was(ladder: Project) -> None:
    before = [forecasts(ladder, run) for run in (LARGE, LAUNCHED)]
    with changed(ladder.path("validated.json", "ladder-d2-s1-k0_4"), bpb=1.5):
        done = ladder.forge("forecast")
        assert done.returncode == 0, done.stderr
        assert (
            f"{LARGE}: other points or another floor than at its forecast, which stays"
            in done.stderr
        )
        assert (
            "This forecast was of other points" in (ladder.root / "results/ladder.html").read_text()
        )
    assert [forecasts(ladder, run) for run in (LARGE, LAUNCHED)] == before
    assert ladder.forge("forecast").returncode == 0


def test_log_is_read_and_the_run_shown_without_the_plugin(ladder: Project, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "forge", tmp_path / "forge")
    shutil.rmtree(tmp_path / "forge/plugins/ladder")
    done = subprocess.run(
        [sys.executable, "-m", "forge", "show", LARGE],
        cwd=ladder.root,
        env={**ladder.environment, "PYTHONPATH": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SEC,
    )
    assert done.returncode == 0, done.stderr
    assert "validated at step" in done.stdout and "interval" not in done.stdout
    log = events.read(ladder.path("events.jsonl", LARGE))
    assert len(log) == len(log_of(ladder, LARGE)) - 1


class changed:
    """A JSON file with other values, as long as the block lasts; without the file for no values."""

    def __init__(self, path: Path, **values: object) -> None:
        self.path, self.values, self.before = path, values, path.read_bytes()
        self.times = path.stat()

    def __enter__(self) -> None:
        if self.values:
            write_json(self.path, {**json.loads(self.before), **self.values})
        else:
            self.path.unlink()

    def __exit__(self, *_: object) -> None:
        self.path.write_bytes(self.before)
        os.utime(self.path, ns=(self.times.st_atime_ns, self.times.st_mtime_ns))


def test_rungs_that_do_not_compare_are_refused_by_name(ladder: Project) -> None:
    rung = "ladder-d3-s2-k0_2"
    config = ladder.path("config.json", rung)
    train = {**read_json(config)["train"], "eval_samples": 32}
    with changed(config, train=train):
        done = ladder.forge("forecast")
    assert done.returncode == 78
    assert f"and {rung} were not validated on the same text" in done.stderr
    for values in ({}, {"step": 3}, {"bpb": None}):
        with changed(ladder.path("validated.json", rung), **values):
            done = ladder.forge("forecast")
        assert done.returncode == 78, values
        assert f"run {rung} has no validation loss in bits per byte at step" in done.stderr


def failed(project: Project, run: str, also: Callable[[], None]) -> None:
    """Call a function while a run has failed."""
    log = project.path("events.jsonl", run)
    with changed(project.path("validated.json", run)), changed(project.path("trained.json", run)):
        why = {"message": "the loss is nan", "diverged": True, "config_digest": "c" * 64}
        events.record(log, launched())
        events.record(log, events.Failed(code=70, rank=0, **why))
        try:
            also()
        finally:
            log.unlink()


def test_failed_rung_is_left_out_and_named_until_too_few_are_left(ladder: Project) -> None:
    first, second = "ladder-d4-s1-k0_4", "ladder-d4-s2-k0_4"

    def one_is_left_out() -> None:
        done = ladder.forge("forecast")
        assert done.returncode == 0, done.stderr
        assert f"left out: {first}, failed" in done.stderr
        assert read_json(ladder.root / "results/ladder.json")["left_out"] == [first]
        failed(ladder, second, too_few)

    def too_few() -> None:
        done = ladder.forge("forecast")
        assert done.returncode == 78
        assert "the rungs have 3 sizes with 3 lengths or more, and a fit needs 4" in done.stderr
        assert f"left out: {first}, {second}" in done.stderr

    failed(ladder, first, one_is_left_out)
