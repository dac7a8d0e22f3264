"""Train an interval of a run again, in a directory of its own: `forge train` in a process of its own,
which sees no Slurm job. What depends on the program that trained the run is in its recipe."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol

from forge.attestation.verify import Links, VerificationError, part
from forge.checkpoint.checkpoints import RunCheckpoints
from forge.core import project_plugins
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, Exit, UnfitError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths
from forge.core.process import run_within
from forge.core.terminal import say
from forge.hosts.network import available_cores, available_memory
from forge.launch import kernel_cache
from forge.launch.rank_output import shown_bar
from forge.plugins.attestation.certificate import MadeBy, Retrained
from forge.plugins.attestation.intervals import Interval, Saved
from forge.plugins.attestation.reproduce_options import ReproduceOptions
from forge.validation.replay import RANKS_PER_CORE

RUN = "again"  # name of the run that trains an interval
GRACE_SEC = 60.0  # beyond the time that training has for itself
LINES_SHOWN = 6  # of its output, where it fails
# What would make it a part of something else: ranks of a launch, a job, a step of the workflow.
OF_OTHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("FORGE_LOG_DIR", "FORGE_IN_WORKFLOW", "FORGE_SLURM_START", "FORGE_USER_OMP_NUM_THREADS"),
)
PREFIXES = ("SLURM", "WANDB_", "MLFLOW_")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


class Recipe(Protocol[Saved]):
    """Steps that depend on the program that trained the run: Forge's own trainer, or another one."""

    @property
    def links(self) -> Links:
        """Links of the statement."""

    @property
    def cwd(self) -> Path | None:
        """Directory in which training runs; None for one of its own."""

    # --- what there is to retrain ---

    def checkpoints(self, run: RunPaths) -> RunCheckpoints:
        """Checkpoints of a run that this program has trained."""

    @property
    def never_made_again(self) -> frozenset[int]:
        """Steps of checkpoints that are no end of an interval: retraining does not save there."""

    def prepare_data(self, request: ReproduceOptions, scratch: Path) -> Path:
        """The directory from which training reads. Raises VerificationError where the texts give other
        tokens, ConfigError where the statement's data are not here."""

    # --- retraining an interval ---

    def config(self, interval: Interval[Saved], data: Path, place: Path) -> ResolvedConfig:
        """Config by which the interval is trained. data: with the statement's tokens. place: for its
        results."""

    def check(self, config: ResolvedConfig, interval: Interval[Saved]) -> None:
        """VerificationError where a checkpoint of the interval was made otherwise than the statement
        says. Their digests are right."""

    def num_bytes(self, config: ResolvedConfig, ranks: int) -> float:
        """Memory that the ranks need; 0.0 where it is not known, or that of GPUs."""

    def threads(self, interval: Interval[Saved]) -> int | None:
        """Threads of each rank in the run; None where the number is not known."""

    def copy(self, checkpoint: Saved, paths: RunPaths) -> None:
        """Put a checkpoint where training resumes from it. Its digests are verified when it does."""

    def stopped_at_end(
        self, config: ResolvedConfig, interval: Interval[Saved]
    ) -> AbstractContextManager[None]:
        """While it is entered, training is asked to stop once it has saved the end of the interval, where
        it would train on."""

    def made(self, config: ResolvedConfig, interval: Interval[Saved]) -> Saved:
        """The checkpoint at the end of the interval, as it was retrained. DataError where there is
        none."""

    # --- what became of it ---

    def judged(self, interval: Interval[Saved], made: Saved) -> Retrained:
        """Judge an interval. Raises DataError where its ends cannot be compared."""

    def different_files(
        self, folder: Path, checkpoint: Saved, trainer: Retrainer[Saved]
    ) -> list[str]:
        """Names of the files of an export that are missing, too many, or not as the exported checkpoint
        gives them."""

    def differences(self, interval: Interval[Saved], made: Saved) -> list[str]:
        """Differences from the code and the environment of the statement, as far as it has them, and from
        how the interval was trained."""

    def by(self, made: Saved, machine: Literal["another", "the same", "unknown"]) -> MadeBy:
        """With what a checkpoint was made again."""


