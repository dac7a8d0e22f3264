"""`forge status`: the numbers of its table, its questions to Slurm, and what is on the screen."""

import json
import os
import pty
import signal
import stat
import subprocess
import sys
import time

import pytest
from support import happenings
from support.recorded_run import RecordedRun
from support.run_states import GOAL, hold, new_run, train

from forge.cli import main
from forge.core.files import write_json
from forge.core.paths import RunPaths
from forge.core.process import hostname
from forge.reporting import run_state
from forge.reporting.status import look, row
from forge.slurm import slurm


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    monkeypatch.setattr(slurm, "is_here", lambda: False)


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path / "base")


# --- rows -----------------------------------------------------------------------------------------


def test_a_run_that_trains_shows_step_rate_and_what_is_left(run):
    hold(run)
    train(run)
    found = row(run.paths, None)
    assert (found.state.step, found.state.goal, found.state.reason) == (40, GOAL, "training")
    assert found.state.job == hostname() and found.restarts == 0
    assert found.eta_sec == pytest.approx(30)  # 60 steps of half a second
    assert found.tokens_per_sec == 20_040 and found.loss is not None


def test_a_run_that_has_shrunk_shows_it_and_what_is_left(run):
    hold(run)
    train(run, job="17")
    one = {"job": "17", "nodes": ["node02"], "world_size": 1}
    run.launch(20, **one)
    run.steps(21, 30)
    run.launch(30, **one)
    run.steps(31, 40)
    found = row(run.paths, None)
    words = "training on 1 of 2 nodes since step 20, without node01"
    assert found.state.reason == words and found.eta_sec
    run.launch(40, job="17", restart=1)
    run.steps(41, 50)
    assert row(run.paths, None).state.reason == "training"


def test_a_run_that_does_not_train_has_no_time_of_arrival(run):
    train(run)
    run.event(happenings.stop("SIGTERM", 40))
    assert row(run.paths, None).eta_sec is None


def test_a_log_of_another_version_is_reported_and_hides_no_other_run(run, tmp_path):
    train(run)
    old = RecordedRun(tmp_path / "old")
    old.paths.events.write_text('{"time": 1, "event": "launch", "launch": "a"}\n')
    (first, second), _ = look([old.paths, run.paths])
    assert (first.state.run, second.state.run, second.state.step) == ("old", "base", 40)
    assert first.state.state == "unknown" and "has format None, this" in first.state.reason


def test_restarts_are_counted(run):
    train(run)
    run.event(happenings.lost())
    train(run)
    assert row(run.paths, None).restarts == 1


# As root without what passes over modes of files; other users have none of it.
AS_ANYBODY = (
    ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.getuid() == 0 else ()
)


@pytest.mark.parametrize("closed", ["closed", "closed/events.jsonl"])
def test_run_that_may_not_be_read_is_unknown_and_hides_no_other(tmp_path, closed):
    runs = [new_run(tmp_path / f"results/{name}") for name in ("base", "closed")]
    for one in runs:
        train(one)
    path = tmp_path / "results" / closed
    path.chmod(0)
    try:
        command = [*AS_ANYBODY, sys.executable, "-m", "forge", "status", "--json"]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    finally:
        path.chmod(0o700)
    found = {one["run"]: one for one in json.loads(done.stdout)["runs"]}
    assert found["base"]["step"] == 40
    assert found["closed"]["state"] == "unknown"
    assert "Permission denied" in found["closed"]["reason"]
    assert "check owner and mode" in found["closed"]["next"]


def test_runs_that_may_not_be_read_are_left_out_of_all_runs_with_a_note(tmp_path):
    runs = [new_run(tmp_path / f"results/{name}") for name in ("base", "closed")]
    for one in runs:
        train(one)
    (tmp_path / "results/lost+found").mkdir(mode=0)
    (tmp_path / "results/closed").chmod(0)
    try:
        command = [*AS_ANYBODY, sys.executable, "-m", "forge", "show"]
        done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    finally:
        (tmp_path / "results/closed").chmod(0o700)
        (tmp_path / "results/lost+found").chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert "note: results/closed may not be read, and is left out" in done.stderr
    assert "base" in done.stdout and "lost+found" not in done.stdout + done.stderr


def test_logs_that_may_not_be_read_are_not_called_none(tmp_path):
    one = new_run(tmp_path / "results/base")
    one.paths.logs.mkdir(exist_ok=True)
    one.paths.logs.chmod(0)
    try:
        command = [*AS_ANYBODY, sys.executable, "-m", "forge", "logs", "base"]
        done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    finally:
        one.paths.logs.chmod(0o700)
    assert done.returncode == 69 and "Permission denied" in done.stderr, done.stderr


