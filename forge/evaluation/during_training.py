"""Jobs that evaluate every k-th checkpoint while the run trains, submitted by the launcher."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from forge.checkpoint import directory
from forge.cluster import slurm
from forge.cluster.sbatch import batch_line
from forge.core.errors import ForgeError
from forge.core.paths import RunPaths, checkpoint_step
from forge.core.process import user_threads
from forge.core.records import RunSettings, SubmittedEvaluation
from forge.core.terminal import say
from forge.core.values import as_cell

POLL_SEC = 10.0
# Variables of the rule that trains, removed for the job: it is not a part of the workflow.
OF_THE_RULE = ("FORGE_IN_WORKFLOW", "FORGE_SUBMITTED", "OMP_NUM_THREADS")


@contextmanager
def evaluated(paths: RunPaths, settings: RunSettings, data: str) -> Iterator[None]:
    """Submit a job for each checkpoint that evaluate.every names, while the body trains; outside of Slurm
    nothing. Nothing that goes wrong with it is raised. data: the directory with the run's tokenizer."""
    wanted = settings.evaluate.tasks and settings.evaluate.every and settings.sbatch is not None
    if not wanted or slurm.this_job_id() is None:
        yield
        return
    over = Event()
    thread = Thread(target=_submit_until, args=(paths, settings, data, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * slurm.ASK_SEC)


def _submit_until(paths: RunPaths, settings: RunSettings, data: str, over: Event) -> None:
    """Look for new checkpoints until training is over, and once more then; no more after a failure."""
    try:
        while True:
            is_last = over.wait(POLL_SEC)
            for folder in due(paths, settings):
                submit(paths, settings, data, folder)
            if is_last:
                return
    except (ForgeError, OSError) as err:
        what = err.what if isinstance(err, ForgeError) else err
        say(
            f"warning: evaluate: no job was submitted: {what}; the target `evaluate` makes up for it,"
            " training is not affected"
        )


def due(paths: RunPaths, settings: RunSettings) -> list[Path]:
    """Committed checkpoints that evaluate.every names and no job was submitted for, oldest first."""
    every = settings.evaluate.every
    assert every
    return [
        folder
        for folder in directory.committed(paths.checkpoints)
        if (step := checkpoint_step(folder.name))
        and step % every == 0
        and not paths.evaluation_at(step).exists()
        and not _submitted_file(paths, folder).exists()
    ]


def _submitted_file(paths: RunPaths, folder: Path) -> Path:
    return paths.evaluations / f"{folder.name}.job.json"


def submit(paths: RunPaths, settings: RunSettings, data: str, folder: Path) -> None:
    """Submit the job that evaluates this checkpoint. Raises ForgeError where sbatch fails.

    The caller holds the run's lock. What is submitted is written down before, so that a launcher that is
    killed in between never leads to a second job.
    """
    marker = _submitted_file(paths, folder)
    SubmittedEvaluation(job="").write(marker)
    try:
        job = slurm.ask(*sbatch_line(paths, settings, data, folder), patience_sec=0)
    except (slurm.Refused, slurm.SlurmSilent) as err:
        # Where Slurm was silent it may have taken the job, which the target would not repeat.
        if isinstance(err, slurm.Refused):
            marker.unlink(missing_ok=True)
        raise ForgeError(err.what if isinstance(err, ForgeError) else str(err)) from None
    job = job.strip().partition(";")[0]  # ID;CLUSTER
    SubmittedEvaluation(job=job).write(marker)
    say(f"evaluate: job {job} for {folder.name}")


def sbatch_line(paths: RunPaths, settings: RunSettings, data: str, folder: Path) -> list[str]:
    """The sbatch command of the job that evaluates this checkpoint. It names the tasks, since the job
    trusts nothing that stands beside the results."""
    # Not *.log: an error in this file would make the state of the run `failed`.
    threads = user_threads()
    environment = [*(f"--unset={name}" for name in OF_THE_RULE)]
    environment += [f"OMP_NUM_THREADS={threads}"] if threads else []
    command = [sys.executable, "-m", "forge", "evaluate", str(folder), f"--data={as_cell(data)}"]
    values = settings.evaluate.model_dump(mode="json", exclude={"every"})
    command += [f"--evaluate.{key}={as_cell(value)}" for key, value in values.items()]
    return batch_line(
        f"evaluate-{paths.root.name}-{folder.name}",
        paths.logs.absolute() / f"evaluate-{folder.name}.txt",
        settings.sbatch or (),
        ["env", *environment, *command],
    )
