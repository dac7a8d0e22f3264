"""Checks of one checkpoint, in groups from cheap to expensive; those of Forge's own trainer: its files,
its tensors, its losses.

torch is imported for the tensors only: validate.depth `digests`, and a corrupt file, do not wait for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from forge.checkpoint import compatibility, directory
from forge.checkpoint.checkpoints import RunCheckpoints, SavedCheckpoint
from forge.checkpoint.manifest import data_digests
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, ForgeError, UnfitError
from forge.core.paths import RunPaths
from forge.core.records import BitsPerByte, Check, Trained, Validation
from forge.data.sources import digests_by_source
from forge.validation.replay import check_next_losses
from forge.validation.run_data import Data

if TYPE_CHECKING:
    from forge.validation.model_checks import ModelChecks

# Checks that fail only for a corrupt checkpoint. The others may fail because `latest`, the config or
# the data was changed.
OF_THE_CHECKPOINT = {
    *("manifest", "digests", "tensors", "finite", "weights", "world size"),
    *("probe", "next loss", "validation loss"),
}


class Checks(ABC):
    """Runs the checks of one checkpoint in groups, from cheap to expensive.

    Each group raises UnfitError where the disk or this host fails, which says nothing about the
    checkpoint. After a failed check no other one runs, since each relies on those before it.
    """

    CAUSE: ClassVar[str]  # the likely one, of an invalid checkpoint

    def __init__(self, config: ResolvedConfig, checkpoint: SavedCheckpoint | None) -> None:
        """checkpoint: None for a program without checkpoints that Forge knows."""
        self.config = config
        self.checks: list[Check] = []
        self.step, self.digest = (checkpoint.step, checkpoint.digest) if checkpoint else (0, "")

    @property
    def failed(self) -> Check | None:
        """The check that failed, if any."""
        return self.checks[-1] if self.checks and self.checks[-1].status == "fail" else None

    @abstractmethod
    def check_files(self) -> None:
        """Checks for which no tensor is read."""

    @abstractmethod
    def check_content(self) -> None:
        """Checks that run on every checkpoint. After check_files."""

    @abstractmethod
    def check_last(self) -> None:
        """Checks of the last checkpoint of a run alone. After check_content."""

    @property
    @abstractmethod
    def measured(self) -> dict[str, Any]:
        """Values that validation.json has beside the checks."""

    def run_all(self) -> None:
        self.check_files()
        self.check_content()
        self.check_last()

    def _run(self, checks: dict[str, Callable[[], str | Check | None]]) -> None:
        """A check returns its message, a whole Check, or None where it has nothing to check; it raises
        ForgeError where it fails."""
        for name, check in checks.items():
            if self.failed:
                return
            try:
                result = check()
            except UnfitError:
                raise
            except ForgeError as err:
                result = Check(name, "fail", err.what, err.fix)
            if result is not None:
                self.checks.append(
                    result if isinstance(result, Check) else Check(name, "ok", result)
                )

    def result(self) -> Validation:
        """The content of validation.json."""
        failed = self.failed
        return Validation(
            status="invalid" if failed else "valid",
            step=self.step,
            checkpoint_digest=self.digest,
            settings=self.config.validation_json(),
            reasons=[f"{failed.name}: {failed.message}"] if failed else [],
            checks=self.checks,
            **self.measured,
        )


class SavedRun(Protocol):
    """Checkpoints and config of a run, as its training program has saved them, whose directory may come
    from somebody else."""

    @property
    def paths(self) -> RunPaths: ...

    @property
    def data(self) -> Path:
        """The directory with tokenizers, tokens and input files, which need not be there."""

    @property
    def is_of_config(self) -> bool:
        """Return whether the config of the run is given. Else the user has named a directory, in which
        nothing is written unasked."""

    @property
    def checkpoints(self) -> RunCheckpoints: ...

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Heads of the table of all checkpoints, each with the checks that it stands for."""

    def checks_of(self, folder: Path, goal: Trained | None) -> Checks:
        """Checks of any checkpoint of the run. goal: trained.json, where it is of this checkpoint. Raises
        as `RunCheckpoints.open_complete`."""

    def checks_of_last(self) -> tuple[Path, Checks]:
        """The checkpoint to validate, or the run where it has none that Forge knows, and its checks.
        DataError where there is none yet."""

    def export(self, to: Path | None, dtype: str) -> Path:
        """Write the last checkpoint as a directory that other software loads; the directory. to: None for
        the default one. dtype: of the weights, where the program lets it be chosen."""


