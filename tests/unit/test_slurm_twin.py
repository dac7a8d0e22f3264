"""Threat: a twin that differs from its site where nobody says so, and a file from elsewhere whose names
become lines of slurm.conf or words of sacctmgr that root runs."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.each import hold_for_each
from support.repository import CLONE
from support.site_answers import nodes, partition, site

from forge.core.errors import DataError
from forge.slurm.site import SiteAnswers
from tools.slurm_cluster.cluster import why_not
from tools.slurm_cluster.settings import NodeKind, slurm_conf
from tools.slurm_cluster.twin import fit_for_here, twin_of

pytestmark = pytest.mark.tools

GPUS = "gpu:nvidia_h100_80gb_hbm3:4(S:0-1)"


def numbered(stem, count):
    return [f"{stem}{number:03}" for number in range(1, count + 1)]


@pytest.fixture
def gpu_site():
    """60 GPU nodes in two partitions, 500 CPU nodes in one."""
    return site(
        [
            partition("gpu", MaxTime="2-00:00:00", QoS="gpus", JobDefaults="DefCpuPerGPU=24"),
            partition("requeue", PreemptMode="REQUEUE", GraceTime="60", AllowAccounts="lab"),
            partition("cpu", Default="YES", DefMemPerCPU="3800", MaxCPUsPerNode="40"),
        ],
        [
            *nodes("gpu,requeue", numbered("gn", 60), gres=GPUS, of="ib,h100"),
            *nodes("cpu", numbered("cn", 500), "48|190000"),
        ],
        qos=[
            "normal|0||00:00:00||cluster|||",
            "gpus|0|DenyOnLimit,Relative|00:00:00||cluster|gres/lustre=1|gres/gpu=16|",
            "long|10||00:02:00|normal|requeue|mem=8T||14-00:00:00",
            "other|0||00:00:00||cluster|||",
        ],
        associations=[
            "far|lab||long,normal|normal|node=8||",
            "near|lab2||normal|||",
            "far|lab3|no||||",
        ],
        examples=[
            "NodeName=gn001 CoresPerSocket=48 CPUTot=96 Sockets=2 Boards=1 CoreSpecCount=4"
            " MemSpecLimit=16384 ThreadsPerCore=1 OS=Linux 5 #1 SMP",
            "NodeName=cn001 CoresPerSocket=24 CPUTot=48 Sockets=2 ThreadsPerCore=2",
        ],
        PreemptMode="REQUEUE",
        PreemptType="preempt/partition_prio",
        EnforcePartLimits="ALL",
        KillWait="45 sec",
        JobSubmitPlugins="lua",
    )


def conf_of(settings):
    """Lines of slurm.conf as key=value words, by NodeName or PartitionName, and the others by key."""
    found = {}
    for line in slurm_conf(settings, Path("/F")).splitlines():
        if line.startswith(("NodeName=", "PartitionName=")):
            first, *words = line.split()
            found[first.partition("=")[2]] = dict(word.split("=", 1) for word in words)
        elif "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[key] = value
    return found


def test_partitions_and_nodes_are_those_of_the_site(gpu_site):
    settings, _ = twin_of(gpu_site)
    conf = conf_of(settings)
    assert conf["gpu"] == {
        **{"Nodes": "node05,node06,node07,node08", "MaxTime": "2-00:00:00", "QoS": "gpus"},
        **{"DefCpuPerGPU": "24", "GraceTime": "0", "MinNodes": "0", "PriorityTier": "1"},
        **{"PreemptMode": "OFF", "State": "UP"},
    }
    assert conf["requeue"]["AllowAccounts"] == "lab"
    assert (conf["requeue"]["PreemptMode"], conf["requeue"]["GraceTime"]) == ("REQUEUE", "60")
    assert (
        conf["cpu"].items()
        >= {
            **{"Nodes": "node01,node02,node03,node04", "Default": "YES"},
            **{"DefMemPerCPU": "3800", "MaxCPUsPerNode": "40"},
        }.items()
    )
    assert settings.kind_of["node05"] == NodeKind(
        cpus=96,
        sockets=2,
        memory_mb=1500000,
        disk_mb=0,
        gpus=(("nvidia_h100_80gb_hbm3", 4),),
        features=("h100", "ib"),
        reserved=(("CoreSpecCount", 4), ("MemSpecLimit", 16384)),
    )
    # Its cores are its CPUs, though each has two threads.
    assert settings.kind_of["node01"] == NodeKind(
        cpus=48, sockets=2, memory_mb=190000, disk_mb=0, gpus=()
    )


def test_settings_are_those_of_the_site_or_slurms_defaults_but_for_what_makes_tests_fast(gpu_site):
    conf = conf_of(twin_of(gpu_site)[0])
    expected = {
        **{"PreemptMode": "REQUEUE", "PreemptType": "preempt/partition_prio", "KillWait": "45"},
        **{"EnforcePartLimits": "ALL", "AccountingStorageEnforce": "associations,limits,qos,safe"},
        **{"AuthInfo": "cred_expire=10", "TaskPlugin": "task/none", "ClusterName": "forge"},
        "AccountingStorageTRES": "gres/gpu,gres/gpu:nvidia_h100_80gb_hbm3",
    }
    assert {key: conf[key] for key in expected} == expected
    assert "SlurmctldParameters" not in conf and "JobSubmitPlugins" not in conf


def test_nodes_are_exclusive_and_billed_as_the_site_prints_it_in_slurm_25():
    newer = partition(
        "gpu", Exclusive="NODE", TRESBillingWeights="CPU=1.0,Mem=0.25G,GRES/gpu:h100=14,GRES/fpga=3"
    )
    settings, notes = twin_of(site([newer], nodes("gpu", ["n1"], gres="gpu:h100:4")))
    conf = conf_of(settings)
    assert conf["gpu"]["OverSubscribe"] == "EXCLUSIVE"
    assert conf["gpu"]["TRESBillingWeights"] == '"CPU=1.0,Mem=0.25G,GRES/gpu:h100=14"'
    assert "left out: TRESBillingWeights=GRES/fpga=3 (partition gpu)" in notes


def test_signal_of_a_job_is_sent_at_preemption_where_the_site_sends_it():
    lines = [partition("gpu")], nodes("gpu", ["n1"])
    for told in (
        {"PreemptParameters": "send_user_signal,youngest_first"},
        {"SlurmctldParameters": "enable_configless,preempt_send_user_signal"},
    ):
        conf = conf_of(twin_of(site(*lines, **told))[0])
        assert conf["SlurmctldParameters"] == "preempt_send_user_signal"


def test_accounts_and_qos_are_those_that_matter_to_the_user(gpu_site):
    settings, _ = twin_of(gpu_site)
    assert settings.qos == ("gpus", "long")
    assert list(settings.accounting) == [
        ("modify", "qos", "gpus", "set", "Flags=DenyOnLimit", "MaxTRESPerUser=gres/gpu=16"),
        *[
            (
                *("modify", "qos", "long", "set", "Priority=10", "GraceTime=120"),
                *("MaxWall=14-00:00:00", "PreemptMode=requeue", "Preempt=normal", "GrpTRES=mem=8T"),
            )
        ],
        ("add", "account", "lab", "Cluster=forge", "Description=twin", "Organization=twin"),
        *[
            (
                *("add", "user", "root", "Account=lab", "QosLevel=long,normal"),
                *("DefaultQOS=normal", "GrpTRES=node=8"),
            )
        ],
        ("modify", "user", "root", "set", "DefaultAccount=lab"),
        ("delete", "user", "root", "Account=root"),
    ]


def test_notes_say_what_stands_for_what_and_what_is_left_out(gpu_site):
    assert twin_of(gpu_site)[1] == [
        "node01, node02, node03, node04: the site's 500 nodes such as cn001: 48 CPUs, 190000 MB; in cpu",
        "node05, node06, node07, node08: the site's 60 nodes such as gn001: 4 x nvidia_h100_80gb_hbm3,"
        " 96 CPUs, 1500000 MB (h100, ib); in gpu, requeue",
        "jobs are root's, with the accounts that the user has at the site",
        "left out: 1 QOS such as other (neither the user's nor a partition's)",
        "left out: Flags=Relative (QOS gpus)",
        "left out: GrpTRES=gres/lustre=1 (QOS gpus)",
        "left out: account lab3 (only in partition no)",
        "the test cluster's own, not the site's: TaskPlugin (the site's: task/affinity),"
        " JobSubmitPlugins (the site's: lua)",
    ]


def test_each_kind_of_node_is_there_and_each_partition_can_hold_a_job_of_two_nodes():
    lines = [line for i in range(6) for line in nodes(f"p{i}", numbered(f"n{i}x", 10 + i))]
    settings, _ = twin_of(site([partition(f"p{i}") for i in range(6)], lines))
    assert settings.nodes == 12
    assert {len(one.nodes) for one in settings.partitions} == {2}
    kinds = [f"{cores}|1000" for cores in range(1, 12)]
    lines = [
        line for i, kind in enumerate(kinds) for line in nodes("p", numbered(f"m{i}x", 3), kind)
    ]
    settings, _ = twin_of(site([partition("p")], lines))
    assert settings.nodes == 12 and {kind.cpus for kind in settings.kinds} == set(range(1, 12))


def test_more_kinds_than_nodes_leave_out_the_rarest_by_name():
    lines = [line for i in range(1, 21) for line in nodes("p", numbered(f"m{i}x", i), f"{i}|1000")]
    settings, notes = twin_of(site([partition("p")], lines))
    assert settings.nodes == 12
    assert {kind.cpus for kind in settings.kinds} == set(range(10, 21))
    assert "left out: the site's m1x001: 1 CPUs, 1000 MB; in p" in notes
    assert "left out: the site's 9 nodes such as m9x001: 9 CPUs, 1000 MB; in p" in notes


def test_partition_that_is_closed_or_can_start_no_job_here_is_named():
    partitions = [
        partition("main"),
        partition("large", MinNodes="64"),
        partition("none"),
        partition("secret", AllowGroups="admins"),
        partition("reserved", ReqResv="YES"),
    ]
    lines = [*nodes("main,large", numbered("n", 100)), *nodes("secret", ["s1"])]
    settings, notes = twin_of(site(partitions, lines))
    assert [one.name for one in settings.partitions] == ["main", "large", "none"]
    assert {
        "left out: partition secret, closed to the user (AllowGroups)",
        "left out: partition reserved, closed to the user (ReqResv)",
        "partition none has no nodes here",
        "partition large has 4 nodes here, and a job must ask for 64 (MinNodes): none can start",
    } <= set(notes)


def test_site_without_gpus_or_accounting_has_a_twin():
    settings, notes = twin_of(site([partition("p")], nodes("p", ["n1"]), associations=[], qos=[]))
    conf = conf_of(settings)
    assert "GresTypes" not in conf and "AccountingStorageTRES" not in conf
    assert ("add", "user", "root", "Account=lab", "DefaultAccount=lab") in settings.accounting
    assert "the file has no account of the user: here it is root, or lab" in notes


def test_account_root_which_each_new_cluster_has_is_not_added_again():
    own = ["far|root||normal|normal|||", "far|lab||normal|||"]
    settings, _ = twin_of(site([partition("p")], nodes("p", ["n1"]), associations=own))
    assert [words for words in settings.accounting if "Account=root" in words] == [
        (
            *("modify", "user", "root", "Account=root", "set"),
            *("QosLevel=normal", "DefaultQOS=normal"),
        )
    ]


@pytest.mark.skipif(why_not() is not None, reason="no Slurm here")
def test_keys_that_the_slurm_here_does_not_know_are_left_out_and_named(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # slurm.conf takes no blank in a path
    newer = site([partition("p")], nodes("p", ["n1"]), PreemptParameters="youngest_first")
    settings, _ = twin_of(newer)
    settings.partitions[0].keys["KeyOfTheFuture"] = "3"
    fitting, notes = fit_for_here(settings)
    assert "left out: KeyOfTheFuture, which the Slurm here does not know" in notes
    assert "KeyOfTheFuture" not in conf_of(fitting)["p"]
    assert fit_for_here(fitting) == (fitting, [])


SITES = sorted((CLONE / "tests/plugins/site/sites").glob("*.json"))


@pytest.mark.parametrize("path", SITES, ids=[path.stem for path in SITES])
def test_twin_of_a_recorded_site_has_all_its_partitions_and_kinds_of_nodes(path):
    recorded = SiteAnswers.read(path)
    settings, notes = twin_of(recorded)
    nodes = [node for one in recorded.partitions().values() for node in one.nodes]
    there = {(node.gpus, node.features) for node in nodes}
    here = {(kind.gpus, frozenset(kind.features)) for kind in settings.kinds}
    assert here == there
    assert {one.name for one in settings.partitions} == recorded.partitions().keys()
    assert all(one.nodes for one in settings.partitions)
    assert len([note for note in notes if note.startswith("node")]) >= len(here)


# --- a file from elsewhere ------------------------------------------------------------------------

ODD = ["a=b", "x#y", "-n", "a;b", "a`id`", 'a"b', "a\\", "é", "x" * 70, "DEFAULT", "all"]


def check_odd_name(case):
    name, place = case
    named = {
        "partition": "p",
        "feature": "f",
        "GPU type": "h100",
        "account": "lab",
        "QOS": "normal",
    }
    named[place] = name
    answers = site(
        [partition(named["partition"], AllowQos=named.get("list", "ALL"))],
        nodes(named["partition"], ["n1"], gres=f"gpu:{named['GPU type']}:4", of=named["feature"]),
        associations=[f"far|{named['account']}||normal|||"],
        qos=[f"{named['QOS']}|1||00:00:00||cluster|||"],
    )
    with pytest.raises(DataError, match="is no name that Slurm's files can hold"):
        twin_of(answers)


def test_name_that_slurms_files_cannot_hold_is_refused():
    places = ("partition", "feature", "GPU type", "account", "QOS", "list")
    cases = ((f"{place} {name}", (name, place)) for place in places for name in ODD)
    hold_for_each(cases, check_odd_name)


def test_value_that_is_none_of_slurms_is_left_out():
    odd = partition(
        "p", MaxTime="1:00\tNodes=ALL", State="UP;x", PreemptMode="OFF,x", GraceTime="-1"
    )
    settings, notes = twin_of(
        site([odd], nodes("p", ["n1"]), KillWait="30 sec x", SelectType="/x/y")
    )
    conf = conf_of(settings)
    assert conf["p"].keys() == {"Nodes", "MinNodes", "PriorityTier"}
    assert (conf["KillWait"], conf["SelectType"]) == ("30", "select/cons_tres")
    for what in ("MaxTime=1:00", "State=UP;x", "GraceTime=-1", "SelectType=/x/y"):
        assert any(note.startswith(f"left out: {what}") for note in notes), (what, notes)


@pytest.mark.parametrize(
    "what", ["0|1000", "70000|1000", "8|0", "8|9999999999", "x|1000", "8|x", "9" * 400 + "|1"]
)
def test_size_of_a_node_out_of_bounds_is_refused(what):
    with pytest.raises(DataError):
        twin_of(site([partition("p")], nodes("p", ["n1"], what)))


@pytest.mark.parametrize(
    "details",
    [
        "Sockets=0 CoresPerSocket=0 ThreadsPerCore=0 CoreSpecCount=96 MemSpecLimit=1500000",
        "Sockets=7 ThreadsPerCore=5",
        f"Sockets={'9' * 5000} CoreSpecCount=x MemSpecLimit=-1",
    ],
)
def test_shape_of_a_node_that_cannot_be_is_not_taken_over(details):
    answers = site([partition("p")], nodes("p", ["n1"]), examples=[f"NodeName=n1 {details}"])
    [kind] = twin_of(answers)[0].kinds
    assert kind == NodeKind(cpus=96, memory_mb=1500000, disk_mb=0, gpus=())


def test_node_with_more_gpus_than_devices_can_be_made_is_refused():
    with pytest.raises(DataError, match="'n1' has more than 64 GPUs"):
        twin_of(site([partition("p")], nodes("p", ["n1"], gres="gpu:1000000")))


def test_file_without_partitions_or_nodes_is_refused():
    with pytest.raises(DataError, match="the file has 0 partitions"):
        twin_of(site([], []))
    with pytest.raises(DataError, match="no partition that the user may use has a node"):
        twin_of(site([partition("p")], []))


@pytest.mark.parametrize(
    "which", ["missing", "no json", "format", "loop", "large", "folder", "part"]
)
@pytest.mark.skipif(why_not() is not None, reason="no cluster can run here")
def test_bad_file_is_refused_in_a_line_and_nothing_starts(tmp_path, which, gpu_site):
    path = tmp_path / "site.json"
    if which == "no json":
        path.write_text("PartitionName=gpu")
    elif which == "format":
        path.write_text(json.dumps({"format": 7}))
    elif which == "loop":
        path.symlink_to(path)
    elif which == "folder":
        path.mkdir()
    elif which == "large":
        with open(path, "wb") as file:
            file.truncate(SiteAnswers.MAX_BYTES + 1)
    elif which == "part":
        answers = {key: value for key, value in gpu_site.answers.items() if key != "nodes"}
        gpu_site.model_copy(update={"answers": answers}).write(path)
    base = tmp_path / "slurm"
    done = subprocess.run(
        ["make", "-o", ".venv/ready", "slurm-up", f"TWIN={path}"],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "FORGE_SLURM_DIR": str(base)},
        cwd=CLONE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode and "Traceback" not in done.stderr
    assert str(path) in done.stderr.splitlines()[0]
    if which not in ("loop", "folder"):
        assert "fix:   write it again on that cluster: forge profile --save FILE" in done.stderr
    assert not list(base.glob("cluster/*"))


def test_nodes_and_twin_exclude_each_other(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tools.slurm_cluster", "--nodes", "3", "up", "--twin", "x.json"],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "FORGE_SLURM_DIR": str(tmp_path / "s")},
        cwd=CLONE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
