"""The paced program as a job of submitit.

submitit_paced.py NODES MINUTES PARTITION OPTION ... submits it with these options of paced.py, and prints
the job's id.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import submitit  # type: ignore[import-not-found]


class Training:
    """What every task of the job runs. Pickled: it holds only what the program is started with."""

    def __init__(self, programs: str, options: list[str]) -> None:
        self.programs, self.options = programs, options

    def __call__(self) -> None:
        submitit.helpers.TorchDistributedEnvironment().export(overwrite=True)
        sys.path.insert(0, self.programs)
        sys.argv = ["paced.py", *self.options]
        import paced  # type: ignore[import-not-found]

        paced.main()

    def checkpoint(self) -> Any:
        """The program itself finds its newest checkpoint."""
        return submitit.helpers.DelayedSubmission(Training(self.programs, self.options))


def main() -> None:
    nodes, minutes, partition, *options = sys.argv[1:]
    executor = submitit.AutoExecutor(folder="submitit")
    executor.update_parameters(
        nodes=int(nodes),
        tasks_per_node=1,
        cpus_per_task=2,
        timeout_min=int(minutes),
        slurm_mem="1800M",
        slurm_partition=partition,
        slurm_additional_parameters={"open-mode": "append"},
    )
    here = str(Path(__file__).resolve().parent)
    print(executor.submit(Training(here, options)).job_id)


if __name__ == "__main__":
    main()
