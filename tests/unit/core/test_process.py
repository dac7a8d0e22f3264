"""Whether a recorded process still runs: a reused pid blocks a run for ever."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from functools import partial

import pytest

from forge import worker
from forge.core import process
from forge.core.process import MAX_OPEN_FILES, Process


@pytest.mark.parametrize(
    ("job", "user", "folder"),
    [("/job", "/user", "/job"), ("", "/user", "/user"), ("", "", "/tmp")],
)
def test_node_local_folder_is_the_jobs_then_the_users(monkeypatch, job, user, folder):
    monkeypatch.setenv("SLURM_TMPDIR", job)
    monkeypatch.setenv("TMPDIR", user)
    assert str(process.node_local_folder()) == folder


def test_threads_that_snakemake_sets_are_not_the_users(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("FORGE_USER_OMP_NUM_THREADS", "")
    monkeypatch.setenv("FORGE_IN_WORKFLOW", "1")
    assert process.user_threads() is None
    monkeypatch.setenv("FORGE_USER_OMP_NUM_THREADS", "6")
    assert process.user_threads() == "6"
    monkeypatch.setenv("FORGE_IN_WORKFLOW", "")
    assert process.user_threads() == "2"


@pytest.mark.parametrize(
    ("variables", "start"),
    [
        ({}, ("", None)),
        ({"SLURM_JOB_ID": "7"}, ("7", 0)),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, ("7", 2)),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, ("7", None)),  # Slurm does not say it there
        ({"SLURM_JOB_ID": "7", "FORGE_SLURM_START": "7:1"}, ("7", 1)),  # a rule
        ({"FORGE_SLURM_START": "7:1"}, ("7", 1)),  # a Snakemake whose jobs are others
        ({"SLURM_JOB_ID": "8", "FORGE_SLURM_START": "7:1"}, ("8", 0)),  # one of those
        ({"FORGE_SLURM_START": "7:"}, ("7", None)),
    ],
)
def test_start_of_a_job_is_known_to_all_that_belongs_to_it(monkeypatch, variables, start):
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "FORGE_SLURM_START"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert process.slurm_start() == start
    if start[0]:
        kept = process.slurm_start_variable()["FORGE_SLURM_START"]
        assert kept == f"{start[0]}:{'' if start[1] is None else start[1]}"


def test_a_living_process_is_alive_and_survives_json():
    me = Process.current()
    assert Process.from_json(me.to_json()) == me
    assert me.is_here
    assert me.life() == "alive"
    with pytest.raises(KeyError):
        Process.from_json({"host": me.host, "pid": me.pid})


def test_a_reused_pid_is_not_alive():
    me = Process.current()
    assert replace(me, start_ticks=me.start_ticks - 1).life() == "gone"


@pytest.mark.parametrize(
    ("facts", "life"),
    [
        ({}, "gone"),
        ({"machine_id": "of another machine"}, "unknown"),
        ({"machine_id": ""}, "unknown"),
        ({"slurm_job": "17"}, "unknown"),
    ],
    ids=["this host", "another of its name", "a container", "a job, which Slurm is asked for"],
)
def test_a_process_before_the_last_boot_is_gone_and_one_of_another_host_of_the_name_is_not(
    monkeypatch, facts, life
):
    monkeypatch.setattr(process, "_machine_id", lambda: "of this machine")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert replace(Process.current(), boot_id=str(uuid.uuid4()), **facts).life() == life


def test_without_a_machine_id_no_reboot_is_known(monkeypatch):
    monkeypatch.setattr(process, "_machine_id", lambda: "")
    assert replace(Process.current(), boot_id=str(uuid.uuid4())).life() == "unknown"


@pytest.fixture
def contained():
    """The first process of a pid namespace, as in a container, and what it says of itself."""
    code = (
        "import json; from forge.core.process import Process\n"
        "print(json.dumps(Process.current().to_json()), flush=True); input()"
    )
    line = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        if not (said := child.stdout.readline()):
            pytest.skip(f"may not make a pid namespace here: {child.stderr.read().strip()}")
        yield child, Process.from_json(json.loads(said))
        child.kill()


def test_a_process_in_a_container_is_seen_from_outside_of_all_and_else_not_called_gone(
    monkeypatch, contained
):
    child, inside = contained
    me = Process.current()
    assert (inside.host, inside.boot_id) == (me.host, me.boot_id) and not inside.is_here
    monkeypatch.setattr(process, "INITIAL_NAMESPACE", 0)
    assert inside.life() == "unknown"
    # This namespace contains that of the child, as the initial one contains all.
    monkeypatch.setattr(process, "INITIAL_NAMESPACE", me.pid_namespace)
    assert inside.life() == "alive"
    assert replace(inside, pid=inside.pid + 1).life() == "gone"
    child.communicate("")
    assert inside.life() == "gone"
    monkeypatch.setattr(process, "_sees_all", lambda: False)
    assert inside.life() == "unknown"


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
        seen = Process.of(child.pid)
        assert seen.life() == "alive"
    assert before <= seen.start_ticks <= ticks()


def test_a_pid_that_nobody_has_is_no_process():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    with pytest.raises(ProcessLookupError, match=f"no process {child.pid} on"):
        Process.of(child.pid)


@pytest.mark.parametrize(
    ("error", "life"), [(PermissionError, "alive"), (ProcessLookupError, "gone")]
)
def test_a_process_that_proc_hides_may_be_alive(monkeypatch, error, life):
    """With hidepid, /proc shows only one's own processes."""

    def kill(pid, number):
        assert number == 0
        raise error

    me = Process.current()
    monkeypatch.setattr(process, "_state_and_start", lambda pid: None)
    monkeypatch.setattr(os, "kill", kill)
    assert me.life() == life