# --- squeue ---------------------------------------------------------------------------------------

LINE = (
    "17|RUNNING|None|node[01-02]|node01|2026-11-21T04:36:00|2026-11-21T04:37:00|{}|/home/ada/forge"
)


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Puts a squeue with these words into the PATH."""

    def install(script):
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in ("squeue", "scontrol"):
            path = folder / name
            path.write_text(f"#!/bin/bash\n{script}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(slurm, "is_here", lambda: True)

    return install


def test_slurm_is_asked_once_for_all_runs_and_their_owners(run, squeue, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comment = "rule_allocation-base_stage_run_train_run"
    line = LINE.format(comment).replace("/home/ada/forge", str(tmp_path))
    squeue(f"echo \"$@\" >> {tmp_path}/asked; echo '{line}'")
    rows, note = look([run.paths, run.paths])
    assert [one.state.job for one in rows] == ["17 on node[01-02]"] * 2 and note == ""
    asked = (tmp_path / "asked").read_text()
    assert asked.count("\n") == 1 and f"--user={os.getuid()} " in asked


@pytest.mark.parametrize("script", ["exec sleep 60", "echo 'Unable to contact' >&2; exit 1"])
def test_a_silent_slurm_leaves_a_note_and_the_table(run, squeue, script, monkeypatch):
    monkeypatch.setattr(run_state, "ASK_SEC", 0.3)
    squeue(script)
    train(run)
    run.event(happenings.stop("SIGTERM", 40))
    began = time.monotonic()
    rows, note = look([run.paths])
    assert time.monotonic() - began < 5
    assert rows[0].state.state == "stopped" and note.startswith("note: Slurm does not answer")


def test_slurms_commands_without_a_cluster_are_no_slurm(run, squeue):
    squeue("echo 'squeue: fatal: Could not establish a configuration source' >&2; exit 1")
    assert look([run.paths])[1] == ""


# --- on the screen --------------------------------------------------------------------------------


@pytest.fixture
def project(run, tmp_path, monkeypatch):
    """A project's folder with runs in results/."""
    (tmp_path / "results").mkdir()
    for name in ("alpha", "beta"):
        write_json(RunPaths(tmp_path / "results" / name).config, {"train": {"max_steps": 7}})
    (tmp_path / "results/notes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_run_of_the_project_has_a_line(project, capsys):
    assert main(["status"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "state", "job"]
    assert [line.split()[0] for line in lines] == ["alpha", "beta"]
    assert all("0/7" in line and "not started" in line for line in lines)


def test_runs_can_be_named(project, capsys):
    assert main(["status", "beta", "base"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "beta",
        "base",
    ]
    assert main(["status", "gamma"]) == 78
    assert "there is no run gamma\n  fix:   there are: alpha, beta" in capsys.readouterr().err


def test_scripts_get_json(project, run, capsys):
    hold(run)
    train(run)
    assert main(["status", "base", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert (found["run"], found["state"], found["step"]) == ("base", "running", 40)
    assert found["eta_sec"] == pytest.approx(30)


def test_a_project_without_runs_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    assert f"no runs in {tmp_path}/results yet" in capsys.readouterr().err


def test_watching_needs_a_terminal(project, capsys):
    assert main(["status", "--watch"]) == 78
    assert "--watch needs a terminal" in capsys.readouterr().err


def test_watching_redraws_until_interrupted(project):
    mine, theirs = pty.openpty()
    code = (
        "import sys; from forge import cli; from forge.reporting import status; status.WATCH_SEC = 0.2\n"
        "raise SystemExit(cli.main(['status', '--watch']))"
    )
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "PATH": "/nowhere"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=theirs,
        env=environ,
        # In the background of a script, the shell has SIGINT ignored for all.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as child:
        try:
            os.close(theirs)
            text, end = "", time.monotonic() + 30
            while not ("not started" in text and "running" in text):
                assert time.monotonic() < end, text
                text += os.read(mine, 2**16).decode()
                if "not started" in text:
                    hold(RecordedRun(project / "results/alpha"))
            child.send_signal(signal.SIGINT)
            assert child.wait(20) == 0
        finally:
            child.kill()  # else a failure would wait for it
    os.close(mine)


def test_the_table_comes_without_torch_pandas_and_rich(project):
    code = (
        "import sys; from forge.cli import main; assert main(['status']) == 0\n"
        "assert not {'torch', 'pandas', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_long_metrics_file_is_read_from_its_end(run):
    hold(run)
    with open(run.paths.metrics, "wb") as file:
        file.truncate(4 * 2**30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
    train(run)
    began = time.monotonic()
    assert row(run.paths, None).state.step == 40
    assert time.monotonic() - began < 1
