"""Recipe that retrains a run of Forge's own trainer: by the config of the statement.

Of that config training gets numbers, names of choices and content ids: no path, address, command, tracker
or task. It sees nothing of the project but the tokens.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge.attestation.verify import Links, VerificationError, part
from forge.checkpoint import compatibility, directory
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.export_folder import MANIFEST as EXPORT_MANIFEST
from forge.checkpoint.resume import CommittedCheckpoints
from forge.core.config import ResolvedConfig, checked, is_free
from forge.core.errors import ConfigError, DataError, ForgeError
from forge.core.files import canonical, digest_bytes, digest_file
from forge.core.paths import MANIFEST, RunPaths, tokens_folder
from forge.core.records import Trained
from forge.core.section import without_retired
from forge.core.train_settings import Train
from forge.plugins.attestation.certificate import MadeBy, Retrained
from forge.plugins.attestation.intervals import Interval
from forge.plugins.attestation.judgement import differences, judged
from forge.plugins.attestation.reduce import stated_values
from forge.plugins.attestation.reproduce_options import ReproduceOptions
from forge.plugins.attestation.retokenize import stated_ids, verify_texts
from forge.plugins.attestation.retrain import RUN, Retrainer
from forge.plugins.attestation.statement import different_files
from forge.validation.estimates import training_bytes


@dataclass(frozen=True)
class TrainerRecipe:
    """The recipe of Forge's own trainer. links: of the statement."""

    links: Links
    cwd: None = None
    never_made_again: frozenset[int] = frozenset()

    def checkpoints(self, run: RunPaths) -> CommittedCheckpoints:
        return CommittedCheckpoints(run)

    def prepare_data(self, request: ReproduceOptions, scratch: Path) -> Path:
        """Tokens, made of the texts where the user has named these."""
        ids, data = stated_ids(self.links), request.data
        if request.texts:
            data = scratch / "data"
            verify_texts(request.texts, self.links, request.folder, keep=data)
            return data
        manifest = tokens_folder(data, ids.tokens) / MANIFEST
        if not manifest.is_file() or digest_file(manifest) != self.links["tokens"].get("blake3"):
            raise ConfigError(
                f"the tokens of the statement are not in {data}",
                cause="this is another project than that of the run, or they were removed",
                fix="name the texts, of which they are made again: --data TEXTS (or python:stdlib)",
            )
        return data

    # --- retraining an interval ---

    def config(self, interval: Interval[Checkpoint], data: Path, place: Path) -> ResolvedConfig:
        """Keys that may change when a run resumes are those of the checkpoint at its end."""
        stated = self.links["config"]
        values, is_whole = stated_values(self.links), stated.get("values") is not None
        if is_whole and digest_bytes(canonical(values)) != stated.get("blake3"):
            raise VerificationError("the values of the config do not have the digest beside them")
        ids, tokenizer = stated_ids(self.links), part(values, "tokenizer", dict)
        is_trained = tokenizer.get("source") == "train"
        made = {
            **{"run": RUN, "results": str(place), "data": str(data)},
            "model": part(values, "model", dict),
            "train": _train(part(values, "train", dict), interval),
            "parent": values.get("parent"),
            **({} if is_whole else _start(values, interval)),
            "tokenizer": {"vocab_size": tokenizer.get("vocab_size")} if is_trained else {},
            # Names alone: the files behind them are tokens already.
            "tokenize": {"sources": {name: {"inputs": ["none"]} for name in ids.sources}}
            if ids.sources
            else {},
            # A step of before an edit is not retrained by the code of after it.
            "ids": ids.model_dump(exclude={"plugins_before"}),
        }
        try:
            return checked(ResolvedConfig, made, "the statement")
        except ForgeError as err:
            raise VerificationError(f"this Forge cannot train that config: {err.what}") from None

    def check(self, config: ResolvedConfig, interval: Interval[Checkpoint]) -> None:
        for checkpoint in interval.checkpoints:
            try:
                compatibility.check_compatible(config, checkpoint)
            except ForgeError as err:
                raise VerificationError(
                    f"step {checkpoint.step} was not made by the config of the statement: {err.what}"
                ) from None

    def num_bytes(self, config: ResolvedConfig, ranks: int) -> float:
        return training_bytes(config, ranks)

    def threads(self, interval: Interval[Checkpoint]) -> int | None:
        return interval.end.manifest.lineage.numerics.threads if interval.end else None

    def copy(self, checkpoint: Checkpoint, paths: RunPaths) -> None:
        folder = paths.checkpoints / checkpoint.folder.name
        folder.mkdir()
        for name in checkpoint.whole_list.entries:
            shutil.copyfile(checkpoint.folder / name, folder / name)
        directory.point_latest(paths, folder)
        if Checkpoint.open(folder).digest != checkpoint.digest:
            raise DataError(f"{checkpoint.folder} has changed while it was copied")

    def stopped_at_end(
        self, config: ResolvedConfig, interval: Interval[Checkpoint]
    ) -> AbstractContextManager[None]:
        return nullcontext()  # its last step is that of the interval

    def made(self, config: ResolvedConfig, interval: Interval[Checkpoint]) -> Checkpoint:
        folder = directory.latest_folder(RunPaths.of(config))
        assert folder is not None
        return Checkpoint.open(folder)

    # --- what became of it ---

    def judged(self, interval: Interval[Checkpoint], made: Checkpoint) -> Retrained:
        again = RunPaths.of_checkpoint(made.folder)
        assert again is not None
        return judged(interval, made, Trained.read(again.trained).weights_digest, self.links)

    def different_files(
        self, folder: Path, checkpoint: Checkpoint, trainer: Retrainer[Checkpoint]
    ) -> list[str]:
        """Without the model card, which is text, and forge.json, whose digests `verify` compares."""
        changed = different_files(folder, trainer.export(checkpoint))
        return [name for name in changed if name not in ("README.md", EXPORT_MANIFEST)]

    def differences(self, interval: Interval[Checkpoint], made: Checkpoint) -> list[str]:
        return [*differences(interval, made, self.links)]

    def by(self, made: Checkpoint, machine: Literal["another", "the same", "unknown"]) -> MadeBy:
        lineage = made.manifest.lineage
        return MadeBy(
            code=lineage.code,
            versions=lineage.versions,
            cpu=lineage.hardware.cpu,
            numerics=lineage.numerics,
            machine=machine,
        )


def _start(values: dict[str, Any], interval: Interval[Checkpoint]) -> dict[str, Any]:
    """`parent` and `model.init`, with which the run began, as the checkpoint before the interval names
    them, where the statement has last names alone. Nothing is read there: a checkpoint is resumed."""
    if not interval.begin:
        return {}
    recorded = interval.begin.manifest.lineage.config
    init = compatibility.recorded_value("model", recorded.model, "init")
    return {"parent": recorded.parent, "model": {**part(values, "model", dict), "init": init}}


def _train(stated: dict[str, Any], interval: Interval[Checkpoint]) -> dict[str, Any]:
    values, length = without_retired(Train, stated), interval.last - interval.first
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
        **{"keep_last": 2, "keep_every": None},
    }
