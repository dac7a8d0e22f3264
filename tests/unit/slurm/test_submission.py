"""What Slurm could never start is refused with the number to set; what passes by itself is only said.

Answers of sbatch --test-only as Slurm 22.05 gave them on the test cluster.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.core.errors import ConfigError
from forge.slurm import slurm, submission
from forge.slurm.partitions import Node, Partition
from forge.slurm.sbatch import Request, excluding, requests_of

NO_NODES = "allocation failure: Requested node configuration is not available"
NODES = tuple(Node(f"n{i}", 8, 5000, "idle", frozenset({"h100"}), (("", 2),)) for i in range(1, 5))
MAIN = Partition("main", True, "UP", 60, 0, 3, frozenset(), frozenset(), NODES)
LONG = replace(MAIN, name="long", is_default=False, max_minutes=600)
KNOWN = {"main": MAIN, "long": LONG}
ALLOCATION = Request(
    rules=("preflight_run", "stage_run", "train_run"),
    minutes=60,
    other_minutes=20,
    partition="main",
    nodes=2,
    tasks_per_node=2,
    cpus_per_task=4,
    mem_mb=5000,
)
TOKENIZE = Request(("tokenize",), 60, partition="main", cpus_per_task=4, mem_mb=4000)


@pytest.fixture
def answers(monkeypatch):
    """Slurm knows KNOWN, has these reservations, and sbatch --test-only says this."""
    said = {"sbatch": "", "reservations": "No reservations in the system"}
    asked = []

    def run(line, **_):
        asked.append(line)
        return "", said["sbatch"]

    monkeypatch.setattr(submission, "read_partitions", lambda: KNOWN)
    monkeypatch.setattr(submission.slurm, "run", run)
    monkeypatch.setattr(submission.slurm, "ask", lambda *_, **__: said["reservations"])
    return SimpleNamespace(said=said, asked=asked, lines=[])


def check(answers, *requests):
    submission.check(requests, answers.lines.append)


def test_a_request_that_fits_is_submitted_without_a_message(answers):
    check(answers, ALLOCATION, TOKENIZE)
    assert answers.lines == []
    assert len(answers.asked) == 2


@pytest.mark.parametrize("several", ["all", "one,two"])
def test_several_clusters_are_refused_and_one_that_is_not_known_is_named(
    monkeypatch, answers, several
):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_CLUSTERS", several)
    with pytest.raises(ConfigError, match=f"is '{several}': not one cluster"):
        check(answers, TOKENIZE)

    def ask(*_, **__):
        raise slurm.Refused("scontrol: error: No cluster 'two' known by database.")

    monkeypatch.setenv("SLURM_CLUSTERS", "two")
    monkeypatch.setattr(submission.slurm, "ask", ask)
    with pytest.raises(ConfigError, match="is 'two': scontrol: error: No cluster 'two' known"):
        check(answers, TOKENIZE)
    assert answers.asked == []  # nothing was planned


@pytest.mark.parametrize(
    ("wrong", "told", "fix"),
    [
        (
            {"minutes": 240, "other_minutes": 20},
            "240 minutes (20 of them for stage and preflight), its limit (MaxTime) is 60",
            "set runtime: 40 or less (set-resources of train_run)",
        ),
        ({"other_minutes": 60, "minutes": 61}, "MaxTime", "with a longer MaxTime"),
        ({"nodes": 4}, "4 nodes, it gives 3 (MaxNodes)", "set nodes: 3 or less"),
        ({"mem_mb": 6000}, "6000 MB a node, 2 of its nodes have 5000", "set mem_mb for 5000"),
        ({"cpus_per_task": 5}, "10 cores a node, 2 of its nodes have 8", "tasks_per_node x cpus"),
        ({"gres": "gpu:4"}, "4 GPUs a node, 2 of its nodes have 2", "set gres for 2 GPUs"),
        (
            {"gres": "gpu:a100:1"},
            "1 a100 GPUs a node, 2 of its nodes have 0",
            "set gres to what its nodes have (gpu:2 on 4 nodes)",
        ),
        ({"constraint": "a100"}, "feature a100 each; 0 of its 4 have all of this", "sinfo"),
        ({"extra": "--exclude=n[1-3]"}, "1 of its 4 are left: excluded are n1, n2", "bad_nodes"),
    ],
)
def test_what_never_starts_is_refused_with_the_number_to_set(answers, wrong, told, fix):
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        check(answers, replace(ALLOCATION, **wrong))
    assert fix in caught.value.fix
    assert answers.asked == []


def test_rule_on_one_node_is_refused_by_its_name_and_its_keys(answers):
    with pytest.raises(ConfigError, match="rule tokenize asks partition main for 61") as caught:
        check(answers, ALLOCATION, replace(TOKENIZE, minutes=61))
    assert "default-resources, or set-resources of tokenize" in caught.value.fix
    with pytest.raises(ConfigError, match="9 cores a node") as caught:
        check(answers, replace(TOKENIZE, cpus_per_task=9))
    assert "set-threads of tokenize" in caught.value.fix


def test_one_partition_of_several_is_enough(answers):
    check(answers, replace(ALLOCATION, partition="main,long", minutes=240))
    with pytest.raises(ConfigError, match=r"its limit \(MaxTime\) is 600"):
        check(answers, replace(ALLOCATION, partition="main,long", minutes=700))


def test_default_partition_is_meant_where_none_is_named(answers):
    with pytest.raises(ConfigError, match="partition main for 240"):
        check(answers, replace(ALLOCATION, partition="", minutes=240))


def test_limits_that_the_qos_lifts_are_none(answers, monkeypatch):
    flags = {"long": "DenyOnLimit,PartitionTimeLimit,PartitionMaxNodes\n", "normal": "\n"}

    def run(line, **_):
        return (flags[line[-2]], "") if line[0] == "sacctmgr" else ("", "")

    monkeypatch.setattr(submission.slurm, "run", run)
    wide = replace(ALLOCATION, minutes=240, nodes=4)
    check(answers, replace(wide, qos="long"))
    for limited in (replace(wide, qos="normal"), wide):
        with pytest.raises(ConfigError, match="MaxTime"):
            check(answers, limited)


@pytest.mark.parametrize("state", ["DRAIN", "INACTIVE"])
def test_partition_that_takes_no_jobs_is_refused(answers, monkeypatch, state):
    known = {"main": replace(MAIN, state=state)}
    monkeypatch.setattr(submission, "read_partitions", lambda: known)
    with pytest.raises(ConfigError, match=f"rule tokenize: partition main is {state}"):
        check(answers, TOKENIZE)


def test_partition_that_is_down_is_said_and_waited_for(answers, monkeypatch):
    known = {"main": replace(MAIN, state="DOWN")}
    monkeypatch.setattr(submission, "read_partitions", lambda: known)
    check(answers, TOKENIZE)
    assert "partition main is DOWN: rule tokenize waits" in answers.lines[0]


def test_account_is_not_called_wrong_where_accounting_does_not_answer(
    answers, tmp_path, monkeypatch
):
    refused = "Failed to connect to db1:6819: Connection refused"
    for name in ("sacctmgr", "sshare"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{name}: error: {refused}' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check(answers, replace(TOKENIZE, account="lab"))
    assert answers.lines == ["account lab is not checked: Slurm's accounting does not answer"]


def test_partition_that_admits_other_accounts_is_refused(answers, monkeypatch):
    known = {"main": replace(MAIN, accounts=frozenset({"lab"}))}
    monkeypatch.setattr(submission, "read_partitions", lambda: known)
    monkeypatch.setattr(submission, "_check_account", lambda *_: None)
    with pytest.raises(ConfigError, match=r"does not admit account root \(it admits: lab\)"):
        check(answers, replace(TOKENIZE, account="root"))


# --- answers of sbatch -----------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["drained", "down*", "maint", "reserved"])
def test_nodes_that_come_back_are_waited_for(answers, monkeypatch, state):
    nodes = tuple(replace(node, state=state) for node in NODES[:3]) + NODES[3:]
    monkeypatch.setattr(submission, "read_partitions", lambda: {"main": replace(MAIN, nodes=nodes)})
    answers.said["sbatch"] = NO_NODES
    check(answers, ALLOCATION)
    assert f"waits in the queue: 3 of 4 nodes that fit are n1 {state}" in answers.lines[0]


def test_reservation_of_later_is_waited_for(answers):
    answers.said["sbatch"] = NO_NODES
    answers.said["reservations"] = "ReservationName=r1 Nodes=n[1-3] NodeCnt=3 State=INACTIVE"
    check(answers, ALLOCATION)
    assert "3 of 4 nodes that fit are n1 reserved" in answers.lines[0]


def test_refusal_while_all_nodes_are_up_is_final(answers):
    answers.said["sbatch"] = NO_NODES
    with pytest.raises(ConfigError, match="Slurm would not start the allocation"):
        check(answers, ALLOCATION)


@pytest.mark.parametrize(
    "words", [("--nodelist=n1",), ("--nodelist", "n1"), ("-w", "n1"), ("-wn1",)], ids=" ".join
)
def test_node_that_the_job_must_have_among_others_is_no_reason_to_refuse(
    answers, monkeypatch, words
):
    """--test-only answers as for a missing node where the list is shorter than --nodes."""

    def run(line, **_):
        answers.asked.append(line)
        return "", NO_NODES if any("n1" in word for word in line) else ""

    monkeypatch.setattr(submission.slurm, "run", run)
    options = ("--nodes=2", *words, "--exclude=n3")
    check(answers, replace(ALLOCATION, options=options))
    assert answers.asked[-1][2:-1] == ["--nodes=2", "--exclude=n3"]


@pytest.mark.parametrize(
    "answer",
    [
        "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name",
        "allocation failure: Invalid feature specification",
        "sbatch: error: Invalid generic resource (gres) specification",
        "allocation failure: Requested reservation is invalid",
        "sbatch: unrecognized option '--foo'",
    ],
)
def test_what_sbatch_refuses_for_good_is_refused(answers, answer):
    answers.said["sbatch"] = answer
    with pytest.raises(ConfigError, match=re.escape(answer)) as caught:
        check(answers, TOKENIZE)
    assert "partitions are: main, long" in caught.value.fix


def test_number_of_jobs_that_slurm_allows_is_no_reason_to_refuse(answers):
    answers.said["sbatch"] = (
        "sbatch: error: AssocMaxSubmitJobLimit\nallocation failure: Job violates accounting/QOS policy"
        " (job submit limit, user's size and/or time limits)"
    )
    check(answers, ALLOCATION)
    assert "waits in the queue: AssocMaxSubmitJobLimit" in answers.lines[0]


@pytest.mark.parametrize(
    "answer",
    [
        "no answer within 60 s",
        "sbatch: error: Unable to contact slurm controller (connect failure)",
        "allocation failure: Socket timed out on send/recv operation",
    ],
)
def test_slow_controller_refuses_nothing(answers, answer):
    answers.said["sbatch"] = answer
    check(answers, ALLOCATION)


def test_limits_that_cannot_be_read_refuse_nothing(answers, monkeypatch):
    def silent():
        raise slurm.silent("scontrol: no answer within 20 s")

    monkeypatch.setattr(submission, "read_partitions", silent)
    check(answers, replace(ALLOCATION, minutes=240))
    assert "limits of the partitions are not checked: Slurm does not answer" in answers.lines[0]
    assert len(answers.asked) == 1  # sbatch is asked all the same


# --- what nodes see --------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["/tmp/project/results", "/dev/shm/project"])
def test_folder_in_memory_is_reported(folder):
    lines = []
    submission.check_folders([Path(folder), Path(folder), Path(folder) / "data"], lines.append)
    assert len(lines) == 1
    assert re.match(
        rf"{folder} is on (the /tmp|a tmpfs) of this machine: other machines do not see", lines[0]
    )


def test_folder_on_a_local_disk_is_not_reported():
    lines = []
    submission.check_folders([Path("/usr"), Path("/usr/not/there")], lines.append)
    assert lines == []


@pytest.mark.parametrize("name", ["a$b", "a`b", "a\\b"])
def test_path_that_a_job_could_not_be_given_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="a Slurm job cannot be given the path"):
        submission.check_folders([tmp_path / name / "project"], lambda _: None)


# --- what jobs ask for -----------------------------------------------------------------------------


def job(rule, resources, *, threads=1, is_local=False):
    return SimpleNamespace(
        rule=SimpleNamespace(name=rule),
        resources=resources,
        threads=threads,
        is_local=is_local,
        is_group=lambda: False,
    )


def group(jobs, **resources):
    merged = {**jobs[0].resources, **resources}
    whole = job("", merged)
    return SimpleNamespace(**{**vars(whole), "jobs": jobs, "is_group": lambda: True})


def test_request_of_an_allocation_is_what_the_executor_submits():
    resources = {"runtime": 40, "nodes": 2, "tasks_per_node": 2, "tasks": 4, "mem_mb": 1800}
    resources |= {"cpus_per_task": 1, "slurm_partition": "main", "slurm_extra": "--exclude=n1,n2"}
    jobs = [
        job("train_run", resources),
        *(job(n, {"runtime": 10}) for n in ("stage_run", "preflight_run")),
    ]
    [request] = requests_of([group(jobs, runtime=60)])
    assert request.rules == ("preflight_run", "stage_run", "train_run")
    assert (request.minutes, request.other_minutes, request.cpus) == (60, 20, 2)
    assert request.excluded == {"n1", "n2"}
    assert request.options == (
        *("-p", "main", "-t", "60", "--mem", "1800", "--nodes=2"),
        *("--ntasks=4", "--cpus-per-task=1", "--exclude=n1,n2"),
    )


@pytest.mark.parametrize("word", ["-x n7", "-xn7", "--exclude n7", "--exclude=n7"])
def test_nodes_that_a_user_excludes_are_excluded_beside_those_of_the_run(word):
    """Of two --exclude sbatch takes the last."""
    found = excluding(f"{word} --mail-type=END", ["n8"])
    assert found == "--exclude=n7,n8 --mail-type=END"
    given = Request(("tokenize",), 1, extra=word, options=tuple(word.split()))
    assert given.excluded == {"n7"}
    assert given.excluding({"n8"}).options == ("--exclude=n7,n8",)


@pytest.mark.parametrize("word", ["-x ./bad", "-x./bad", "--exclude={here}/bad"])
def test_nodes_in_a_file_are_excluded_beside_those_of_the_run(word, tmp_path, monkeypatch):
    """Of two --exclude sbatch takes the last, whether one names a file or not."""
    monkeypatch.chdir(tmp_path)
    Path("bad").write_text("# broken\nn[1-2,4],gpu7\n\n  n9 # fan\nn1*2\n")
    found = excluding(f"{word.format(here=tmp_path)} --nice", ["n8", "n9"])
    assert found == "--exclude=n1,n2,n4,gpu7,n9,n8 --nice"


def test_file_without_nodes_excludes_none(tmp_path):
    (tmp_path / "bad").write_text("# all are well\n")
    assert excluding(f"-x {tmp_path}/bad", []) == ""
    assert excluding(f"-x {tmp_path}/bad", ["n8"]) == "--exclude=n8"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_file_of_excluded_nodes_that_cannot_be_read_is_refused(content, tmp_path):
    if content:
        (tmp_path / "bad").write_bytes(content)
    with pytest.raises(
        ConfigError, match=f"--exclude={tmp_path}/bad: the file of nodes cannot be read"
    ):
        excluding(f"--exclude={tmp_path}/bad", ["n8"])


def test_request_has_what_the_executors_own_settings_add():
    """Such as a reservation: without it, sbatch --test-only would judge another job."""
    settings = SimpleNamespace(requeue=False, no_requeue=False, qos="high", reservation="class")
    [request] = requests_of([job("tokenize", {"runtime": 60}, threads=2)], settings)
    assert request.options == (
        *("-t", "60", "--qos=high", "--reservation=class", "--ntasks=1", "--cpus-per-task=2"),
    )


def test_equal_jobs_are_asked_about_once_and_local_ones_not_at_all():
    validation = {"runtime": 60, "mem_mb_per_cpu": 1000, "slurm_partition": "main"}
    jobs = [job("validate_run", validation, threads=2) for _ in range(3)]
    [request] = requests_of([*jobs, job("config_run", {}, is_local=True)])
    assert (request.cpus, request.mem_mb, request.nodes) == (2, 2000, 1)


@pytest.mark.parametrize("resource", ["cluster", "clusters", "slurm_cluster"])
def test_job_for_another_cluster_which_would_not_be_found_again_is_refused(resource):
    with pytest.raises(ConfigError, match="tokenize of the profile: slurm_cluster far") as caught:
        requests_of([job("tokenize", {"runtime": 60, resource: "far"})])
    assert "export SLURM_CLUSTERS=far" in caught.value.fix
    assert requests_of([job("config_run", {resource: "far"}, is_local=True)]) == []


# --- a job on other nodes than those that trained ---------------------------------------------------


def avoided(monkeypatch, trained, nodes=NODES, request=TOKENIZE):
    known = {"main": replace(MAIN, nodes=nodes)}
    monkeypatch.setattr(submission, "read_partitions", lambda patience_sec: known)
    return submission.nodes_to_avoid(request, trained)


def test_nodes_that_trained_are_avoided_where_another_one_fits(monkeypatch):
    assert avoided(monkeypatch, {"n1", "n3"}) == ["n1", "n3"]
    assert avoided(monkeypatch, {"n1", "of-another-cluster"}) == ["n1"]


def test_nodes_that_trained_are_not_avoided_where_the_job_could_only_wait(monkeypatch):
    assert avoided(monkeypatch, {"n1", "n2", "n3", "n4"}) == []
    down = (*NODES[:3], replace(NODES[3], state="down"))
    assert avoided(monkeypatch, {"n1", "n2", "n3"}, down) == []
    small = (*NODES[:3], replace(NODES[3], memory_mb=3000))
    assert avoided(monkeypatch, {"n1", "n2", "n3"}, small) == []
    unhealthy = replace(TOKENIZE, extra="--exclude=n4")
    assert avoided(monkeypatch, {"n1", "n2", "n3"}, request=unhealthy) == []


def test_nodes_that_trained_are_not_avoided_while_slurm_is_silent(monkeypatch):
    def silent(patience_sec):
        raise slurm.silent("sinfo: Unable to contact slurm controller")

    monkeypatch.setattr(submission, "read_partitions", silent)
    assert submission.nodes_to_avoid(TOKENIZE, {"n1"}) == []
