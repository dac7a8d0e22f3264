"""What Slurm prints is read as it stands there, on jobs of every kind."""

import os
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import DataError, UnfitError
from forge.slurm import jobs, slurm

RUNNING = (
    "JobId=8 JobName=wrap UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=1 Nice=0"
    " Account=lab QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2"
    " BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:05 TimeLimit=00:10:00 TimeMin=N/A"
    " EndTime=2026-11-21T04:25:31 Partition=main AllocNode:Sid=ctl:0 ReqNodeList=(null)"
    " ExcNodeList=(null) NodeList=node[01-02,07] BatchHost=node01 NumNodes=3 NumCPUs=6 NumTasks=3"
    " CPUs/Task=2 ReqB:S:C:T=0:0:*:*"
)
PENDING = RUNNING.replace("JobState=RUNNING", "JobState=PENDING").replace(
    "NodeList=node[01-02,07]", "NodeList="
)


def test_a_running_job_is_read():
    job = slurm.parse_job(RUNNING)
    assert (job.tasks, job.gpus_per_node, job.num_cpus) == (3, 0, 6)
    of_one_thread = RUNNING.replace("T=0:0:*:*", "T=0:0:*:1")
    assert slurm.parse_job(of_one_thread).num_cpus == 0  # srun gives fewer to tasks then
    assert (job.id, job.state, job.restarts, job.cpus_per_task) == ("8", "RUNNING", 2, 2)
    assert job.nodes == ("node01", "node02", "node07")
    assert job.is_living and job.batch and not job.is_waiting


def test_a_waiting_job_has_no_nodes():
    job = slurm.parse_job(PENDING.replace("NumCPUs=6", "NumCPUs=6-12"))
    assert job.nodes == () and job.is_waiting and not job.is_living


def test_cores_of_each_node_are_read():
    details = " JOB_GRES=(null)   Nodes=node01 CPU_IDs=0-2 Mem=100 GRES= "
    details += "  Nodes=node[02,07] CPU_IDs=0,4-5 Mem=100 GRES= MinCPUsNode=1"
    job = slurm.parse_job(RUNNING + details)
    assert job.cpus == (("node01", 3), ("node02", 3), ("node07", 3))
    assert job.nodes == ("node01", "node02", "node07")
    assert slurm.parse_job(RUNNING).cpus == ()


def test_other_components_of_a_heterogeneous_job_are_no_part_of_it():
    first = f"{RUNNING}   Nodes=node[01-02,07] CPU_IDs=0-1 Mem=100 GRES= Comment=two\nlines"
    other = first.replace("JobId=8", "JobId=9").replace("node[01-02,07]", "gpu1")
    job = slurm.parse_job(f"{first} \n{other} TresPerNode=gres:gpu:4 \n")
    assert (job.id, job.gpus_per_node, job.cpus) == (
        *("8", 0),
        (("node01", 2), ("node02", 2), ("node07", 2)),
    )
    assert slurm.parse_job(f"{first} TresPerNode=gres:gpu:2 \n{other} \n").gpus_per_node == 2


def test_a_preempted_job_is_known_by_its_time():
    assert not slurm.parse_job(RUNNING).is_preempted
    assert not slurm.parse_job(f"{RUNNING} PreemptTime=None").is_preempted
    assert slurm.parse_job(f"{RUNNING} PreemptTime=2026-11-21T04:25:31").is_preempted


def test_a_job_without_a_limit_has_no_end():
    assert slurm.parse_job(RUNNING.replace("2026-11-21T04:25:31", "Unknown")).end_time is None


