"""Two writers of one folder destroy a run: a living holder is refused by name, a dead one replaced."""

import json
import os
import subprocess
import sys
import time

import pytest

from forge import slurm
from forge.errors import UnfitError
from forge.launch import Process, hostname
from forge.lease import check_held, lease


def test_second_writer_is_refused_with_pid_and_host(tmp_path):
    with (
        lease(tmp_path, "train"),
        pytest.raises(UnfitError) as caught,
        lease(tmp_path, "preflight"),
    ):
        pass
    message = str(caught.value)
    assert f"`forge train` (pid {os.getpid()} on {hostname()}" in message


def test_lease_is_given_back(tmp_path):
    with lease(tmp_path, "train"):
        pass
    with lease(tmp_path, "train"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lease_of_a_killed_process_is_taken_over(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from forge.lease import lease\n"
        "with lease(Path(sys.argv[1]), 'train'): print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    with pytest.raises(UnfitError, match=f"pid {child.pid}"), lease(tmp_path, "train"):
        pass
    child.kill()
    child.wait()
    with lease(tmp_path, "train"):
        assert json.loads((tmp_path / ".lease").read_text())["pid"] == os.getpid()


def test_a_reused_pid_does_not_hold_a_lease(tmp_path):
    stale = {**Process.current().to_json(), "verb": "train"}
    stale["started"] = time.time() - 10**6
    (tmp_path / ".lease").write_text(json.dumps(stale))
    with lease(tmp_path, "train"):
        pass


def held_by_job(folder, restart=0):
    there = {**Process.current().to_json(), "host": "node07", "slurm_job": "42"}
    (folder / ".lease").write_text(json.dumps({**there, "verb": "train", "restart": restart}))


@pytest.fixture
def slurm_says(monkeypatch):
    def set_job(state, restarts=0):
        job = slurm.Job("42", state, restarts, (), 1, "gpu", "x", True, None) if state else None
        monkeypatch.setattr(slurm, "is_here", lambda: True)
        monkeypatch.setattr(slurm, "show_job", lambda _: job)

    return set_job


@pytest.mark.parametrize(("state", "restarts"), [(None, 0), ("COMPLETED", 0), ("RUNNING", 1)])
def test_lease_of_a_slurm_job_that_ended_or_restarted_is_taken_over(
    tmp_path, slurm_says, state, restarts
):
    held_by_job(tmp_path)
    slurm_says(state, restarts)
    with lease(tmp_path, "train"):
        assert json.loads((tmp_path / ".lease").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "PENDING"])
def test_lease_of_a_slurm_job_that_goes_on_is_refused_by_its_number(tmp_path, slurm_says, state):
    held_by_job(tmp_path)
    slurm_says(state)
    with pytest.raises(UnfitError, match=f"job 42 is {state}") as caught, lease(tmp_path, "train"):
        pass
    assert "scancel 42" in caught.value.fix


def test_holder_on_another_host_is_refused_with_what_to_do(tmp_path):
    held = {**Process.current().to_json(), "verb": "train", "host": "elsewhere", "slurm_job": "42"}
    (tmp_path / ".lease").write_text(json.dumps(held))
    with pytest.raises(UnfitError) as caught, lease(tmp_path, "train"):
        pass
    assert "Slurm job 42" in str(caught.value)
    assert f"rm {tmp_path}/.lease" in str(caught.value)


def test_damaged_lease_does_not_lock_a_run_for_ever(tmp_path):
    (tmp_path / ".lease").write_text("{half")
    with lease(tmp_path, "train"):
        pass


def test_of_many_starts_at_once_exactly_one_wins(tmp_path):
    stale = {**Process.current().to_json(), "verb": "train", "started": 1.0}
    (tmp_path / ".lease").write_text(json.dumps(stale))
    code = (
        "import sys, time; from pathlib import Path; from forge.lease import lease\n"
        "from forge.errors import UnfitError\n"
        "sys.stdin.readline()\n"
        "try:\n"
        "    with lease(Path(sys.argv[1]), 'train'):\n"
        "        print('won', flush=True); sys.stdin.readline()\n"
        "except UnfitError: print('refused', flush=True)\n"
    )
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for start in starts:
        start.stdin.write("go\n")
        start.stdin.flush()
    outcomes = [start.stdout.readline().strip() for start in starts]
    for start in starts:
        start.communicate("done\n", timeout=30)
    assert sorted(outcomes) == ["refused"] * 5 + ["won"]


def test_a_node_that_was_cut_off_is_told_that_the_run_went_on_elsewhere(tmp_path):
    mine = Process.current().to_json()
    with lease(tmp_path, "train"):
        check_held(tmp_path, mine)
    check_held(tmp_path, mine)  # nobody
    held_by_job(tmp_path)
    with pytest.raises(UnfitError, match=r"held by `forge train` .* on node07, Slurm job 42"):
        check_held(tmp_path, mine)
