"""Threat: an end of launches that one reader of the event log takes for another than the next reader."""

from __future__ import annotations

import time

import pytest
from support import happenings
from support.recorded_run import START, RecordedRun
from support.run_states import hold

from forge.core import events
from forge.core.events import End
from forge.preflight import preflight
from forge.reporting import logs
from forge.reporting.history import read_history
from forge.reporting.run_files import RunFiles
from forge.reporting.run_state import judge
from forge.run.crash_loop import launches_without_progress
from forge.run.forecast import expected_by
from forge.run.interruptions import interruptions
from forge.run.launches import launches_of

SAVED = 20  # step of the last of three saves, after 5 and 10
KNOWN = {event.event: event for event in happenings.ALL if isinstance(event, End)}
CAUSES = {f"stop by {cause}": happenings.stop(cause) for cause in events.STOP_CAUSES if cause}
LOST = {"requeue after a lost rank": happenings.requeue("peer lost")}


class Drained(End):
    """An end that no reader has heard of: the site drains a node, and the ranks save."""

    state, words = "stopped", "drained"
    starts_again = True

    node: str
    step: int

    @property
    def reason(self) -> str:
        return f"the site drains {self.node}"


NEW = {"an end that is new": Drained(node="node07", step=SAVED)}
ENDS = KNOWN | CAUSES | LOST | NEW


@pytest.fixture(params=ENDS)
def end(request, monkeypatch):
    monkeypatch.setitem(events._KINDS, "drained", Drained)
    found = ENDS[request.param]
    return found.model_copy(update={"step": SAVED} if hasattr(found, "step") else {})


@pytest.fixture
def run(tmp_path, end):
    """Three launches that began at step 0, and ended so: the last one 20 s after its last save."""
    run = RecordedRun(tmp_path / "base")
    for _ in range(3):
        run.launch(0, job="7")
    for first, last in ((1, 5), (6, 10), (11, SAVED)):
        run.steps(first, last)
        run.save(last)
    run.steps(SAVED + 1, SAVED + 10)
    run.event(end, after=20)
    return run


def test_status_has_the_state_of_the_end_and_its_reason(run, end):
    seen = judge(RunFiles(run.paths, now=run.time), None)
    states = {"completed": ("done", "checkpoint missing")}.get(end.state, (end.state,))
    assert seen.state in states
    assert end.is_final or seen.reason == end.reason.split("\n")[0]


def test_a_command_that_still_runs_says_what_it_does_after_the_end(run, end):
    hold(run, ago=time.time() - START)
    assert end.then in judge(RunFiles(run.paths, now=run.time), None).reason


def test_history_has_its_words_and_counts_steps_that_no_save_has_as_recomputed(run, end):
    last = read_history(run.paths).launches[-1]
    assert (last.outcome, last.end) == (": ".join(filter(None, (end.words, end.reason))), run.time)
    assert ("recomputed" in read_history(run.paths).seconds) == end.is_failure


def test_logs_show_where_it_saved_or_who_failed(run, end, capsys):
    run.paths.logs.mkdir()
    (run.paths.logs / "7.0.node01.0.log").write_text("banner\n")
    logs.logs(run.paths)
    text = capsys.readouterr().out
    assert (f"{end.words} at step" in text) == (end.saved_step is not None)
    assert ("no errors" not in text) == end.is_failure
    assert not end.is_failure or (end.text in text and end.who in text)


def test_crash_loop_counts_the_launch_unless_a_person_ended_it_or_has_acted_since(run, end):
    found = launches_without_progress(events.read(run.paths.events), 0)
    if end.is_final:
        assert found == []
    elif end.by_person:
        assert len(found) == 2
    else:
        assert found[-1] == f"{run.id}: {end.text}"


def test_interruptions_count_it_with_its_save_unless_the_run_or_a_person_ended_it(run, end):
    [*_, last] = launches_of(events.read(run.paths.events))
    known = interruptions([[last]])
    assert known.number == (not end.is_final and not end.by_person)
    assert known.saved == (known.number and end.saved_step is not None)


def test_next_launch_without_a_person_is_down_time(run, end):
    run.time += 100
    run.launch(SAVED)  # not in that job
    last_two = launches_of(events.read(run.paths.events))[-2:]
    assert (interruptions([last_two]).restart == 104) == (end.starts_again and not end.is_final)


def test_forecast_leaves_its_save_out(run, end):
    expected = expected_by(events.read(run.paths.events))
    assert expected is not None
    # The median of 2.5 and 5 s.
    assert expected.interval == pytest.approx(3.75 if end.saved_step is None else 2.5)


def test_preflight_checks_the_fabric_after_a_failure(run, end):
    assert (preflight._suspects(run.paths) is None) == end.is_failure