@dataclass(frozen=True)
class Retrainer(Generic[Saved]):
    """Trains intervals again. data: directory with the statement's tokens. place: an empty directory for
    all that training writes. code: checkout of Forge that trains; None for this one. minutes: that an
    interval may take."""

    recipe: Recipe[Saved]
    data: Path
    place: Path
    code: Path | None
    minutes: float

    def train(self, interval: Interval[Saved]) -> Saved:
        """The checkpoint at the end of the interval, made again. It replaces that of the interval before.

        Raises DataError where the stated checkpoints are corrupt, do not fit the stated config, or where
        that cannot be trained; UnfitError where this machine is too small, or needs longer.
        """
        recipe = self.recipe
        config, ranks = recipe.config(interval, self.data, self.place), self.ranks(interval)
        _refuse_corrupt(interval)
        recipe.check(config, interval)
        self._check_size(config, interval, ranks)
        paths = RunPaths.of(config)
        say(f"retraining {interval} on {ranks} rank{'s' * (ranks > 1)} …")
        with disk_trouble(paths.root):
            shutil.rmtree(paths.root, ignore_errors=True)
            paths.checkpoints.mkdir(parents=True)
            config.write(paths.config)
            if interval.begin:
                recipe.copy(interval.begin, paths)
        with recipe.stopped_at_end(config, interval), shown_bar(paths.launches):
            self._run(
                *("train", str(paths.config), f"--ranks-per-node={ranks}"),
                f"--machine.launcher={'torchrun' if ranks > 1 else 'single'}",
                f"--machine.max_minutes={self.minutes:g}",
                interval=interval,
                may_stop=paths.stop,
            )
        return recipe.made(config, interval)

    def export(self, checkpoint: Saved) -> Path:
        """The directory of a new export of a checkpoint, in the stated type."""
        folder = self.place / "export"
        say(f"exporting {checkpoint.folder} again …")
        dtype = part(self.recipe.links["export"], "dtype", str)
        if dtype not in ("fp32", "bf16"):
            raise VerificationError(
                f"the export has dtype {dtype!r:.20}, which Forge does not write"
            )
        self._run(
            *("export", str(checkpoint.folder.resolve()), f"--to={folder}", f"--dtype={dtype}"),
            f"--data={self.data}",
        )
        return folder

    def ranks(self, interval: Interval[Saved]) -> int:
        """Ranks of the training that ended with this interval."""
        if interval.end:
            return interval.end.manifest.world_size
        launches = part(self.recipe.links["launches"], "launches", list)
        sizes = [part(launch, "world_size", int) for launch in launches]
        return max(1, sizes[-1]) if sizes else 1

    def _check_size(self, config: ResolvedConfig, interval: Interval[Saved], ranks: int) -> None:
        """UnfitError where the CPUs of this machine cannot train so many ranks of such a model."""
        numerics = self.recipe.links["environment"].get("numerics")
        if isinstance(numerics, dict) and numerics.get("device") == "cuda":
            return
        needed = self.recipe.num_bytes(config, ranks)
        cores, free = available_cores(), available_memory()
        why = ""
        if ranks > RANKS_PER_CORE * cores:
            why = f"they were trained by {ranks:,} ranks, and this machine has {cores} cores"
        elif needed > free:
            why = f"they need {needed / 2**30:,.1f} GiB of memory, {free / 2**30:,.1f} GiB are free"
        if why:
            raise UnfitError(
                f"{interval} cannot be retrained here: {why}",
                cause="this machine is smaller than what trained the run",
                fix="run the command on a node like those that trained",
            )

    def _run(
        self, *arguments: str, interval: Interval[Saved] | None = None, may_stop: Path | None = None
    ) -> None:
        """Run a command of the Forge that trains. may_stop: where this file is there, it was asked to
        stop. Raises as its exit code says."""
        log = self.place / "output.txt"
        project_plugins.bring_along(self.place)
        command = [sys.executable, "-m", "forge", *arguments]
        cwd = self.recipe.cwd or self.place
        status = _end_of(command, cwd, self._environment(interval), log, self.minutes)
        if status == Exit.DONE or (status == Exit.STOPPED and may_stop and may_stop.exists()):
            return
        what = f"{interval}" if interval else "the export"
        if status in (None, Exit.STOPPED):
            raise UnfitError(
                f"{what} did not end within {self.minutes:g} minutes",
                cause="this machine is slower than expected, or the statement asks for very much",
                fix="give more time: --minutes N; or check fewer steps",
            )
        kind = UnfitError if status == Exit.UNFIT or status < 0 else DataError
        raise kind(
            f"{what} cannot be made again: forge {arguments[0]} ended with {status}\n{_last_lines(log)}"
        )

    def _environment(self, interval: Interval[Saved] | None) -> dict[str, str]:
        """Without what belongs to a job, a launch or a tracker; with as many threads as in the run."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in OF_OTHERS
            and not name.startswith(PREFIXES)
            and not (name == kernel_cache.VARIABLE and kernel_cache.is_default(value))
        }
        kept |= dict.fromkeys(OFFLINE, "1")
        if interval and (threads := self.recipe.threads(interval)):
            kept["OMP_NUM_THREADS"] = str(min(threads, available_cores()))
        if self.code:
            kept["PYTHONPATH"] = str(self.code)
        return kept


def _refuse_corrupt(interval: Interval[Saved]) -> None:
    for checkpoint in interval.checkpoints:
        if bad := [*checkpoint.bad_files()]:
            raise DataError(
                f"{checkpoint.folder} is corrupt: {'; '.join(bad)}",
                fix="restore it, or name another copy of the run: --checkpoints RUN",
            )


def _end_of(
    command: list[str], place: Path, environment: dict[str, str], log: Path, minutes: float
) -> int | None:
    """Exit status of a command; None where it did not end in time. All that it has started is stopped,
    however this ends."""
    seconds = 60 * minutes + GRACE_SEC
    with open(log, "wb") as output:
        return run_within(
            *(seconds, command),
            cwd=place,
            environment=environment,
            output=output,
            grace_sec=GRACE_SEC,  # its ranks stop with it
        )


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LINES_SHOWN:]
    return "\n".join(f"    {line}" for line in lines)
