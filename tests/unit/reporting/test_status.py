"""People decide by this table whether to wait, to look or to start again: it must not guess."""

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

from forge.cli import main
from forge.cluster import jobs, slurm
from forge.core.files import write_json
from forge.core.paths import RunPaths
from forge.core.process import Process, hostname
from forge.reporting import status
from forge.reporting.status import look, row

GOAL = 100


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    monkeypatch.setattr(slurm, "is_here", lambda: False)


@pytest.fixture
def run(tmp_path):
    """A run whose clock says that it is now when its last line was written 10 s ago."""
    made = RecordedRun(tmp_path / "base", time=time.time() - 1000)
    write_json(made.paths.config, {"run": "base", "train": {"max_steps": GOAL}})
    return made


def train(run, last=40, ago=0.0, job=None):
    """Steps up to `last`, the newest of them `ago` seconds before now."""
    run.time = time.time() - ago - 4 - last * 0.5
    run.launch(0, job=job)
    run.steps(1, last)


def hold(run, process=None, verb="train", ago=1000):
    holder = (process or Process.current()).to_json()
    lock = run.paths.root / ".lock"
    write_json(lock, {**holder, "verb": verb, "restart": 0})
    os.utime(lock, (time.time() - ago,) * 2)


def dead():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        return Process.of(child.pid)


def elsewhere(job=None):
    return Process("node07", 12, "of-node07", 1, job)


def queued(state="RUNNING", job_id="17", run="base", folder=None, **facts):
    values = {"reason": "None", "nodes": "node[01-02]", "submitted": None, "start": None, **facts}
    if state == "PENDING":
        values["nodes"] = ""
    return jobs.QueuedJob(
        id=job_id, state=state, run=run, folder=folder or jobs.Path.cwd(), **values
    )


# --- states ---------------------------------------------------------------------------------------


def test_a_run_that_trains_shows_step_rate_and_what_is_left(run):
    hold(run)
    train(run)
    found = row(run.paths, None)
    assert (found.state, found.step, found.goal, found.now) == ("running", 40, GOAL, "training")
    assert found.job == hostname() and found.restarts == 0
    assert found.eta_sec == pytest.approx(30)  # 60 steps of half a second
    assert found.tokens_per_sec == 20_040 and found.loss is not None


def test_no_step_for_long_is_where_it_hangs(run):
    hold(run)
    train(run, ago=245)
    found = row(run.paths, None)
    assert found.now == f"no step for 4 min: forge logs {run.root}"
    assert found.state == "running" and found.eta_sec is None


def test_a_run_whose_steps_are_slow_does_not_hang(run):
    hold(run)
    run.time = time.time() - 400
    run.launch(0)
    for step in range(1, 4):
        run.time += 60
        run.metric("train", step, loss=5.0, tokens_per_sec=9.0)
    assert row(run.paths, None).now == "training"


def test_a_long_evaluation_counts_as_progress(run):
    hold(run)
    train(run, ago=100)
    run.evaluate(40, seconds=95)
    assert row(run.paths, None).now == "training"


def test_ranks_that_do_not_come_up_are_seen(run):
    hold(run)
    run.time = time.time() - 20
    run.event(happenings.launch())
    assert row(run.paths, None).now == "starting ranks for 20 s"
    run.paths.events.unlink()
    run.time = time.time() - 700
    run.event(happenings.launch())
    assert row(run.paths, None).now == f"starting ranks for 11 min: forge logs {run.root}"


def test_an_earlier_launch_says_nothing_of_this_start(run):
    train(run, ago=500)
    hold(run, ago=30)
    assert row(run.paths, None).now == "starting for 30 s"


@pytest.mark.parametrize("verb", ["preflight", "validate"])
def test_a_verb_that_works_on_the_run_is_named(run, verb):
    train(run, GOAL)
    hold(run, verb=verb)
    found = row(run.paths, None)
    assert found.state == "running" and found.now.startswith(f"{verb} for")


