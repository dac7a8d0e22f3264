"""Jobs that evaluate every k-th checkpoint while the run trains (`evaluate.every`), submitted by the
launcher."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Self

from forge.checkpoint import directory
from forge.core.errors import ForgeError
from forge.core.paths import RunPaths, checkpoint_step
from forge.core.process import user_threads
from forge.core.records import RunSettings
from forge.core.terminal import say
from forge.core.values import as_cell
from forge.plugins.evaluation.flow import RULE
from forge.plugins.evaluation.records import SubmittedJob
from forge.plugins.evaluation.settings import Evaluate
from forge.slurm import slurm
from forge.slurm.sbatch import Request, batch_line

POLL_SEC = 10.0
# Variables of the rule that trains, removed for the job: it is not a part of the workflow.
OF_THE_RULE = ("FORGE_IN_WORKFLOW", "FORGE_SUBMITTED", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class EvaluationJobs:
    """Jobs that evaluate checkpoints of a run. request: to Slurm. options: of `forge evaluate`."""

    paths: RunPaths
    every: int
    request: Request
    options: Sequence[str]

    @classmethod
    def of(cls, paths: RunPaths, settings: RunSettings, data: str) -> Self | None:
        """The jobs that the config asks for; None where it asks for none, and without Slurm. data: the
        directory with the run's tokenizer."""
        evaluate, request = settings.of(Evaluate), settings.jobs.get(RULE)
        if not (evaluate.tasks and evaluate.every and request):
            return None
        # With the tasks, since the job trusts nothing that stands beside the results.
        tasks = evaluate.model_dump(mode="json", exclude={"every"})
        options = [f"--evaluate.{key}={as_cell(value)}" for key, value in tasks.items()]
        return cls(
            paths,
            evaluate.every,
            Request.from_json(request),
            [f"--data={as_cell(data)}", *options],
        )

    def submitted(self, checkpoint: Path) -> Path:
        """Return the path of the record of a checkpoint's job."""
        return self.paths.evaluations / f"{checkpoint.name}.job.json"

    def due(self) -> list[Path]:
        """Committed checkpoints whose step is a multiple of `every` and no job was submitted for, oldest
        first."""
        return [
            folder
            for folder in directory.committed(self.paths.checkpoints)
            if (step := checkpoint_step(folder.name))
            and step % self.every == 0
            and not (self.paths.evaluations / f"{folder.name}.json").exists()
            and not self.submitted(folder).exists()
        ]

    def submit(self, checkpoint: Path) -> None:
        """Submit the job of this checkpoint. Raises ForgeError where sbatch fails.

        The caller holds the run's lock. What is submitted is written down before, so that a launcher that
        is killed in between never leads to a second job.
        """
        marker = self.submitted(checkpoint)
        SubmittedJob(job="").write(marker)
        try:
            job = slurm.ask(*self.sbatch_line(checkpoint), patience_sec=0)
        except (slurm.Refused, slurm.SlurmSilent) as err:
            # Where Slurm was silent it may have taken the job, which must not run twice.
            if isinstance(err, slurm.Refused):
                marker.unlink(missing_ok=True)
            raise ForgeError(err.what if isinstance(err, ForgeError) else str(err)) from None
        job = job.strip().partition(";")[0]  # ID;CLUSTER
        SubmittedJob(job=job).write(marker)
        say(f"evaluate: job {job} for {checkpoint.name}")

    def sbatch_line(self, checkpoint: Path) -> list[str]:
        """The sbatch command of the job of this checkpoint."""
        # Not *.log: an error in this file would make the state of the run `failed`.
        threads = user_threads()
        environment = [*(f"--unset={name}" for name in OF_THE_RULE)]
        environment += [f"OMP_NUM_THREADS={threads}"] if threads else []
        command = [sys.executable, "-m", "forge", "evaluate", str(checkpoint), *self.options]
        return batch_line(
            f"evaluate-{self.paths.root.name}-{checkpoint.name}",
            self.paths.logs.absolute() / f"evaluate-{checkpoint.name}.txt",
            self.request.options,
            ["env", *environment, *command],
        )


@contextmanager
def checkpoint_jobs(paths: RunPaths, settings: RunSettings, data: str) -> Iterator[None]:
    """Submit the job of each checkpoint that is due while the body trains; outside of Slurm nothing.
    Nothing that goes wrong with it is raised. data: as for `EvaluationJobs.of`."""
    jobs = EvaluationJobs.of(paths, settings, data) if slurm.this_job_id() is not None else None
    if jobs is None:
        yield
        return
    over = Event()
    thread = Thread(target=_submit_until, args=(jobs, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * slurm.ASK_SEC)


def _submit_until(jobs: EvaluationJobs, over: Event) -> None:
    """Look for new checkpoints until training is over, and once more then; no more after a failure, which
    is a warning."""
    is_last = False
    while not is_last:
        is_last = over.wait(POLL_SEC)
        try:
            for folder in jobs.due():
                jobs.submit(folder)
        except (ForgeError, OSError) as err:
            what = err.what if isinstance(err, ForgeError) else err
            say(
                f"warning: evaluate: no job was submitted: {what}; the target `evaluate` makes up for it,"
                " training is not affected"
            )
            return