@pytest.mark.parametrize("hidepid", [1, 2])
def test_process_of_another_user_is_alive_whatever_hidepid_proc_is_mounted_with(hidepid):
    """With 1 its files may not be read, with 2 they are not there."""
    code = (
        "import os; from forge.core.process import Process\n"
        "root = Process.current()\n"
        "if not os.fork():\n"
        "    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "    print(root.life(), flush=True); os._exit(0)\n"
        "os.wait()"
    )
    mounted = f'mount -t proc -o hidepid={hidepid} proc /proc && echo mounted && exec "$@"'
    unshared = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", mounted, "sh"]
    line = [*unshared, sys.executable, "-c", code]
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    if not done.stdout.startswith("mounted\n"):
        pytest.skip(f"may not mount /proc here: {done.stderr.strip()}")
    assert done.stdout == "mounted\nalive\n", done.stderr


def test_a_zombie_is_not_alive_and_neither_is_what_is_gone():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = Process.of(child.pid)
    assert seen.life() == "alive"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has asked yet
    assert seen.life() == "gone"
    child.wait()
    assert seen.life() == "gone"


def test_a_child_gets_sigterm_when_its_parent_is_killed(tmp_path):
    grandchild = (
        "import signal, sys, time; from pathlib import Path\n"
        "from forge.core.process import stop_with_parent\n"
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


@pytest.mark.parametrize(
    ("limits", "most"), [("-Sn 100", None), ("-n 100", 100), ("-Sn 100; ulimit -Hn 300", 300)]
)
def test_open_files_are_raised_to_what_the_system_allows(limits, most):
    """In a process of its own: the hard limit cannot be raised again."""
    code = (
        "import resource\n"
        "from forge.core.process import raise_open_files\n"
        "print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run(
        ["bash", "-c", f"ulimit {limits}; exec {sys.executable} -c '{code}'"],
        check=True,
        capture_output=True,
        text=True,
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allowed = most or (MAX_OPEN_FILES if hard < 0 else min(hard, MAX_OPEN_FILES))
    assert done.stdout.split() == [str(allowed)] * 2


@pytest.mark.parametrize(("exported", "left"), [({}, 0), ({"FORGE_CORE_DUMPS": "1"}, 1024**2)])
def test_ranks_that_crash_write_no_core_files_unless_the_user_wants_them(exported, left):
    """They filled the disk of the project. In a process of its own: its limits are changed."""
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (1024**2, 2 * 1024**2))\n"
        "from forge.core.process import limit_core_dumps\n"
        "limit_core_dumps()\n"
        "print(*resource.getrlimit(resource.RLIMIT_CORE))"
    )
    if 0 <= resource.getrlimit(resource.RLIMIT_CORE)[1] < 2 * 1024**2:
        pytest.skip("the hard limit of this process is lower")
    env = {name: value for name, value in os.environ.items() if name != "FORGE_CORE_DUMPS"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env | exported
    )
    assert [int(limit) for limit in done.stdout.split()] == [left, 2 * 1024**2]


def test_a_rank_limits_its_core_files_before_anything_else_can_crash(monkeypatch):
    called = []
    for name in ("stop_with_parent", "raise_open_files", "limit_core_dumps"):
        monkeypatch.setattr(worker, name, partial(called.append, name))
    monkeypatch.setattr(worker, "LaunchSpec", None)
    with pytest.raises(AttributeError):
        worker.main("spec.json")
    assert "limit_core_dumps" in called
