"""How training's end is told: to the event log, to the queue, to people."""

import pytest
from support import happenings

from forge.cluster import slurm
from forge.core import events
from forge.core.machine import load_machine
from forge.core.paths import RunPaths
from forge.launch.rank_records import RankRecord
from forge.run import requeue, train

JOB = slurm.Job("42", "RUNNING", 0, ("n1", "n2"), 1, "gpu", "x", True, None)
LOST = RankRecord("lost", code=69, cause="peer lost", message="rank 1 of 2 exited without a record")


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def test_lost_ranks_of_a_requeued_job_do_not_reset_crash_loop_detection(paths, monkeypatch):
    monkeypatch.setattr(requeue, "requeue", lambda *_, **__: (True, ""))
    with pytest.raises(
        train.StoppedEarly, match="exited without a record; job 42 resumes from step 0"
    ):
        train._requeue(LOST, paths, JOB, load_machine(None))
    assert events.read(paths.events) == []


def test_why_a_job_stays_ended_is_said(paths, monkeypatch, capsys):
    monkeypatch.setattr(requeue, "requeue", lambda *_, **__: (False, "it was cancelled"))
    train._requeue(LOST, paths, JOB, load_machine(None))
    assert "not requeued: it was cancelled" in capsys.readouterr().err


def test_launches_that_lose_ranks_are_counted_across_requeues(paths):
    for number in range(3):
        events.record(paths.events, happenings.launch(0, launch=f"l{number}"))
        events.record(paths.events, happenings.lost(LOST.message))
        events.record(paths.events, happenings.requeue(LOST.cause, 0))
    assert len(train.crash_loop.launches_without_progress(events.read(paths.events), 0)) == 3


def test_ranks_that_were_killed_before_their_last_save_are_reported():
    killed = RankRecord("stopped", cause="SIGTERM", lost=(1,))
    assert "rank 1 ended without a final checkpoint" in train._what_is_kept(killed, 400)
    assert "the steps after 400 are lost" in train._what_is_kept(killed, 400)
    assert train._what_is_kept(RankRecord("stopped"), 400) == "a checkpoint is committed"
    assert train._what_is_kept(RankRecord("stopped"), 400, 400) == "nothing had been trained yet"
