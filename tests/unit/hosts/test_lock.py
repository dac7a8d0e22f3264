"""Two writers of one folder destroy a run: a living holder is refused by name, a dead one replaced."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import forge.hosts.lock
from forge.core.errors import Exit, OtherFormat, UnfitError
from forge.core.files import read_json, short_id, write_json
from forge.core.process import Process, hostname
from forge.core.records import Lock
from forge.hosts.lock import check_held, lock
from forge.slurm import slurm

FORK = multiprocessing.get_context("fork")


def held_by(process=None, **other):
    """The lock of a process, of this one if None."""
    made_of = (process or Process.current()).to_json()
    return Lock(**{**made_of, "command": "train", "restart": 0, **other})


def left_by_a_dead(**other):
    """A lock whose holder had the pid of this process, in an earlier life."""
    return held_by(**{"start_ticks": Process.current().start_ticks - 1, **other})


def pid_in(folder):
    return Lock.read(folder / ".lock").pid


def test_second_writer_is_refused_with_pid_and_host(tmp_path):
    with (
        lock(tmp_path, "train"),
        pytest.raises(UnfitError) as caught,
        lock(tmp_path, "preflight"),
    ):
        pass
    message = str(caught.value)
    assert f"`forge train` (pid {os.getpid()} on {hostname()}" in message


def test_lock_is_given_back(tmp_path):
    with lock(tmp_path, "train"):
        pass
    with lock(tmp_path, "train"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lock_of_a_killed_process_is_taken_over(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from forge.hosts.lock import lock\n"
        "with lock(Path(sys.argv[1]), 'train'): print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    with pytest.raises(UnfitError, match=f"pid {child.pid}"), lock(tmp_path, "train"):
        pass
    child.kill()
    child.wait()
    with lock(tmp_path, "train"):
        assert pid_in(tmp_path) == os.getpid()


@pytest.mark.parametrize("reboot", [False, True])
def test_a_reused_pid_does_not_hold_a_lock(tmp_path, reboot):
    before = {"boot_id": "another", "start_ticks": Process.current().start_ticks} if reboot else {}
    left_by_a_dead(**before).write(tmp_path / ".lock")
    with lock(tmp_path, "train"):
        assert Lock.read(tmp_path / ".lock").command == "train"
    assert list(tmp_path.iterdir()) == []


def test_a_pid_that_the_kernel_gave_out_again_does_not_hold_a_lock(tmp_path):
    """The same as above, but real: the holder dies, another process gets its number."""
    code = "import os; print(os.getpid(), flush=True); input()"
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        held = held_by(Process.of(first.pid))
    held.write(tmp_path / ".lock")
    for _ in range(100):  # another process of this machine may take the number first
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(first.pid - 1))
        except OSError as err:
            pytest.skip(f"may not choose pids here: {err}")
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as second:
            if second.pid == first.pid:
                with lock(tmp_path, "train"):
                    assert pid_in(tmp_path) == os.getpid()
                return
    pytest.skip(f"others of this machine were quicker to take pid {first.pid}")


def test_a_wall_clock_that_jumps_does_not_make_a_second_writer(tmp_path):
    """When a clock is set, the kernel moves the boot time in /proc/stat; who counted starts from it
    would not know the holder any more."""
    jumped = tmp_path / "stat"
    real = Path("/proc/stat").read_text()
    jumped.write_text(re.sub(r"btime \d+", "btime 1000000000", real))
    run = tmp_path / "run"
    code = (
        "import sys, time; from pathlib import Path; from forge.core.errors import UnfitError\n"
        "from forge.hosts.lock import lock\n"
        "time.time = lambda: 1e9 + 60\n"
        "assert 'btime 1000000000' in Path('/proc/stat').read_text()\n"
        "try:\n"
        "    with lock(Path(sys.argv[1]), 'train'): print('two writers')\n"
        "except UnfitError as err: print(err.what)\n"
    )
    inside = 'mount --bind "$0" /proc/stat || exit 42; exec "$@"'
    with lock(run, "train"):
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", inside, jumped, sys.executable, "-c", code, run],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    if done.returncode == 42 or "unshare:" in done.stderr:
        pytest.skip(f"may not change what /proc tells here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert f"is being written by `forge train` (pid {os.getpid()} on" in done.stdout


def test_a_rank_on_another_node_commits_only_under_the_lock_of_its_own_launcher(tmp_path):
    launcher = replace(Process.current(), host="node01")
    file = tmp_path / ".lock"
    with pytest.raises(UnfitError, match="no longer held by the command that began"):
        check_held(tmp_path, launcher)  # a successor has come and gone
    held_by(launcher).write(file)
    check_held(tmp_path, launcher)
    held_by(launcher, pid=1).write(file)
    with pytest.raises(UnfitError, match=r"held by `forge train` \(pid 1 on node01\) now"):
        check_held(tmp_path, launcher)


def test_a_link_whose_answer_was_lost_on_the_network_is_ours(tmp_path, monkeypatch):
    link = os.link

    def link_twice(*names):
        link(*names)
        link(*names)  # as an NFS client that asks again

    monkeypatch.setattr(os, "link", link_twice)
    with lock(tmp_path, "train"):
        assert pid_in(tmp_path) == os.getpid()


def held_by_job(folder, restart=0, cluster="here", **facts):
    job = {"slurm_job": "42", "restart": restart, "cluster": cluster}
    held_by(**{"host": "node07", **job, **facts}).write(folder / ".lock")


@pytest.fixture
def slurm_says(monkeypatch):
    def set_job(state, restarts=0):
        job = slurm.Job("42", state, restarts, (), 1, "gpu", "x", True, None) if state else None
        monkeypatch.setattr(slurm, "is_here", lambda: True)
        monkeypatch.setattr(slurm, "show_job", lambda _: job)
        monkeypatch.setattr(slurm, "cluster_name", lambda: "here")

    return set_job


@pytest.mark.parametrize(("state", "restarts"), [(None, 0), ("COMPLETED", 0), ("RUNNING", 1)])
def test_lock_of_a_slurm_job_that_ended_or_restarted_is_taken_over(
    tmp_path, slurm_says, state, restarts
):
    held_by_job(tmp_path)
    slurm_says(state, restarts)
    with lock(tmp_path, "train"):
        assert pid_in(tmp_path) == os.getpid()


def test_start_of_a_job_is_known_where_slurms_programs_are_not(tmp_path, monkeypatch):
    """As in a container without them: a later start of the job takes over, and is not called older."""
    monkeypatch.setattr(slurm, "is_here", lambda: False)
    monkeypatch.delenv("FORGE_SLURM_START", raising=False)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    own = {"SLURM_JOB_ID": "42", "SLURM_CLUSTER_NAME": "here", "SLURM_RESTART_COUNT": "1"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    held_by_job(tmp_path)
    with lock(tmp_path, "train"):
        held = Lock.read(tmp_path / ".lock")
        assert (held.pid, held.restart, held.cluster) == (os.getpid(), 1, "here")
    held_by_job(tmp_path, restart=1)
    with pytest.raises(UnfitError), lock(tmp_path, "train"):
        pass
    held_by_job(tmp_path, cluster="elsewhere")
    with pytest.raises(UnfitError), lock(tmp_path, "train"):
        pass


def test_start_of_a_job_that_nobody_can_tell_is_not_recorded_as_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "is_here", lambda: False)
    monkeypatch.delenv("FORGE_SLURM_START", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    own = {"SLURM_JOB_ID": "42", "SLURM_CLUSTER_NAME": "here", "SLURM_STEP_ID": "0"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with lock(tmp_path, "train"):
        assert Lock.read(tmp_path / ".lock").cluster is None


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "PENDING"])
def test_lock_of_a_running_slurm_job_is_refused_by_its_number(tmp_path, slurm_says, state):
    held_by_job(tmp_path)
    slurm_says(state)
    with pytest.raises(UnfitError, match=f"job 42 is {state}") as caught, lock(tmp_path, "train"):
        pass
    assert "scancel 42" in caught.value.fix


def test_holder_on_another_host_is_refused_with_what_to_do(tmp_path):
    held_by(host="elsewhere", slurm_job="42").write(tmp_path / ".lock")
    with pytest.raises(UnfitError) as caught, lock(tmp_path, "train"):
        pass
    assert "Slurm job 42" in str(caught.value)
    assert f"rm {tmp_path}/.lock" in str(caught.value)


@pytest.mark.parametrize("cluster", ["there", None])
@pytest.mark.parametrize("known", [None, "COMPLETED"])
def test_a_job_of_another_cluster_is_not_the_one_with_its_number_here(
    tmp_path, slurm_says, cluster, known
):
    """Nodes of two clusters may even have the same names and come from one installation."""
    held_by_job(tmp_path, cluster=cluster, host=hostname(), boot_id="of a node there")
    slurm_says(known)
    with pytest.raises(UnfitError) as caught, lock(tmp_path, "train"):
        pass
    of_cluster = f" of cluster {cluster}" if cluster else ""
    assert f"on {hostname()}, Slurm job 42{of_cluster})" in caught.value.what
    assert f"rm {tmp_path}/.lock" in caught.value.fix


@pytest.mark.parametrize(("hidden", "mine"), [(True, False), (True, True), (False, False)])
def test_a_colleagues_job_that_slurm_does_not_show_is_not_called_ended(
    tmp_path, slurm_says, monkeypatch, hidden, mine
):
    held_by_job(tmp_path)
    slurm_says(None)
    monkeypatch.setattr(slurm, "hides_jobs", lambda: hidden)
    uid = os.getuid() if mine else os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)
    refused = pytest.raises(UnfitError, match="Slurm job 42")
    with refused if hidden and not mine else contextlib.nullcontext(), lock(tmp_path, "train"):
        assert pid_in(tmp_path) == os.getpid()


def test_holder_on_another_machine_of_the_same_name_is_refused(tmp_path):
    held_by(boot_id="another", machine_id="another").write(tmp_path / ".lock")
    with pytest.raises(UnfitError, match=f"on {hostname()}") as caught, lock(tmp_path, "train"):
        pass
    assert "another machine of this name" in caught.value.cause
    assert f"rm {tmp_path}/.lock" in caught.value.fix


IN_CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c")


def test_a_living_holder_in_another_container_of_this_host_is_refused_by_its_namespace(tmp_path):
    """Containers with the name of their host: each has its own pids, and does not see the others'."""
    code = (
        "import os, sys; from pathlib import Path; from forge.hosts.lock import lock\n"
        "from forge.core.errors import UnfitError\n"
        "try:\n"
        "    with lock(Path(sys.argv[1]), 'train'):\n"
        "        print(os.stat('/proc/self/ns/pid').st_ino, flush=True); input()\n"
        "except UnfitError as err: print(err)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*IN_CONTAINER, code, tmp_path], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as holder:
        if not (namespace := holder.stdout.readline().strip()):
            pytest.skip(f"may not make a pid namespace here: {holder.stderr.read().strip()}")
        for line in ([*IN_CONTAINER, code], [sys.executable, "-c", code]):
            done = subprocess.run(
                [*line, tmp_path], input="", capture_output=True, text=True, check=True, timeout=60
            )
            assert f"(pid 1 of pid namespace {namespace} on {hostname()})" in done.stdout
            assert "is being written by `forge train`" in done.stdout
        holder.communicate("\n")
    with lock(tmp_path, "train"):
        pass


@pytest.mark.parametrize(
    "content",
    ["", "{half", "[]", "null", '{"format": 2, "command": "train"}', "\0" * 99],
    ids=["empty", "half", "list", "null", "without a holder", "zeros after a power cut"],
)
def test_corrupt_lock_does_not_lock_a_run_forever(tmp_path, content, capfd):
    (tmp_path / ".lock").write_text(content)
    with lock(tmp_path, "train"):
        assert pid_in(tmp_path) == os.getpid()
    assert list(tmp_path.iterdir()) == []
    assert "took over from a corrupt lock" in capfd.readouterr().err


def test_lock_of_another_version_is_refused_by_its_format_and_stays(tmp_path):
    path = tmp_path / ".lock"
    held_by().write(path)
    write_json(path, {**read_json(path), "format": 9, "new": "key"})
    before = path.read_bytes()
    with pytest.raises(OtherFormat) as caught, lock(tmp_path, "train"):
        pass
    assert f"{path} has format 9, this version of Forge reads 2" in caught.value.what
    assert "no command of that version works there" in caught.value.fix
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# --- many at once ---------------------------------------------------------------------------------

RIVALS = 6
ROUNDS, ROUNDS_SEC, PATIENCE_SEC = 300, 30, 600
HOLDERS = 100


def _compete(folder, number, gate, is_over):
    """Try for each round's lock at the same moment as the others; hold it until all have tried. On a busy
    machine, where six processes meet late, there are fewer rounds."""
    outcomes, end = [], time.monotonic() + ROUNDS_SEC
    for each in sorted(folder.glob("round-*")):
        if number == 0 and time.monotonic() > end:
            is_over.set()
        gate.wait(PATIENCE_SEC)
        if is_over.is_set():
            break
        try:
            with lock(each, f"train{number}"):
                outcomes.append([number, ""])
                gate.wait(PATIENCE_SEC)
        except UnfitError as err:
            outcomes.append([number, err.what])
            gate.wait(PATIENCE_SEC)
    (folder / f"outcomes-{number}.json").write_text(json.dumps(outcomes))


@pytest.mark.parametrize("dead", [False, True], ids=["free", "dead lock in the way"])
def test_of_several_that_start_in_the_same_moment_one_wins_and_is_named_to_the_others(
    tmp_path, dead
):
    for number in range(ROUNDS):
        folder = tmp_path / f"round-{number:03}"
        folder.mkdir()
        if dead:
            left_by_a_dead().write(folder / ".lock")
    shared = FORK.Barrier(RIVALS), FORK.Event()
    rivals = [FORK.Process(target=_compete, args=(tmp_path, n, *shared)) for n in range(RIVALS)]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join(PATIENCE_SEC)
        rival.kill()
    outcomes = [json.loads((tmp_path / f"outcomes-{n}.json").read_text()) for n in range(RIVALS)]
    assert outcomes[0]
    for number, tries in enumerate(zip(*outcomes, strict=True)):
        [winner] = [n for n, refusal in tries if not refusal]
        who = f"`forge train{winner}` (pid {rivals[winner].pid} on {hostname()}"
        assert all(who in refusal for n, refusal in tries if n != winner)
        assert list((tmp_path / f"round-{number:03}").iterdir()) == []


def _write_and_die(folder, until):
    """Hold the lock once and be killed with it. flock, which the kernel gives back, tells whether
    somebody else is inside as well."""
    with open(folder / "inside", "a", buffering=1) as inside:
        while time.monotonic() < until:
            with contextlib.suppress(UnfitError), lock(folder, "train"):
                try:
                    fcntl.flock(inside, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    (folder / "two writers").touch()
                inside.write("x\n")
                os.kill(os.getpid(), signal.SIGKILL)


def test_writers_that_are_killed_at_any_moment_are_replaced_by_one_at_a_time(tmp_path):
    """Those who wait fight over every dead lock, and some of them are killed while they do."""
    chance, until = random.Random(7), time.monotonic() + 60

    def start():
        writer = FORK.Process(target=_write_and_die, args=(tmp_path, until))
        writer.start()
        return writer

    writers = [start() for _ in range(RIVALS)]
    inside, killed = tmp_path / "inside", 0
    try:
        while time.monotonic() < until and not (
            inside.exists() and inside.stat().st_size >= 2 * HOLDERS
        ):
            victim = chance.randrange(RIVALS)
            if chance.random() < 0.3:
                killed += writers[victim].is_alive()
                writers[victim].kill()
            writers[victim].join(0.01)
            if not writers[victim].is_alive():
                writers[victim].close()
                writers[victim] = start()
    finally:
        for writer in writers:
            writer.kill()
            writer.join(10)
    assert not (tmp_path / "two writers").exists()
    assert inside.stat().st_size >= 2 * HOLDERS and killed >= 10
    with lock(tmp_path, "train"):
        pass


def test_one_that_died_while_it_took_over_is_replaced_too(tmp_path):
    dead = left_by_a_dead()
    heir = left_by_a_dead(command="preflight")
    dead.write(tmp_path / ".lock")
    heir.write(tmp_path / f".lock.{short_id(dead.model_dump())}")
    with lock(tmp_path, "train"):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []


def test_one_that_comes_late_leaves_the_new_lock_in_its_place_all_the_time(tmp_path, monkeypatch):
    """It has judged the old holder dead, and is put to sleep; meanwhile another one takes over. Were
    the new lock away for a moment, a third could make one."""
    path, dead = tmp_path / ".lock", left_by_a_dead()
    new = held_by(command="preflight")
    dead.write(path)
    judge, in_place = forge.hosts.lock._refuse_living, []

    def judge_and_sleep(name, held):
        judge(name, held)
        new.write(path)
        for change in ("link", "rename", "replace", "unlink"):
            monkeypatch.setattr(os, change, watched(getattr(os, change)))

    def watched(change):
        def call(*arguments, **keys):
            try:
                return change(*arguments, **keys)
            finally:
                in_place.append(path.exists() and Lock.read(path) == new)

        return call

    monkeypatch.setattr(forge.hosts.lock, "_refuse_living", judge_and_sleep)
    with pytest.raises(UnfitError, match="by `forge preflight` "), lock(tmp_path, "train"):
        pass
    assert in_place and all(in_place)


def test_one_that_is_taking_over_is_refused_by_name(tmp_path):
    dead = left_by_a_dead()
    heir = held_by(command="preflight")
    dead.write(tmp_path / ".lock")
    heir.write(tmp_path / f".lock.{short_id(dead.model_dump())}")
    with pytest.raises(UnfitError, match="by `forge preflight` "), lock(tmp_path, "train"):
        pass
    assert Lock.read(tmp_path / ".lock") == dead


def test_refusal_names_the_new_holder_not_another_that_comes_late_as_well(tmp_path, monkeypatch):
    path, dead = tmp_path / ".lock", left_by_a_dead()
    right = tmp_path / f".lock.{short_id(dead.model_dump())}"
    late, new = held_by(command="preflight"), held_by(command="validate")
    dead.write(path)
    late.write(right)
    judge = forge.hosts.lock._refuse_living

    def judge_when_replaced(name, held):
        if name == right:
            new.write(path)
        judge(name, held)

    monkeypatch.setattr(forge.hosts.lock, "_refuse_living", judge_when_replaced)
    with pytest.raises(UnfitError, match="by `forge validate` "), lock(tmp_path, "train"):
        pass


# --- folders that do not serve --------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB. As root a folder's mode would not bind."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"may not mount a tmpfs here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_read_only_folder_is_refused_by_name(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UnfitError) as caught, lock(small_disk, "train"):
        pass
    assert caught.value.code == Exit.UNFIT
    assert str(small_disk) in caught.value.what and "Read-only file system" in caught.value.what
    assert "choose another directory" in caught.value.fix


@pytest.mark.parametrize("dead", [False, True], ids=["free", "dead lock in the way"])
def test_full_disk_while_acquiring_leaves_the_folder_as_it_was(small_disk, dead):
    if dead:
        left_by_a_dead().write(small_disk / ".lock")
    with contextlib.suppress(OSError), open(small_disk / "data", "wb") as data:
        while True:
            data.write(b"x" * 4096)
            data.flush()
    with pytest.raises(UnfitError) as caught, lock(small_disk, "train"):
        pass
    assert caught.value.code == Exit.UNFIT
    assert str(small_disk) in caught.value.what and "No space left" in caught.value.what
    assert {path.name for path in small_disk.iterdir()} == ({".lock", "data"} if dead else {"data"})
    (small_disk / "data").unlink()
    with lock(small_disk, "train"):
        pass


def test_disk_that_became_read_only_does_not_hide_what_the_verb_says(small_disk, capfd):
    with pytest.raises(UnfitError, match="the command's own"), lock(small_disk, "train"):
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        raise UnfitError("the command's own")
    assert f"{small_disk}/.lock stays behind: Read-only" in capfd.readouterr().err


def test_folder_that_vanishes_while_held_stays_away(tmp_path):
    run = tmp_path / "run"
    with lock(run, "train"):
        shutil.rmtree(run)
    assert not run.exists()


def test_lock_that_somebody_else_has_got_meanwhile_is_not_given_back(tmp_path):
    other = held_by(host="node07")
    with lock(tmp_path, "train"):
        other.write(tmp_path / ".lock")
    assert Lock.read(tmp_path / ".lock") == other


def test_a_node_that_was_cut_off_learns_that_the_run_continued_elsewhere(tmp_path):
    mine = Process.current()
    with lock(tmp_path, "train"):
        check_held(tmp_path, mine)
    check_held(tmp_path, mine)  # nobody, and who comes will wait for us
    held_by_job(tmp_path)
    with pytest.raises(UnfitError, match=r"held by `forge train` .* on node07, Slurm job 42"):
        check_held(tmp_path, mine)
    held_by(pid_namespace=7).write(tmp_path / ".lock")  # of a container, which does not see ours
    with pytest.raises(UnfitError, match=r"held by `forge train` .* of pid namespace 7 on"):
        check_held(tmp_path, mine)
