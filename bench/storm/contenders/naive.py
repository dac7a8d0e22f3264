"""`sbatch --requeue` and torchrun: what documentation of PyTorch and of many sites shows."""

from __future__ import annotations

from bench.storm.contender import SbatchContender


class Naive(SbatchContender):
    """torchrun starts ranks again inside the job, three times at most; Slurm starts the job again after
    a preemption and the loss of a node. The program resumes from its newest checkpoint; it has no handler
    of signals."""

    name = "naive"
    what = "`sbatch --requeue`, torchrun, newest checkpoint"

    def script(self) -> str:
        # --kill-on-bad-exit: else agents of the other nodes may wait for one that has given up.
        return f"""\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
srun --kill-on-bad-exit=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=1 --max-restarts=3 \\
  --rdzv-backend=c10d --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID {self.program()}
"""


class NaiveRequeue(Naive):
    """The same, whose script requeues the job itself when training has failed. Without this line a grace
    period ends the job for good: its SIGTERM reaches torchrun, and the script exits before Slurm requeues
    the job."""

    name = "naive-requeue"
    what = "the same, and `scontrol requeue` where it fails"

    def script(self) -> str:
        return super().script().rstrip() + ' || scontrol requeue "$SLURM_JOB_ID"\n'


class Undisturbed(Naive):
    """The naive script without events: what pacing, saves and the machine leave of the wall time."""

    name = "none"
    what = "the naive script, undisturbed"
    is_struck = False
