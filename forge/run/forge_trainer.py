"""Forge's own trainer, whose ranks commit their checkpoints and verify them themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.checkpoint import compatibility, directory, family, parent, resume
from forge.checkpoint.directory import Checkpoint
from forge.core import events, provenance
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.machine import Machine
from forge.core.paths import MANIFEST, RunPaths, tokens_folder
from forge.core.records import Trained
from forge.core.terminal import say
from forge.data import text_bytes
from forge.data.lossy_tokenizer import check_tokenizer
from forge.data.sources import manifests_there, open_tokens, unused_warnings
from forge.hosts.placement import Placement, WorldLayout
from forge.launch.launcher import LaunchPlan, run_ranks
from forge.launch.rank_records import RankRecord, TrainTask
from forge.run.interruptions import known_at_launch
from forge.run.step_time import step_seconds
from forge.validation.checkpoint_checks import CheckpointChecks
from forge.validation.estimates import memory_bytes
from forge.validation.run_data import Data


@dataclass(frozen=True)
class ForgeRun:
    """A run of Forge's own trainer, or one of its checkpoints in any directory.

    config: that every checkpoint must fit; None: each counts with the config that made it, and
    `overrides`, such as the current path of `data`.
    """

    paths: RunPaths
    config: ResolvedConfig | None
    overrides: dict[str, Any] = field(default_factory=dict)
    _data: dict[str, Data] = field(default_factory=dict)  # by their ids

    @property
    def data(self) -> Path:
        return Path(self.config.data if self.config else self.overrides["data"])

    @property
    def checkpoints(self) -> resume.CommittedCheckpoints:
        return resume.CommittedCheckpoints(self.paths)

    @property
    def is_of_config(self) -> bool:
        return self.config is not None

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        loads = ("config", "data", "tensors", "finite", "weights", "world size")
        return {
            "digests": ("goal", "digests"),
            "loads": loads,
            "probe": ("probe",),
            "next loss": ("next loss",),
        }

    def checks_of(self, folder: Path, goal: Trained | None) -> CheckpointChecks:
        return self._checks_of(self.checkpoints.open_complete(folder), goal, self.paths)

    def checks_of_last(self) -> tuple[Path, CheckpointChecks]:
        """Raises ConfigError where the config does not fit the checkpoint."""
        if self.config is None:
            checkpoint = resume.named(self.paths.root)
            run = RunPaths.of_checkpoint(checkpoint.folder)
            with_metrics = run if run and run.metrics.exists() else None
            return checkpoint.folder, self._checks_of(checkpoint, None, with_metrics)
        checkpoint = resume.required(self.paths)
        # An edited config says nothing of the checkpoint.
        compatibility.check_compatible(self.config, checkpoint)
        goal = Trained.read_from(self.paths.trained, checkpoint.step)
        return checkpoint.folder, self._checks_of(checkpoint, goal, self.paths)

    def _checks_of(
        self, checkpoint: Checkpoint, goal: Trained | None, paths: RunPaths | None
    ) -> CheckpointChecks:
        config = self.config or checkpoint.config(self.overrides)
        data = self._data.setdefault(str(config.ids), Data(config))
        return CheckpointChecks(checkpoint, config, data, goal=goal, paths=paths)

    def export(self, to: Path | None, dtype: str) -> Path:
        from forge.trainer.export import export  # imports torch

        return export(self.paths.root, to, dtype, self.overrides)


@dataclass(frozen=True)
class ForgeTrainer(ForgeRun):
    """Forge's own trainer, whose ranks commit their checkpoints and verify them themselves."""

    config: ResolvedConfig

    def check_start(self, runs: Mapping[str, ResolvedConfig]) -> list[str]:
        checkpoint = resume.check_resumable(self.config, self.paths)
        # A finished run needs no parent any more, even where its checkpoints were removed.
        if checkpoint is None and not self.paths.trained.exists():
            family.check_start(self.config, runs)
        warnings = family.check_parent(self.config, runs)
        return warnings + compatibility.schedule_warnings(self.config, checkpoint)

    def resumable_step(self) -> int | None:
        checkpoint = resume.check_resumable(self.config, self.paths)
        return checkpoint.step if checkpoint else None

    def validation_bytes(self, world_size: int) -> float:
        return memory_bytes(self.config, world_size)

    def seconds_left(self, machine: Machine, layout: WorldLayout) -> float | None:
        seconds, saved = step_seconds(self.config, machine, layout), self.resumable_step()
        steps = self.config.goal - (self.first_step if saved is None else saved)
        return None if seconds is None else seconds * max(0, steps)

    @property
    def first_step(self) -> int:
        return parent.first_step(self.config)

    def prepare(self, start: LaunchPlan) -> int | None:
        for line in family.check_parent(self.config, {}):
            say(f"{self.config.run}: {line}")
        check_tokenizer(self.config)
        checkpoint = self.checkpoints.repaired_latest()
        if checkpoint is None:
            parent.find(self.config)
            resume.begin_afresh(self.paths, start.require_checkpoint, self.config.starts_from)
        else:
            compatibility.check_compatible(self.config, checkpoint)
            self._check_tokens(checkpoint)
        directory.clean(self.paths)
        return checkpoint.step if checkpoint else None

    def _check_tokens(self, checkpoint: Checkpoint) -> None:
        """DataError where the tokens were made anew from other text, of equal size or made by a rule, so
        that their id is the same. Ranks check this, too, but a run at its goal starts none."""
        folder = tokens_folder(self.config.data, self.config.ids.tokens)
        try:
            tokens = open_tokens(folder)
        except DataError:
            return  # removed since: who reads them says so
        compatibility.check_same_tokens(checkpoint, tokens)

    def is_complete(self, step: int) -> bool:
        return step == self.config.goal and bool(self._recorded_digest(step))

    def warnings(self) -> list[str]:
        tokens = tokens_folder(self.config.data, self.config.ids.tokens)
        return [
            *compatibility.schedule_warnings(self.config, self.checkpoints.latest()),
            *unused_warnings(manifests_there(tokens), self.config.train.seq_len),
        ]

    def on(self, layout: WorldLayout) -> ForgeTrainer:
        return self

    def launch(self, start: LaunchPlan, placement: Placement, step: int | None) -> RankRecord:
        staged, files = start.staged.folders, None
        if start.machine.stage.results == "first_node":
            checkpoint = resume.verified_here(self.paths)
            step = checkpoint.step if checkpoint else None
            files = checkpoint.whole_list if checkpoint else None
        task = TrainTask(
            step=self.first_step if step is None else step,
            started=time.time(),
            staged=staged,
            shared=self._shards(is_staged=bool(staged)),
            require_checkpoint=start.require_checkpoint,
            deadline=start.deadline,
            own_deadline=start.own_deadline,
            environment=placement.recorded_environment(),
            interruptions=known_at_launch(self.config, self.paths, start.job),
            threads=self._threads(),
            text_bytes=text_bytes.of_run(self.config),
        )
        return run_ranks(
            task,
            self.paths,
            start.machine,
            start.layout,
            placement=placement,
            python=start.staged.interpreter,
            checkpoint=files,
        )

    def _threads(self) -> int | None:
        """Threads a rank with which CPUs have made the checkpoint to resume from."""
        checkpoint = self.checkpoints.latest()
        return checkpoint.manifest.lineage.numerics.cpu_threads if checkpoint else None

    def trained(self, step: int) -> Trained:
        checkpoint = resume.required(self.paths)
        assert checkpoint.step == step
        made_from = checkpoint.manifest.lineage.parent
        return Trained(
            run=self.config.run,
            goal_step=self.config.goal,
            step=step,
            checkpoint=f"checkpoints/{checkpoint.folder.name}",
            weights_digest=str(self._recorded_digest(step)),
            config_digest=provenance.config_digest(self.config),
            parent=made_from.to_json() if made_from else None,
        )

    def _recorded_digest(self, step: int) -> str | None:
        """The weights digest of the completed run at this step, from the event log; None where the run
        has trained up to this step since, and was cut off before its digest was recorded."""
        for event in reversed(events.read(self.paths.events)):
            if isinstance(event, events.Completed) and event.step == step:
                return event.weights_digest
            if isinstance(event, events.Launch | events.Init) and event.step < step:
                return None
        return None

    def _shards(self, *, is_staged: bool) -> str:
        """The shared directory of the shards. DataError without shards, unless they are staged."""
        folder = tokens_folder(self.config.data, self.config.ids.tokens)
        if not is_staged and not (folder / MANIFEST).exists():
            made = f"forge tokenizer {self.paths.config} && forge tokenize {self.paths.config}"
            raise DataError(
                f"{folder} has no complete shards",
                cause="the corpus has not been tokenized for this config",
                fix=f"run: {made}",
            )
        return str(folder)
