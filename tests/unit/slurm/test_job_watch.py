"""Threat: the command drops a job, or asks for ever for one that Slurm has forgotten."""

import asyncio
import inspect
import os
import pwd
import stat
import threading
import time
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
from snakemake_executor_plugin_slurm import Executor as SlurmExecutor
from snakemake_executor_plugin_slurm import ExecutorSettings as SlurmSettings

from forge.hosts import allocation
from forge.slurm import adopt, job_watch, slurm
from forge.slurm.job_watch import JobWatch
from snakemake_executor_plugin_forge import Executor, ExecutorSettings

TIMES = "2026-11-21T04:25:31|2026-11-21T04:26:31"
LINE = "{id}|{state}|{reason}|node01|node01|" + TIMES + "|(null)|/home/ada/forge"
SILENT = "echo 'squeue: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"

# Methods of the plugin, or of Snakemake's interface for executors.
OVERRIDDEN = {
    *("run_job", "cancel_jobs", "check_active_jobs", "sleep"),
    *("_report_job_error_threadsafe", "get_job_exec_prefix", "format_job_exec"),
    *("report_job_submission", "_report_job_submission_threadsafe"),
}


def test_plugin_is_the_one_that_the_watch_was_tested_with():
    found = metadata.version("snakemake-executor-plugin-slurm")
    assert found == job_watch.PLUGIN_VERSION, (
        f"the plugin is {found}, Forge's executor was tested with {job_watch.PLUGIN_VERSION}. Read in the"
        " plugin what snakemake_executor_plugin_forge overrides (check_active_jobs, sleep, run_job,"
        " cancel_jobs, _report_job_error_threadsafe, get_job_exec_prefix, format_job_exec,"
        " report_job_submission and its _threadsafe form) and what is read of it (run_uuid, wait,"
        " array_jobs, aux['slurm_logfile']), run tests/slurm/test_job_watch.py and test_workflow.py, then"
        " change PLUGIN_VERSION and pyproject.toml."
    )


def test_what_the_executor_overrides_is_there_with_the_same_parameters():
    own = {name for name, value in vars(Executor).items() if inspect.isfunction(value)}
    assert own - {"__init__", "__post_init__"} == OVERRIDDEN
    for name in own:
        ours, theirs = (inspect.signature(getattr(e, name)) for e in (Executor, SlurmExecutor))
        assert list(ours.parameters) == list(theirs.parameters)


def test_options_of_the_plugin_are_there_but_for_those_that_forge_decides():
    ours, theirs = ({o.name for o in fields(s)} for s in (ExecutorSettings, SlurmSettings))
    assert {name.replace("_", "-") for name in theirs - ours} == set(allocation._WITHOUT)
    assert ours <= theirs
    assert ExecutorSettings().requeue and not ExecutorSettings(no_requeue=True).requeue


class Job:
    """What the watch asks of a job of Snakemake."""

    def __init__(self, *output):
        self.output = output
        self.rule = SimpleNamespace(name="validate_run")
        self.rules = [self.rule.name]
        self.wildcards_dict = {"run": "base"}
        self.resources = {}

    def is_group(self):
        return False


class Recorder:
    """An executor, its scheduler and its logger, which note what they are told."""

    run_uuid = "uuid"
    array_jobs = ()

    def __init__(self):
        self.said, self.success, self.failure, self.submitted = [], [], [], []
        self.wait = True
        self.logger = SimpleNamespace(
            info=self.said.append, warning=self.said.append, error=self.said.append
        )
        self.workflow = SimpleNamespace(
            execution_settings=SimpleNamespace(latency_wait=60),
            scheduler=SimpleNamespace(error_callback=self.failure.append),
        )

    def report_job_success(self, info):
        self.success.append(info.job)

    def report_job_error(self, info, msg, aux_logs):
        self.failure.append(info.job)

    def cancel_jobs(self, active):
        pass

    def run_job(self, job):
        self.submitted.append(job)


def watching(executor):
    """A watch of an executor that submits and cancels as this one does."""
    return JobWatch(executor, executor.run_job, executor.cancel_jobs)


