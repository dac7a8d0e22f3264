"""A plain Snakemake rule on Slurm, without Forge."""

from __future__ import annotations

import re

from bench.storm.contender import Contender
from tools.slurm_cluster.inside import Inside
from tools.slurm_cluster.machines import ClusterError

SNAKEFILE = """\
rule train:
    output:
        "finished",
    resources:
        mpi="srun",
        nodes={nodes},
        tasks={nodes},
        cpus_per_task=2,
        mem_mb=1800,
        runtime={minutes},
        slurm_partition="low",
    retries: 20
    shell:
        "bash train.sh"
"""
# Slurm's variables are gone inside a rule, but for the job's id.
TRAIN = """\
export OMP_NUM_THREADS=1
nodes=$(squeue -h -j "$SLURM_JOB_ID" -o %N)
head=$(scontrol show hostnames "$nodes" | head -n1)
srun -N {nodes} -n {nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 torchrun --nnodes={nodes} \\
  --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=$head:29500 \\
  --rdzv-id=$SLURM_JOB_ID {program}
"""
COMMAND = "snakemake --executor slurm --slurm-requeue --jobs 1 --nolock --rerun-incomplete"


class Rule(Contender):
    """The executor plugin for Slurm as it is, with its option --slurm-requeue, and a rule with retries: a
    job that failed is submitted again by Snakemake, one that is preempted is started again by Slurm."""

    name = "snakemake"
    what = "a Snakemake rule with `retries`, `--slurm-requeue`, torchrun, newest checkpoint"
    packages = ("torch", "snakemake", "snakemake-executor-plugin-slurm")
    _command: Inside | None = None

    def prepare(self) -> None:
        super().prepare()
        own = self.layout
        snakefile = SNAKEFILE.format(nodes=own.nodes, minutes=own.limit_minutes)
        (self.folder / "Snakefile").write_text(snakefile)
        train = TRAIN.format(nodes=own.nodes, program=self.program())
        (self.folder / "train.sh").write_text(train)

    def start(self) -> None:
        # Its output into a file: a pipe that nobody reads would stop it.
        line = f"exec {COMMAND} >> snakemake.out 2>&1"
        self._command = self.cluster.popen("bash", "-c", line, cwd=self.folder)

    @property
    def job(self) -> str:
        """That which Snakemake has submitted last."""
        log = self.folder / "snakemake.out"
        jobs = re.findall(r"SLURM jobid (\d+)", log.read_text() if log.exists() else "")
        if not jobs:
            raise ClusterError("Snakemake has submitted no job yet")
        return str(jobs[-1])

    def has_ended(self) -> bool:
        return self._command is not None and self._command.poll() is not None

    def end(self) -> None:
        if self._command is not None:
            self._command.kill_group()  # first, or it would submit the canceled job again
        super().end()
