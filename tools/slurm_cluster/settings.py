"""What is in /etc of the test cluster: its size, and Slurm's configuration with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CONTROLLER = "ctl"
NETWORK = "10.78.0"
DECOY_NETWORK = "10.79.0"


@dataclass(frozen=True)
class Settings:
    """The size and shape of a cluster. Memory is taken only when something is written to /tmp."""

    nodes: int = 4
    tmp_mib: int = 2048
    """Size of each machine's own /tmp."""
    grace_sec: int = 5
    """Time between SIGTERM and SIGKILL when a job is preempted."""
    interfaces: dict[str, str] = field(default_factory=dict)
    """Name of a node's network interface where it is not eth0."""
    decoy: str = ""
    """Name of a second interface of every node, first in the kernel's list: up, with an address that the
    node's name resolves to, but in a network over which no node reaches another."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 12:
            raise ValueError(f"the test cluster has 1 to 12 nodes, not {self.nodes}")
        if unknown := set(self.interfaces) - set(self.node_names):
            raise ValueError(f"interfaces names {sorted(unknown)}; nodes are {self.node_names}")

    @property
    def node_names(self) -> list[str]:
        return [f"node{number:02d}" for number in range(1, self.nodes + 1)]

    @property
    def machine_names(self) -> list[str]:
        return [CONTROLLER, *self.node_names]

    def address(self, name: str) -> str:
        """The IPv4 address of a machine."""
        return f"{NETWORK}.{10 + self.machine_names.index(name)}"

    def decoy_address(self, name: str) -> str:
        """The IPv4 address of a node in the decoy network; "" where it has none."""
        is_there = self.decoy and name != CONTROLLER
        return f"{DECOY_NETWORK}.{10 + self.machine_names.index(name)}" if is_there else ""


# Each line with the failure it prevents, where the value is not the obvious one.
SLURM_CONF = """\
ClusterName=forge
SlurmctldHost=ctl({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A requeued job starts only after its old credential has expired: 121 s with the default.
AuthInfo=cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/machines/ctl/slurmctld.log
SlurmdLogFile={folder}/machines/%n/slurmd.log
SlurmctldDebug=verbose
SlurmdDebug=verbose

# No cgroups: the machines are namespaces that share the kernel's one tree of them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
MpiDefault=none
TmpFS=/tmp

# 8 CPUs on each node, however few this machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu

# Schedule at once, not every minute.
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,sched_min_interval=0,bf_interval=3,batch_sched_delay=0
PriorityType=priority/basic

# --signal is sent at preemption too. It belongs here: 22.05 knows no PreemptParameters=send_user_signal.
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1

# A node that went away is noticed within seconds, and comes back by itself.
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=10
InactiveLimit=0
# A cancelled job saves within it, on a host that is busy with other tests too: 10 to 25 s were seen.
KillWait=60
# `scontrol show job` still knows an ended job when a test asks.
MinJobAge=300

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctl
AccountingStoreFlags=job_comment
AccountingStorageTRES=gres/gpu

NodeName=DEFAULT CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1
NodeName=DEFAULT RealMemory=5000 TmpDisk=1000 Gres=gpu:2 State=UNKNOWN
{nodes}

# high takes nodes from low (its jobs are requeued), from lownow (requeued, without time to end) and from
# lowcancel (cancelled).
PartitionName=DEFAULT Nodes={all_nodes} State=UP MaxTime=1:00:00 DefaultTime=10 DefMemPerCPU=200
PartitionName=DEFAULT PriorityTier=1 PreemptMode=OFF GraceTime={grace_sec}
PartitionName=main Default=YES
PartitionName=gpu
PartitionName=low PreemptMode=REQUEUE
PartitionName=lownow PreemptMode=REQUEUE GraceTime=0
PartitionName=lowcancel PreemptMode=CANCEL
PartitionName=high PriorityTier=10
"""


NO_CHANGES: Mapping[str, object] = {}


def slurm_conf(settings: Settings, folder: Path, changes: Mapping[str, object] = NO_CHANGES) -> str:
    """slurm.conf of the cluster in `folder`; `changes` replace or add top-level keys."""
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={settings.address(name)}" for name in settings.node_names
    )
    text = SLURM_CONF.format(
        address=settings.address(CONTROLLER),
        folder=folder,
        nodes=nodes,
        all_nodes=",".join(settings.node_names),
        grace_sec=settings.grace_sec,
    )
    kept = [line for line in text.splitlines() if line.split("=")[0] not in changes]
    return "\n".join([*(f"{key}={value}" for key, value in changes.items()), *kept, ""])


def other_files(settings: Settings, folder: Path) -> dict[str, str]:
    """The rest of /etc, by file name."""
    hosts = [
        f"{settings.decoy_address(name) or settings.address(name)} {name}"
        for name in settings.machine_names
    ]
    dbd = {
        "AuthType": "auth/munge",
        "DbdHost": CONTROLLER,
        "SlurmUser": "root",
        "LogFile": f"{folder}/machines/ctl/slurmdbd.log",
        "PidFile": "/run/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm_acct_db",
    }
    return {
        # Without this line Slurm tries to mount cgroups.
        "cgroup.conf": "CgroupAutomount=no\n",
        # A GPU must be a character device, else Slurm sets no CUDA_VISIBLE_DEVICES.
        "gres.conf": f"Name=gpu File={folder}/gpus/nvidia[0-1]\n",
        "hosts": "\n".join(["127.0.0.1 localhost", *hosts, ""]),
        # No DNS: with it, each look-up of a node's name hangs for 10 s.
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
        "plugstack.conf": "",
        "slurmdbd.conf": "".join(f"{key}={value}\n" for key, value in dbd.items()),
    }