def extended(executor):
    """The same executor, with what Forge's executor puts around the methods of the plugin."""
    executor._watch = watching(executor)
    for name in OVERRIDDEN:
        setattr(executor, name, MethodType(getattr(Executor, name), executor))
    return executor


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Puts a command with these words into the PATH, in place of Slurm's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def install(name, script):
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    install("squeue", "true")
    install("sacct", "true")
    install("scancel", "true")
    return install


@pytest.fixture
def watch():
    return watching(Recorder())


@pytest.fixture
def info(tmp_path, watch):
    """A submitted job with one output, which is not there yet."""
    log = tmp_path / "17.log"
    log.write_text("")
    info = SimpleNamespace(
        job=Job(tmp_path / "validated.json"), external_jobid="17", aux={"slurm_logfile": log}
    )
    watch.submit(info.job)
    return info


def lists(command, state, reason="None"):
    command("squeue", f"echo '{LINE.format(id=17, state=state, reason=reason)}'")


def check(watch, *infos):
    """The jobs that the watch keeps."""

    async def kept():
        return [info async for info in watch.check(list(infos))]

    return asyncio.run(kept())


def test_requeued_job_asks_again_for_the_nodes_that_it_was_submitted_with(
    command, watch, info, tmp_path
):
    asked = tmp_path / "asked"
    command("scontrol", f"echo $* >> {asked}")
    for state in ("RUNNING", "PENDING"):  # with one number of nodes nothing is changed
        lists(command, state)
        check(watch, info)
    assert not asked.exists()
    info.job.resources |= {"slurm_extra": "-N2-4", "tasks_per_node": 3}
    for state in ("PENDING", "RUNNING", "PENDING", "PENDING", "RUNNING", "PENDING"):
        lists(command, state)
        check(watch, info)
    line = "update JobId=17 NumNodes=2-4 NumTasks=6\n"
    assert asked.read_text() == line * 2


def test_waiting_job_of_an_earlier_command_asks_for_all_its_nodes_until_slurm_agrees(
    command, watch, info, tmp_path, monkeypatch
):
    """A requeue leaves it the number of its last start, which this command has not seen."""
    asked = tmp_path / "asked"
    command(
        "scontrol", f"echo $* >> {asked}; [ $(wc -l < {asked}) != 1 ] || {{ echo no; exit 1; }} >&2"
    )
    monkeypatch.setattr(adopt, "take_back", lambda *_, **__: "PENDING")
    watch.submit(info.job)
    info.job.resources |= {"slurm_extra": "-N2-4", "tasks_per_node": 3}
    lists(command, "PENDING")
    for _ in range(3):
        check(watch, info)
    assert asked.read_text() == "update JobId=17 NumNodes=2-4 NumTasks=6\n" * 2
    [said] = watch._executor.said
    assert "asks for what it had last (no)" in said


@pytest.mark.parametrize(
    ("options", "batch_host", "again"),
    [("--no-kill", "node00", True), ("--no-kill", "node01", False), ("", "node00", False)],
)
def test_job_that_slurm_keeps_without_its_first_node_is_requeued_once(  # noqa: PLR0917
    command, watch, info, options, batch_host, again
):
    asked = Path(info.job.output[0]).with_name("asked")
    shown = "echo JobId=17 BatchFlag=1 JobState"
    command(
        "scontrol",
        f"if [ $1 = requeue ]; then touch {asked}; elif [ -e {asked} ]; then {shown}=PENDING Restarts=1;"
        f" else {shown}=RUNNING Restarts=0; fi",
    )
    info.job.resources |= {"slurm_extra": options}
    line = LINE.format(id=17, state="RUNNING", reason="None")
    command("squeue", f"echo '{line.replace('node01|2', f'{batch_host}|2')}'")
    for _ in range(2):
        assert check(watch, info) == [info]
    assert asked.exists() == again
    words = "job 17 (rule validate_run, run base) has lost its first node, node00, and is requeued"
    assert watch._executor.said == [words] * again


def test_jobs_are_kept_while_slurm_does_not_answer_and_it_is_said_once(command, watch, info):
    command("sacct", SILENT)
    for words in ("connect failure", "timed out", "connect failure"):
        command("squeue", SILENT.replace("connect failure", words))
        assert check(watch, info) == [info]
    [said] = watch._executor.said
    assert "Slurm does not answer" in said
    lists(command, "RUNNING")
    assert check(watch, info) == [info]
    assert watch._executor.said[-1] == "Slurm answers again"


