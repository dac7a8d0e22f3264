"""Checks of one checkpoint, in groups from cheap to expensive: its files, its tensors, its losses.

torch is imported for the tensors only: validate.depth `digests`, and a corrupt file, do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import blake3

from forge.checkpoint import compatibility, directory
from forge.checkpoint.manifest import MANIFEST, data_digests
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, ForgeError, UnfitError
from forge.core.paths import RunPaths
from forge.core.records import Check, Trained, Validation
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


class CheckpointChecks:
    """Runs the checks of one checkpoint in groups, from cheap to expensive.

    Each group raises UnfitError where the disk or this host fails, which says nothing about the
    checkpoint. After a failed check no other one runs, since each relies on those before it.
    """

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
        self.checkpoint, self.config, self.data = checkpoint, config, data
        self.goal, self.paths = goal, paths
        self.manifest = checkpoint.manifest
        self.checks: list[Check] = []
        self.model: ModelChecks | None = None
        self.manifest_digest = blake3.blake3(
            (checkpoint.folder / MANIFEST).read_bytes()
        ).hexdigest()

    @property
    def failed(self) -> Check | None:
        """The check that failed, if any."""
        return self.checks[-1] if self.checks and self.checks[-1].status == "fail" else None

    def _are_due(self, *depths: str) -> bool:
        """Whether the next group is run: at these values of validate.depth, where nothing has failed."""
        return self.config.validation.depth in depths and not self.failed

    def check_files(self) -> None:
        self._run({"goal": self._goal, "digests": self._digests})

    def check_state(self) -> None:
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

    def check_losses(self) -> None:
        """Recorded losses against recomputed ones, at validate.depth `probe`. After check_state."""
        if self.model and self._are_due("probe"):
            self._run({"probe": self.model.probe, "next loss": self._next_losses})

    def check_outputs(self) -> None:
        """Validation loss and samples for the report, at validate.depth `probe`. After check_losses."""
        if self.model and self._are_due("probe"):
            self._run({"validation loss": self.model.validation_loss, "samples": self.model.sample})

    def _run(self, checks: dict[str, Callable[[], str | Check]]) -> None:
        """A check returns its message, or a whole Check, and raises ForgeError where it fails."""
        for name, check in checks.items():
            if self.failed:
                return
            try:
                result = check()
            except UnfitError:
                raise
            except ForgeError as err:
                result = Check(name, "fail", err.what, err.fix)
            self.checks.append(result if isinstance(result, Check) else Check(name, "ok", result))

    def result(self) -> Validation:
        """The content of validation.json."""
        failed, model = self.failed, self.model
        return Validation(
            status="invalid" if failed else "valid",
            step=self.checkpoint.step,
            depth=self.config.validation.depth,
            settings=self.config.validation_json(),
            reasons=[f"{failed.name}: {failed.message}"] if failed else [],
            checks=self.checks,
            loss=model.loss if model else None,
            weights_digest=model.weights_digest if model else None,
            checkpoint_digest=self.manifest_digest,
            samples=model.samples if model else [],
        )

    # --- files -----------------------------------------------------------------------------------

    def _goal(self) -> str:
        step = self.checkpoint.step
        if self.goal and self.goal.step != step:
            raise DataError(f"trained.json says step {self.goal.step}, latest is step {step}")
        return f"step {step}"

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
