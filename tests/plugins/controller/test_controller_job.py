"""A second controller, or a Snakemake beside one, would submit the same jobs again."""

import json
import time

import pytest

from forge.cli import main
from forge.core.errors import UnfitError
from forge.plugins.controller import controller_job
from forge.plugins.controller.places import ControllerPaths
from forge.plugins.controller.records import Controller, ControllerState, SubmitCheck
from forge.slurm import slurm

RUNS = {"base": "results/base", "large": "results/large"}
TOKENS = "data/tokens/0123/manifest.json"
CHECK = SubmitCheck(rules=["train_run"], runs=RUNS, shared=[TOKENS], submitted="submitted-1.json")
COMMAND = "forge submit --profile profiles/mine train"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setattr(slurm, "cluster_name", lambda **_: "forge")
    monkeypatch.setattr(slurm, "accounted_end", lambda *_, **__: "TIMEOUT, exit code 0:0")
    submitted("12")
    return tmp_path


def submitted(job, **check):
    record = Controller(
        job=job,
        cluster="forge",
        command=["--profile", "profiles/mine", "train"],
        check=CHECK.model_copy(update=check),
        environment={},
    )
    record.write(ControllerPaths(job).record)
    return record


def lines():
    return [line for one in controller_job.statuses() for line in one.lines()]


def squeue(monkeypatch, line):
    monkeypatch.setattr(slurm, "ask", lambda *_, **__: line)


def line(state, nodes="", reason="None", name=controller_job.JOB_NAME, folder="."):
    end = "N/A" if state == "PENDING" else "2026-11-26T09:00:00"
    folder = controller_job.Path(folder).resolve()
    return f"{state}|{nodes}|2026-11-25T09:00:00|{end}|{reason}|{name}|{folder}\n"


def ended(phase, reason="", ago=100.0):
    state = ControllerState(job="12", phase=phase, reason=reason, time=time.time() - ago)
    state.write(ControllerPaths("12").state)


def test_project_without_a_controller_has_no_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lines() == []
    controller_job.refuse_living(["base"])


def test_running_one_shows_node_and_limit_and_refuses_by_name(project, monkeypatch):
    squeue(monkeypatch, line("RUNNING", "node01"))
    where = "RUNNING on node01 since 2026-11-25T09:00:00, limit 2026-11-26T09:00:00"
    assert lines() == [f"controller: job 12 {where}, {COMMAND}"]
    with pytest.raises(UnfitError, match=r"the controller, job 12 \(RUNNING.*base, large") as err:
        controller_job.refuse_living(RUNS)
    assert "forge submit --stop 12" in err.value.fix and "--config runs=" in err.value.fix
    with pytest.raises(UnfitError, match="looks after large:"):
        controller_job.refuse_living(["large", "other"])
    controller_job.refuse_living(["other"])


def test_pending_one_shows_the_reason_with_what_to_do(project, monkeypatch):
    squeue(monkeypatch, line("PENDING", reason="JobHeldUser"))
    assert lines() == [
        f"controller: job 12 pending (JobHeldUser), {COMMAND}",
        "  the job is held: scontrol release 12",
    ]
    with pytest.raises(UnfitError, match=r"job 12 \(pending \(JobHeldUser\)\)"):
        controller_job.refuse_living(["base"])


@pytest.mark.parametrize("other", [{"name": "other"}, {"folder": "/"}])
def test_job_of_another_cluster_with_the_same_id_is_not_ours(project, monkeypatch, other):
    squeue(monkeypatch, line("RUNNING", "node01", **other))
    assert "ended: TIMEOUT" in lines()[0]
    controller_job.refuse_living(["base"])


def test_recorded_end_is_shown_and_slurm_is_not_needed_to_start_again(project, monkeypatch):
    ended("failed", "Snakemake ended with status 1")
    squeue(monkeypatch, "")
    [shown] = lines()
    assert "job 12 ended: failed (Snakemake ended with status 1), 1 min" in shown
    monkeypatch.setattr(slurm, "ask", lambda *_, **__: pytest.fail("it was asked"))
    controller_job.refuse_living(["base"])


def test_end_without_a_record_says_what_slurm_knows_and_the_command(project, monkeypatch):
    ended("running")
    squeue(monkeypatch, "")
    [shown] = lines()
    assert "ended: TIMEOUT, exit code 0:0, without a record" in shown
    assert f"Rerun {COMMAND}: it takes its jobs back" in shown


def test_silent_slurm_is_said(project, monkeypatch):
    def ask(*_, **__):
        raise slurm.SlurmSilent("no answer")

    monkeypatch.setattr(slurm, "ask", ask)
    assert lines() == [f"controller: job 12: Slurm does not answer; {COMMAND}"]


