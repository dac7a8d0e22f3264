"""A node that is frozen, dead or wrong must be named within the deadline, and hold up nobody else.

Processes on this host stand in for nodes: each host's command may be another one.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from forge.core.errors import UnfitError
from forge.core.process import hostname
from forge.hosts import nodes
from forge.hosts.nodes import NodeFailure, NodePool, hello
from forge.hosts.placement import Placement
from forge.preflight import packages
from forge.slurm import slurm
from forge.staging import on_node

NODE = [sys.executable, "-m", "forge.node_agent"]
FROZEN = ["sleep", "60"]
DEAD = ["sh", "-c", "echo no such node >&2; exit 1"]
JUST_STARTED = (
    "srun: error: Unable to create step for job 1: Memory required by task is not available"
)
CHATTY = ["sh", "-c", f'echo "Welcome to this site"; exec {sys.executable} -m forge.node_agent']


# Killed by the first request, or by the first but for `hello`, in as many starts as its second argument
# says.
KILLED = """
import os, signal, sys
from pathlib import Path
from forge import node_agent
starts = Path(sys.argv[1])
with open(starts, "a") as file:
    file.write("x")
respond = node_agent.respond
def until_killed(line):
    if sys.argv[3] not in line and len(starts.read_text()) <= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return respond(line)