@pytest.mark.parametrize(
    ("hostlist", "names"),
    [
        ("node01", ["node01"]),
        ("node[01-03]", ["node01", "node02", "node03"]),
        ("a[1,3-4],login", ["a1", "a3", "a4", "login"]),
        ("holygpu8a[19101-19102],x", ["holygpu8a19101", "holygpu8a19102", "x"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_host_lists_are_expanded(hostlist, names):
    assert slurm.expand(hostlist) == names


@pytest.mark.parametrize(
    "hostlist", ["n[1-40000000]", "n[1-300]m[1-300]", ",".join(["n[1-60000]"] * 2)]
)
def test_host_list_that_no_slurm_has_is_refused_before_it_is_expanded(hostlist):
    with pytest.raises(DataError, match="has more than 65,536 names"):
        slurm.expand(hostlist)


@pytest.mark.parametrize("hostlist", ["n[a-b]", "n[1-]", "n[]", f"n[{'1' * 5000}]"])
def test_host_list_with_a_range_that_is_none_is_refused(hostlist):
    with pytest.raises(DataError, match="no range of numbers"):
        slurm.expand(hostlist)


@given(st.lists(st.integers(0, 9999), min_size=1, unique=True))
def test_any_list_of_plain_names_is_itself(numbers):
    names = [f"n{number}" for number in numbers]
    assert slurm.expand(",".join(names)) == names


# Each of man squeue (JOB STATE CODES): whether the job is running, whether its processes may still run.
STATES = {
    **dict.fromkeys(slurm.RUNNING, (True, True)),
    **dict.fromkeys(slurm.ENDING, (False, True)),
    **dict.fromkeys(slurm.WAITING, (False, False)),
    **dict.fromkeys(slurm.ENDED, (False, False)),
    "OF_A_LATER_SLURM": (False, True),
}


def test_every_state_of_a_job_tells_whether_it_runs_and_whether_its_processes_may():
    running = slurm.parse_job(RUNNING)
    jobs = {state: replace(running, state=state) for state in STATES}
    told = {state: (job.is_running, job.is_living) for state, job in jobs.items()}
    wrong = {state: told[state] for state in STATES if told[state] != STATES[state]}
    assert not wrong, wrong


def test_a_signal_on_its_way_or_a_pause_ends_no_job_and_a_cancellation_does():
    assert {"RUNNING", "SIGNALING", "STOPPED", "SUSPENDED", "RESIZING"} <= set(slurm.RUNNING)
    assert {"COMPLETING", "CANCELLED", "PREEMPTED", "STAGE_OUT"}.isdisjoint(slurm.RUNNING)
    assert len(STATES) == 25  # the 24 of Slurm 22.05, and one


def test_queries_ignore_what_filters_or_formats_and_only_a_submission_sees_what_sbatch_does(
    monkeypatch,
):
    for name in ("SQUEUE_STATES", "SACCT_LOCAL", "SCONTROL_ALL", "SCANCEL_STATE", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")

    def seen(**how):
        lines = slurm.run(["env"], timeout_sec=10, **how)[0].splitlines()
        assert "SLURM_TIME_FORMAT=standard" in lines
        return [line for line in lines if line.endswith("=7")]

    assert seen() == []
    assert seen(submits=True) == ["SBATCH_ACCOUNT=7"]


@pytest.mark.parametrize(
    ("set_by_user", "asked"),
    [
        ({}, ""),
        ({"SLURM_CLUSTERS": "two"}, "two"),
        ({"SBATCH_CLUSTERS": "two", "SLURM_CLUSTERS": "three"}, "two"),
        ({"SLURM_CLUSTERS": "two", "SLURM_JOB_ID": "7"}, ""),  # a job's own cluster
    ],
)
def test_queries_submissions_and_the_plugins_commands_ask_the_same_cluster(
    monkeypatch, set_by_user, asked
):
    for name in ("SLURM_JOB_ID", *slurm.CLUSTERS):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    environments = [slurm.environment(), slurm.environment(submits=True)]
    monkeypatch.setattr(slurm.os, "environ", dict(os.environ))
    slurm.settle_environment()
    for environ in (*environments, slurm.os.environ):
        wanted = {"SLURM_CLUSTERS": asked} if asked else {}
        assert {k: v for k, v in environ.items() if k in slurm.CLUSTERS} == wanted


def test_rules_in_the_batch_step_do_not_see_what_describes_it(monkeypatch):
    """An srun in a rule would take the memory and the tasks of the batch step for its options."""
    monkeypatch.setattr(slurm.os, "environ", {})
    of_step = {"SLURM_NTASKS": "4", "SLURM_MEM_PER_NODE": "1800", "SBATCH_REQUEUE": "1"}
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "HOME": "/root"}
    slurm.os.environ |= of_step | kept
    slurm.settle_in_batch_step()
    assert slurm.os.environ == of_step | kept  # no allocation of the workflow
    slurm.os.environ[slurm.RULES_IN_BATCH_STEP] = "1"
    slurm.settle_in_batch_step()
    assert slurm.os.environ == kept


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (["train_run"], True),
        (["stage_run", "preflight_run", "train_run"], True),
        (["stage_run", "preflight_run"], True),  # of the target preflight
        (["tokenize"], False),
        (["validate_run"], False),
        ([], False),
    ],
)
def test_job_of_a_run_is_known_by_its_rules(rules, expected):
    assert jobs.is_allocation(rules) is expected


@pytest.mark.parametrize(
    ("rules", "arrays", "expected"),
    [
        (["stage_run", "preflight_run", "train_run"], set(), True),
        (["tokenize"], set(), True),
        (["validate_run"], {"tokenize"}, True),
        (["validate_run"], {"validate_run"}, False),
        (["validate_run"], {"all"}, False),
        (["of_the_user"], set(), False),
        (["tokenize", "of_the_user"], set(), False),
    ],
)
def test_jobs_of_forge_outside_of_arrays_start_snakemake_once(rules, arrays, expected):
    assert jobs.runs_in_batch_step(rules, arrays) is expected


@pytest.mark.parametrize(
    ("after", "refusal"),
    [
        ("JobState=PENDING Restarts=0", ""),
        ("JobState=COMPLETING Restarts=1", ""),
        ("JobState=COMPLETING Restarts=0", "it is COMPLETING: it was cancelled meanwhile"),
        ("JobState=CANCELLED Restarts=0", "it is CANCELLED: it was cancelled meanwhile"),
        ("", "it is gone: it was cancelled meanwhile"),
    ],
)
def test_a_job_cancelled_just_before_is_not_brought_back_by_a_requeue(monkeypatch, after, refusal):
    """`requeue incomplete` answers nothing where it does nothing."""
    asked = []

    def ask(*command, **_):
        asked.append(command)
        if command[1] == "requeue":
            return ""
        if not after:
            raise slurm.Refused("slurm_load_jobs error: Invalid job id specified")
        return f"JobId=8 {after} NodeList=node01"

    monkeypatch.setattr(slurm, "ask", ask)
    assert slurm.requeue("8", 0) == refusal
    assert asked[0] == ("scontrol", "requeue", "incomplete", "8")


def test_a_step_inherits_nothing_that_describes_another(monkeypatch):
    for name in ("SLURM_NTASKS", "SRUN_DEBUG", "SBATCH_REQUEUE", "SLURM_JOB_ID", "HOME"):
        monkeypatch.setenv(name, "7")
    kept = slurm.environment()
    assert kept["SLURM_JOB_ID"] == "7" and kept["HOME"] == "7"
    assert not {"SLURM_NTASKS", "SRUN_DEBUG", "SBATCH_REQUEUE"} & set(kept)


def answer(monkeypatch, *answers):
    """Slurm's commands give these (exit status, stdout, stderr), one after the other."""
    left = list(answers)

    def run(command, **_):
        code, out, err = left.pop(0) if len(left) > 1 else left[0]
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(slurm.subprocess, "run", run)
    monkeypatch.setattr(slurm.time, "sleep", lambda _: None)


def test_a_forgotten_job_is_none(monkeypatch):
    answer(monkeypatch, (1, "", "slurm_load_jobs error: Invalid job id specified"))
    assert slurm.show_job("8") is None


def test_a_restarting_controller_is_asked_again(monkeypatch):
    silence = (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    answer(monkeypatch, silence, silence, (0, RUNNING, ""))
    assert slurm.show_job("8").state == "RUNNING"


def test_address_of_a_node_is_its_name_where_slurm_has_none(monkeypatch):
    shown = "NodeName=node01 Arch=x86_64 Gres=gpu:2 NodeAddr=10.78.0.11 NodeHostName=n1 State=IDLE"
    answer(monkeypatch, (0, shown, ""), (0, "NodeName=node01 CPUTot=8 State=DOWN*", ""))
    assert slurm.node_address("node01") == "10.78.0.11"
    assert slurm.node_address("node01") == "node01"
    answer(monkeypatch, (1, "", "Node node01 not found"))
    with pytest.raises(slurm.SlurmSilent, match="Node node01 not found"):
        slurm.node_address("node01")


def test_a_silent_controller_ends_with_what_to_do(monkeypatch):
    answer(monkeypatch, (1, "", "Unable to contact slurm controller"))
    monkeypatch.setattr(slurm, "PATIENCE_SEC", 0)
    with pytest.raises(slurm.SlurmSilent, match="Unable to contact") as caught:
        slurm.show_job("8")
    assert "sinfo" in caught.value.fix


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        *(("gres:gpu:2", 2), ("gres/gpu:4", 4), ("gres:gpu:h100:4", 4), ("gres/gpu:h100=8", 8)),
        *(("gres:gpu", 1), ("gres:gpu:2,gres:nvme:1", 2), ("gres:nvme:1", 0), ("(null)", 0)),
        *(("gres:gpu:nvidia_a100-sxm4-80gb:4", 4), ("gres/gpu:1g.10gb=2", 2)),
        *(("gres:gpu:2080ti", 1), ("gres:gpu:2080:3", 3), ("gres:gpu:a40:1,gres:gpu:h100:2", 3)),
    ],
)
def test_gpus_of_a_job_are_read_as_versions_of_slurm_write_them(tres, gpus):
    assert slurm.parse_job(f"{RUNNING} TresPerNode={tres}").gpus_per_node == gpus


@pytest.mark.parametrize(
    ("details", "gpus"),
    [
        ("Nodes=node[01-02,07] CPU_IDs=0-1 Mem=100 GRES=gpu:h100:4(IDX:0-3)", 4),
        (
            "Nodes=node[01-02] CPU_IDs=0-1 Mem=100 GRES=gpu:4(IDX:0-3)"
            "   Nodes=node07 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0,3),nvme:1(IDX:0)",
            2,
        ),
        (
            "Nodes=node[01-02,07] CPU_IDs=0-1 Mem=9 GRES=gpu:a40:1(IDX:0),gpu:h100:2(IDX:1,3)",
            3,
        ),
        ("Nodes=node[01-02,07] CPU_IDs=0-1 Mem=100 GRES=", 0),
        ("", 2),  # six of the job, on three nodes
    ],
)
def test_gpus_of_a_job_that_asked_for_none_on_each_node_are_those_that_it_got(details, gpus):
    """As with --gpus=6, --gpus-per-task and --exclusive."""
    job = slurm.parse_job(f"{RUNNING} JOB_GRES=gpu:6   {details}  TresPerJob=gres/gpu:6")
    assert job.gpus_per_node == gpus


# What srun, sbcast and a program that srun started print: of 22.05, as recorded.
AWAY = (
    "srun: error: Unable to confirm allocation for job 1: Unable to contact slurm controller (connect"
    " failure)\nsrun: Check SLURM_JOB_ID environment variable. Expired or invalid job 1"
)
JUST_STARTED = (
    "srun: error: Unable to create step for job 1: Memory required by task is not available"
)
OF_A_NODE = (
    "srun: error: Task launch for StepId=2.5 failed on node node03: Socket timed out on send/recv"
    " operation\nsrun: error: Application launch failed: Socket timed out on send/recv operation"
)

OF_LARGE_PACKETS = (
    "srun: error: slurm_receive_msgs: [[node03]:6818] failed: Zero Bytes were transmitted or received\n"
    "srun: error: Task launch for StepId=1.2 failed on node node03: Zero Bytes were transmitted or"
    " received\nsrun: error: Application launch failed: Zero Bytes were transmitted or received"
)


@pytest.mark.parametrize(
    ("error", "is_own"),
    [
        *((AWAY, True), (JUST_STARTED, True)),
        (
            "srun: Job 1 step creation temporarily disabled, retrying (Requested nodes are busy)",
            True,
        ),
        ("srun: error: Unable to create step for job 1: Requested nodes are busy", True),
        (
            "srun: error: Unable to create step for job 1: Socket timed out on send/recv operation",
            True,
        ),
        ("sbcast: error: Slurm job 2.0 lookup error: Unable to contact slurm controller", True),
        (OF_A_NODE, False),
        (OF_LARGE_PACKETS, False),
        (
            "srun: error: Unable to create step for job 2: Requested node configuration is not",
            False,
        ),
        ("srun: error: Unable to confirm allocation for job 9: Invalid job id specified", False),
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),
        ("no answer within 20 s", False),
        ("", False),
    ],
)
def test_errors_of_slurm_itself_are_told_from_those_of_nodes_and_programs(error, is_own):
    assert slurm.is_slurms_own(error) == is_own


