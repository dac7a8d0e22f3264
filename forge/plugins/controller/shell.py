"""The environment of the shell in which `forge submit` was called, without that of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping

# What Slurm, or a site's prolog, sets anew in a job, beside the variables that describe the job.
SET_IN_JOBS = (
    *("TMPDIR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    *("ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
_OF_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SALLOC_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND", "PMI")
_OF_SHELL = ("SLURM_CONF", "SLURM_CLUSTERS")


def outside_of_job(shell: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process in a job that submits jobs as from the login node: without what
    describes this job, and passes to its own as options. shell: values that SET_IN_JOBS had there."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _OF_SHELL or not name.startswith((*_OF_JOB, *SET_IN_JOBS))
    }
    return kept | dict(shell)