def test_a_run_whose_process_died_is_cut_off(run):
    train(run)
    hold(run, dead())
    found = row(run.paths, None)
    assert found.state == "cut off"
    assert found.now == "its process is gone: rerun the command"


def test_a_process_that_cannot_be_asked_is_not_called_dead(run):
    train(run, ago=30)
    hold(run, elsewhere())
    found = row(run.paths, None)
    assert found.state == "unknown"
    assert "node07 cannot be asked" in found.now and "30 s ago" in found.now


def test_a_run_that_never_began_has_not_started(run):
    found = row(run.paths, None)
    assert (found.state, found.step, found.restarts) == ("not started", None, 0)


def test_a_stop_says_its_cause_and_how_to_go_on(run):
    train(run)
    run.event(happenings.stop("SIGTERM", 40))
    assert row(run.paths, None).now == "SIGTERM: rerun the command to resume"
    run.paths.stop.touch()
    found = row(run.paths, None)
    assert found.state == "stopped" and f"rm {run.paths.stop}" in found.now


def test_a_failure_says_why_and_where_to_read(run):
    train(run)
    run.event(happenings.failed("step 41: loss nan\n  fix:   lower train.lr"))
    found = row(run.paths, None)
    assert (found.state, found.now) == ("failed", f"step 41: loss nan: forge logs {run.root}")


def test_a_failed_preflight_names_its_checks(run):
    run.event(happenings.preflight(status="failed", failed=["disk", "clock"]))
    found = row(run.paths, None)
    assert found.state == "failed" and "disk, clock" in found.now


def test_a_passed_preflight_hides_no_earlier_end(run):
    train(run)
    run.event(happenings.stop("Ctrl-C", 40))
    run.preflight()
    assert row(run.paths, None).state == "stopped"


def test_a_finished_run_is_done_then_validated_or_invalid(run):
    train(run, GOAL)
    run.complete(GOAL)
    found = row(run.paths, None)
    assert found.state == "done" and "forge validate" in found.now
    run.validate(GOAL)
    found = row(run.paths, None)
    assert found.state == "validated" and found.now.startswith("held-out loss ")
    run.validate(GOAL, "a bit has flipped")
    found = row(run.paths, None)
    assert (found.state, found.now) == ("invalid", "a bit has flipped")


def test_a_raised_goal_is_not_done(run):
    train(run)
    run.complete(40)
    found = row(run.paths, None)
    assert found.state == "stopped" and "now it is 100" in found.now


def test_a_log_of_another_version_is_told_and_hides_no_other_run(run, tmp_path):
    train(run)
    old = RecordedRun(tmp_path / "old")
    old.paths.events.write_text('{"time": 1, "event": "launch", "launch": "a"}\n')
    rows, _ = look([old.paths, run.paths])
    assert [one.run for one in rows] == ["old", "base"] and rows[1].step == 40
    assert rows[0].state == "unknown" and "of format None, not 1" in rows[0].now


def test_restarts_are_counted(run):
    train(run)
    run.event(happenings.lost())
    train(run)
    assert row(run.paths, None).restarts == 1


# --- jobs -----------------------------------------------------------------------------------------


def test_a_waiting_job_says_for_what_and_how_long(run):
    now = time.time()
    job = queued("PENDING", reason="Priority", submitted=now - 600, start=now + 7205)
    found = row(run.paths, [job])
    assert (found.state, found.job) == ("waiting", "17")
    assert found.now == "PENDING (Priority) for 10 min, expected to start in 2 h 0 min"


def test_a_job_that_never_starts_by_itself_says_what_to_do(run):
    found = row(run.paths, [queued("PENDING", reason="PartitionTimeLimit")])
    assert "PENDING (PartitionTimeLimit)" in found.now and "lower runtime" in found.now


def test_a_job_of_this_run_runs_on_nodes(run):
    train(run)
    hold(run, elsewhere("17"))
    found = row(run.paths, [queued()])
    assert (found.state, found.job, found.now) == ("running", "17 on node[01-02]", "training")


def test_a_job_is_known_by_what_the_run_wrote_where_no_comment_tells(run, tmp_path):
    train(run, job="17")
    hold(run, elsewhere("17"))
    assert row(run.paths, [queued(run=None, folder=tmp_path)]).state == "running"