def test_step_is_tried_again_while_slurm_itself_starts_none(monkeypatch):
    answer(
        monkeypatch, (1, "", AWAY), (1, "", JUST_STARTED), (1, "", JUST_STARTED), (0, "n1\n", "")
    )
    assert slurm.output_on("1", "n1", ["hostname"]) == "n1\n"
    answer(monkeypatch, (1, "", JUST_STARTED), (1, "", OF_A_NODE))
    with pytest.raises(UnfitError, match=r"node n1 cannot run hostname: .*failed on node"):
        slurm.output_on("1", "n1", ["hostname"])


def test_output_of_a_site_before_that_of_a_command_is_left_out(monkeypatch, tmp_path):
    srun = 'echo "Welcome to this site"; while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"'
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{srun}\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert slurm.output_on("1", "n1", ["printf", "%s\\n", "a b", "c"]) == "a b\nc\n"
    with pytest.raises(UnfitError, match=r"node n1 cannot run false: exit status 1"):
        slurm.output_on("1", "n1", ["false"])


def test_step_that_slurm_itself_never_starts_blames_slurm(monkeypatch):
    answer(monkeypatch, (1, "", JUST_STARTED))
    monkeypatch.setattr(slurm, "PATIENCE_SEC", -1)
    with pytest.raises(slurm.SlurmSilent, match=r"Slurm starts no process: .*Memory required"):
        slurm.output_on("1", "n1", ["hostname"])


