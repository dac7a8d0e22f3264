"""Which steps count as checked must not be more than what was retrained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.manifests import manifest_of

from forge.attestation.verify import VerificationError
from forge.checkpoint.resume import CommittedCheckpoints
from forge.core.files import digest_file
from forge.core.paths import RunPaths, checkpoint_name
from forge.plugins.attestation.intervals import Interval, coverage, drawn, seconds_of

SAVED = (10, 20, 30, 40)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """It has a checkpoint at each of SAVED, without files."""
    paths = RunPaths(tmp_path / "run")
    for step in SAVED:
        folder = paths.checkpoints / checkpoint_name(step)
        folder.mkdir(parents=True)
        manifest_of(step).write(folder)
    return paths


def links_of(run: RunPaths, exported: int = 40, **parents: Any) -> dict[str, dict[str, Any]]:
    saved = [{"step": step, "blake3": digest_of(run, step)} for step in SAVED]
    return {
        "export": {"step": exported},
        "checkpoints": {"saved": saved},
        "parents": {"checkpoint": None, "weights": None, **parents},
        "config": {"values": {"model": {}}},
        "launches": {"launches": [launch(0, 20, 200.0), launch(20, 40, 20.0)]},
    }


def launch(begin: int, end: int, seconds: float) -> dict[str, Any]:
    return {"resumed_from": begin, "last_step": end, "started": 1000.0, "ended": 1000.0 + seconds}


def digest_of(run: RunPaths, step: int) -> str:
    return digest_file(run.checkpoints / checkpoint_name(step) / "checkpoint.json")


def ends(intervals: Any) -> list[tuple[int, int]]:
    return [(one.first, one.last) for one in intervals]


def test_run_with_all_checkpoints_is_covered_from_its_first_step(run):
    covers = coverage(links_of(run), [CommittedCheckpoints(run)])
    assert ends(covers.intervals) == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert covers.intervals[0].begin is None and covers.intervals[1].begin.step == 10
    assert covers.steps == 40 and covers.exported.step == 40
    assert covers.parts_in(covers.intervals) == 4 and covers.parts_in(covers.intervals[1:3]) == 2


def test_checkpoint_of_another_digest_or_of_a_later_step_is_none_of_the_run(run):
    links = links_of(run, exported=30)
    manifest_of(20, decay_steps=7).write(run.checkpoints / checkpoint_name(20))
    covers = coverage(links, [CommittedCheckpoints(run)])
    assert ends(covers.intervals) == [(0, 10), (10, 30)]
    assert covers.parts_in(covers.intervals) == 3


def test_intervals_that_took_too_long_are_not_drawn_and_count_as_unchecked(run):
    covers = coverage(links_of(run), [CommittedCheckpoints(run)], most_sec=99.0)
    assert ends(covers.intervals) == [(20, 30), (30, 40)]
    assert ends(covers.too_long) == [(0, 10), (10, 20)]
    assert covers.parts_in(covers.intervals) == 2
    assert coverage(links_of(run), [CommittedCheckpoints(run)], most_sec=100.0).too_long == ()


def test_steps_that_were_trained_twice_took_what_the_faster_launch_needed(run):
    links = links_of(run)
    links["launches"]["launches"] += [launch(10, 15, 5.0), launch(15, 15, 9.0), launch(9, 5, 9.0)]
    assert seconds_of(Interval(10, 20, None, None), links) == 10.0
    assert seconds_of(Interval(0, 10, None, None), links) == 100.0
    assert seconds_of(Interval(50, 60, None, None), links) == 0.0


@pytest.mark.parametrize("odd", [math.inf, math.nan, -1.0, 10**400, "9", None])
def test_times_that_no_clock_shows_are_none(run, odd):
    links = links_of(run)
    links["launches"]["launches"] = [launch(0, 20, 5.0) | {"ended": odd}, launch(20, 10**400, 5.0)]
    assert coverage(links, [CommittedCheckpoints(run)], most_sec=1.0).too_long == ()


def test_missing_last_checkpoint_counts_as_unchecked(run):
    links = links_of(run)
    (run.checkpoints / checkpoint_name(40) / "checkpoint.json").unlink()
    covers = coverage(links, [CommittedCheckpoints(run)])
    assert covers.exported is None
    assert covers.parts_in(covers.intervals) == 3


@pytest.mark.parametrize(
    "parents",
    [{"checkpoint": {"run": "base", "step": 0, "digest": "0"}}, {"weights": {"id": "x"}}],
    ids=["another run", "weights"],
)
def test_steps_after_a_start_from_elsewhere_count_as_unchecked(run, parents):
    covers = coverage(links_of(run, **parents), [CommittedCheckpoints(run)])
    assert not covers.can_start
    assert ends(covers.intervals) == [(10, 20), (20, 30), (30, 40)]
    assert covers.parts_in(covers.intervals) == 3


def test_steps_of_the_parent_are_none_of_the_run(run):
    parent = {"run": "base", "step": 20, "digest": "0"}
    covers = coverage(links_of(run, checkpoint=parent), [CommittedCheckpoints(run)])
    assert (covers.first, covers.saved, covers.steps) == (20, (30, 40), 20)
    assert ends(covers.intervals) == [(30, 40)]


def test_statement_whose_export_is_before_its_start_is_refused(run):
    parent = {"run": "base", "step": 50, "digest": "0"}
    with pytest.raises(VerificationError, match="between steps 50 and 40"):
        coverage(links_of(run, checkpoint=parent), [CommittedCheckpoints(run)])


def test_draw_depends_on_the_seed_alone_and_is_sorted_by_step():
    intervals = [Interval(step, step + 1, None, None) for step in range(100)]
    first = drawn(intervals, 5, seed=1)
    assert drawn(intervals[::-1], 5, seed=1) == first == sorted(first, key=lambda one: one.first)
    assert drawn(intervals, 5, seed=2) != first
    assert len(drawn(intervals[:3], 5, seed=1)) == 3
    draws = [ends(drawn(intervals, 5, seed)) for seed in range(400)]
    counts = [sum(end in draw for draw in draws) for end in ends(intervals)]
    assert min(counts) > 3 and max(counts) < 50  # 20 on average


def test_draw_is_the_documented_one():
    """As docs/plugins/attestation.md has it: by SHA-256 of `SEED FIRST LAST`."""
    intervals = [Interval(0, 50, None, None), Interval(50, 100, None, None)]
    assert ends(drawn(intervals, 1, seed=0)) == [(0, 50)]