def test_a_job_of_another_project_is_not_this_runs(run, tmp_path):
    assert row(run.paths, [queued(folder=tmp_path)]).state == "not started"


def test_a_holder_whose_job_has_left_the_queue_is_gone(run):
    train(run)
    hold(run, elsewhere("17"))
    assert row(run.paths, [queued(job_id="18", run="other")]).state == "cut off"
    assert row(run.paths, None).state == "unknown"  # Slurm was not asked


def test_a_requeued_job_waits_though_its_dead_start_left_its_lock(run):
    train(run, job="17")
    hold(run, elsewhere("17"))
    found = row(run.paths, [queued("PENDING", reason="BeginTime")])
    assert (found.state, found.now) == ("waiting", "PENDING (BeginTime)")


def test_a_job_between_two_verbs_says_what_is_behind_it(run):
    job = queued(start=time.time() - 700)
    found = row(run.paths, [job])
    assert found.now == f"starting, or staging for 11 min: forge logs {run.root}"
    write_json(run.paths.stage, {})
    assert row(run.paths, [job]).now == "staged for 0 s"
    write_json(run.paths.preflight_pass, {})
    assert row(run.paths, [job]).now == "preflight passed for 0 s"


LINE = "17|RUNNING|None|node[01-02]|2026-11-21T04:36:00|2026-11-21T04:37:00|{}|/home/ada/forge"


@pytest.mark.parametrize(
    ("comment", "name"),
    [
        ("rule_allocation-base_preflight_run_stage_run_train_run", "base"),
        ("rule_allocation-base_2_train_run", "base_2"),
        ("rule_allocation-base", None),
        ("rule_tokenize_wildcards_0123", None),
        ("(null)", None),
    ],
)
def test_a_line_of_squeue_is_read(comment, name):
    job = jobs.parse_line(LINE.format(comment))
    assert (job.id, job.state, job.nodes) == ("17", "RUNNING", "node[01-02]")
    assert job.start - job.submitted == 60
    assert str(job.folder) == "/home/ada/forge"
    assert job.run == name


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
    assert [one.job for one in rows] == ["17 on node[01-02]"] * 2 and note == ""
    asked = (tmp_path / "asked").read_text()
    assert asked.count("\n") == 1 and f"--user={os.getuid()} " in asked


@pytest.mark.parametrize("script", ["exec sleep 60", "echo 'Unable to contact' >&2; exit 1"])
def test_a_silent_slurm_leaves_a_note_and_the_table(run, squeue, script, monkeypatch):
    monkeypatch.setattr(status, "ASK_SEC", 0.3)
    squeue(script)
    train(run)
    run.event(happenings.stop("SIGTERM", 40))
    began = time.monotonic()
    rows, note = look([run.paths])
    assert time.monotonic() - began < 5
    assert rows[0].state == "stopped" and note.startswith("note: Slurm does not answer")


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
    assert "there is no run gamma\n  fix:   runs in results: alpha, beta" in capsys.readouterr().err


def test_scripts_get_json(project, run, capsys):
    hold(run)
    train(run)
    assert main(["status", "base", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["run"], found["state"], found["step"]) == ("base", "running", 40)
    assert found["eta_sec"] == pytest.approx(30)


def test_a_project_without_runs_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    assert "no runs in results/ yet" in capsys.readouterr().err


def test_watching_needs_a_terminal(project, capsys):
    assert main(["status", "--watch"]) == 78
    assert "--watch needs a terminal" in capsys.readouterr().err


def test_watching_draws_anew_until_interrupted(project):
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
        os.close(theirs)
        text, end = "", time.monotonic() + 30
        while not ("not started" in text and "running" in text):
            assert time.monotonic() < end, text
            text += os.read(mine, 2**16).decode()
            if "not started" in text:
                hold(RecordedRun(project / "results/alpha"))
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 0
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
    assert row(run.paths, None).step == 40
    assert time.monotonic() - began < 1
