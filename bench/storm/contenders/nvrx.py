"""NVIDIA's resiliency extension: `ft_launcher` in place of torchrun, ranks that send heartbeats."""

from __future__ import annotations

from bench.storm import environments
from bench.storm.contender import SbatchContender


class Nvrx(SbatchContender):
    """As the guides of 0.4.1 say: ft_launcher starts failed and hung ranks again inside the job, the
    program saves on SIGTERM on all ranks together, and the script starts the job again until a flag says
    that it has finished (their section on auto-resume). Hot spares came with later releases."""

    name = "nvrx"
    what = "NVRx `ft_launcher`, heartbeats, save on SIGTERM, `sbatch --requeue` and auto-resume"
    environment = "nvrx"
    script_name = "nvrx_paced.py"
    # Slurm signals the steps also before the time limit, early enough for a save.
    sbatch_options = ("--requeue", "--signal=TERM@90")

    def script(self) -> str:
        launcher = environments.program(self.environment, "ft_launcher")
        # A step with a save takes some seconds: below the heartbeat's limit, which is below that of Gloo.
        return f"""\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
srun --kill-on-bad-exit=1 {launcher} --nnodes=$SLURM_NNODES --nproc-per-node=1 --max-restarts=10 \\
  --rdzv-backend=c10d --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID --term-timeout=45 \\
  --ft-initial-rank-heartbeat-timeout=60 --ft-rank-heartbeat-timeout=15 \\
  {self.program("--save-on-sigterm")}
[ -e finished ] || scontrol requeue $SLURM_JOB_ID
"""
