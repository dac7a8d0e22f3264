"""Jobs for every k-th checkpoint while the run trains, submitted by the launcher: `evaluate.every` scores
the checkpoint, `certify.every` trains the steps up to it again on other nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from forge.checkpoint import directory
from forge.cluster import exclude, slurm
from forge.cluster.sbatch import Request, batch_line
from forge.cluster.submission import nodes_to_avoid
from forge.core import events
from forge.core.errors import ForgeError
from forge.core.paths import RunPaths, checkpoint_step
from forge.core.process import user_threads
from forge.core.records import RunSettings, SubmittedJob
from forge.core.terminal import say
from forge.core.values import as_cell
from forge.run import certified

POLL_SEC = 10.0
# Rules whose resources in the profile the jobs have.
EVALUATION, REPRODUCTION = "evaluate_run", "reproduce_run"
# Variables of the rule that trains, removed for the job: it is not a part of the workflow.
OF_THE_RULE = ("FORGE_IN_WORKFLOW", "FORGE_SUBMITTED", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class JobKind:
    """One kind of these jobs. name: of the config's section, in names of jobs and logs. options: of the
    subcommand. folder: where it writes NAME-OF-CHECKPOINT.json, and the records of the jobs are. instead:
    what makes up for jobs that Slurm refused. is_elsewhere: on nodes that have not trained the run, where
    others fit."""

    name: str
    every: int
    request: Request
    subcommand: str
    options: Sequence[str]
    folder: Path
    instead: str
    is_elsewhere: bool = False

    def result(self, checkpoint: Path) -> Path:
        return self.folder / f"{checkpoint.name}.json"

    def submitted(self, checkpoint: Path) -> Path:
        return self.folder / f"{checkpoint.name}.job.json"


def kinds(paths: RunPaths, settings: RunSettings, data: str) -> Iterator[JobKind]:
    """The kinds that the config asks for; none without Slurm. data: the directory with the run's
    tokenizer."""
    evaluate, certify = settings.evaluate, settings.certify
    if evaluate.tasks and evaluate.every and (request := settings.jobs.get(EVALUATION)):
        # With the tasks, since the job trusts nothing that stands beside the results.
        tasks = evaluate.model_dump(mode="json", exclude={"every"})
        yield JobKind(
            name="evaluate",
            every=evaluate.every,
            request=Request.from_json(request),
            subcommand="evaluate",
            options=[
                f"--data={as_cell(data)}",
                *(f"--evaluate.{key}={as_cell(value)}" for key, value in tasks.items()),
            ],
            folder=paths.evaluations,
            instead="the target `evaluate` makes up for it",
        )
    if certify.every and (request := settings.jobs.get(REPRODUCTION)):
        asked = Request.from_json(request)
        yield JobKind(
            name="certify",
            every=certify.every,
            request=asked,
            subcommand="reproduce",
            # By the config that this training reads, for its data. Half of the job's time is for the
            # export, its statement and digests.
            options=[f"--config={paths.config}", f"--minutes={max(1, asked.minutes // 2)}"],
            folder=paths.certificates,
            instead="forge reproduce CHECKPOINT makes up for it",
            is_elsewhere=True,
        )


@contextmanager
def checkpoint_jobs(paths: RunPaths, settings: RunSettings, data: str) -> Iterator[None]:
    """Submit the jobs of each checkpoint that is due while the body trains, and say what came out of
    certify.every; outside of Slurm nothing. Nothing that goes wrong with it is raised. data: as for
    `kinds`."""
    wanted = [*kinds(paths, settings, data)] if slurm.this_job_id() is not None else []
    if not wanted:
        yield
        return
    over = Event()
    thread = Thread(target=_submit_until, args=(paths, wanted, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * slurm.ASK_SEC)


def _submit_until(paths: RunPaths, wanted: list[JobKind], over: Event) -> None:
    """Look for new checkpoints until training is over, and once more then; of a kind no more after a
    failure."""
    said = {line for line in _results(paths) if not line.startswith(certified.WRONG)}
    while True:
        is_last = over.wait(POLL_SEC)
        wanted = [kind for kind in wanted if _submit_due(paths, kind)]
        for line in _results(paths):
            if line not in said:
                said.add(line)
                say(f"certify: {line}")
        if is_last:
            return


def _results(paths: RunPaths) -> list[str]:
    """A line on the steps up to each checkpoint that were trained again. [] while that cannot be read,
    which `forge status` says."""
    try:
        return [certified.described(one) for one in certified.results(paths)]
    except (ForgeError, OSError):
        return []


def _submit_due(paths: RunPaths, kind: JobKind) -> bool:
    """Submit what is due. False, with a warning, where that fails."""
    try:
        for folder in due(paths, kind):
            submit(paths, kind, folder)
    except (ForgeError, OSError) as err:
        what = err.what if isinstance(err, ForgeError) else err
        say(
            f"warning: {kind.name}: no job was submitted: {what}; {kind.instead}, training is not"
            " affected"
        )
        return False
    return True


def due(paths: RunPaths, kind: JobKind) -> list[Path]:
    """Committed checkpoints whose step is a multiple of `every` and no job was submitted for, oldest
    first; to train steps again only those whose checkpoint before is there."""
    folders = [
        folder
        for folder in directory.committed(paths.checkpoints)
        if (step := checkpoint_step(folder.name))
        and step % kind.every == 0
        and not kind.result(folder).exists()
        and not kind.submitted(folder).exists()
    ]
    return _with_the_one_before(paths, folders) if kind.is_elsewhere and folders else folders


def _with_the_one_before(paths: RunPaths, folders: list[Path]) -> list[Path]:
    """Without checkpoints that were saved before train.keep_pairs was on: where certify.every is set for
    a run that has many of them, nearly all of its steps would be trained again at once."""
    there = {checkpoint_step(folder.name) for folder in directory.committed(paths.checkpoints)}
    log = events.read(paths.events) if paths.events.exists() else []
    saved = {event.step for event in log if isinstance(event, events.Save)}

    def has_it(step: int) -> bool:
        earlier = [one for one in saved if one < step]
        return not earlier or max(earlier) in there

    return [folder for folder in folders if has_it(checkpoint_step(folder.name) or 0)]


def submit(paths: RunPaths, kind: JobKind, folder: Path) -> None:
    """Submit the job of this checkpoint. Raises ForgeError where sbatch fails.

    The caller holds the run's lock. What is submitted is written down before, so that a launcher that is
    killed in between never leads to a second job.
    """
    marker = kind.submitted(folder)
    request = _elsewhere(paths, kind) if kind.is_elsewhere else kind.request
    SubmittedJob(job="").write(marker)
    try:
        job = slurm.ask(*sbatch_line(paths, kind, request, folder), patience_sec=0)
    except (slurm.Refused, slurm.SlurmSilent) as err:
        # Where Slurm was silent it may have taken the job, which must not run twice.
        if isinstance(err, slurm.Refused):
            marker.unlink(missing_ok=True)
        raise ForgeError(err.what if isinstance(err, ForgeError) else str(err)) from None
    job = job.strip().partition(";")[0]  # ID;CLUSTER
    SubmittedJob(job=job).write(marker)
    say(f"{kind.name}: job {job} for {folder.name}")


def _elsewhere(paths: RunPaths, kind: JobKind) -> Request:
    """The request, on no unhealthy node and, where others fit, on none that has trained the run. Where
    none fits the job waits for room on these, at the latest until the run ends."""
    request = kind.request.excluding(exclude.read(paths.bad_nodes))
    return request.excluding(nodes_to_avoid(request, events.trained_nodes(paths.events)))


def sbatch_line(paths: RunPaths, kind: JobKind, request: Request, folder: Path) -> list[str]:
    """The sbatch command of the job of this checkpoint."""
    # Not *.log: an error in this file would make the state of the run `failed`.
    threads = user_threads()
    environment = [*(f"--unset={name}" for name in OF_THE_RULE)]
    environment += [f"OMP_NUM_THREADS={threads}"] if threads else []
    command = [sys.executable, "-m", "forge", kind.subcommand, str(folder), *kind.options]
    return batch_line(
        f"{kind.name}-{paths.root.name}-{folder.name}",
        paths.logs.absolute() / f"{kind.name}-{folder.name}.txt",
        request.options,
        ["env", *environment, *command],
    )
