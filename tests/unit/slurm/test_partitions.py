"""What Slurm prints of partitions and nodes is read as it stands there."""

import math

import pytest

from forge.slurm.partitions import parse_partitions

# As Slurm 22.05 prints it on the test cluster, names of GPUs and limits as sites set them.
MAIN = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES"
    " QoS=N/A DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=5 Hidden=NO"
    " MaxNodes=UNLIMITED MaxTime=01:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED"
    " Nodes=node[01-02] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO"
    " OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=16 TotalNodes=2"
    " SelectTypeParameters=NONE JobDefaults=(null) DefMemPerCPU=200 MaxMemPerNode=UNLIMITED"
    " TRES=cpu=16,mem=10000M,node=2,billing=16,gres/gpu=4"
)
GPU = (
    MAIN.replace("=main ", "=gpu ")
    .replace("Default=YES", "Default=NO")
    .replace("MaxNodes=UNLIMITED MaxTime=01:00:00", "MaxNodes=8 MaxTime=7-00:30:00")
    .replace("AllowAccounts=ALL", "AllowAccounts=lab,other")
    .replace("MaxCPUsPerNode=UNLIMITED", "MaxCPUsPerNode=6")
    .replace("MaxMemPerNode=UNLIMITED", "MaxMemPerNode=4000")
    .replace("State=UP", "State=DRAIN")
)
NODES = [
    "main|node01|8|5000|idle|(null)|gpu:2|1000",
    "main|node02|8|5000|drained|(null)|(null)|0",
    "gpu|node02|8|5000|down*|h100,nvme|gpu:h100:4(S:0-1),gpu:1g.10gb:7,lustre:1|0",
    "hidden|node02|8|5000|idle|(null)|(null)|0",
    "slurm_load_node warning",
]


@pytest.fixture
def known():
    return parse_partitions([MAIN, GPU, ""], NODES)


def test_limits_of_a_partition_are_read(known):
    main, gpu = known["main"], known["gpu"]
    assert list(known) == ["main", "gpu"]
    assert (main.is_default, main.state, main.max_minutes, main.max_nodes) == (
        *(True, "UP", 60),
        math.inf,
    )
    assert (gpu.is_default, gpu.state, gpu.max_minutes, gpu.max_nodes) == (
        *(False, "DRAIN"),
        *(7 * 24 * 60 + 30, 8),
    )


@pytest.mark.parametrize(
    "exclusive",
    [
        MAIN.replace("OverSubscribe=NO", "OverSubscribe=EXCLUSIVE"),
        MAIN.replace("ExclusiveUser=NO", "Exclusive=NODE"),  # 25.05
    ],
)
def test_exclusive_partition_is_read_from_each_version_of_slurm(exclusive):
    assert parse_partitions([exclusive], [])["main"].is_exclusive
    assert not parse_partitions([MAIN], [])["main"].is_exclusive


def test_fields_of_later_versions_of_slurm_hide_no_other_one():
    later = (
        MAIN.replace("MaxCPUsPerNode=UNLIMITED", "MaxCPUsPerNode=124 MaxCPUsPerSocket=UNLIMITED")
        .replace("ExclusiveUser=NO", "ExclusiveUser=NO ExclusiveTopo=NO")
        .replace("JobDefaults=(null)", "JobDefaults=DefCpuPerGPU=32,DefMemPerGPU=94000")
        .replace("MaxMemPerNode=UNLIMITED", "MaxMemPerCPU=12000 TRESBillingWeights=CPU=1,Mem=0.2G")
        .replace("PreemptMode=OFF", "PreemptMode=GANG,SUSPEND")
        .replace("PriorityTier=1 RootOnly=NO", "PriorityTier=40 RootOnly=YES")
        .replace("QoS=N/A", "QoS=gpu")
        .replace("AllowQos=ALL", "DenyQos=debug")
    )
    main = parse_partitions([later], ["main|n1|128|5000|idle|(null)|(null)|0"])["main"]
    assert (main.nodes[0].cpus, main.max_memory_per_cpu, main.max_minutes) == (124, 12000, 60)
    assert (main.preempt_mode, main.grace_sec, main.tier) == ("GANG,SUSPEND", 5, 40)
    assert (main.qos, main.is_closed, main.state) == ("gpu", True, "UP")
    assert not main.accepts_qos("debug") and main.accepts_qos("long")


def test_accounts_of_a_partition_are_read(known):
    assert known["main"].accepts("anybody")
    assert known["gpu"].accepts("Lab") and not known["gpu"].accepts("root")
    denied = MAIN.replace("AllowAccounts=ALL", "DenyAccounts=lab")
    assert not parse_partitions([denied], [])["main"].accepts("lab")


def test_nodes_are_read_with_the_limits_of_their_partition(known):
    [first, second] = known["main"].nodes
    assert (first.name, first.cpus, first.memory_mb, first.num_gpus("")) == ("node01", 8, 5000, 2)
    assert second.num_gpus("") == 0 and first.features == frozenset()
    [node] = known["gpu"].nodes
    assert (node.cpus, node.memory_mb) == (6, 4000)
    assert node.features == {"h100", "nvme"}
    assert (node.num_gpus("h100"), node.num_gpus("1g.10gb"), node.num_gpus("a100")) == (4, 7, 0)


@pytest.mark.parametrize(
    ("state", "is_available"),
    [
        *(("idle", True), ("mixed", True), ("allocated", True), ("idle~", True), ("planned", True)),
        *(("drained", False), ("draining", False), ("down*", False), ("idle*", False)),
        *(("maint", False), ("reserved", False), ("failing", False), ("unknown*", False)),
    ],
)
def test_state_tells_whether_a_job_could_start_on_a_node(state, is_available):
    [node] = parse_partitions([MAIN], [f"main|node01|8|5000|{state}|(null)|(null)|0"])["main"].nodes
    assert node.is_available is is_available
