"""Intervals between checkpoints rest on what event logs and Slurm say of interruptions: nothing counts
that a person did, and nothing twice."""

import pytest
from support import happenings

from forge.core import events
from forge.core.config import Config
from forge.core.goodput import Interruptions
from forge.core.paths import RunPaths
from forge.launch.rank_records import NO_RECORD
from forge.run import interruptions as module
from forge.run.interruptions import interruptions, known_at_launch, known_here
from forge.run.launches import launches_of
from forge.slurm.slurm import AccountedStart

HOUR = 3600


def at(time, event):
    """The event at another time."""
    return event.model_copy(update={"time": float(time)})


def launched(time, *later, **facts):
    """A launch at `time` that is ready 20 s later, and what follows, each with its time."""
    name = f"launch-{time}"
    begun = at(time, happenings.launch(launch=name, **facts))
    return [begun, at(time + 20, happenings.init(launch=name)), *later]


def known_of(*logs, starts=()):
    return interruptions([launches_of(log) for log in logs], starts)


ENDINGS = {
    "a lost rank": (happenings.lost(), 0, 1),
    "preemption": (happenings.preempted(), 1, 0),
    "a time limit": (happenings.requeue("SIGUSR1"), 1, 0),
    "max_minutes": (happenings.stop("deadline"), 1, 0),
    "a requeue after a hang": (happenings.requeue("hang"), 0, 1),
    "a STOP file": (happenings.stop("STOP file"), 0, 0),
    "Ctrl-C": (happenings.stop("Ctrl-C"), 0, 0),
    "a bug": (happenings.failed(), 0, 0),
    "completion": (happenings.completed(), 0, 0),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_launch_counts_by_how_it_ended(name):
    ending, saved, not_saved = ENDINGS[name]
    known = known_of(launched(0, at(100, ending)))
    assert (known.saved, known.not_saved) == (saved, not_saved)
    assert (known.number, known.seconds) == (saved + not_saved, 100)


def test_stop_whose_ranks_were_killed_before_their_save_was_not_saved_in_time():
    killed = at(100, happenings.rank_error(NO_RECORD))
    known = known_of(launched(0, killed, at(100, happenings.stop("SIGTERM"))))
    assert (known.saved, known.not_saved) == (0, 1)


def test_launch_without_an_end_was_cut_off_if_another_follows():
    cut = launched(0, at(100, happenings.save()))
    assert known_of(cut).number == 0
    known = known_of(cut + launched(500, at(700, happenings.completed())))
    assert (known.number, known.not_saved, known.seconds) == (1, 1, 300)


def test_launch_that_was_lost_and_requeued_counts_once():
    log = launched(0, at(100, happenings.lost()), at(101, happenings.requeue("hang")))
    assert known_of(log).number == 1


def test_down_time_is_to_the_next_first_step_unless_a_person_restarted():
    lost = launched(0, at(100, happenings.lost())) + launched(130)
    assert known_of(lost).restart == 50
    stopped = launched(0, at(100, happenings.stop())) + launched(9000)
    assert known_of(stopped).restart == 20  # of a launch to its first step
    given_up = launched(0, at(100, happenings.lost()), at(100, happenings.failed()))
    assert known_of(given_up + launched(9000)).restart == 20
    cut_off = launched(0, job="7") + launched(9000, job="7", restart=1)
    assert known_of(cut_off).restart == 9000


def test_jobs_of_slurm_count_unless_a_log_has_them():
    """Rows as sacct -D of Slurm 22.05 has them."""
    starts = [
        AccountedStart("7", "REQUEUED", 100),  # in the log
        AccountedStart("8", "PREEMPTED", 100),
        AccountedStart("8", "COMPLETED", 50),
        AccountedStart("9", "NODE_FAIL", 30),
        *(AccountedStart("10", state, 10) for state in ("TIMEOUT", "FAILED", "CANCELLED")),
    ]
    log = launched(0, at(100, happenings.preempted()), job="7")
    known = known_of(log, starts=starts)
    assert (known.number, known.seconds) == (3, 310)
    assert (known.saved, known.not_saved) == (1, 0)


def test_other_runs_of_the_project_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(module.time, "time", lambda: 40.0 * 24 * HOUR)
    monkeypatch.setattr(module, "hostname", lambda: "laptop")
    recent, old = 39 * 24 * HOUR, 24 * HOUR
    logs = {
        "own": launched(recent, at(recent + 100, happenings.lost())),
        "other": launched(recent, at(recent + 100, happenings.preempted())),
        "old": launched(old, at(old + 100, happenings.lost())),
        "from-the-future": launched(recent * 9, at(recent * 9 + 100, happenings.lost())),
    }
    for name, log in logs.items():
        for event in log:
            events.record(tmp_path / name / "events.jsonl", event)
    (tmp_path / "linked").symlink_to(tmp_path / "other")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer/events.jsonl").write_text('{"event": "lost", "format": 99}\n')
    known = known_here(RunPaths(tmp_path / "own"))
    assert (known.number, known.saved, known.not_saved) == (2, 1, 1)


@pytest.mark.parametrize(
    ("partition", "accounted", "counted"),
    [
        (None, [], {"own"}),  # on the laptop
        ("gpu", ["7"], {"of-7"}),
        ("gpu", [], {"of-7", "of-8"}),  # no accounting, so no job's partition is known
        ("", ["7"], {"of-7", "of-8"}),
    ],
)
def test_launches_of_another_machine_or_partition_do_not_count(
    tmp_path, monkeypatch, partition, accounted, counted
):
    """Each log lasts a power of ten, so that the sum tells which of them count."""
    monkeypatch.setattr(module, "hostname", lambda: "laptop")
    monkeypatch.setattr(module.time, "time", lambda: 90.0 * HOUR)
    starts = [AccountedStart(job, "RUNNING", 50) for job in accounted]
    monkeypatch.setattr(module.slurm, "accounted_starts", lambda *_: starts)
    facts = {
        "own": {},
        "other-host": {"host": "desktop"},
        "of-7": {"job": "7"},
        "of-8": {"job": "8"},
    }
    seconds = {name: 10**power for power, name in enumerate(facts, 2)}
    for name, of_launch in facts.items():
        for event in launched(0, at(seconds[name], happenings.lost()), **of_launch):
            events.record(tmp_path / name / "events.jsonl", event)
    known = known_here(RunPaths(tmp_path / "own"), partition=partition)
    assert (known.number, known.seconds) == (len(counted), sum(seconds[n] for n in counted))


def test_slurm_is_asked_for_an_automatic_interval_only(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module.slurm, "accounted_starts", lambda *a: asked.append(a) or [])
    job = module.slurm.parse_job("JobId=7 JobState=RUNNING Partition=low JobName=x")
    paths = RunPaths(tmp_path)
    config = Config(train={"checkpoint_minutes": 5})
    assert known_at_launch(config, paths, job) == Interruptions()
    assert not asked
    auto = Config(train={"checkpoint_minutes": "auto"})
    known_at_launch(auto, paths, None)
    assert not asked
    known_at_launch(auto, paths, job)
    assert [partition for _, partition in asked] == ["low"]