def test_silence_of_two_days_ends_the_wait_and_says_that_the_job_may_still_run(
    command, watch, info, monkeypatch
):
    command("squeue", SILENT)
    assert check(watch, info) == [info]
    lists(command, "RUNNING")
    assert check(watch, info) == [info], "an answer begins the time anew"
    command("squeue", SILENT)
    assert check(watch, info) == [info]
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + job_watch.SILENCE_SEC)
    assert check(watch, info) == []
    assert watch._executor.failure == [info.job]
    assert "has not answered for 48 hours. The job may still run" in watch._executor.said[-1]


def test_all_jobs_are_asked_for_by_one_squeue_and_sacct_by_none(command, watch, info, tmp_path):
    line = LINE.format(id=17, state="RUNNING", reason="None")
    command(
        "squeue", f"echo \"$@\" >> {tmp_path}/asked; echo '{line}'; echo '{line}' | sed s/17/18/"
    )
    command("sacct", f"echo sacct >> {tmp_path}/asked")
    other = SimpleNamespace(job=Job(), external_jobid="18", aux={})
    assert check(watch, info, other) == [info, other]
    [asked] = (tmp_path / "asked").read_text().splitlines()
    assert "--name=uuid" in asked and "--states=all" in asked and "--array" in asked


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "RESIZING"])
def test_job_that_has_not_ended_is_kept(command, watch, info, state):
    lists(command, state)
    assert check(watch, info) == [info] and not watch._executor.said


def latency_has_passed(watch):
    watch._executor.workflow.execution_settings.latency_wait = 0


def test_completed_job_is_a_success(command, watch, info):
    lists(command, "COMPLETED")
    assert check(watch, info) == [] and watch._executor.success == [info.job]


def test_forgotten_job_that_left_new_outputs_is_a_success(command, watch, info):
    info.job.output[0].write_text("{}")
    assert check(watch, info) == [] and watch._executor.success == [info.job]


@pytest.mark.parametrize(
    ("state", "is_success"), [("TIMEOUT", False), ("COMPLETED", True), ("", True)]
)
def test_forgotten_job_of_a_rule_of_a_user_counts_by_accounting_where_there_is_one(
    command, watch, info, state, is_success
):
    """Its outputs may be half written."""
    info.job.rules = ["plot"]
    info.job.output[0].write_text("half")
    command("sacct", f"[[ $* == *.batch* ]] || echo '{state}'")
    assert check(watch, info) == []
    assert watch._executor.success == [info.job] * is_success
    assert watch._executor.failure == [info.job] * (not is_success)


def test_output_of_an_earlier_job_is_no_success_of_a_forgotten_one(command, watch, info):
    info.job.output[0].write_text("{}")
    watch.submit(info.job)
    assert check(watch, info) == [info]
    latency_has_passed(watch)
    assert check(watch, info) == [] and watch._executor.failure == [info.job]
    assert "job 17 (rule validate_run, run base) is no longer known" in watch._executor.said[-1]
    assert "did not write its outputs" in watch._executor.said[-1]


def test_forgotten_job_without_a_record_fails_by_name_and_is_not_asked_for_forever(
    command, watch, info
):
    assert check(watch, info) == [info]  # its files may show up late
    latency_has_passed(watch)
    assert check(watch, info) == [] and watch._executor.failure == [info.job]
    assert "left no" in watch._executor.said[-1] and "validated.json" in watch._executor.said[-1]


def test_forgotten_job_is_asked_of_accounting(command, watch, info):
    command("sacct", f"echo 'CANCELLED by {os.getuid()}'")
    assert check(watch, info) == [] and watch._executor.failure == [info.job]
    assert f"was cancelled by user {pwd.getpwuid(os.getuid()).pw_name}" in watch._executor.said[-1]


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "SUSPENDED", "REQUEUED"])
def test_job_that_accounting_calls_running_has_not_ended_and_is_not_asked_for_forever(
    command, watch, info, state, monkeypatch
):
    command("sacct", f"echo {state}")
    now = time.monotonic()
    for after in (0, 600, job_watch.SILENCE_SEC - 60):
        monkeypatch.setattr(job_watch.time, "monotonic", lambda at=now + after: at)
        assert check(watch, info) == [info]
        assert f"is {state} in Slurm's accounting" in watch._executor.said[-1]
    monkeypatch.setattr(job_watch.time, "monotonic", lambda: now + job_watch.SILENCE_SEC + 60)
    assert check(watch, info) == [] and watch._executor.failure == [info.job]


