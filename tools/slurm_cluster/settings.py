"""Files in /etc of the test cluster: nodes, partitions, accounts, and Slurm's configuration with
reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

CONTROLLER = "ctl"
CLUSTER = "forge"
MAX_NODES = 12
NETWORK = "10.78.0"
DECOY_NETWORK = "10.79.0"


@dataclass(frozen=True)
class NodeKind:
    """The hardware of a node as Slurm is told of it, whatever this machine has."""

    cpus: int = 8
    """Hardware threads, as Slurm counts CPUs."""
    sockets: int = 1
    threads_per_core: int = 1
    memory_mb: int = 5000
    disk_mb: int = 1000
    gpus: tuple[tuple[str, int], ...] = (("", 2),)
    """(type, count); the type is "" where Slurm is told of none."""
    features: tuple[str, ...] = ()
    reserved: tuple[tuple[str, int], ...] = ()
    """What the system keeps for itself: CoreSpecCount, MemSpecLimit in MB."""

    def __post_init__(self) -> None:
        if self.cpus % (self.sockets * self.threads_per_core):
            raise ValueError(
                f"{self.cpus} CPUs are no multiple of {self.sockets} sockets x"
                f" {self.threads_per_core} threads a core"
            )

    @property
    def num_gpus(self) -> int:
        return sum(count for _, count in self.gpus)

    @property
    def keys(self) -> dict[str, object]:
        """Keys of its NodeName line in slurm.conf."""
        gres = ",".join(":".join(filter(None, ("gpu", model, str(n)))) for model, n in self.gpus)
        return {
            "CPUs": self.cpus,
            "Boards": 1,
            "SocketsPerBoard": self.sockets,
            "CoresPerSocket": self.cpus // self.sockets // self.threads_per_core,
            "ThreadsPerCore": self.threads_per_core,
            "RealMemory": self.memory_mb,
            "TmpDisk": self.disk_mb,
            **({"Gres": gres} if gres else {}),
            **({"Features": ",".join(self.features)} if self.features else {}),
            **dict(self.reserved),
            "State": "UNKNOWN",
        }


@dataclass(frozen=True)
class PartitionSettings:
    """A PartitionName line of slurm.conf."""

    name: str
    keys: dict[str, str]
    nodes: tuple[str, ...] | None = None
    """None: all nodes."""


def default_partitions(grace_sec: int = 5) -> tuple[PartitionSettings, ...]:
    """Partitions of the test cluster: `high` takes nodes from `low` (its jobs are requeued), from
    `lownow` (requeued, without time to end) and from `lowcancel` (cancelled).

    grace_sec: time between SIGTERM and SIGKILL when a job is preempted.
    """
    common = {
        **{"State": "UP", "MaxTime": "1:00:00", "DefaultTime": "10", "DefMemPerCPU": "200"},
        **{"PriorityTier": "1", "PreemptMode": "OFF", "GraceTime": str(grace_sec)},
    }
    own: dict[str, dict[str, str]] = {
        "main": {"Default": "YES"},
        "gpu": {},
        "low": {"PreemptMode": "REQUEUE"},
        "lownow": {"PreemptMode": "REQUEUE", "GraceTime": "0"},
        "lowcancel": {"PreemptMode": "CANCEL"},
        "high": {"PriorityTier": "10"},
    }
    return tuple(PartitionSettings(name, common | keys) for name, keys in own.items())


@dataclass(frozen=True)
class Settings:
    """The size and shape of a cluster. Memory is taken only when something is written to /tmp."""

    nodes: int = 4
    kinds: tuple[NodeKind, ...] = (NodeKind(),)
    """Of each node, in the order of their names; those behind the last one are like that."""
    partitions: tuple[PartitionSettings, ...] = default_partitions()
    qos: tuple[str, ...] = ()
    """Names beside `normal`. They are made first: slurmctld refuses to start with a partition whose QOS
    is unknown; but what limits GPUs is known to the database only after slurmctld has started."""
    accounting: tuple[tuple[str, ...], ...] = (
        ("add", "account", "lab", f"Cluster={CLUSTER}", "Description=lab", "Organization=lab"),
        ("add", "user", "root", "Account=lab", "DefaultAccount=lab"),
    )
    """Words of each command of sacctmgr that fills the empty accounting database. The plugin of Snakemake
    looks up the user's account, so root has one."""
    keys: dict[str, str | None] = field(default_factory=dict)
    """Top-level keys of slurm.conf with other values than in SLURM_CONF; None leaves the key out."""
    tmp_mib: int = 2048
    """Size of each machine's own /tmp."""
    interfaces: dict[str, str] = field(default_factory=dict)
    """Name of a node's network interface where it is not eth0."""
    decoy: str = ""
    """Name of a second interface of every node, first in the kernel's list: up, with an address that the
    node's name resolves to, but in a network over which no node reaches another."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"the test cluster has 1 to {MAX_NODES} nodes, not {self.nodes}")
        if unknown := set(self.interfaces) - set(self.node_names):
            raise ValueError(f"interfaces names {sorted(unknown)}; nodes are {self.node_names}")

    @property
    def node_names(self) -> list[str]:
        return [f"node{number:02d}" for number in range(1, self.nodes + 1)]

    @property
    def machine_names(self) -> list[str]:
        return [CONTROLLER, *self.node_names]

    def without(self, names: Collection[str]) -> Settings:
        """The same without these keys of slurm.conf, of the cluster and of partitions."""
        partitions = tuple(
            replace(one, keys={key: value for key, value in one.keys.items() if key not in names})
            for one in self.partitions
        )
        keys = {key: None if key in names else value for key, value in self.keys.items()}
        return replace(self, partitions=partitions, keys=keys)

    @property
    def kind_of(self) -> dict[str, NodeKind]:
        """The kind of each node, by its name."""
        last = len(self.kinds) - 1
        return {name: self.kinds[min(at, last)] for at, name in enumerate(self.node_names)}

    def address(self, name: str) -> str:
        """The IPv4 address of a machine."""
        return f"{NETWORK}.{10 + self.machine_names.index(name)}"

    def decoy_address(self, name: str) -> str:
        """The IPv4 address of a node in the decoy network; "" where it has none."""
        is_there = self.decoy and name != CONTROLLER
        return f"{DECOY_NETWORK}.{10 + self.machine_names.index(name)}" if is_there else ""


# Each line with the failure it prevents, where the value is not the obvious one.
SLURM_CONF = """\
ClusterName={cluster}
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