# --- Forge's own trainer ---------------------------------------------------------------------------


class CheckpointChecks(Checks):
    """The checks of a checkpoint of Forge's own trainer."""

    CAUSE = "a corrupt file, or a checkpoint of another run"

    def __init__(
        self,
        checkpoint: directory.Checkpoint,
        config: ResolvedConfig,
        data: Data,
        *,
        goal: Trained | None = None,
        paths: RunPaths | None = None,
    ) -> None:
        """goal: the run's trained.json; its step and weights must be those of the checkpoint. paths: the
        run whose metrics have the next losses; None for a checkpoint outside of a run."""
        super().__init__(config, checkpoint)
        self.checkpoint, self.data, self.goal, self.paths = checkpoint, data, goal, paths
        self.manifest = checkpoint.manifest
        self.model: ModelChecks | None = None

    def _are_due(self, *depths: str) -> bool:
        """Return whether the next group is run: at these values of validate.depth, where nothing has
        failed."""
        return self.config.validation.depth in depths and not self.failed

    def check_files(self) -> None:
        self._run({"goal": self._goal, "digests": self._digests})

    def check_content(self) -> None:
        self._check_state()
        self._check_losses()

    def _check_state(self) -> None:
        """Every tensor, from validate.depth `load` on."""
        if self._are_due("load", "probe"):
            from forge.validation.model_checks import ModelChecks

            self.model = ModelChecks(self.checkpoint, self.config, self.data, self.goal)
            self._run(
                {
                    "config": self._config,
                    "data": self._data,
                    "tensors": self.model.tensors,
                    "finite": self.model.finite,
                    "weights": self.model.weights,
                    "world size": self.model.world_size,
                }
            )

    def _check_losses(self) -> None:
        """Recorded losses against recomputed ones, at validate.depth `probe`."""
        if self.model and self._are_due("probe"):
            self._run({"probe": self.model.probe, "next loss": self._next_losses})

    def check_last(self) -> None:
        """Validation loss and samples for the report, at validate.depth `probe`."""
        if self.model and self._are_due("probe"):
            self._run({"validation loss": self.model.validation_loss, "samples": self.model.sample})

    @property
    def measured(self) -> dict[str, Any]:
        depth, model = self.config.validation.depth, self.model
        if model is None:
            return {"depth": depth}
        return {
            "depth": depth,
            "loss": model.measured.loss if model.measured else None,
            **BitsPerByte.keys(model.measured.bpb if model.measured else None),
            "weights_digest": model.weights_digest,
            "samples": model.samples,
        }

    # --- files -----------------------------------------------------------------------------------

    def _goal(self) -> str:
        if self.goal and self.goal.step != self.step:
            raise DataError(f"trained.json says step {self.goal.step}, latest is step {self.step}")
        return f"step {self.step}"

    def _digests(self) -> str:
        if bad := list(self.checkpoint.bad_files()):
            raise DataError("; ".join(bad))
        files = self.manifest.files
        size = sum(file.bytes for file in files.values())
        return f"{len(files)} files, {size / 2**20:.1f} MiB"

    # --- state -----------------------------------------------------------------------------------

    def _config(self) -> str:
        compatibility.check_compatible(self.config, self.checkpoint)
        return "fits the checkpoint"

    def _data(self) -> str:
        """Shards and tokenizer must be those that the checkpoint was trained with."""
        shards, tokenizer = self.data.shards, self.data.tokenizer
        digests = data_digests(shards.digest, digests_by_source(shards), tokenizer.digest)
        compatibility.check_same_data(self.checkpoint, digests)
        return f"digests right, a tokenizer of {tokenizer.vocab_size:,} tokens"

    # --- losses ----------------------------------------------------------------------------------

    def _next_losses(self) -> Check:
        return check_next_losses(self.config, self.checkpoint, self.paths)