def test_corrupt_record_is_a_line(project):
    ControllerPaths("12").record.write_text("{")
    [shown] = lines()
    assert shown.startswith("controller: job 12: .snakemake/forge/controllers/12.json")


def test_other_runs_that_need_tokens_it_makes_are_refused_by_their_file(project, monkeypatch):
    """Snakemake removes outputs before it makes them: the first one's training would miss its tokens."""
    squeue(monkeypatch, line("RUNNING", "node01"))
    controller_job.refuse_living(["other"], ["data/tokens/4567/manifest.json"])
    with pytest.raises(UnfitError, match=f"job 12 .* makes {TOKENS}, which these runs need") as err:
        controller_job.refuse_living(["other"], [TOKENS])
    assert "wait until they are there" in err.value.fix


def test_controllers_of_other_runs_have_lines_of_their_own(project, monkeypatch):
    submitted("9", runs={"other": "results/other"})
    squeue(monkeypatch, line("RUNNING", "node01"))
    assert [text.split()[2] for text in lines()] == ["9", "12"]


@pytest.mark.parametrize(
    ("run", "queue", "kept"),
    [
        ("other", "the controller and a job", True),
        ("other", "a job", True),  # for `forge submit --stop`
        ("other", "", False),
        ("base", "a job", False),  # which the new one takes back
    ],
)
def test_only_records_of_jobs_that_ended_and_left_none_are_forgotten(
    project, monkeypatch, run, queue, kept
):
    new = submitted("13", runs={run: f"results/{run}"})
    squeue(monkeypatch, line("RUNNING", "node01") if "controller" in queue else "")
    jobs = ["a job"] if "a job" in queue else []
    monkeypatch.setattr(controller_job.adopt, "adoptable", lambda _: jobs)
    controller_job.forget_ended(new)
    assert [paths.job for paths in ControllerPaths.all()] == (["12"] if kept else []) + ["13"]


@pytest.fixture
def elsewhere(project, monkeypatch):
    """Here is another cluster than that of job 12, whose Slurm knows no such job."""
    monkeypatch.setattr(slurm, "cluster_name", lambda **_: "beta")
    monkeypatch.setattr(controller_job.adopt, "adoptable", lambda _: [])
    squeue(monkeypatch, "")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("run", ["base", "other"])
def test_record_of_another_cluster_is_kept_unless_it_says_that_its_job_has_ended(run):
    new = submitted("13", runs={run: f"results/{run}"}).model_copy(update={"cluster": "beta"})
    new.write(ControllerPaths("13").record)
    controller_job.forget_ended(new)
    assert [paths.job for paths in ControllerPaths.all()] == ["12", "13"]
    ended("done")
    controller_job.forget_ended(new)
    assert [paths.job for paths in ControllerPaths.all()] == ["13"]


@pytest.mark.usefixtures("elsewhere")
def test_controller_of_another_cluster_is_unknown_and_its_runs_and_files_are_refused():
    why = "it is of cluster forge, and this is beta"
    assert lines() == [f"controller: job 12: {why}; {COMMAND}"]
    [shown] = controller_job.statuses()
    assert (shown.state, shown.reason) == ("unknown", why)
    for named in ((["base"],), (["other"], [TOKENS])):
        with pytest.raises(UnfitError, match=f"job 12, may still .*: {why}") as err:
            controller_job.refuse_living(*named)
        assert "forge submit --stop 12" in err.value.fix
        assert f"rm {ControllerPaths('12').record}" in err.value.fix
    controller_job.refuse_living(["other"])
    ended("done")
    controller_job.refuse_living(["base"])


def test_scripts_get_each_value_by_a_key(project, monkeypatch):
    squeue(monkeypatch, line("RUNNING", "node01"))
    [shown] = controller_job.statuses()
    assert shown.to_json() == {
        "job": "12",
        "state": "running",
        "log": ".snakemake/forge/controllers/12.log",
        "reason": "",
        "slurm_state": "RUNNING",
        "nodes": "node01",
        "since": "2026-11-25T09:00:00",
        "limit": "2026-11-26T09:00:00",
        "ended": None,
        "runs": ("base", "large"),
        "command": COMMAND,
        "next": "",
    }


def test_status_for_scripts_lists_controllers_before_runs(project, monkeypatch, capsys):
    squeue(monkeypatch, line("RUNNING", "node01"))
    assert main(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [*shown] == ["controllers", "runs"]
    assert [one["job"] for one in shown["controllers"]] == ["12"]


def test_status_for_scripts_has_an_empty_list_without_a_controller(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"controllers": [], "runs": []}
