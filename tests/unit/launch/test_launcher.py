"""Exit codes come from what ranks recorded: torchrun turns every code into 1."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from support.live_run import wait_until

from forge.core import events, process
from forge.core.errors import Exit, UnfitError
from forge.core.files import write_json
from forge.core.json_lines import Follower
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.core.process import Process
from forge.hosts.nodes import UnresponsiveNodes
from forge.hosts.placement import Placement
from forge.launch import launcher, lost_ranks
from forge.launch.heartbeat import Activity
from forge.launch.rank_output import MESSAGES
from forge.launch.rank_records import NO_RECORD, LaunchSpec, PreflightTask, RankRecord
from forge.slurm import slurm

DONE = RankRecord("completed", step=100)
STOPPED = RankRecord("stopped", 0, Exit.STOPPED, step=40, cause="SIGTERM")
PEER = RankRecord("failed", 0, Exit.UNFIT, cause="peer lost", message="connection closed by peer")


def spec_of(folder, nodes=1, ranks_per_node=4):
    return LaunchSpec(
        task=PreflightTask(patience_sec=5, nccl_file=""),
        run=str(folder),
        launch="20260101T000000-1",
        machine=Machine(),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        launcher=Process.current(),
    )


def bad(rank, code):
    return RankRecord("failed", rank, code, cause="DataError", message=f"rank {rank} failed")


def lost(rank):
    return RankRecord("lost", rank, message="it exited without a record")


def broken(rank, cause=lost_ranks.GPU_FAULT):
    return RankRecord("failed", rank, Exit.UNFIT, cause=cause, message="CUDA error", host="n2")


@pytest.mark.parametrize(
    ("records", "status", "rank", "code"),
    [
        ([DONE, RankRecord("completed", 1)], "completed", 0, 0),
        ([STOPPED, RankRecord("stopped", 1, Exit.STOPPED)], "stopped", 0, Exit.STOPPED),
        ([DONE, bad(1, Exit.DATA)], "failed", 1, Exit.DATA),
        ([lost(0), bad(1, Exit.FAILED)], "failed", 1, Exit.FAILED),
        ([PEER, bad(1, Exit.CONFIG), lost(2)], "failed", 1, Exit.CONFIG),
        ([bad(0, Exit.DATA), bad(1, Exit.FAILED)], "failed", 0, Exit.DATA),
        ([DONE, lost(1)], "lost", 1, Exit.UNFIT),
        ([STOPPED, lost(1)], "lost", 1, Exit.UNFIT),
        ([PEER, RankRecord("completed", 1), lost(2)], "lost", 2, Exit.UNFIT),
        ([PEER, RankRecord("completed", 1)], "lost", 0, Exit.UNFIT),
        ([PEER, broken(1), lost(2)], "lost", 1, Exit.UNFIT),
        ([PEER, broken(1, lost_ranks.GPU_ERROR)], "lost", 1, Exit.UNFIT),
        ([broken(0), bad(1, Exit.DATA)], "failed", 1, Exit.DATA),
    ],
)
def test_verdict_over_all_ranks(records, status, rank, code):
    found = launcher.verdict(records)
    assert (found.status, found.rank, found.code) == (status, rank, code)


def test_the_node_of_a_broken_gpu_is_known():
    found = launcher.verdict([PEER, broken(1), lost(2)])
    assert (found.cause, found.host, found.lost) == (lost_ranks.GPU_FAULT, "n2", (1, 2))


def test_the_program_that_ended_first_is_named():
    ends = [
        RankRecord("lost", 0, Exit.FAILED, message="its program exited with 1", ended=9.0),
        RankRecord("stopped", 1, Exit.STOPPED, cause="SIGTERM", ended=8.5),
        RankRecord("lost", 2, Exit.UNFIT, message="its program was killed", ended=8.0),
        lost(3),
    ]
    found = launcher.verdict(ends)
    assert (found.status, found.rank, found.code) == ("lost", 2, Exit.UNFIT)
    assert found.what == "rank 2: its program was killed"


@pytest.mark.parametrize(
    ("statuses", "all_0"), [((0, 0), True), ((0, 1), False), ((143, 0), False)]
)
def test_programs_have_exited_with_0_when_all_of_them_have(statuses, all_0):
    ends = [
        RankRecord("stopped", rank, Exit.STOPPED, exit_status=status)
        for rank, status in enumerate(statuses)
    ]
    assert launcher.verdict(ends).all_exited_with_0 == all_0
    assert not launcher.verdict([*ends, lost(2)]).all_exited_with_0


def test_lost_ranks_are_named_with_what_the_others_saw():
    found = launcher.verdict([PEER, lost(1), lost(3)])
    assert found.message == (
        "rank 1, 3 of 3 exited without a record; rank 0 saw: connection closed by peer"
    )
    assert found.lost == (1, 3)


@pytest.mark.parametrize(("exported", "value"), [(None, "3"), ("1", "1")])
@pytest.mark.parametrize("job", [None, "17"])
def test_torchrun_inherits_how_a_rank_ends_whose_peer_is_lost(
    tmp_path, monkeypatch, job, exported, value
):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if exported:
        monkeypatch.setenv(name, exported)
    monkeypatch.setenv("SLURM_NNODES", "7")  # of another step
    found = launcher._environment(spec_of(tmp_path).model_copy(update={"job": job}))
    assert found[name] == value
    assert ("SLURM_NNODES" in found) == (job is None)


@pytest.mark.parametrize("job", [None, "17"])
def test_variables_of_machine_yaml_win_over_exported_ones_and_what_is_held_back(
    tmp_path, monkeypatch, job
):
    monkeypatch.setenv("MY_SETTING", "exported")
    changes = {"variables": {"MY_SETTING": "of the machine"}, "job": job}
    changes["machine"] = Machine(slurm={"export": []})
    found = launcher._environment(spec_of(tmp_path).model_copy(update=changes))
    assert found["MY_SETTING"] == "of the machine"


@pytest.mark.parametrize(("grace_sec", "told"), [(60, "50"), (8, "5")])
def test_torchrun_lets_ranks_save_before_the_launcher_kills_them(tmp_path, grace_sec, told):
    machine = Machine(stop_grace_sec=grace_sec)
    found = launcher._environment(spec_of(tmp_path).model_copy(update={"machine": machine}))
    assert found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == told


def test_living_orphans_are_named_and_their_folder_stays(tmp_path, monkeypatch):
    paths = RunPaths(tmp_path)
    monkeypatch.setattr(launcher, "ORPHAN_WAIT_SEC", 0.1)
    me = Process.current()
    write_json(paths.launches / "old" / "rank-0.pid", me.to_json())
    with pytest.raises(UnfitError, match=f"still write .*: pid {me.pid}") as caught:
        launcher.wait_for_orphans(paths)
    assert f"kill -9 {me.pid}" in caught.value.fix
    assert (paths.launches / "old").is_dir()


@pytest.mark.parametrize("job", [None, "17"])
def test_ranks_in_another_container_are_named_and_not_taken_for_gone(tmp_path, monkeypatch, job):
    """Those of a job ended with it, which the run's lock has asked for."""
    paths = RunPaths(tmp_path)
    monkeypatch.setattr(process, "INITIAL_NAMESPACE", 0)  # as in a container
    hidden = {**Process.current().to_json(), "pid_namespace": 7, "slurm_job": job}
    write_json(paths.launches / "old" / "rank-0.pid", hidden)
    if job:
        launcher.wait_for_orphans(paths)
        return
    with pytest.raises(UnfitError, match=f"pid {hidden['pid']} of pid namespace 7") as caught:
        launcher.wait_for_orphans(paths)
    assert f"rm -r {paths.launches / 'old'}" in caught.value.fix
    assert (paths.launches / "old").is_dir()