def test_variables_that_hide_jobs_from_slurms_commands_are_not_passed_on(monkeypatch):
    hiding = {"SQUEUE_STATES": "PENDING", "SCANCEL_STATE": "PENDING", "SACCT_LOCAL": "1"}
    for name, value in {**hiding, "SBATCH_ACCOUNT": "ada", "SLURM_CONF": "/etc/slurm.conf"}.items():
        monkeypatch.setenv(name, value)
    prepared(monkeypatch)
    assert not hiding.keys() & os.environ.keys()
    assert (os.environ["SBATCH_ACCOUNT"], os.environ["SLURM_CONF"]) == ("ada", "/etc/slurm.conf")


@pytest.mark.parametrize(
    ("state", "word"),
    [("TIMEOUT", "raise runtime"), ("OUT_OF_MEMORY", "raise mem_mb"), ("BOOT_FAIL", "boot")],
)
def test_end_outside_of_forge_is_one_line(command, watch, info, state, word):
    lists(command, state)
    assert check(watch, info) == [] and watch._executor.failure == [info.job]
    [said] = watch._executor.said
    assert "job 17" in said and word in said and str(info.aux["slurm_logfile"]) in said


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED"])
def test_job_that_slurm_may_send_back_counts_when_it_is_seen_twice(command, watch, info, state):
    lists(command, state)
    assert check(watch, info) == [info]
    lists(command, "PENDING")
    assert check(watch, info) == [info]
    lists(command, state)
    assert check(watch, info) == [info]
    assert check(watch, info) == [] and watch._executor.failure == [info.job]


@pytest.mark.parametrize("state", ["PREEMPTED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY"])
def test_job_that_slurm_ends_after_it_has_done_everything_is_a_success(command, watch, info, state):
    info.job.output[0].write_text("{}")
    lists(command, state)
    while check(watch, info):
        pass
    assert watch._executor.success == [info.job] and not watch._executor.failure


@pytest.mark.parametrize(
    ("ended", "is_success"), [("COMPLETED|0:0", True), ("CANCELLED|0:15", False), ("", False)]
)
def test_rule_of_a_user_that_is_out_of_time_counts_by_its_exit_status(
    command, watch, info, ended, is_success
):
    """Its outputs may be half written."""
    info.job.rules = ["plot"]
    info.job.output[0].write_text("half")
    command("sacct", f"[[ $* == *' 17.batch '* && $* != *allocations* ]] && echo '{ended}'")
    lists(command, "TIMEOUT")
    assert check(watch, info) == []
    assert watch._executor.success == [info.job] * is_success
    assert watch._executor.failure == [info.job] * (not is_success)


def test_job_of_another_with_the_id_of_one_that_slurm_has_forgotten_is_not_waited_for(
    command, watch, info
):
    """A controller that was killed after a submission gives the id again."""
    other = "case $* in *--name=uuid*--user=*) ;; *) echo RUNNING ;; esac"
    command("sacct", other)
    watch._executor.workflow.execution_settings.latency_wait = 0
    assert check(watch, info) == [] and watch._executor.failure == [info.job]
    assert "no longer known to Slurm" in watch._executor.said[-1]


def test_who_cancelled_is_asked_until_accounting_has_it(command, watch, info, tmp_path):
    lists(command, "CANCELLED")
    once = (
        f"[ -e {tmp_path}/once ] && echo 'CANCELLED by 4294' || echo RUNNING; touch {tmp_path}/once"
    )
    command("sacct", once)
    assert check(watch, info) == []
    assert "cancelled by user 4294" in watch._executor.said[-1]


def test_cancellation_is_reported_where_accounting_is_away(command, watch, info, monkeypatch):
    monkeypatch.setattr(job_watch, "WHO_SEC", 0.1)
    lists(command, "CANCELLED")
    command("sacct", SILENT)
    assert check(watch, info) == []
    assert "cancelled by somebody" in watch._executor.said[-1]