SHELL = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "MY_MODE": "a", "MY_API_KEY": "s", "HF_TOKEN": "s"}


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("all", set(SHELL)),
        ([], {"PATH", "NCCL_DEBUG"}),
        (["MY_*"], {"PATH", "NCCL_DEBUG", "MY_MODE"}),
        (["*"], {"PATH", "NCCL_DEBUG", "MY_MODE"}),
        (["MY_API_KEY", "HF_TOKEN"], {"PATH", "NCCL_DEBUG", "MY_API_KEY", "HF_TOKEN"}),
    ],
)
def test_ranks_inherit_what_the_list_names_and_secrets_only_by_their_full_name(wanted, names):
    assert set(slurm.exported(SHELL, wanted)) == names


def test_ranks_in_containers_inherit_what_their_engine_reads():
    names = {"XDG_RUNTIME_DIR", "CONTAINERS_STORAGE_CONF", "APPTAINER_CACHEDIR", "ENROOT_DATA_PATH"}
    assert set(slurm.exported(dict.fromkeys(names, "x"), [])) == names


# --- which start of a job this is ------------------------------------------------------------------


@pytest.fixture
def of_job(monkeypatch):
    """of_job(restart, **facts): this process is of the first start of job 7, Slurm shows this restart."""
    monkeypatch.setenv("FORGE_SLURM_START", "7:0")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(slurm, "is_here", lambda: True)

    def of_job(restart, **facts):
        shown = slurm.Job("7", "RUNNING", restart, ("n1",), 1, "gpu", "x", True, None, **facts)
        monkeypatch.setattr(slurm, "show_job", lambda *_, **__: shown)
        return shown

    return of_job


def test_an_earlier_start_is_told_that_a_later_one_has_the_job(of_job, monkeypatch):
    assert of_job(0) == slurm.own_job() and slurm.is_superseded() is False
    of_job(1)
    with pytest.raises(slurm.Superseded, match="job 7 was requeued and is in its restart 1"):
        slurm.own_job()
    assert slurm.is_superseded() is True

    def away(*_, **__):
        raise slurm.silent("x")

    monkeypatch.setattr(slurm, "show_job", away)
    assert slurm.is_superseded() is None


@pytest.mark.parametrize(
    ("facts", "warns"), [({}, False), ({"exclusive": True}, True), ({"nodes": ("n1", "n2")}, True)]
)
def test_a_command_in_a_job_with_whole_nodes_is_warned(of_job, monkeypatch, facts, warns):
    shown = replace(of_job(0), **facts)
    monkeypatch.setattr(slurm, "show_job", lambda *_, **__: shown)
    assert bool(jobs.own_nodes()) == warns
