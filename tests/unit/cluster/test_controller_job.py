"""A second controller, or a Snakemake beside one, would submit the same jobs again."""

import time

import pytest

from forge.cluster import controller_job, slurm
from forge.core.errors import UnfitError
from forge.core.paths import CONTROLLER, CONTROLLER_STATE
from forge.core.records import Controller, ControllerState, SubmitCheck

CHECK = SubmitCheck(rules=["train_run"], runs=["base", "large"], submitted="submitted-1.json")
COMMAND = "forge submit --profile profiles/mine train"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setattr(slurm, "accounted_end", lambda *_, **__: "TIMEOUT, exit code 0:0")
    command = ["--profile", "profiles/mine", "train"]
    Controller(job="12", cluster="forge", command=command, check=CHECK, environment={}).write(
        CONTROLLER
    )
    return tmp_path


def squeue(monkeypatch, line):
    monkeypatch.setattr(slurm, "ask", lambda *_, **__: line)


def line(state, nodes="", reason="None", name=controller_job.JOB_NAME, folder="."):
    end = "N/A" if state == "PENDING" else "2026-11-26T09:00:00"
    folder = controller_job.Path(folder).resolve()
    return f"{state}|{nodes}|2026-11-25T09:00:00|{end}|{reason}|{name}|{folder}\n"


def ended(phase, reason="", ago=100.0):
    ControllerState(job="12", phase=phase, reason=reason, time=time.time() - ago).write(
        CONTROLLER_STATE
    )


def test_project_without_a_controller_has_no_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert controller_job.status_lines() == []
    controller_job.refuse_living()


def test_running_one_shows_node_and_limit_and_refuses_by_name(project, monkeypatch):
    squeue(monkeypatch, line("RUNNING", "node01"))
    where = "RUNNING on node01 since 2026-11-25T09:00:00, limit 2026-11-26T09:00:00"
    assert controller_job.status_lines() == [f"controller: job 12 {where}, {COMMAND}"]
    with pytest.raises(UnfitError, match=r"the controller, job 12 \(RUNNING.*base, large") as err:
        controller_job.refuse_living()
    assert "forge submit --stop" in err.value.fix
    with pytest.raises(UnfitError, match="looks after large:"):
        controller_job.refuse_living(["large", "other"])
    controller_job.refuse_living(["other"])


def test_pending_one_shows_the_reason_with_what_to_do(project, monkeypatch):
    squeue(monkeypatch, line("PENDING", reason="JobHeldUser"))
    assert controller_job.status_lines() == [
        f"controller: job 12 pending (JobHeldUser), {COMMAND}",
        "  the job is held: scontrol release 12",
    ]
    with pytest.raises(UnfitError, match=r"job 12 \(pending \(JobHeldUser\)\)"):
        controller_job.refuse_living()


@pytest.mark.parametrize("other", [{"name": "other"}, {"folder": "/"}])
def test_job_of_another_cluster_with_the_same_id_is_not_ours(project, monkeypatch, other):
    squeue(monkeypatch, line("RUNNING", "node01", **other))
    assert "ended: TIMEOUT" in controller_job.status_lines()[0]
    controller_job.refuse_living()


def test_recorded_end_is_shown_and_slurm_is_not_needed_to_start_again(project, monkeypatch):
    ended("failed", "Snakemake ended with status 1")
    squeue(monkeypatch, "")
    [shown] = controller_job.status_lines()
    assert "job 12 ended: failed (Snakemake ended with status 1), 1 min" in shown
    monkeypatch.setattr(slurm, "ask", lambda *_, **__: pytest.fail("it was asked"))
    controller_job.refuse_living()


def test_end_without_a_record_says_what_slurm_knows_and_the_command(project, monkeypatch):
    ended("running")
    squeue(monkeypatch, "")
    [shown] = controller_job.status_lines()
    assert "ended: TIMEOUT, exit code 0:0, without a record" in shown
    assert f"Rerun {COMMAND}: it takes its jobs back" in shown


def test_silent_slurm_is_said(project, monkeypatch):
    def ask(*_, **__):
        raise slurm.SlurmSilent("no answer")

    monkeypatch.setattr(slurm, "ask", ask)
    assert controller_job.status_lines() == [
        f"controller: job 12: Slurm does not answer; {COMMAND}"
    ]


def test_corrupt_record_is_a_line(project):
    CONTROLLER.write_text("{")
    [shown] = controller_job.status_lines()
    assert shown.startswith("controller: .snakemake/forge/controller.json")
