"""The Trainer of Hugging Face, which saves when it gets SIGTERM."""

from __future__ import annotations

from bench.storm import environments
from bench.storm.contender import SbatchContender


class JitTrainer(SbatchContender):
    """`enable_jit_checkpoint`, with `--signal=TERM@…` as its documentation says for Slurm, the newest
    checkpoint by `get_last_checkpoint`, and `scontrol requeue` until a flag says that it has finished.

    In two of three storms no start after a preemption trained a step. Seen by hand, in one of seven tries
    with one event: each rank decides by a clock of its own after which step it saves, so they wait for
    each other until torchrun kills them, and leave a directory `checkpoint-90` with nothing in it but the
    mark of an incomplete checkpoint, which `get_last_checkpoint` takes all the same."""

    name = "trainer"
    what = "Hugging Face Trainer, just-in-time checkpoint, torchrun, `scontrol requeue`"
    environment = "trainer"
    script_name = "trainer_paced.py"
    sbatch_options = ("--requeue", "--signal=TERM@90")

    def script(self) -> str:
        torchrun = environments.program(self.environment, "torchrun")
        return f"""\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
srun --kill-on-bad-exit=1 {torchrun} --nnodes=$SLURM_NNODES --nproc-per-node=1 --max-restarts=3 \\
  --rdzv-backend=c10d --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID {self.program()}
[ -e finished ] || scontrol requeue $SLURM_JOB_ID
"""