def test_what_failed_inside_the_job_is_reported_with_its_logs(command, watch, info):
    lists(command, "FAILED")
    assert check(watch, info) == [] and watch._executor.failure == [info.job]
    assert watch._executor.said == []  # Snakemake's report has it


def test_job_that_failed_without_a_log_names_node_and_folder(command, watch, info):
    info.aux["slurm_logfile"].unlink()
    lists(command, "FAILED")
    assert check(watch, info) == [] and watch._executor.failure == [info.job]
    assert (
        "failed on node01" in watch._executor.said[-1]
        and "srun -w node01" in watch._executor.said[-1]
    )


def test_reason_that_does_not_pass_is_said_at_once_and_again_every_ten_minutes(
    command, watch, info, monkeypatch
):
    lists(command, "PENDING", "PartitionTimeLimit")
    now = time.monotonic()
    for after in (0, 5, 599, 601, 610, 1202):
        monkeypatch.setattr(job_watch.time, "monotonic", lambda at=now + after: at)
        assert check(watch, info) == [info]
    assert len(watch._executor.said) == 3
    assert all("PartitionTimeLimit" in said and "MaxTime" in said for said in watch._executor.said)


@pytest.mark.parametrize("output", ["trained.json", ".allocation/preflight.json"])
def test_job_that_has_too_few_nodes_left_names_those_that_its_run_excludes(
    command, watch, info, tmp_path, output
):
    info.job.output = (tmp_path / output,)
    (tmp_path / "bad_nodes.txt").write_text("n1   # 2999-01-01T00:00:00 GPU fault\nn2\n")
    lists(command, "PENDING", "BadConstraints")
    assert check(watch, info) == [info]
    [said] = watch._executor.said
    assert "does not pass by itself (BadConstraints)" in said
    assert f"{tmp_path}/bad_nodes.txt excludes n1 (GPU fault), n2 (added by hand): remove" in said


def test_maintenance_that_keeps_a_job_back_is_said_once(command, watch, info):
    lists(command, "PENDING", "ReqNodeNotAvail, Reserved for maintenance")
    assert check(watch, info) == [info] and check(watch, info) == [info]
    [said] = watch._executor.said
    assert "job 17 (rule validate_run, run base) waits (ReqNodeNotAvail, Reserved for" in said


def test_pause_is_short_even_and_over_at_once_at_the_end(watch):
    assert job_watch.POLL_SEC <= 5
    watch._executor.wait = False
    began = time.monotonic()
    asyncio.run(watch.sleep())
    assert time.monotonic() - began < job_watch.POLL_SEC / 2


@pytest.fixture
def now(monkeypatch):
    """A function that tells the time of the watch, which only its pauses move on."""
    passed = [0.0]

    async def pause(seconds):
        passed[0] += seconds

    clock = {**vars(time), "monotonic": lambda: passed[0]}
    monkeypatch.setattr(job_watch, "time", SimpleNamespace(**clock))
    monkeypatch.setattr(job_watch, "asyncio", SimpleNamespace(sleep=pause))
    return lambda: passed[0]


def test_slurm_is_asked_soon_but_not_for_ever_about_a_job_that_has_written_its_outputs(
    command, watch, info, now
):
    lists(command, "RUNNING")
    assert check(watch, info) == [info]
    Path(info.job.output[0]).write_text("{}")
    for _ in range(job_watch.QUICK_CHECKS):
        asyncio.run(watch.sleep())
        assert check(watch, info) == [info]
    assert 0 < now() < job_watch.QUICK_CHECKS * job_watch.POLL_SEC / 2
    began = now()
    asyncio.run(watch.sleep())
    assert now() - began >= job_watch.POLL_SEC


