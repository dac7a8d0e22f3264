"""Train an interval of a run again, in a directory of its own, by the config of a statement.

Of that config training gets numbers, names of choices and content ids: no path, address, command, tracker
or task. It is `forge train` in a process of its own, which sees neither the project nor a Slurm job.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.attestation.intervals import Interval
from forge.attestation.retokenize import stated_ids
from forge.attestation.verify import Links, VerificationError, part
from forge.checkpoint import compatibility, directory
from forge.checkpoint.directory import Checkpoint
from forge.cluster.network import available_cores, available_memory
from forge.core.config import ResolvedConfig, checked, is_free
from forge.core.errors import DataError, Exit, ForgeError, UnfitError
from forge.core.files import canonical, digest_bytes, disk_trouble
from forge.core.paths import RunPaths
from forge.core.process import run_within
from forge.core.records import Trained
from forge.core.terminal import say
from forge.core.train_settings import Train
from forge.validation.estimates import training_bytes
from forge.validation.replay import RANKS_PER_CORE

RUN = "again"  # name of the run that trains an interval
GRACE_SEC = 60.0  # beyond the time that training has for itself
LINES_SHOWN = 6  # of its output, where it fails
# What would make it a part of something else: ranks of a launch, a job, a step of the workflow.
OF_OTHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("FORGE_LOG_DIR", "FORGE_IN_WORKFLOW", "FORGE_CONTROLLER_JOB", "FORGE_USER_OMP_NUM_THREADS"),
)
PREFIXES = ("SLURM", "WANDB_", "MLFLOW_")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


@dataclass(frozen=True)
class Retrainer:
    """Trains intervals again. data: directory with the statement's tokens. place: an empty directory for
    all that training writes. code: checkout of Forge that trains; None for this one. minutes: that an
    interval may take."""

    links: Links
    data: Path
    place: Path
    code: Path | None
    minutes: float

    def train(self, interval: Interval) -> Checkpoint:
        """The checkpoint at the end of the interval, made again. It replaces that of the interval before.

        Raises DataError where the stated checkpoints are corrupt, do not fit the stated config, or where
        that cannot be trained; UnfitError where this machine is too small, or needs longer.
        """
        config, ranks = self.config(interval), self.ranks(interval)
        _check_checkpoints(config, interval)
        self._check_size(config, interval, ranks)
        paths = RunPaths.of(config)
        say(f"training {interval} again on {ranks} rank{'s' * (ranks > 1)} …")
        with disk_trouble(paths.root):
            shutil.rmtree(paths.root, ignore_errors=True)
            paths.checkpoints.mkdir(parents=True)
            config.write(paths.config)
            if interval.begin:
                _copy(interval.begin, paths)
        self._run(
            *("train", str(paths.config), f"--ranks-per-node={ranks}"),
            f"--machine.launcher={'torchrun' if ranks > 1 else 'single'}",
            f"--machine.max_minutes={self.minutes:g}",
            interval=interval,
        )
        made = directory.latest_folder(paths)
        assert made is not None
        return Checkpoint.open(made)

    @property
    def weights_digest(self) -> str:
        """Of the weights that the last training ended with."""
        return Trained.read(RunPaths(self.place / RUN).trained).weights_digest

    def export(self, checkpoint: Checkpoint) -> Path:
        """The directory of a new export of a checkpoint, in the stated type."""
        folder = self.place / "export"
        dtype = part(self.links["export"], "dtype", str)
        if dtype not in ("fp32", "bf16"):
            raise VerificationError(
                f"the export has dtype {dtype!r:.20}, which Forge does not write"
            )
        self._run(
            *("export", str(checkpoint.folder.resolve()), f"--to={folder}", f"--dtype={dtype}"),
            f"--data={self.data}",
        )
        return folder

    def ranks(self, interval: Interval) -> int:
        """Of the training that ended with this interval."""
        if interval.end:
            return interval.end.manifest.world_size
        launches = part(self.links["launches"], "launches", list)
        sizes = [part(launch, "world_size", int) for launch in launches]
        return max(1, sizes[-1]) if sizes else 1

    def config(self, interval: Interval) -> ResolvedConfig:
        """By which the interval is trained. Keys that may change when a run resumes are those of the
        checkpoint at its end."""
        stated = self.links["config"]
        values = part(stated, "values", dict)
        if digest_bytes(canonical(values)) != stated.get("blake3"):
            raise VerificationError("the values of the config do not have the digest beside them")
        ids, tokenizer = stated_ids(self.links), part(values, "tokenizer", dict)
        is_trained = tokenizer.get("source") == "train"
        made = {
            **{"run": RUN, "results": str(self.place), "data": str(self.data)},
            "model": part(values, "model", dict),
            "train": self._train(part(values, "train", dict), interval),
            "parent": values.get("parent"),
            "tokenizer": {"vocab_size": tokenizer.get("vocab_size")} if is_trained else {},
            # Names alone: the files behind them are tokens already.
            "tokenize": {"sources": {name: {"inputs": ["none"]} for name in ids.sources}}
            if ids.sources
            else {},
            "ids": ids.model_dump(),
        }
        try:
            return checked(ResolvedConfig, made, "the statement")
        except ForgeError as err:
            raise VerificationError(f"this Forge cannot train that config: {err.what}") from None

    def _train(self, stated: dict[str, Any], interval: Interval) -> dict[str, Any]:
        values, length = dict(stated), interval.last - interval.first
        decay_steps = values.get("decay_steps")
        if interval.end:
            manifest = interval.end.manifest
            recorded = manifest.lineage.config.train
            values |= {
                key: compatibility.recorded_value("train", recorded, key)
                for key in Train.model_fields
                if is_free(Train, key)
            }
            decay_steps = manifest.decay_steps
        return {
            **values,
            "max_steps": interval.last,
            "decay_steps": decay_steps,
            # Neither a save nor an evaluation changes what is trained.
            **{"checkpoint_every": 2 * interval.last, "checkpoint_minutes": None},
            **{
                "eval_every": 2 * interval.last,
                "eval_samples": 1,
                "log_every": max(1, length // 10),
            },
            **{"keep_last": 2, "keep_every": None, "keep_pairs": False},
        }

    def _check_size(self, config: ResolvedConfig, interval: Interval, ranks: int) -> None:
        """UnfitError where the CPUs of this machine cannot train so many ranks of such a model."""
        numerics = self.links["environment"].get("numerics")
        if isinstance(numerics, dict) and numerics.get("device") == "cuda":
            return
        needed = training_bytes(config, ranks)
        cores, free = available_cores(), available_memory()
        why = ""
        if ranks > RANKS_PER_CORE * cores:
            why = f"they were trained by {ranks:,} ranks, and this machine has {cores} cores"
        elif needed > free:
            why = f"they need {needed / 2**30:,.1f} GiB of memory, {free / 2**30:,.1f} GiB are free"
        if why:
            raise UnfitError(
                f"{interval} cannot be trained again here: {why}",
                cause="this machine is smaller than what trained the run",
                fix="run the command on a node like those that trained",
            )

    def _run(self, *arguments: str, interval: Interval | None = None) -> None:
        """Run a command of the Forge that trains. Raises as its exit code says."""
        log = self.place / "output.txt"
        command = [sys.executable, "-m", "forge", *arguments]
        status = _end_of(command, self.place, self._environment(interval), log, self.minutes)
        if status == Exit.DONE:
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

    def _environment(self, interval: Interval | None) -> dict[str, str]:
        """Without what belongs to a job, a launch or a tracker; with as many threads as in the run."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in OF_OTHERS and not name.startswith(PREFIXES)
        }
        kept |= dict.fromkeys(OFFLINE, "1")
        if interval and interval.end:
            threads = interval.end.manifest.lineage.numerics.threads
            kept["OMP_NUM_THREADS"] = str(min(threads, available_cores()))
        if self.code:
            kept["PYTHONPATH"] = str(self.code)
        return kept


def _check_checkpoints(config: ResolvedConfig, interval: Interval) -> None:
    """DataError where a checkpoint is corrupt, or was made by another config than the stated one."""
    for checkpoint in filter(None, (interval.begin, interval.end)):
        if bad := [*checkpoint.bad_files()]:
            raise DataError(
                f"{checkpoint.folder} is corrupt: {'; '.join(bad)}",
                fix="restore it, or name another copy of the run: --checkpoints RUN",
            )
        try:
            compatibility.check_compatible(config, checkpoint)
        except ForgeError as err:
            raise VerificationError(
                f"step {checkpoint.step} was not made by the config of the statement: {err.what}"
            ) from None


def _copy(checkpoint: Checkpoint, paths: RunPaths) -> None:
    """Put a checkpoint where training resumes from it. Its digests are verified when it does."""
    folder = paths.checkpoints / checkpoint.folder.name
    folder.mkdir()
    for name in checkpoint.whole_list.entries:
        shutil.copyfile(checkpoint.folder / name, folder / name)
    directory.point_latest(paths, folder)
    if Checkpoint.open(folder).digest != checkpoint.digest:
        raise DataError(f"{checkpoint.folder} has changed while it was copied")


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
