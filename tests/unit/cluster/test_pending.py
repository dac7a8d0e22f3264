"""Threat: a job that can never start waits in the queue, and nobody says so."""

import pytest

from forge.cluster.pending import lasting_advice


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