def test_of_many_outputs_each_folder_is_listed_once_and_none_is_looked_at_after_a_missing_one(
    watch, tmp_path, monkeypatch
):
    outputs = [tmp_path / f"{number}.txt" for number in range(100)]
    job = Job(*outputs)
    watch.submit(job)
    looked, stamp = [], job_watch._stamp
    monkeypatch.setattr(job_watch, "_stamp", lambda path: looked.append(path) or stamp(path))
    listed, iterdir = [], Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: listed.append(path) or iterdir(path))
    assert not watch._left_outputs(job)
    assert (looked, listed) == ([outputs[0]], [tmp_path])
    for path in outputs:
        path.write_text("")
    assert watch._left_outputs(job)
    assert listed == [tmp_path] * 2


@pytest.fixture
def refusing(monkeypatch):
    """refusing(words, …): an installed executor whose sbatch says these words, "" where it submits."""
    monkeypatch.setattr(job_watch, "POLL_SEC", 0.05)

    def make(*words):
        executor, left = Recorder(), list(words)

        def run_job(job):
            if word := left.pop(0):
                executor._report_job_error_threadsafe(SimpleNamespace(job=job), word)
            else:
                executor.submitted.append(job)

        executor.run_job = run_job
        return extended(executor)

    return make


def prepared(monkeypatch, *due):
    """Forge's executor as it is before the first job. due: jobs that will run."""

    def prepare(executor, test_mode):
        executor.run_uuid = "uuid"

    monkeypatch.setattr(SlurmExecutor, "__post_init__", prepare)
    executor = object.__new__(Executor)
    executor.workflow = SimpleNamespace(dag=SimpleNamespace(needrun_jobs=lambda: due))
    executor.__post_init__()
    return executor


def test_jobs_are_called_after_the_runs_in_squeue(monkeypatch):
    wide, shared = Job(), Job()
    wide.wildcards_dict, shared.wildcards_dict = {"run": "wide"}, {"tokens": "0123456789ab"}
    assert prepared(monkeypatch, wide, shared, Job(), Job()).run_uuid == "base-wide_uuid"
    assert prepared(monkeypatch, shared).run_uuid == "uuid"
    wide.wildcards_dict["run"] = "w" * 60
    assert prepared(monkeypatch, wide).run_uuid == "w" * adopt.MAX_NAME + "_uuid"


def test_job_that_cannot_be_submitted_fails_with_what_sbatch_said(refusing):
    executor, job = refusing("Invalid qos specification"), Job()
    executor.run_job(job)
    assert "(rule validate_run, run base) could not be submitted: Invalid qos" in executor.said[-1]
    assert executor.failure == [job]


def test_job_whose_submission_raises_fails_instead_of_being_waited_for(tmp_path):
    executor, job = Recorder(), Job()

    def run_job(job):  # as the plugin does for a group
        try:
            raise ValueError("no such account")
        except ValueError:
            raise AttributeError("'GroupJob' object has no attribute 'rule'")  # noqa: B904

    executor.run_job = run_job
    extended(executor)
    executor.run_job(job)
    assert "no such account" in executor.said[-1] and executor.failure == [job]


def test_job_is_submitted_when_slurm_is_back(refusing):
    away = "Batch job submission failed: Unable to contact slurm controller (connect failure)"
    database = "Problem talking to the database: Connection refused"
    executor, job = refusing(away, database, ""), Job()
    executor.run_job(job)
    assert executor.submitted == [job] and executor.failure == [] and len(executor.said) == 1


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize("has_taken", [True, False])
def test_job_that_slurm_took_without_an_answer_is_watched_and_else_submitted_again(
    refusing, command, tmp_path, monkeypatch, has_taken
):
    monkeypatch.delenv(adopt.CONTROLLED, raising=False)
    line = f"17|PENDING|None|||{TIMES}|rule_validate_run_wildcards_base|{Path.cwd()}"
    command("squeue", f"echo '{line}'" if has_taken else "true")
    executor, job, reported = refusing(TIMED_OUT, ""), Job(), []
    job.name, job.wildcards, job.jobid = "validate_run", ["base"], 3
    executor.slurm_logdir, executor._without_snakemake = tmp_path, set()
    executor._submitted = set()
    executor._report_job_submission_threadsafe = reported.append
    executor.run_job(job)
    assert executor.failure == []
    assert [info.external_jobid for info in reported] == ["17"] * has_taken
    assert executor.submitted == [job] * (not has_taken)


MANY = (
    "SLURM sbatch failed. The error message was 'sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch:"
    " error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's"
    " size and/or time limits)'."
)


