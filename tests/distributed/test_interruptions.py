"""Against losing work: a run that is stopped, killed or loses a rank ends as if nothing had happened.

Signals come at random steps; what is random is printed when a test fails.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time

import psutil
import pytest
from support import happenings
from support.forked import stop_before_a_step
from support.live_run import (
    GOAL,
    LONG,
    TWO_RANKS,
    Outcome,
    Started,
    living,
    ranks,
    wait_until,
)

from forge.checkpoint import resume
from forge.core import events
from forge.core.files import read_object_or_empty
from forge.core.process import hostname

ENDLESS = ("--train.max_steps=1000000", "--train.decay_steps=1000000", "--train.log_every=1")


def wait_for_step(run, step):
    wait_until(lambda: run.step() >= step, f"step {step} of {run.folder}")


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "resource_tracker"  # left meanwhile


def some_steps():
    step = random.randrange(5, 30)
    print(f"{step} steps on")
    return step


class Battered:
    """One run of two ranks, hit by everything in turn, and what was seen each time."""

    def __init__(self, run):
        self.run = run
        self.terminated = self._terminate_twice()
        # Python's resource tracker leaves once it sees that torchrun has left.
        self.left_after_sigterm = [p for p in living() if "resource_tracker" not in command_of(p)]
        self.step_after_sigterm = resume.latest(run.paths).step
        self.logged_after_sigterm = run.step()
        self._kill_everything()
        self.killed_at, self.orphans = self._kill_launcher()
        self.finished = self._finish_without_one_rank()

    def _start_and_wait(self) -> Started:
        there = self.run.step()
        started = self.run.start("train", *TWO_RANKS)
        wait_for_step(self.run, there + some_steps())
        return started

    def _terminate_twice(self) -> Outcome:
        started = self._start_and_wait()
        started.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
        for process in (started.process, *ranks()):
            process.send_signal(signal.SIGTERM)
        return started.end()

    def _kill_everything(self):
        there = self.run.step()
        started = self.run.fork("train", *TWO_RANKS)
        wait_for_step(self.run, there + some_steps())
        started.kill()

    def _kill_launcher(self):
        started = self._start_and_wait()
        orphans = ranks()
        for rank in orphans:  # else they may be gone before the next command looks for them
            rank.suspend()
        started.process.kill()
        started.end()
        return self.run.step(), orphans

    def _finish_without_one_rank(self) -> Outcome:
        started = self.run.start("train", *TWO_RANKS)
        wait_until(lambda: "waiting for" in started.output.read_text(), "it waits for them")
        for rank in self.orphans:
            rank.resume()
        wait_until(lambda: len(self.run.events("init")) == 4, "the fourth start")
        there = self.run.events("init")[-1]["step"]
        self.resumed_at = there
        self.orphans_left = [process for process in self.orphans if process.is_running()]
        wait_for_step(self.run, there + some_steps())
        ranks()[-1].kill()
        return started.end()


@pytest.fixture(scope="module")
def battered(session_runs):
    return Battered(session_runs("battered", *LONG))


def test_sigterm_ends_with_75_and_a_commit_and_nothing_left_running(battered):
    assert battered.terminated.code == 75, battered.terminated.text
    assert [(p, command_of(p)) for p in battered.left_after_sigterm] == []
    assert battered.step_after_sigterm == battered.logged_after_sigterm < GOAL
    assert battered.run.events("stop")[0]["cause"] == "SIGTERM"


def test_second_sigterm_during_the_stop_changes_nothing(battered):
    # It went to the launcher and to each rank.
    assert battered.run.events("stop")[0]["step"] == battered.step_after_sigterm
    assert "Traceback" not in battered.terminated.text


def test_ranks_of_a_killed_launcher_commit_and_the_same_command_resumes_there(battered):
    assert battered.resumed_at >= battered.killed_at
    assert battered.orphans_left == []
    assert re.search(r"waiting for \d processes of an earlier launch", battered.finished.text)


def test_loss_of_one_rank_is_recorded_and_made_good(battered):
    assert battered.finished.code == 0, battered.finished.text
    assert [event["attempt"] for event in battered.run.events("lost")] == [0]
    assert "restarting from the last checkpoint" in battered.finished.text


def test_run_hit_by_everything_ends_as_the_uninterrupted_one(battered, uninterrupted):
    assert battered.run.weights_digest() == uninterrupted.weights_digest()
    expected = dict(uninterrupted.losses())
    assert sorted(expected) == list(range(1, GOAL + 1))
    losses = battered.run.losses()
    assert {step for step, _ in losses} == set(expected)
    assert [entry for entry in losses if expected[entry[0]] != entry[1]] == []


@pytest.mark.weekly
def test_rank_that_is_aborted_while_it_waits_has_left_a_record_before(runs):
    """As NCCL does at its timeout, from a thread of C++."""
    limits = ("--machine.fabric.timeout_sec=20", "--machine.stop_grace_sec=10")
    run = runs("aborted", *ENDLESS, *limits)
    started = run.start("train", *TWO_RANKS)
    wait_for_step(run, 3)
    waiting, stopped = ranks()
    stopped.suspend()

    def is_recorded():
        files = run.paths.launches.glob("*/rank-*.provisional")
        # A start that takes long is recorded, too, until the watchdog looks again.
        return any(
            read_object_or_empty(file).get("activity", {}).get("waits", False) for file in files
        )

    wait_until(is_recorded, "the record of the watchdog")
    waiting.send_signal(signal.SIGABRT)
    wait_until(lambda: run.events("lost"), "the loss")
    [lost] = run.events("lost")
    assert re.search(
        r"did not arrive at the .+( does not respond|: stopped by SIGSTOP .*); rank \d saw:"
        r" no progress: in the .+ for \d+ s$",
        lost["message"],
    )
    wait_until(lambda: len(run.events("init")) == 2, "the restart")
    started.process.send_signal(signal.SIGTERM)
    assert started.end().code == 75


def test_each_way_to_stop_ends_with_75_and_its_cause(runs):
    ways = {
        "SIGUSR1": lambda run, pid: os.kill(pid, signal.SIGUSR1),
        "Ctrl-C": lambda run, pid: os.kill(pid, signal.SIGINT),
        "STOP file": lambda run, pid: run.paths.stop.touch(),
    }
    all_runs = {cause: runs(f"way{number}", *ENDLESS) for number, cause in enumerate(ways)}
    started = {cause: run.fork("train") for cause, run in all_runs.items()}
    for cause, run in all_runs.items():
        wait_for_step(run, 3)
        ways[cause](run, started[cause].process.pid)
    for cause, run in all_runs.items():
        outcome = started[cause].end()
        assert outcome.code == 75, outcome.text
        [stop] = run.events("stop")
        assert stop["cause"] == cause
        assert resume.latest(run.paths).step == stop["step"] == run.step()
    assert living() == []

    stopped = all_runs["STOP file"]
    again = stopped.forge("train")
    assert again.code == 75
    assert str(stopped.paths.stop) in again.text
    assert len(stopped.events("launch")) == 1


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_run_whose_directory_is_gone_ends_with_69_and_makes_no_other_one(runs, how):
    """Which would have neither config nor lock: a second command would write beside it."""
    run = runs(how, *ENDLESS, "--train.checkpoint_every=20")
    started = run.start("train", *TWO_RANKS)
    wait_until(lambda: run.events("save"), "a checkpoint")
    aside = run.folder.with_name("aside")
    run.folder.rename(aside)
    if how == "removed":
        shutil.rmtree(aside)
    outcome = started.end()
    assert outcome.code == 69, outcome.text
    assert f"{run.folder} was removed or moved while its ranks ran" in outcome.text
    assert "Traceback" not in outcome.text
    assert living() == []
    assert not run.folder.exists()
    if how == "moved":
        aside.rename(run.folder)
    begun = len(run.events("init"))
    again = run.start("train", *TWO_RANKS)
    wait_until(lambda: len(run.events("init")) > begun, "the next start")
    again.process.terminate()
    assert again.end().code == 75
    assert (run.events("init")[-1]["step"] >= 20) == (how == "moved")


def test_stop_before_the_ranks_are_up_stops_and_starts_nothing_again(runs):
    run = runs("early", *ENDLESS)
    started = run.start("train")
    wait_until(lambda: list(run.paths.launches.glob("*/launcher.pid")), "the launch")
    os.kill(started.process.pid, signal.SIGTERM)
    outcome = started.end()
    assert outcome.code == 75, outcome.text
    assert [stop["cause"] for stop in run.events("stop")] == ["SIGTERM"]
    assert len(run.events("launch")) == 1
    assert living() == []


def test_stop_at_step_0_keeps_nothing_and_changes_nothing(runs, uninterrupted):
    run = runs("at-zero", *LONG)
    outcome = run.fork("train", *TWO_RANKS, arm=stop_before_a_step).end()
    assert outcome.code == 75, outcome.text
    assert (run.step(), resume.latest(run.paths)) == (0, None)
    assert run.forge("train", *TWO_RANKS).code == 0
    assert run.weights_digest() == uninterrupted.weights_digest()
    assert run.losses() == uninterrupted.losses()


def test_deadline_stops_in_time_with_a_checkpoint(runs):
    run = runs("deadline", *ENDLESS)
    # A machine so busy that its ranks take seconds to start has nothing to commit: once more. A save
    # that was never measured is given 10 seconds.
    for minutes in (0.2, 0.5, 1, 2):
        stopped = run.forge("train", *TWO_RANKS, f"--machine.max_minutes={minutes}")
        assert stopped.code == 75, stopped.text
        if run.step():
            break
    stop, launch = run.events("stop")[-1], run.events("launch")[-1]
    assert stop["cause"] == "deadline"
    assert stop["step"] == run.step() == resume.latest(run.paths).step > 0
    # There a step or a save may also take seconds longer than any before it.
    late_sec = 0 if minutes == 0.2 else 5
    assert stop["time"] < launch["time"] + 60 * minutes + late_sec


def test_checkpoints_are_due_by_the_clock_as_well(runs):
    run = runs("clock", "--train.max_steps=60", "--train.checkpoint_minutes=0.0001")
    assert run.forge("train").code == 0
    saved = [save["step"] for save in run.events("save")]
    assert len(saved) > 10
    assert saved[-1] == 60


def interrupted_every(seconds, log):
    """An event log of 800 launches here today, each of which lost a rank."""
    for number in reversed(range(1, 801)):
        began = time.time() - 2 * number * seconds
        launch = happenings.launch(launch=str(number), host=hostname())
        for event, at in ((launch, 0), (happenings.lost(), seconds)):
            events.record(log, event.model_copy(update={"time": began + at}))


def test_automatic_interval_is_shorter_where_runs_are_interrupted(runs, tmp_path):
    """And changes no bit of what is trained."""
    calm = runs("calm", "--train.checkpoint_minutes=auto")
    assert calm.forge("train", *TWO_RANKS).code == 0  # by its save it is known what one costs
    stormy = calm.copy(tmp_path / "elsewhere" / "stormy")
    interrupted_every(2, stormy.folder.parent / "other" / "events.jsonl")
    endless = ("--train.checkpoint_every=1000000", "--train.max_steps=1000000")
    both = [run.fork("train", *TWO_RANKS, *endless) for run in (calm, stormy)]
    wait_until(lambda: len(stormy.events("save")) >= 2, "a save by the clock")
    assert len(calm.events("save")) == 1
    saved_at = stormy.events("save")[-1]["step"]
    wait_until(lambda: min(calm.step(), stormy.step()) > saved_at + 5, "steps after that save")
    for started in both:
        started.process.terminate()
    assert [started.end().code for started in both] == [75, 75]
    often, rarely = (run.events("forecast")[-1]["interval"] for run in (stormy, calm))
    assert often < rarely / 5
    assert "0 of 800 with time for a save" in stormy.events("forecast")[-1]["basis"]
    losses, others = dict(calm.losses()), dict(stormy.losses())
    common = losses.keys() & others.keys()
    assert max(common) > saved_at
    assert [losses[step] for step in common] == [others[step] for step in common]
    saved = resume.latest(stormy.paths)  # a commit needs the parts of all ranks, of one step
    assert saved.step == stormy.events("stop")[-1]["step"] == stormy.step()


def test_starts_that_get_nowhere_end_with_70_and_their_reasons_and_then_may_continue(runs):
    run = runs("stuck", *ENDLESS)
    limit = "--machine.max_restarts_without_progress=2"
    for number in (1, 2):
        started = run.fork("train", limit)
        wait_until(lambda: len(run.events("init")) == number, "the start")  # noqa: B023
        started.kill()
    stuck = run.forge("train", limit)
    assert stuck.code == 70
    assert "2 launches in a row did not get beyond step 0" in stuck.text
    assert stuck.text.count("no end is recorded") == 2
    again = run.fork("train", limit)
    wait_for_step(run, 3)
    again.process.terminate()
    assert again.end().code == 75


def test_corrupt_newest_checkpoint_costs_one_interval_and_no_bit_of_the_end(
    uninterrupted, tmp_path
):
    run = uninterrupted.copy(tmp_path / "damaged")
    run.paths.trained.unlink()
    file = next(resume.latest(run.paths).folder.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = run.forge("train", *TWO_RANKS, "--train.max_steps=201")
    assert again.code == 0, again.text
    assert "has digest" in again.text
    assert [event["checkpoint"] for event in run.events("quarantine")] == ["step-00000200"]
    assert run.events("init")[-1]["step"] == 195
    assert run.losses()[-6:-1] == uninterrupted.losses()[-5:]
