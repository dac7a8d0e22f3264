"""Threat: a limit of Slurm's accounting that is read as none, or as another one."""

import math

from forge.slurm.accounts import read_associations, read_qos, tres
from forge.slurm.partitions import parse_partitions

ROW = {"cluster": "forge", "account": "lab", "qos": "", "defaultqos": "", "partition": ""}


def associations(*rows, default="lab"):
    users = [{"user": "me", "defaultaccount": default}]
    return read_associations([{**ROW, **row} for row in rows], users, "Forge")


def partition(**fields):
    words = " ".join(f"{key}={value}" for key, value in {"PartitionName": "p", **fields}.items())
    return parse_partitions([words], [])["p"]


def test_resources_are_read_with_their_units():
    assert tres("cpu=64,mem=1.5T,gres/gpu=16,gres/gpu:h100=8,node=4,mem=") == {
        **{"cpu": 64, "mem": 1.5 * 1024**2, "gres/gpu": 16, "gres/gpu:h100": 8, "node": 4}
    }


def test_limits_of_a_qos_are_the_least_of_those_for_all_jobs():
    rows = [{"name": "q", "grptres": "gres/gpu=96,cpu=10", "maxtresperuser": "gres/gpu=16"}]
    limits = read_qos(rows)["q"].limits
    assert limits.of_all == {"gres/gpu": 16, "cpu": 10} and limits.of_job == {}
    assert math.isinf(limits.max_minutes)


def test_qos_has_its_time_its_grace_and_whom_it_preempts():
    row = {"name": "q", "maxwall": "2-00:00:00", "gracetime": "00:02:00", "preempt": "a,b"}
    qos = read_qos([{**row, "preemptmode": "requeue", "flags": "PartitionTimeLimit,DenyOnLimit"}])[
        "q"
    ]
    assert (qos.limits.max_minutes, qos.grace_sec, qos.preempt_mode) == (2880, 120, "REQUEUE")
    assert qos.preempts == {"a", "b"} and "PartitionTimeLimit" in qos.flags


def test_default_account_comes_first_and_those_of_other_clusters_are_left_out():
    found = associations(
        {"account": "a"}, {"account": "b"}, {"account": "c", "cluster": "other"}, default="b"
    )
    assert [one.account for one in found] == ["b", "a"]


def test_usual_qos_is_the_default_else_the_only_one_else_normal():
    rows = (
        {"qos": "a,b", "defaultqos": "b"},
        {"qos": "a"},
        {"qos": "a,normal"},
        {"qos": "a,b"},
        {},
    )
    assert [one.usual_qos for one in associations(*rows)] == ["b", "a", "normal", "", ""]


def test_partition_is_open_to_accounts_and_qos_that_it_admits():
    [one] = associations({"qos": "a,b"})
    assert one.qos_in(partition()) == ["a", "b"] and one.opens(partition())
    assert one.qos_in(partition(AllowQos="b,c")) == ["b"]
    assert one.qos_in(partition(DenyQos="b")) == ["a"]
    assert not one.opens(partition(AllowQos="c"))
    assert not one.opens(partition(AllowAccounts="other"))
    [other] = associations({"partition": "q"})
    assert not other.opens(partition())