@pytest.mark.parametrize("is_gone", [False, True])
def test_ranks_are_killed_without_the_directory_that_names_them(tmp_path, is_gone):
    """A rank has a session of its own, as torchrun gives it."""
    spec = spec_of(tmp_path)
    rank = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    pid = int(child.stdout.readline())
    launcher.register(spec, "launcher", child.pid)
    launcher.register(spec, "rank-0", pid)
    rank = Process.of(pid)
    if is_gone:
        shutil.rmtree(spec.directory)
    end = threading.Thread(target=launcher._kill_all, args=(spec, child), daemon=True)
    end.start()
    end.join(30)
    try:
        assert not end.is_alive() and child.poll() is not None
        wait_until(lambda: rank.life() == "gone", "the end of the rank")
    finally:
        child.kill()


def test_a_launch_that_survives_kill_9_is_an_error_that_names_it_and_stays_known(
    tmp_path, monkeypatch
):
    spec = spec_of(tmp_path)
    monkeypatch.setattr(launcher, "KILL_SEC", 0.2)
    monkeypatch.setattr(launcher, "_kill_family", lambda pid: None)
    monkeypatch.setattr(os, "kill", lambda *_: None)  # it waits in the kernel
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        launcher.register(spec, "launcher", child.pid)
        with pytest.raises(UnfitError, match=f"not ended .* after kill -9: pid {child.pid}"):
            launcher._kill_all(spec, child)
        assert (spec.directory / "launcher.pid").exists()


