"""What universities publish for partitions whose jobs are requeued: a recipe as it stands, and a
well-written one."""

from __future__ import annotations

from bench.storm.contender import SbatchContender

TORCHRUN = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
launch=(torchrun --nnodes=$SLURM_NNODES --nproc-per-node=1 --max-restarts=3
  --rdzv-backend=c10d --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID)
"""


class Foreground(SbatchContender):
    """The recipe of the Illinois campus cluster: a signal for the batch shell two minutes before the end,
    and a program that saves when it is asked, in the shell's foreground. The shell ends on the signal and
    hands it to no process: ranks save at the SIGTERM that ends the job, which has failed by then."""

    name = "foreground"
    what = (
        "a published recipe: `--signal=B:SIGTERM@120`, the program in the foreground, `--requeue`"
    )
    sbatch_options = ("--requeue", "--signal=B:SIGTERM@120")

    def script(self) -> str:
        return f"""\
{TORCHRUN}\
srun --kill-on-bad-exit=1 "${{launch[@]}}" {self.program("--save-on-sigterm")}
"""


class Trap(SbatchContender):
    """The shell waits in `wait`, so that its trap runs at once: it asks the step to save, waits until
    that has ended, and requeues its job. The same after a failure, as torchrun has given up by then."""

    name = "trap"
    what = "trap, `wait`, save on SIGTERM, `scontrol requeue`"
    sbatch_options = ("--requeue", "--signal=B:USR1@120")

    def script(self) -> str:
        # scancel --signal reaches the processes of the steps, and not the shell.
        return f"""\
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap : TERM
{TORCHRUN}\
srun --kill-on-bad-exit=1 "${{launch[@]}}" {self.program("--save-on-sigterm")} &
while kill -0 $! 2>/dev/null; do wait $!; done
[ -e finished ] || scontrol requeue "$SLURM_JOB_ID"
"""
