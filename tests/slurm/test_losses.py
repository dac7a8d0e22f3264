"""Nodes, ranks and daemons that are lost in the middle of a training: it goes on by itself, from the
last checkpoint at the latest, and ends with the weights of the uninterrupted run."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest

from forge.slurm import slurm

from .job_run import MOST_LOST, PAUSES, JobRun, Uninterrupted

NewRun = Callable[..., JobRun]


@pytest.mark.parametrize(
    ("launcher", "cuts"),
    [
        ("srun", ["power_cut", "cable_cut"]),
        pytest.param("torchrun", ["power_cut"], marks=pytest.mark.weekly),
    ],
)
def test_killed_rank_restarts_inside_the_allocation_and_cut_off_nodes_send_the_job_to_others(
    new_run: NewRun,
    uninterrupted: Uninterrupted,
    launcher: str,
    cuts: list[str],
) -> None:
    first, *others = PAUSES[: 1 + len(cuts)]
    run = new_run(launcher, on=2 + len(cuts), pauses=[first, *others])
    job = run.submit()
    times = [run.during_pause(first, lambda: run.ranks()[-1].send_signal(signal.SIGKILL))]
    run.wait_for_pause(others[0])
    assert len(run.events("launch")) == 2
    assert run.cluster.job(job)["Restarts"] == "0"
    for pause, cut in zip(others, cuts, strict=True):
        run.wait_for_pause(pause)
        lost = run.events("launch")[-1]["nodes"][1]
        times.append(run.during_pause(pause, partial(getattr(run.cluster, cut), lost)))
    ended = run.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED"
    assert int(ended["Restarts"]) == len(cuts)
    uninterrupted.equals(run)
    assert max(map(run.steps_lost, times)) <= MOST_LOST


def test_node_of_a_rank_that_is_stopped_is_checked_and_a_spare_takes_its_place(
    new_run: NewRun, uninterrupted: Uninterrupted
) -> None:
    run = new_run("srun", on=3)
    job = run.submit(nodes=3)
    run.wait_for_pause()
    first, second = run.ranks()
    # Stopped inside a collective, mostly: Slurm continues it when the other one has failed, and then both
    # have waited in the same one. What is asserted holds as well where it has not come that far.
    first.suspend()
    run.end_pause()
    time.sleep(1)
    second.suspend()
    first.resume()
    ended = run.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), run.said()
    [lost] = run.events("lost")
    found = re.match(
        r"rank \d of 2 on (\w+) did not arrive at .*: stopped by SIGSTOP \(pid \d+, state T\); rank",
        lost["message"],
    )
    assert found, lost["message"]
    assert f"checking {found[1]}, on which a rank hung" in run.output.read_text()
    before, after = (launch["nodes"] for launch in run.events("launch"))
    assert found[1] in before and found[1] not in after
    assert not run.paths.bad_nodes.exists()
    uninterrupted.equals(run)


def test_job_whose_gpu_fails_is_requeued_without_that_node(
    new_run: NewRun, uninterrupted: Uninterrupted
) -> None:
    run = new_run("srun", on=3)
    job = run.submit()
    run.wait_for_pause()
    excluded = set(slurm.expand(run.cluster.job(job)["ExcNodeList"]))
    bad = run.events("launch")[0]["nodes"][1]
    run.fail_gpu(bad)
    run.end_pause()
    ended = run.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), run.said()
    assert set(slurm.expand(ended["ExcNodeList"])) == excluded | {bad}
    assert bad in run.paths.bad_nodes.read_text()
    assert bad not in run.events("launch")[-1]["nodes"]
    uninterrupted.equals(run)
