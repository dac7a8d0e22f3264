"""Snakemake in a job must not take it for one that it has submitted; nothing restarts for ever."""

import json
import os
import signal
from pathlib import Path

import pytest
from support import happenings
from support.run_states import new_run

from forge.core import process
from forge.core.errors import TrainingError, UnfitError
from forge.core.paths import WORKFLOW_RUNS
from forge.core.records import WorkflowRuns
from forge.plugins.controller import control
from forge.plugins.controller.controller_job import ControllerJob
from forge.plugins.controller.places import ControllerPaths
from forge.plugins.controller.records import Controller, ControllerState, SubmitCheck
from forge.slurm import adopt, slurm


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check = SubmitCheck(
        rules=["train_run"], runs={"base": "results/base"}, submitted="submitted-1.json"
    )
    shell = {"TMPDIR": "/scratch/me"}
    made = Controller(job="12", cluster="forge", command=["train"], check=check, environment=shell)
    made.write(ControllerPaths("12").record)
    return made


def test_record_with_words_of_a_command_is_read_by_its_owner_alone(record):
    """--config tracking=https://me:password@… is one of them."""
    assert ControllerPaths("12").record.stat().st_mode & 0o777 == 0o600


def test_command_is_shown_without_the_password_of_an_address(record):
    words = ["--config", "tracking=https://me:secret@host/x"]
    shown = ControllerJob(record.model_copy(update={"command": words}), None).command
    assert "secret" not in shown
    assert "https://me:…@host/x" in shown


def test_snakemake_sees_the_shell_of_the_user_and_not_this_job(record, monkeypatch):
    of_job = {
        **{"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1", "SLURM_CPU_BIND": "x", "SRUN_DEBUG": "3"},
        **{"SLURMD_NODENAME": "node01", "TMPDIR": "/tmp/job12", "CUDA_VISIBLE_DEVICES": "0"},
        **{"SBATCH_MEM_BIND": "local", "PMI_RANK": "0"},
    }
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "big", "SBATCH_QOS": "normal"}
    for name, value in {**of_job, **kept}.items():
        monkeypatch.setenv(name, value)
    seen = control.environment(record)
    left = {name for name in of_job if name in seen}
    assert left == {"TMPDIR"} and seen["TMPDIR"] == "/scratch/me"
    assert {name: seen[name] for name in kept} == kept
    assert (seen[process.SLURM_START], seen[adopt.CONTROLLED]) == ("12:0", "submitted-1.json")


def test_lock_of_snakemake_in_the_controller_names_its_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv(process.SLURM_START, "12:0")
    assert process.Process.current().slurm_job == "12"
    monkeypatch.setenv("SLURM_JOB_ID", "34")  # a job that Snakemake has submitted
    assert process.Process.current().slurm_job == "34"


class Snakemakes:
    """Ends of one Snakemake after the other."""

    def __init__(self, monkeypatch, *ends):
        self.ends = list(ends)
        monkeypatch.setattr(control._Control, "_run_snakemake", lambda _: self.ends.pop(0))
        monkeypatch.setattr(control, "may_not_submit", lambda _: "")


def state():
    return ControllerState.read(ControllerPaths("12").state)


def control_of(record, received=()):
    return control._Control(record, list(received))


def test_good_end_is_recorded(record, monkeypatch):
    Snakemakes(monkeypatch, 0)
    control_of(record).run()
    assert state().phase == "done"


def test_snakemake_that_fails_is_not_started_again(record, monkeypatch):
    snakemakes = Snakemakes(monkeypatch, 1, 0)
    with pytest.raises(TrainingError, match="Snakemake ended with status 1"):
        control_of(record).run()
    assert snakemakes.ends == [0]
    assert state().phase == "failed"


def test_snakemake_that_is_killed_is_started_again_twice_at_most(record, monkeypatch):
    snakemakes = Snakemakes(monkeypatch, -9, -9, -9, 0)
    with pytest.raises(TrainingError, match="killed by signal 9, 3 times in a row"):
        control_of(record).run()
    assert snakemakes.ends == [0]


def test_snakemake_that_is_killed_once_ends_well(record, monkeypatch):
    Snakemakes(monkeypatch, -9, 0)
    control_of(record).run()
    assert state().phase == "done"


