"""Against every fault at every point of save, commit, prune, load and reading of data.

After each the next start ends with the weights, losses and samples of the uninterrupted run, or with
the designed error. `make faults` goes through all cases, `make test-all` through some.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from cases import CASES, CHOSEN, LOADING, Case, chosen
from outcomes import note
from runs import GOAL, IMPATIENT, INTERVAL, FaultyRun
from support.processes import Outcome

from forge.core.errors import Exit


@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.name)
def test_the_next_start_ends_as_the_uninterrupted_run(
    case, runs, resumable, uninterrupted, tmp_path
):
    run, shard = _stage(case, runs, resumable, tmp_path)
    before = len(run.starts())
    ended = run.train(*case.faults(shard), more=IMPATIENT if case.kind == "stop" else ())
    starts = len(run.starts()) - before
    struck = [s for s in run.strikes() if (s["point"], s["kind"]) == (case.point, case.kind)]
    assert len(struck) == 1, ended.text
    assert ended.code == case.code, ended.text

    if ended.code != Exit.DONE:
        ended = _end_after(case, run, Path(shard), ended)
    assert ended.code == Exit.DONE, ended.text
    assert run.story() == uninterrupted(case.ranks)
    assert bool(run.quarantined()) == case.is_quarantined, ended.text
    run.assert_whole()
    _assert_little_is_lost(case, run, struck[0]["newest"])
    note(case, starts=starts, quarantined=len(run.quarantined()), lost=run.steps_lost())


def _stage(case: Case, runs, resumable, tmp_path: Path) -> tuple[FaultyRun, str]:
    """The run that the fault strikes, fresh or about to load a checkpoint; the shard to spoil."""
    name = case.name.replace(".", "-")
    if case.point in LOADING:
        return resumable(name, case.ranks), ""
    run = runs(name, case.ranks)
    if not case.spoils_data:
        return run, ""
    data = tmp_path / "data"
    shutil.copytree(run.config.parent / "data", data)
    shard = next(data.glob("tokens/*/train-*.bin"))
    shutil.copy(shard, shard.with_suffix(".kept"))
    return runs(name, case.ranks, f"--data={data}"), str(shard)


def _end_after(case: Case, run: FaultyRun, shard: Path, first: Outcome) -> Outcome:
    if case.spoils_data:
        refused = run.train()
        assert refused.code == Exit.DATA, refused.text
        assert shard.name in refused.text
        shutil.copy(shard.with_suffix(".kept"), shard)
    elif first.code == Exit.UNFIT:
        assert "Traceback" not in first.text
        assert "fix:" in first.text
    return run.train()


def _assert_little_is_lost(case: Case, run: FaultyRun, newest: int) -> None:
    """What was committed is gone on from; if not even that was, what the save before committed."""
    trained, resumed = _around_the_gap(run)
    if case.is_quarantined:
        assert run.steps_lost() <= 3 * INTERVAL
        return
    assert resumed >= newest
    begun = (trained - 1) // INTERVAL * INTERVAL  # the last save that is sure to have begun
    assert resumed >= begun - INTERVAL
    assert run.steps_lost() <= 2 * INTERVAL


def _around_the_gap(run: FaultyRun) -> tuple[int, int]:
    """The last step before the fault, and the step at which the start after it began."""
    steps = [step for step, _ in run.losses()]
    for step, following in itertools.pairwise(steps):
        if following <= step:
            return step, following - 1
    return GOAL, GOAL


def test_the_chosen_cases_exist():
    assert {case.name for case in CASES} >= CHOSEN
