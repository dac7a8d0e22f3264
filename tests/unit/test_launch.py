"""Who a process is: a wrong rank trains one model eight times, a reused pid blocks a run for ever."""

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace

import pytest

from forge import launch
from forge.errors import ConfigError
from forge.launch import Process, Rank, this_rank

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*NAMES, *SLURM):
        # Set first, so that what this_rank sets is taken back after the test.
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


def export(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_process_without_launcher_is_the_only_rank():
    assert this_rank(1, 1) == Rank(0, 0, 1, 1)
    assert this_rank(1, 1).is_main
    assert [os.environ[name] for name in NAMES] == ["0", "0", "1"]


def test_rank_comes_from_torchrun(monkeypatch):
    export(monkeypatch, RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", **SLURM)
    assert this_rank(4, 2) == Rank(3, 1, 4, 2)


def test_rank_falls_back_to_slurm_and_torch_sees_it(monkeypatch):
    export(monkeypatch, **SLURM)
    assert this_rank(8, 2) == Rank(5, 1, 8, 2)
    assert not this_rank(8, 2).is_main
    assert [os.environ[name] for name in NAMES] == ["5", "1", "8"]


def test_empty_values_count_as_none(monkeypatch):
    export(monkeypatch, RANK="", LOCAL_RANK="", WORLD_SIZE="", **SLURM)
    assert this_rank(8, 2) == Rank(5, 1, 8, 2)
    export(monkeypatch, **dict.fromkeys((*NAMES, *SLURM), ""))
    assert this_rank(1, 1) == Rank(0, 0, 1, 1)


def test_world_of_another_size_is_refused_with_both_numbers(monkeypatch):
    export(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    with pytest.raises(ConfigError, match=r"world of 1, the geometry says 2") as caught:
        this_rank(2, 2)
    assert "unset RANK" in caught.value.fix


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "3", "WORLD_SIZE": "1"}, "RANK=3, WORLD_SIZE=1, so this would be rank 3 of 1"),
        ({"RANK": "-1"}, "RANK=-1, so this would be rank -1 of 1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2, so this would be"),
        ({"RANK": "first"}, "RANK=first, which are not all numbers"),
        (
            {"RANK": "2", "WORLD_SIZE": "8", **SLURM},
            "RANK=2, WORLD_SIZE=8, but Slurm started this process as task 5",
        ),
    ],
)
def test_variables_left_over_in_the_shell_are_named(monkeypatch, values, message):
    export(monkeypatch, **values)
    with pytest.raises(ConfigError, match=message) as caught:
        this_rank(int(values.get("WORLD_SIZE", 1)), 1)
    assert caught.value.fix.startswith("unset ")
    assert 0 <= launch.rank_for_record(4) < 4


def test_ranks_of_torchrun_may_have_other_numbers_than_slurms_tasks(monkeypatch):
    export(monkeypatch, RANK="2", LOCAL_RANK="0", WORLD_SIZE="8", TORCHELASTIC_RUN_ID="x", **SLURM)
    assert this_rank(8, 1).rank == 2


@pytest.mark.parametrize(
    ("job", "user", "folder"),
    [("/job", "/user", "/job"), ("", "/user", "/user"), ("", "", "/tmp")],
)
def test_node_local_folder_is_the_jobs_then_the_users(monkeypatch, job, user, folder):
    export(monkeypatch, SLURM_TMPDIR=job, TMPDIR=user)
    assert str(launch.node_local_folder()) == folder


def test_threads_that_snakemake_sets_are_not_the_users(monkeypatch):
    export(monkeypatch, OMP_NUM_THREADS="2", FORGE_USER_OMP_NUM_THREADS="", FORGE_IN_WORKFLOW="1")
    assert launch.user_threads() is None
    export(monkeypatch, FORGE_USER_OMP_NUM_THREADS="6")
    assert launch.user_threads() == "6"
    export(monkeypatch, FORGE_IN_WORKFLOW="")
    assert launch.user_threads() == "2"


# --- identity of a process ------------------------------------------------------------------------


def test_a_living_process_is_alive_and_survives_json():
    me = Process.current()
    assert Process.from_json(me.to_json()) == me
    assert me.is_here
    assert me.is_alive()


def test_a_reused_pid_is_not_alive():
    me = Process.current()
    assert not replace(me, start_ticks=me.start_ticks - 1).is_alive()


def test_a_pid_of_another_boot_is_not_alive():
    me = Process.current()
    assert not replace(me, boot_id=str(uuid.uuid4())).is_alive()


def test_start_is_counted_from_boot_whatever_the_process_is_called():
    def ticks():
        return time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")

    before = int(ticks())
    # Blanks and brackets in the name must not shift the fields behind it.
    code = "open('/proc/self/comm', 'w').write('a) Z 1 (b'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        process = Process.of(child.pid)
        assert process.is_alive()
    assert before <= process.start_ticks <= ticks()


def test_a_pid_that_nobody_has_is_no_process():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    with pytest.raises(ProcessLookupError, match=f"no process {child.pid} on"):
        Process.of(child.pid)


@pytest.mark.parametrize(("error", "alive"), [(PermissionError, True), (ProcessLookupError, False)])
def test_a_process_that_proc_hides_may_be_alive(monkeypatch, error, alive):
    """With hidepid, /proc shows only one's own processes."""

    def kill(pid, number):
        assert number == 0
        raise error

    me = Process.current()
    monkeypatch.setattr(launch, "_state_and_start", lambda pid: None)
    monkeypatch.setattr(os, "kill", kill)
    assert me.is_alive() == alive


def test_a_process_that_an_earlier_version_wrote_down_is_known_by_its_pid():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        old = {"host": launch.hostname(), "pid": child.pid, "started": 1.5, "slurm_job": None}
        process = Process.from_json(old)
        assert process.is_here and process.is_alive()
    assert not process.is_alive()


def test_a_zombie_is_not_alive_and_neither_is_what_is_gone():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(child.pid)
    assert process.is_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has asked yet
    assert not process.is_alive()
    child.wait()
    assert not process.is_alive()


def test_a_child_gets_sigterm_when_its_parent_is_killed(tmp_path):
    grandchild = (
        "import signal, sys, time; from pathlib import Path\n"
        "from forge.launch import stop_with_parent\n"
        "def leave(number, _): Path(sys.argv[1]).write_text(signal.Signals(number).name); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave); stop_with_parent()\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    parent_code = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    last_word = tmp_path / "last"
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, grandchild, str(last_word)], stdout=subprocess.PIPE
    )
    assert parent.stdout.readline() == b"ready\n"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while not (last_word.exists() and last_word.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert last_word.read_text() == "SIGTERM"