def test_what_dead_ranks_left_is_cleaned(tmp_path):
    paths = RunPaths(tmp_path)
    dead = {**Process.current().to_json(), "start_ticks": 1}
    write_json(paths.launches / "old" / "rank-0.pid", dead)
    launcher.wait_for_orphans(paths)
    assert list(paths.launches.iterdir()) == []


def test_file_that_names_no_process_is_cleaned(tmp_path):
    paths = RunPaths(tmp_path)
    write_json(paths.launches / "old" / "rank-0.pid", {"pid": 12})
    launcher.wait_for_orphans(paths)
    assert list(paths.launches.iterdir()) == []


def test_failure_of_a_rank_keeps_its_code_and_its_own_fix(tmp_path):
    failure = launcher.RankFailure(bad(2, Exit.DATA), tmp_path)
    assert failure.code == Exit.DATA
    assert str(failure) == f"rank 2: rank 2 failed\n  fix:   read the ranks' logs in {tmp_path}"
    told = RankRecord("failed", 1, Exit.UNFIT, message="no disk\n  fix:   free space")
    assert str(launcher.RankFailure(told, tmp_path)) == "rank 1: no disk\n  fix:   free space"


def test_event_log_has_what_each_rank_says_of_itself(tmp_path):
    paths = RunPaths(tmp_path)
    full = [
        RankRecord("failed", n, Exit.UNFIT, message=f"out of memory on cuda:{n}", host="b")
        for n in (1, 2)
    ]
    launcher._record_errors(paths, [DONE, *full, lost(3), PEER])
    [event] = events.read(paths.events)
    assert (event.ranks, event.host, event.message) == ([1, 2], "b", "out of memory on cuda:1")
    launcher._record_errors(paths, [STOPPED, DONE])
    silent = RankRecord("lost", 1, message=NO_RECORD)
    launcher._record_errors(paths, [PEER, silent])
    _, event = events.read(paths.events)
    assert (event.ranks, event.message) == ([1], NO_RECORD)


# --- launches for which Slurm itself starts no rank ------------------------------------------------

JUST_STARTED = (
    "srun: error: Unable to create step for job 17: Memory required by task is not available"
)


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """launch(script): run it in the place of srun; how often it ran. $RANK: a file that a rank leaves."""
    monkeypatch.setattr(slurm.time, "sleep", lambda _: None)
    spec = spec_of(tmp_path).model_copy(update={"job": "17"})
    spec.write(spec.path)
    monkeypatch.setenv("RANK", str(spec.directory / "rank-0.pid"))
    monkeypatch.setenv("TRIES", str(tmp_path / "tries"))
    log = tmp_path / "logs" / "srun.log"

    def launch(script):
        command = ["sh", "-c", f'echo x >> "$TRIES"; {script}']
        launcher._run(command, spec, log, 1, None, nodes=UnresponsiveNodes(Placement.here()))
        return len((tmp_path / "tries").read_text().split())

    return launch


def test_launch_is_repeated_while_slurm_itself_starts_no_rank(launch, capsys):
    fail = f"echo '{JUST_STARTED}' >&2; exit 1"
    assert launch(f'[ $(wc -l < "$TRIES") = 3 ] || {{ {fail}; }}; touch "$RANK"') == 3
    assert capsys.readouterr().err.count("starting the ranks waits for Slurm") == 1


def test_launch_is_not_repeated_once_a_rank_has_started_or_for_another_reason(launch):
    assert launch("echo 'srun: error: node01: task 0: Killed' >&2; exit 1") == 1
    assert launch(f"touch \"$RANK\"; echo '{JUST_STARTED}' >&2; exit 1") == 2


