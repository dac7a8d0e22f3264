"""The line that starts the ranks, as recorded for each launcher."""

import sys
from pathlib import Path

from forge.core.machine import load_machine
from forge.hosts.placement import Placement, WorldLayout
from forge.launch.launch_command import launch_command
from forge.slurm import slurm

SPEC = "results/base/.launch/20260101T000000-7/spec.json"
ENTRY = ["-m", "forge.worker", SPEC]
JOB = slurm.Job("42", "RUNNING", 0, ("n1", "n2", "n3"), 6, "gpu", "x", True, None)
PLACEMENT = Placement(("n1", "n2"), JOB)
SRUN = ["srun", "--jobid=42", "--nodes=2"]
MEETING = ["--nproc-per-node=4", "--rdzv-id=20260101T000000-7", "--rdzv-conf=timeout=300"]


def line_of(keys, ranks, where, master=("n1", 29500)):
    return launch_command(load_machine(None, keys), ranks, where, Path(SPEC), master=master)


def test_line_of_one_process_is_as_recorded():
    assert line_of({}, WorldLayout(), Placement.here()) == [sys.executable, *ENTRY]


def test_line_of_torchrun_on_this_host_is_as_recorded():
    line = line_of({"launcher": "torchrun"}, WorldLayout(1, 4), Placement.here(), ("127.0.0.1", 0))
    assert line == [
        *(sys.executable, "-m", "forge.launch.torchrun", "127.0.0.1:0", "--nnodes=1"),
        *MEETING,
        "--signals-to-handle=SIGTERM,SIGUSR1,SIGINT",
        *ENTRY,
    ]


def test_line_of_srun_starts_every_rank_itself():
    assert line_of({"launcher": "srun"}, WorldLayout(2, 4), PLACEMENT) == [
        *SRUN,
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--nodelist=n1,n2",
        "--cpus-per-task=6",
        "--mpi=none",
        "--export=ALL",
        "--job-name=20260101T000000-7",
        "--kill-on-bad-exit=1",
        "--overlap",
        sys.executable,
        *ENTRY,
    ]


def test_line_of_torchrun_on_two_nodes_is_one_task_a_node():
    assert line_of({"launcher": "torchrun"}, WorldLayout(2, 4), PLACEMENT) == [
        *SRUN,
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--nodelist=n1,n2",
        "--cpus-per-task=24",
        "--mpi=none",
        "--export=ALL",
        "--job-name=20260101T000000-7",
        "--kill-on-bad-exit=1",
        "--overlap",
        *(sys.executable, "-m", "forge.launch.first_signal"),
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--rdzv-backend=static", "--rdzv-endpoint=n1:29500", "--nnodes=2"),
        *MEETING,
        "--signals-to-handle=SIGHUP",
        *ENTRY,
    ]


def test_torchrun_of_one_node_elsewhere_listens_there_on_the_loopback_address():
    """Preflight tries single nodes of a job."""
    where, master = Placement(("n2",), JOB), ("127.0.0.1", 29500)
    line = line_of({"launcher": "torchrun"}, WorldLayout(1, 4), where, master)
    after_srun = line[line.index(sys.executable) :]
    assert after_srun == [
        *(sys.executable, "-m", "forge.launch.first_signal"),
        *(sys.executable, "-m", "forge.launch.torchrun", "127.0.0.1:29500", "--nnodes=1"),
        *MEETING,
        "--signals-to-handle=SIGHUP",
        *ENTRY,
    ]