# CPUs and memory of each node are those of its line below, however few this machine has.
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

# As nearly every site has one. Without, a job that loses a node while no step runs on its others is
# requeued 12 s later: these others answer together with the lost one, after MessageTimeout.
Epilog=/bin/true

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

{nodes}

{partitions}
"""


NO_CHANGES: Mapping[str, object] = {}


def slurm_conf(settings: Settings, folder: Path, changes: Mapping[str, object] = NO_CHANGES) -> str:
    """slurm.conf of the cluster in `folder`; `changes` replace or add top-level keys, or leave one out by
    None, after those of `settings.keys`."""
    text = SLURM_CONF.format(
        cluster=CLUSTER,
        address=settings.address(CONTROLLER),
        folder=folder,
        nodes="\n".join(_node_lines(settings)),
        partitions="\n".join(_partition_lines(settings)),
    )
    changed = {**settings.keys, **changes}
    kept = [line for line in text.splitlines() if line.split("=")[0] not in changed]
    new = [f"{key}={value}" for key, value in changed.items() if value is not None]
    return "\n".join([*new, *kept, ""])


def _node_lines(settings: Settings) -> Iterator[str]:
    for name, kind in settings.kind_of.items():
        yield _line(NodeName=name, NodeAddr=settings.address(name), **kind.keys)


def _partition_lines(settings: Settings) -> Iterator[str]:
    for partition in settings.partitions:
        nodes = settings.node_names if partition.nodes is None else partition.nodes
        where = {"Nodes": ",".join(nodes)} if nodes else {}
        yield _line(PartitionName=partition.name, **where, **partition.keys)


def _line(**keys: object) -> str:
    return " ".join(f"{key}={value}" for key, value in keys.items())


def _gres_lines(settings: Settings, folder: Path) -> Iterator[str]:
    """A line for the GPUs of one type of a node. A GPU must be a character device, else Slurm sets no
    CUDA_VISIBLE_DEVICES."""
    for name, kind in settings.kind_of.items():
        first = 0
        for model, count in kind.gpus:
            what = {"Name": "gpu", **({"Type": model} if model else {})}
            files = f"{folder}/gpus/nvidia[{first}-{first + count - 1}]"
            yield _line(NodeName=name, **what, File=files)
            first += count


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
        "gres.conf": "".join(f"{line}\n" for line in _gres_lines(settings, folder)),
        "hosts": "\n".join(["127.0.0.1 localhost", *hosts, ""]),
        # No DNS: with it, each look-up of a node's name hangs for 10 s.
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
        "plugstack.conf": "",
        "qos": ",".join(settings.qos),
        "slurmdbd.conf": "".join(f"{key}={value}\n" for key, value in dbd.items()),
    }
