"""Threat: a job that can never start waits in the queue, and nobody says so."""

import pytest

from forge.slurm.jobs import excluded_nodes, lasting_advice, slow_advice


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("PartitionTimeLimit", "runtime"),
        ("PartitionNodeLimit", "nodes"),
        ("AssocMaxWallDurationPerJobLimit", "MaxWall"),
        ("QOSMaxWallDurationPerJobLimit", "MaxWall"),
        ("AssocMaxNodePerJobLimit", "MaxTRES"),
        ("QOSMaxGRESPerJob", "MaxTRES"),
        ("QOSMinCpuNotSatisfied", "MinTRES"),
        ("BadConstraints", "constraint"),
        ("JobHeldUser", "scontrol release 17"),
        ("JobHeldAdmin", "administrator"),
        ("launch failed requeued held", "scontrol release 17"),
        ("launch_failed_requeued_held", "scontrol release 17"),
        ("job requeued in held state", "scontrol release 17"),
        ("DependencyNeverSatisfied", "scancel 17"),
    ],
)
def test_reason_that_never_passes_comes_with_what_to_do(reason, word):
    assert word in lasting_advice("17", reason)


@pytest.mark.parametrize(
    "reason",
    [
        *("None", "Priority", "Resources", "BeginTime", "Dependency", "Licenses", "Reservation"),
        *("AssocGrpGRES", "AssocMaxJobsLimit", "QOSGrpCpuLimit", "QOSMaxJobsPerUserLimit"),
        *("QOSMaxGRESPerUser", "ReqNodeNotAvail, UnavailableNodes:node01", "PartitionDown"),
    ],
)
def test_reason_that_passes_by_itself_is_left_alone(reason):
    assert lasting_advice("17", reason) == ""


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("ReqNodeNotAvail, Reserved for maintenance", "scontrol show reservation"),
        ("Reservation", "scontrol show reservation"),
        ("ReqNodeNotAvail, UnavailableNodes:node01", "sinfo -R"),
        *((reason, "") for reason in ("None", "Priority", "Resources", "BadConstraints")),
    ],
)
def test_reason_that_passes_after_hours_is_explained(reason, word):
    assert word in slow_advice(reason)
    assert bool(slow_advice(reason)) == bool(word)


@pytest.mark.parametrize(
    ("reason", "names"),
    [
        ("BadConstraints", ["n1", "n3"]),
        ("ReqNodeNotAvail, UnavailableNodes:n2", ["n1", "n3"]),
        ("Priority", []),
    ],
)
def test_excluded_nodes_are_named_where_they_may_be_the_reason(tmp_path, reason, names):
    path = tmp_path / "bad_nodes.txt"
    path.write_text("n1   # 2999-01-01T00:00:00 down\nn2   # 2020-01-01T00:00:00 down\nn3\n")
    assert [node.name for node in excluded_nodes(reason, path)] == names
    assert excluded_nodes(reason, tmp_path / "none.txt") == []
