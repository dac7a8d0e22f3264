"""torchft: replica groups that train on when one dies, and a lighthouse that knows who is there."""

from __future__ import annotations

from pathlib import Path

from bench.storm import environments, record
from bench.storm.contender import SbatchContender
from bench.storm.raw import Steps


class Torchft(SbatchContender):
    """The lighthouse and a torchrun for each replica group of one rank, in one job, with the options of
    its README. Slurm starts the job again after a preemption and the loss of a node; where all groups
    have ended, it is requeued, as by torchx, which its example for Slurm uses.

    Not with --no-kill, by which a job outlives a lost node: of a job that has shrunk, accounting of Slurm
    22.05 has each later start only after the next one, so its time in the queue could not be told."""

    name = "torchft"
    what = "torchft, a replica group on each node, `sbatch --requeue`"
    environment = "torchft"
    script_name = "torchft_paced.py"

    def script(self) -> str:
        lighthouse = environments.program(self.environment, "torchft_lighthouse")
        torchrun = environments.program(self.environment, "torchrun")
        return f"""\
export NUM_REPLICA_GROUPS=$SLURM_NNODES TORCHFT_LIGHTHOUSE=http://$(hostname):29510
{lighthouse} --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000 > lighthouse.log 2>&1 &
srun --kill-on-bad-exit=0 bash -c '
  REPLICA_GROUP_ID=$SLURM_PROCID exec "$0" --master-addr=$(hostname) "$@"' {torchrun} \\
  --nnodes=1 --nproc-per-node=1 --master-port=29600 --max-restarts=100 \\
  {self.program()}
scontrol requeue $SLURM_JOB_ID
"""

    def launches(self, begin: float) -> list[Steps]:
        """None: a group's steps are no chain. What counts are its samples."""
        return []

    def samples(self, begin: float) -> list[tuple[float, int]]:
        return record.distinct_samples(self.step_log, begin)

    def remove_newest_checkpoint(self) -> None:
        found = sorted(self.checkpoints.glob("checkpoint-*.pt"), key=_step)
        for path in found[-1:]:
            path.unlink()


def _step(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