def test_job_above_the_number_that_slurm_allows_waits_for_its_turn(refusing, command):
    lists(command, "RUNNING")
    executor, job = refusing(MANY, MANY, ""), Job()
    executor.run_job(job)
    assert executor.submitted == [job] and executor.failure == []
    [said] = executor.said
    assert "(rule validate_run, run base) is submitted after another job of yours has ended" in said
    assert "QOSMaxSubmitJobPerUserLimit" in said and "`jobs: NUMBER`" in said


def test_job_above_the_number_that_others_take_up_fails_and_names_the_setting(refusing, command):
    lists(command, "COMPLETED")
    executor, job = refusing(MANY, MANY), Job()
    executor.run_job(job)
    assert executor.failure == [job]
    assert "could not be submitted" in executor.said[-1] and "`jobs: NUMBER`" in executor.said[-1]


def test_submission_that_waits_for_slurm_ends_when_the_command_is_cancelled(refusing, monkeypatch):
    executor = refusing(*["Unable to contact slurm controller"] * 3)
    monkeypatch.setattr(job_watch.time, "sleep", lambda _: executor.cancel_jobs([]))
    executor.run_job(Job())
    assert len(executor.failure) == 1


@pytest.fixture
def queue(command, tmp_path, monkeypatch):
    """Slurm's queue, a file with a line for each job; scancel removes those of a name."""
    path = tmp_path / "queue"
    path.write_text("")
    monkeypatch.setattr(job_watch, "ON_ITS_WAY_SEC", 0.3)
    command("scancel", f'echo "$@" >> {path}.asked; sed -i "/^${{1#--name=}}$/d" {path}')
    return path


@pytest.mark.parametrize(
    "killed", [False, True], ids=["sbatch ends later", "sbatch dies of Ctrl-C"]
)
def test_job_that_sbatch_submits_while_ctrl_c_comes_is_cancelled(queue, killed):
    """A killed sbatch may have sent its request, which the controller takes a moment later."""
    executor, asked, pressed = Recorder(), threading.Event(), threading.Event()

    def submit():
        queue.write_text(f"{executor.run_uuid}\nanother\n")

    def run_job(job):
        asked.set()
        assert pressed.wait(30)
        if not killed:
            submit()
            return
        threading.Timer(0.1, submit).start()
        executor._report_job_error_threadsafe(SimpleNamespace(job=job), "exit status 130")

    executor.run_job = run_job
    extended(executor)
    thread = threading.Thread(target=executor.run_job, args=(Job(),))
    thread.start()
    assert asked.wait(30)
    executor.cancel_jobs([])
    pressed.set()
    thread.join(30)
    assert queue.read_text() == "another\n"


def test_jobs_that_wait_for_their_turn_are_not_submitted_after_ctrl_c(queue):
    executor = extended(Recorder())
    executor.cancel_jobs([])
    executor.run_job(Job())
    assert executor.submitted == [] == executor.failure
    assert "--name=uuid" in Path(f"{queue}.asked").read_text()


def test_cancellation_that_slurm_does_not_hear_is_said_with_the_command(command, monkeypatch):
    monkeypatch.setattr(slurm, "CANCEL_SEC", 0.0)
    command("scancel", SILENT)
    executor = extended(Recorder())
    executor.cancel_jobs([])
    assert "scancel --name=uuid" in executor.said[-1]


def test_jobs_are_cancelled_while_they_are_asked_for(command, info):
    executor = Recorder()
    cancelled = []
    executor.cancel_jobs = cancelled.extend
    extended(executor)
    other = SimpleNamespace(job=Job(), external_jobid="18", aux={})
    lists(command, "RUNNING")

    async def cancel_amid():
        async for _ in executor.check_active_jobs([info, other]):
            executor.cancel_jobs([other])
            return

    asyncio.run(cancel_amid())
    assert cancelled == [other, info]


def test_slurm_commands_that_hang_keep_the_job(command, watch, info, monkeypatch):
    monkeypatch.setattr(job_watch, "SQUEUE_SEC", 0.3)
    command("squeue", "exec sleep 60")
    assert check(watch, info) == [info]
    assert slurm.accounted_state("17", name="x", timeout_sec=1) == ""