node_agent.respond = until_killed
node_agent.main()
"""


def test_agent_gets_all_cores_that_the_job_has_on_its_node():
    """With one core, preflight took good nodes for small ones, and copies were slow."""
    job = slurm.parse_job("JobId=7 JobState=RUNNING NumTasks=2 CPUs/Task=8")
    assert NodePool(Placement(("n1", "n2"), job), python="python")._command("n2") == [
        *("srun", "--jobid=7", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--nodelist=n2"),
        *("--mpi=none", "--export=ALL", "--overlap", f"--job-name=pool-{os.getpid()}"),
        *("python", "-m", "forge.node_agent"),
    ]


@pytest.fixture
def pool_of(monkeypatch):
    """pool_of(a=NODE, b=FROZEN): hosts a and b, each answered for by a local process."""
    monkeypatch.setattr(nodes, "END_SEC", 0.5)

    def make(start_sec=10, **commands):
        monkeypatch.setattr(NodePool, "_command", lambda self, host: commands[host])
        return NodePool(Placement(tuple(commands)), start_sec=start_sec)

    return make


def pids(asked):
    return [member._process.pid for member in asked._members.values()]


def test_this_host_answers_without_srun():
    with NodePool(Placement.here()) as here:
        answers = here.ask(hello, timeout_sec=5)
    assert answers[hostname()].host == hostname()
    assert answers[hostname()].pid != os.getpid()


def test_frozen_node_is_named_in_time_and_holds_up_nobody(pool_of):
    with pool_of(start_sec=4, a=NODE, b=FROZEN) as both:
        started = time.monotonic()
        answers = both.ask(hello, timeout_sec=30)
        assert time.monotonic() - started < 5
    assert answers["a"].host == hostname()
    assert answers["b"] == NodeFailure("no answer to 'hello' within 4 s")


def test_dead_node_is_named_with_its_last_words(pool_of):
    with pool_of(a=NODE, b=DEAD) as both:
        answers = both.ask(hello, timeout_sec=5)
    assert answers["a"].host == hostname()
    assert answers["b"].message == "its process ended: no such node"


def test_node_that_freezes_later_misses_only_its_own_deadline(pool_of):
    with pool_of(a=NODE, b=NODE) as both:
        frozen = both.ask(hello, timeout_sec=5)["b"].pid
        os.kill(frozen, signal.SIGSTOP)
        answers = both.ask(hello, timeout_sec=0.5)
        assert answers["a"].host == hostname()
        assert isinstance(answers["b"], NodeFailure)
        os.kill(frozen, signal.SIGCONT)
        # The late answer is not taken for the one to this question.
        late = both.ask(on_node.begin, timeout_sec=5, temporary="/proc/no")["b"]
        assert isinstance(late, NodeFailure)
        assert both.ask(hello, timeout_sec=5)["b"].pid == frozen


@pytest.mark.parametrize(
    ("kills", "but_for", "again"),
    [(1, "hello", True), (1, "none", True), (9, "hello", True), (1, "hello", False)],
)
def test_killed_agent_is_asked_once_more_and_blames_no_node(
    pool_of, tmp_path, kills, but_for, again
):
    starts = tmp_path / "starts"
    killed = [sys.executable, "-c", KILLED, str(starts), str(kills), but_for]
    with pool_of(a=NODE, b=killed) as both:
        before = both.ask(hello, timeout_sec=20)["a"].pid
        each = {name: {"temporary": str(tmp_path / name / "new")} for name in "ab"}
        found = both.ask(on_node.begin, timeout_sec=20, again=again, each=each)
        assert both.ask(hello, timeout_sec=20)["a"].pid == before
    assert found["a"] is None
    if (kills, again) == (1, True):
        assert (found["b"], starts.read_text()) == (None, "xx")
    else:
        assert found["b"].message.startswith("its process ended: ")


def test_agent_that_was_killed_between_two_requests_is_started_again(pool_of):
    with pool_of(a=NODE, b=NODE) as both:
        first = both.ask(hello, timeout_sec=20)
        os.kill(first["b"].pid, signal.SIGKILL)
        second = both.ask(hello, timeout_sec=20)
    assert second["a"] == first["a"]
    assert second["b"].pid != first["b"].pid


def test_error_of_a_node_comes_with_cause_and_fix(pool_of, tmp_path):
    (tmp_path / f"forge-{os.getuid()}").symlink_to(tmp_path)
    of_set = {"kind": "shards", "digest": "d", "shared": "/"}
    arguments = {**of_set, "job": None, "sender": "localhost", "mode": "always", "goes_away": True}
    with pool_of(a=NODE) as one:
        answers = one.ask(on_node.look, timeout_sec=5, base=str(tmp_path), **arguments)
    assert "planted link" in answers["a"].message
    assert "another user" in answers["a"].cause
    assert "stage.folder" in answers["a"].fix
    with pytest.raises(UnfitError, match=r"looking failed on node a: .*planted link"):
        raise nodes.failed_on(answers, "looking")


def test_each_host_gets_its_own_arguments(pool_of, tmp_path):
    for name in "ab":
        (tmp_path / name / "old").mkdir(parents=True)
    with pool_of(a=NODE, b=NODE) as both:
        each = {name: {"root": str(tmp_path / name)} for name in "ab"}
        answers = both.ask(on_node.forget, timeout_sec=5, hosts=["b"], each=each, names=["old"])
    assert list(answers) == ["b"]
    assert [(tmp_path / name / "old").exists() for name in "ab"] == [True, False]


def test_words_of_a_site_are_no_answers(pool_of):
    with pool_of(a=CHATTY) as one:
        assert one.ask(hello, timeout_sec=5)["a"].host == hostname()


def nonsense():
    """No request."""


def test_bug_in_a_question_ends_the_node_and_shows_its_traceback(pool_of):
    with pool_of(a=NODE) as one:
        assert "KeyError: 'nonsense'" in one.ask(nonsense, timeout_sec=5)["a"].message


def test_answer_of_another_version_of_forge_is_a_failure_of_the_node(pool_of):
    old = """import json, sys
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "value": {"host": "a"}}), flush=True)
"""
    with pool_of(a=[sys.executable, "-c", old]) as one:
        failure = one.ask(hello, timeout_sec=5)["a"]
    assert "its answer to 'hello' cannot be read: " in failure.message
    assert "another version of Forge" in failure.cause


def test_large_question_reaches_a_node_that_reads_slowly(pool_of):
    slow = ["sh", "-c", f"sleep 0.3; exec {sys.executable} -m forge.node_agent"]
    with pool_of(a=slow) as one:
        names = ["x" * 100] * 5000  # half a megabyte, a pipe holds 64 KiB
        free = one.ask(on_node.forget, timeout_sec=10, root="/nowhere", names=names)["a"]
        assert "No such file" in free.message


def test_no_process_is_left_whatever_state_it_was_in(pool_of):
    with pool_of(start_sec=0.5, a=NODE, b=FROZEN, c=DEAD) as three:
        processes = pids(three)
    assert not [pid for pid in processes if psutil.pid_exists(pid)]


def test_steps_of_nodes_that_do_not_end_are_cancelled(pool_of, monkeypatch):
    cancelled = []
    monkeypatch.setattr(slurm, "cancel_step", lambda job, name: cancelled.append((job, name)))
    asked = pool_of(start_sec=0.5, a=NODE, b=FROZEN)
    job = slurm.parse_job("JobId=7 JobState=RUNNING")
    asked.placement = Placement(asked.placement.hosts, job)
    with asked:
        pass
    assert cancelled == [("7", f"pool-{os.getpid()}")]


def test_nodes_end_with_a_verb_that_was_killed():
    code = textwrap.dedent("""
        import time
        from forge.hosts.nodes import NodePool, hello
        from forge.hosts.placement import Placement
        with NodePool(Placement.here()) as here:
            print(*[a.pid for a in here.ask(hello, timeout_sec=5).values()], flush=True)
            time.sleep(60)
    """)
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    node = psutil.Process(int(command.stdout.readline()))
    command.kill()
    command.wait()
    assert psutil.wait_procs([node], timeout=5)[1] == []


# --- which nodes still start a process ------------------------------------------------------------

JOB = slurm.Job("42", "RUNNING", 0, ("n1", "n2"), 1, "gpu", "x", True, None)


@pytest.mark.parametrize(
    ("trouble", "controller", "unresponsive"),
    [
        ("srun: error: Unable to create step: Unable to contact slurm controller", "", []),
        (JUST_STARTED, "", []),
        ("no answer within 20 s", "Unable to contact slurm controller (connect failure)", []),
        ("no answer within 20 s", "", ["n1", "n2"]),
        ("", "", []),
    ],
)
def test_no_node_is_blamed_for_a_controller_that_is_away(
    monkeypatch, trouble, controller, unresponsive
):
    monkeypatch.setattr(slurm, "PATIENCE_SEC", -1)
    answers = {"srun": ("", trouble), "scontrol": ("", controller)}
    monkeypatch.setattr(slurm, "run", lambda command, **_: answers[command[0]])
    assert nodes.unresponsive(Placement(("n1", "n2"), JOB)) == unresponsive


def test_nodes_are_asked_once_beside_other_work_and_an_error_is_raised_where_it_is_awaited(
    monkeypatch,
):
    calls = []
    monkeypatch.setattr(nodes, "unresponsive", lambda placement: calls.append(placement) or ["n2"])
    asked = nodes.UnresponsiveNodes(Placement(("n1", "n2"), JOB))
    asked.ask()
    asked.ask()
    assert asked.names() == asked.names() == ["n2"]
    assert len(calls) == 1

    def failing(_):
        raise slurm.SlurmSilent("away")

    monkeypatch.setattr(nodes, "unresponsive", failing)
    with pytest.raises(slurm.SlurmSilent, match="away"):
        nodes.UnresponsiveNodes(Placement(("n1",), JOB)).names()


def test_process_that_waits_in_the_kernel_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(nodes, "END_SEC", 0.1)
    member = nodes._Member([sys.executable, "-c", "import time; time.sleep(20)"], Placement.here())
    with monkeypatch.context() as stuck:
        stuck.setattr(member._process, "kill", lambda: None)
        member.release()
    assert member._process.poll() is None
    member._process.kill()
    member._process.wait()


FULL = NodeFailure("/tmp/forge-0 has 0.01 GiB free, the shards and their archive need 3.00 GiB")
SILENT = NodeFailure("no answer to 'hello' within 30 s")


@pytest.mark.parametrize(
    ("failures", "dead", "named"),
    [
        ({"n1": FULL}, [], ["n1"]),
        ({"n1": NodeFailure("cannot write /tmp/x: Read-only file system")}, [], ["n1"]),
        ({"n1": FULL, "n2": FULL}, [], []),
        ({"n1": FULL, "n2": SILENT}, ["n2"], ["n1", "n2"]),
        ({"n1": SILENT, "n2": SILENT}, [], []),
        ({"n1": NodeFailure("its process ended: No module named forge")}, [], []),
    ],
)
def test_node_is_at_fault_for_its_own_disk_or_where_it_starts_no_process(
    monkeypatch, failures, dead, named
):
    monkeypatch.setattr(slurm, "answers", lambda job, host, sec: host not in dead)
    found = nodes.at_fault(failures, Placement(("n1", "n2"), JOB), Path("/tmp"))
    assert list(found) == named


def test_agent_that_slurm_itself_has_not_started_is_started_again(pool_of, monkeypatch, tmp_path):
    monkeypatch.setattr(slurm.time, "sleep", lambda _: None)
    once = (
        f"[ -e {tmp_path}/up ] || {{ touch {tmp_path}/up; echo '{JUST_STARTED}' >&2; exit 1; }}; "
    )
    late = ["sh", "-c", f"{once}exec {sys.executable} -m forge.node_agent"]
    with pool_of(a=late, b=NODE, c=DEAD) as three:
        answers = three.ask(hello, timeout_sec=5)
    assert answers["a"].host == answers["b"].host == hostname()
    assert answers["c"].message == "its process ended: no such node"


def test_agents_that_slurm_itself_never_starts_blame_slurm_and_no_node(pool_of, monkeypatch):
    monkeypatch.setattr(slurm, "PATIENCE_SEC", -1)
    with (
        pytest.raises(slurm.SlurmSilent, match=r"starts no process: srun: .*Memory required"),
        pool_of(a=NODE, b=["sh", "-c", f"echo '{JUST_STARTED}' >&2; exit 1"]),
    ):
        pass


def test_agent_survives_the_signals_that_slurm_sends_to_all_steps_of_a_job():
    """Before a preemption or the time limit: the files of the ranks have yet to come."""
    with NodePool(Placement.here()) as pool:
        [agent] = pool.ask(hello, timeout_sec=30).values()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(agent.pid, number)
        assert pool.ask(hello, timeout_sec=30) == {agent.host: agent}


def test_import_on_a_node_survives_these_signals_so_that_a_preemption_blames_no_node(
    tmp_path, monkeypatch
):
    struck = tmp_path / "torch"
    struck.mkdir()
    (struck / "distributed.py").write_text(
        "import os, signal\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):\n"
        "    os.kill(os.getpid(), number)\n"
    )
    (struck / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with NodePool(Placement.here()) as pool:
        [check] = pool.ask(packages.import_torch, timeout_sec=30).values()
    assert check.status == "ok" and check.message.startswith("imported in")
