"""Threat: unhealthy nodes are given again, or so many are excluded that no job can start any more."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from forge.slurm import exclude, slurm
from forge.slurm.partitions import parse_partitions
from forge.slurm.slurm import Job

JOB = Job("7", "RUNNING", 0, ("n1", "n2"), 1, "main", "forge", True, None, excluded=("n9",))


@pytest.fixture(autouse=True)
def partition(monkeypatch):
    """partition(5): nodes n1 to n5, and n9, which the user of JOB excludes."""

    def has(count):
        names = [f"n{number}" for number in range(1, count + 1)]
        nodes = [f"main|{name}|8|5000|idle|(null)|(null)|0" for name in [*names, "n9"]]
        found = parse_partitions(["PartitionName=main State=UP MaxTime=UNLIMITED"], nodes)
        monkeypatch.setattr(exclude, "read_partitions", lambda: found)

    has(6)
    return has


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """now(job): what Slurm says of the job, None where it has forgotten it; a SlurmSilent is raised."""

    def says(job):
        def show(_):
            if isinstance(job, Exception):
                raise job
            return job

        monkeypatch.setattr(slurm, "show_job", show)

    says(JOB)
    return says


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bad_nodes.txt"


def test_node_is_excluded_with_time_and_reason(path, capsys):
    exclude.add(path, {"n2": "GPU fault:\n  ECC"}, JOB)
    [node] = exclude.entries(path)
    assert (node.name, node.reason) == ("n2", "GPU fault: ECC")
    assert abs(datetime.now() - node.since) < timedelta(minutes=1)
    assert f"n2: excluded for 24 hours, see {path}" in capsys.readouterr().err
    exclude.add(path, {}, JOB)
    assert exclude.read(path) == ["n2"]


def test_line_of_a_person_that_begins_with_a_date_is_kept_for_good(path):
    path.write_text("n7   # 2024-11-20 bad HBM, ticket 123\n")
    assert [str(node) for node in exclude.entries(path)] == [
        "n7   # 2024-11-20 bad HBM, ticket 123"
    ]


def test_entries_expire_after_a_day_and_those_of_a_person_do_not(path):
    now = datetime.now()
    lines = {"n1": now - timedelta(hours=23), "n2": now - timedelta(hours=25)}
    path.write_text(
        "".join(f"{name}   # {time.isoformat()} down\n" for name, time in lines.items())
        + "# mine\nn3\nn4  # loud fan\n"
    )
    assert exclude.read(path) == ["n1", "n3", "n4"]
    exclude.add(path, {"n2": "down again"}, JOB)
    assert exclude.read(path) == ["n1", "n3", "n4", "n2"]
    assert path.read_text().splitlines()[1:3] == ["n3", "n4   # loud fan"]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"suspended": "2026-11-27T15:30:00"}, "was suspended meanwhile"),
        ({"is_preempted": True}, "is being preempted, and Slurm signals its processes"),
    ],
)
def test_no_node_is_excluded_for_what_a_suspended_or_preempted_job_saw(
    path, now, capsys, changed, what
):
    now(replace(JOB, **changed))
    exclude.add(path, {"n2": "does not start a process"}, JOB)
    assert not path.exists()
    assert f"n2: not excluded, since job 7 {what}" in capsys.readouterr().err
    preempted = replace(JOB, is_preempted=True)  # in an earlier start
    now(preempted)
    exclude.add(path, {"n2": "does not start a process"}, preempted)
    assert exclude.read(path) == ["n2"]


def test_partition_keeps_enough_nodes_for_the_job(path, partition, capsys):
    partition(4)
    exclude.add(path, {"n1": "down"}, JOB)
    path.write_text(path.read_text().replace(str(datetime.now().year), "2999"))
    exclude.add(path, {"n2": "down", "n4": "down"}, JOB)
    assert len(exclude.read(path)) == 2 and "n1" in exclude.read(path)
    assert "n4: not excluded, since partition main would have too few" in capsys.readouterr().err


def test_nodes_that_are_tried_again_are_told_apart_from_those_of_the_user(path, partition, capsys):
    """A requeued job excludes what it ever did: with all of these, it would wait for good."""
    partition(3)
    exclude.add(path, {"n1": "down"}, JOB)
    assert (exclude.read(path), exclude.tried_again(path)) == (["n1"], set())
    path.write_text(path.read_text().replace(str(datetime.now().year), "2999"))
    exclude.add(path, {"n2": "down"}, replace(JOB, excluded=("n9", "n1")))
    assert exclude.read(path) == ["n1"] and exclude.tried_again(path) == {"n2"}
    path.write_text(path.read_text().replace("2999", "2020"))
    assert exclude.read(path) == [] and exclude.tried_again(path) == {"n1", "n2"}
    # What the job still excludes from before counts for nothing: one of three is spared.
    exclude.add(path, {"n3": "down"}, replace(JOB, excluded=("n9", "n1", "n2")))
    assert exclude.read(path) == ["n3"] and exclude.tried_again(path) == {"n1", "n2"}


def test_none_of_two_nodes_is_excluded_for_a_job_on_two(path, partition):
    partition(2)
    exclude.add(path, {"n1": "down"}, JOB)
    assert exclude.read(path) == []


def test_without_an_answer_of_slurm_nodes_are_excluded(path, monkeypatch):
    def silent():
        raise slurm.silent("Unable to contact slurm controller")

    monkeypatch.setattr(exclude, "read_partitions", silent)
    exclude.add(path, {"n1": "down"}, JOB)
    assert exclude.read(path) == ["n1"]


@pytest.mark.parametrize(
    "job",
    [
        None,
        replace(JOB, state="COMPLETING"),
        replace(JOB, state="CANCELLED"),
        replace(JOB, state="PENDING", restarts=1),
        replace(JOB, restarts=1),
    ],
)
def test_node_that_starts_nothing_for_a_job_that_is_over_is_not_excluded(path, now, capsys, job):
    """srun says `Slurm job 58 has expired`, or names the failure of another node."""
    now(job)
    exclude.add(path, {"n2": "does not start a process", "n1": "the same"}, JOB)
    assert exclude.read(path) == [] and not path.exists()
    assert "n1, n2: not excluded, since job 7 is over" in capsys.readouterr().err


def test_node_is_excluded_while_slurm_does_not_answer(path, now):
    now(slurm.SlurmSilent("no answer"))
    exclude.add(path, {"n2": "does not start a process"}, JOB)
    assert exclude.read(path) == ["n2"]