def test_launch_for_which_slurm_itself_never_starts_a_rank_lost_none(launch, monkeypatch):
    monkeypatch.setattr(slurm, "PATIENCE_SEC", -1)
    with pytest.raises(slurm.SlurmSilent, match=r"Slurm starts no process: .*Memory required"):
        launch(f"echo '{JUST_STARTED}' >&2; exit 1")


# --- the watch over a launch ----------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """watched(seconds): a launch command of so many seconds, watched to its end; how long that took, and
    how often the files of the ranks were looked at."""
    spec = spec_of(tmp_path)
    spec.write(spec.path)
    looks = []
    look = launcher.RecordsSoFar.look
    monkeypatch.setattr(
        launcher.RecordsSoFar, "look", lambda records: looks.append(1) or look(records)
    )

    def watch(seconds, stopped=()):
        began = time.monotonic()
        with subprocess.Popen(["sleep", str(seconds)], start_new_session=True) as child:
            launcher._watch(
                child, spec, stopped, 60, None, nodes=UnresponsiveNodes(Placement.here())
            )
        return time.monotonic() - began, len(looks)

    watch.spec = spec
    return watch


def test_files_of_ranks_are_looked_at_once_a_second_and_an_end_is_noticed_at_once(watched):
    took, looks = watched(1.5)
    assert looks == 2
    assert took < 1.5 + 0.4


def test_disk_that_does_not_answer_ends_no_launch_and_the_next_look_finds_a_lost_directory(
    watched, monkeypatch
):
    monkeypatch.setattr(launcher, "LOOK_SEC", 0.1)
    lstat = os.lstat

    def no_answer(path, **keys):
        if path == watched.spec.path:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return lstat(path, **keys)

    def unread(follower):
        raise UnfitError(f"cannot read {follower.path}: Input/output error")

    (watched.spec.directory / MESSAGES).write_text("a line of rank 0\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", no_answer)
        patch.setattr(Follower, "new_lines", unread)
        took, looks = watched(0.5)
    assert took >= 0.5 and looks > 1
    watched.spec.path.unlink()
    with pytest.raises(UnfitError, match="was removed or moved while its ranks ran"):
        watched(0.5)


def test_stop_is_passed_on_between_two_looks(watched, monkeypatch):
    monkeypatch.setattr(launcher, "LOOK_SEC", 60.0)
    stopped = []
    timer = threading.Timer(0.3, stopped.append, [signal.SIGTERM])
    timer.start()
    took, looks = watched(30, stopped)
    assert (looks, took < 5) == (1, True)


def test_ranks_are_killed_some_time_after_the_record_of_a_failure(watched, monkeypatch):
    monkeypatch.setattr(launcher, "AFTER_FAILURE_SEC", 0.2)
    record = bad(1, Exit.DATA)
    timer = threading.Timer(0.3, record.write, [watched.spec])
    timer.start()
    took, looks = watched(30)
    assert 0.5 <= took < 5 and looks <= 3


@pytest.mark.parametrize(("cause", "asked"), [(lost_ranks.PEER_LOST, True), ("", False)])
def test_nodes_are_asked_while_the_other_ranks_still_have_time_to_tell(
    watched, monkeypatch, cause, asked
):
    monkeypatch.setattr(launcher, "LOOK_SEC", 0.1)
    monkeypatch.setattr(launcher, "AFTER_FAILURE_SEC", 2.0)
    began, times = time.monotonic(), []
    monkeypatch.setattr(UnresponsiveNodes, "ask", lambda _: times.append(time.monotonic() - began))
    replace(bad(1, Exit.DATA), cause=cause).write(watched.spec)
    took, _ = watched(30)
    assert 2 <= took < 20
    assert bool(times) is asked
    assert not times or times[0] < 1.5


def test_launcher_asks_about_stopped_ranks_and_shows_messages(watched, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "LOOK_SEC", 0.1)
    asked = []
    monkeypatch.setattr(lost_ranks.StoppedRanks, "_ask", lambda _, records: asked.append(records))
    waiting = Activity(3, "all-reduce", True, 35.0, True)
    RankRecord("failed", 2, 69, activity=waiting).write_provisional(watched.spec)
    (watched.spec.directory / "console").write_text("step 5\n")
    watched(0.5)
    assert [[record.rank for record in records] for records in asked] == [[2]]
    assert "step 5" in capsys.readouterr().err