def test_near_time_limit_requeues_and_waits_for_the_end(record, monkeypatch):
    Snakemakes(monkeypatch, None)
    asked = []

    def requeue(job, restarts):
        asked.append((job, restarts))
        received.append(signal.SIGTERM)
        return ""

    monkeypatch.setattr(slurm, "requeue", requeue)
    controller = control_of(record, [signal.SIGUSR1])
    received = controller._received
    controller.run()
    assert asked == [("12", 0)]
    assert state().phase == "running"


def test_node_that_may_not_submit_ends_at_once(record, monkeypatch):
    Snakemakes(monkeypatch)
    monkeypatch.setattr(control, "may_not_submit", lambda _: "sbatch: access denied")
    with pytest.raises(UnfitError, match="refused: sbatch: access denied"):
        control_of(record).run()
    assert state().phase == "refused"


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("allocation failure: Access/permission denied", "to partition gpu: allocation failure"),
        ("allocation failure: Requested nodes are busy", ""),
        ("Unable to contact slurm controller (connect failure)", ""),
        ("", ""),
    ],
)
def test_only_a_denied_submission_counts_as_a_node_that_may_not_submit(monkeypatch, trouble, told):
    monkeypatch.setattr(slurm, "refuse_missing", lambda *_: None)
    lines = []
    monkeypatch.setattr(slurm, "run", lambda line, **_: lines.append(line) or ("", trouble))
    assert told in control.may_not_submit([["lab", "gpu"]])
    assert bool(told) == bool(control.may_not_submit([["lab", "gpu"]]))
    assert {"--test-only", "--account=lab", "--partition=gpu"} <= {*lines[0]}


def test_what_was_told_before_a_restart_is_not_told_again(record, monkeypatch):
    told = ["base: validated"]
    ControllerState(job="12", phase="running", time=1.0, told=told).write(
        ControllerPaths("12").state
    )
    controller = control_of(record)
    monkeypatch.setattr(controller._notifier, "call", lambda event: pytest.fail("told"))
    controller._tell("base: validated", {"event": "run ended"})


@pytest.fixture
def told(record, monkeypatch, tmp_path):
    """What notify.command has been given, over all starts of the controller."""
    file = tmp_path / "told.jsonl"
    machine = tmp_path / "machine.yaml"
    machine.write_text(f"launcher: srun\nnotify: {{command: [tee, -a, {file}]}}\n")
    check = record.check.model_copy(update={"machine": str(machine)})
    monkeypatch.setattr(control, "LOOK_SEC", 0.0)

    def look(submitted=0.0):
        values = {"check": check, "time": submitted}
        controller = control_of(record.model_copy(update=values))
        controller._look()
        controller._look()
        controller._notifier.finish()
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    return look


def test_run_whose_job_is_held_is_told_once_over_restarts(told, monkeypatch):
    new_run(Path("results/base"))
    comment = "rule_allocation-base_stage_run_train_run"
    line = f"17|PENDING|JobHeldUser||n/a|2026-11-21T04:36:00|N/A|{comment}|{Path.cwd()}"
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setattr(slurm, "ask", lambda *_, **__: line)
    told()
    [event] = told()
    assert (event["event"], event["run"]) == ("run needs a person", "base")
    assert "scontrol release 17" in event["next"]


def test_run_that_another_command_was_about_last_is_told_too(told, monkeypatch):
    monkeypatch.setattr(slurm, "is_here", lambda: False)
    WorkflowRuns(folders={"other": "results/other"}).write(WORKFLOW_RUNS)
    new_run(Path("results/base")).event(happenings.failed("loss nan"))
    assert [event["run"] for event in told()] == ["base"]


def test_failure_of_before_the_submission_is_not_told_and_hides_no_later_one(told, monkeypatch):
    monkeypatch.setattr(slurm, "is_here", lambda: False)
    run = new_run(Path("results/base"))
    run.event(happenings.failed("loss nan"))
    submitted = run.time + 100
    assert told(submitted) == []
    run.event(happenings.launch(), after=200)
    run.event(happenings.failed("no room"), after=1)
    told(submitted)
    [event] = told(submitted)
    assert event["event"] == "run ended" and "no room" in event["message"]


def test_record_of_another_job_is_not_taken(record, monkeypatch):
    monkeypatch.setattr(control, "RECORD_SEC", 0.1)
    with pytest.raises(UnfitError, match=r"no \.snakemake/forge/controllers/13\.json of this job"):
        control._await_record("13")
    assert control._await_record("12") == record


def test_outside_of_a_job_the_controller_is_refused(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UnfitError, match="in the job of `forge submit` only"):
        control.control()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL and os.getpid()
