"""The launch command: the line with srun or torchrun that starts all ranks."""

from __future__ import annotations

import sys
from pathlib import Path

from forge.core.machine import Machine
from forge.hosts.container import inside
from forge.hosts.placement import Placement, WorldLayout
from forge.slurm import slurm


def launch_command(
    machine: Machine,
    layout: WorldLayout,
    placement: Placement,
    spec: Path,
    *,
    master: tuple[str, int],
    python: str = sys.executable,
) -> list[str]:
    """The command that starts all ranks, each as `python -m forge.worker SPEC`.

    placement: exactly layout.nodes hosts. master: host and free port for the rendezvous of torchrun, on
    the first of them; on this host alone, port 0 is any free one.
    """
    python = placement.python(python)
    entry = ["-m", "forge.worker", str(spec)]
    job, ranks = placement.job, layout.ranks_per_node
    if machine.launcher == "single":
        return inside(placement.container, [python, *entry])
    if machine.launcher == "srun":
        assert job
        # Without a shell: Slurm signals only the process that it starts.
        line = slurm.srun(
            job.id,
            placement.hosts,
            tasks_per_node=ranks,
            cpus_per_task=job.cpus_per_task,
            options=_step_options(spec, placement),
        )
        return [*line, *inside(placement.container, [python, *entry])]
    torchrun = _torchrun(machine, layout, spec, master, python)
    if layout.nodes == 1 and placement.is_here:
        words = [*torchrun, "--signals-to-handle=SIGTERM,SIGUSR1,SIGINT", *entry]
        return inside(placement.container, words)
    assert job
    line = slurm.srun(
        job.id,
        placement.hosts,
        cpus_per_task=job.cpus_per_task * ranks,
        options=_step_options(spec, placement),
    )
    once = [python, "-m", "forge.launch.first_signal"]  # keeps all other signals from torchrun
    words = [*once, *torchrun, "--signals-to-handle=SIGHUP", *entry]
    return [*line, *inside(placement.container, words)]


def _step_options(spec: Path, placement: Placement) -> tuple[str, ...]:
    # --overlap: a step on a lost node holds its cores until Slurm notices, and the next step would wait
    # for them.
    own = (f"--job-name={spec.parent.name}", "--kill-on-bad-exit=1", "--overlap")
    return (*own, *placement.srun_options)


def _torchrun(
    machine: Machine, layout: WorldLayout, spec: Path, master: tuple[str, int], python: str
) -> list[str]:
    """torchrun of one node, without --signals-to-handle: the signals at which it waits for its ranks.
    Without that option, SIGUSR1 kills the torchrun agent and orphans the ranks."""
    endpoint = f"{master[0]}:{master[1]}"
    # Never dynamic rendezvous (c10d, --standalone): it unpickles what anybody may write into its store.
    # Also, ranks of several nodes would meet at another port, on the node that sorts first by its own
    # name, and nobody listens where a node's name does not lead to `master`.
    meeting = (
        ("forge.launch.torchrun", endpoint)
        if layout.nodes == 1
        else ("torch.distributed.run", "--rdzv-backend=static", f"--rdzv-endpoint={endpoint}")
    )
    return [
        *(python, "-m", *meeting, f"--nnodes={layout.nodes}"),
        f"--nproc-per-node={layout.ranks_per_node}",
        f"--rdzv-id={spec.parent.name}",
        f"--rdzv-conf=timeout={machine.fabric.timeout_sec:.0f}",
    ]
