"""The training program of the config, in place of Forge's own trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from forge.checkpoint import compatibility, directory, resume
from forge.checkpoint.export_folder import export_sealed
from forge.checkpoint.manifest import SealLineage
from forge.checkpoint.sealed import ProgramCheckpoints, SealedCheckpoint
from forge.checkpoint.sealer import Sealer, SealProgress
from forge.core import events, provenance
from forge.core.config import ResolvedConfig
from forge.core.errors import ConfigError, DataError, Exit
from forge.core.machine import Machine
from forge.core.paths import RunPaths, inputs_folder
from forge.core.program_settings import Program
from forge.core.records import StageRecord, Trained
from forge.core.terminal import say
from forge.data.inputs import InputSet, source_digest
from forge.hosts.placement import Placement, WorldLayout
from forge.launch.launcher import LaunchPlan, run_ranks
from forge.launch.program_rank import (
    heartbeat_file,
    how_it_ended,
    read_step,
    running_file,
    saved_file,
)
from forge.launch.rank_records import ProgramTask, RankRecord
from forge.staging.stage import program_folders
from forge.trainer.metrics import StepLog
from forge.validation.program_checks import ProgramChecks


@dataclass(frozen=True)
class OtherProgram:
    """The program of the config. Its checkpoints are sealed by the launcher, and verified before each
    launch; how a launch ended is decided by the sealed ones, since exit statuses of programs vary."""

    config: ResolvedConfig
    paths: RunPaths
    program: Program
    layout: WorldLayout

    @property
    def data(self) -> Path:
        return Path(self.config.data)

    @property
    def checkpoints(self) -> ProgramCheckpoints:
        return ProgramCheckpoints(self.paths, self.program.checkpoints, self.layout.world_size)

    @property
    def is_of_config(self) -> bool:
        return True

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        return {"digests": ("goal", "digests")}

    def checks_of(self, folder: Path, goal: Trained | None) -> ProgramChecks:
        checkpoint = self.checkpoints.open_complete(folder)
        return ProgramChecks(self.config, self.program, checkpoint, goal)

    def checks_of_last(self) -> tuple[Path, ProgramChecks]:
        latest = self.checkpoints.latest()
        if latest is None and self.program.checkpoints:
            raise DataError(
                f"{self.paths.root} has no sealed checkpoint",
                fix="train the run first: the target train",
            )
        goal = Trained.read_from(self.paths.trained, latest.step if latest else 0)
        place = latest.folder if latest else self.paths.root
        return place, ProgramChecks(self.config, self.program, latest, goal)

    def export(self, to: Path | None, dtype: str) -> Path:
        return export_sealed(self.checkpoints, self.program.export, to)

    def check_start(self, runs: Mapping[str, ResolvedConfig]) -> list[str]:
        self.resumable_step()  # digests are verified before each launch
        return []

    def resumable_step(self) -> int | None:
        latest = self.checkpoints.latest()
        return latest.step if latest else None

    def validation_bytes(self, world_size: int) -> None:
        return None

    def seconds_left(self, machine: Machine, layout: WorldLayout) -> None:
        return None

    @property
    def first_step(self) -> int:
        return 0

    def prepare(self, start: LaunchPlan) -> int | None:
        if inputs := self._inputs:
            inputs.check_unchanged()
        self.checkpoints.refuse_other_pattern()
        checkpoint = self.checkpoints.repaired_latest()
        if checkpoint is None:
            resume.begin_afresh(self.paths, start.require_checkpoint)
        elif changed := self._changed(checkpoint):
            raise ConfigError(
                f"the config does not fit {self.paths.latest}: {changed}",
                cause="the list of input files has changed after the run had begun",
                fix="restore them, or give the changed run a new name",
            )
        directory.clean(self.paths)
        return checkpoint.step if checkpoint else None

    def _changed(self, checkpoint: SealedCheckpoint) -> str:
        """Name of the artifact that differs from the one that made the checkpoint; "" for none."""
        made_with, now = checkpoint.manifest.lineage.inputs, self.config.ids.inputs
        then = made_with.id if made_with else ""
        return compatibility.differs("ids.inputs", now, then) if now != then else ""

    def is_complete(self, step: int) -> bool:
        return self.program.checkpoints is not None and step >= self.config.goal

    def warnings(self) -> list[str]:
        return []

    def on(self, layout: WorldLayout) -> OtherProgram:
        return replace(self, layout=layout)

    def launch(self, start: LaunchPlan, placement: Placement, step: int | None) -> RankRecord:
        latest = None if step is None else self.checkpoints.latest()
        task = self._task(start, latest)
        sealer = self._sealer(start.staged, placement)
        machine = start.machine.model_copy(
            update={"stop_grace_sec": self.program.stop.grace_sec, "async_save": False}
        )
        for rank in range(self.layout.world_size):  # of the launch before: its steps are not these
            heartbeat_file(self.program, self.paths, rank).unlink(missing_ok=True)
            running_file(self.paths, rank).unlink(missing_ok=True)
            saved_file(self.paths, rank).unlink(missing_ok=True)
        if sealer:
            sealer.start()
        orderly = False
        try:
            record = run_ranks(
                task,
                self.paths,
                machine,
                start.layout,
                placement=placement,
                python=start.staged.interpreter,
                checkpoint=latest.file_list if latest else None,
            )
            orderly = record.all_exited_with_0
        finally:
            if sealer:
                sealer.finish(orderly=orderly)
        return self._judged(record)

    def _task(self, start: LaunchPlan, latest: SealedCheckpoint | None) -> ProgramTask:
        staged, shared = program_folders(self.config, self.program, start.staged)
        launches = [e for e in events.read(self.paths.events) if isinstance(e, events.Launch)]
        return ProgramTask(
            program=self.program,
            step=latest.step if latest else 0,
            resume=str(latest.folder.absolute()) if latest else "",
            goal=self.config.goal,
            restart=len(launches),
            staged=staged,
            shared=shared,
            deadline=start.deadline,
        )

    @property
    def _inputs(self) -> InputSet | None:
        inputs_id = self.config.ids.inputs
        return InputSet.open(inputs_folder(self.config.data, inputs_id)) if inputs_id else None

    def _sealer(self, staged: StageRecord, placement: Placement) -> Sealer | None:
        if self.program.checkpoints is None:
            return None
        self.paths.checkpoints.mkdir(parents=True, exist_ok=True)
        log = StepLog(self.paths)
        return Sealer(
            self.checkpoints,
            self._progress(),
            self._lineage(staged, placement),
            self.program.keep_last,
            on_look=lambda progress, is_last: log.tell(progress.steps, is_last=is_last),
        )

    def _progress(self) -> Callable[[], SealProgress]:
        ranks = range(self.layout.world_size)
        beats = [heartbeat_file(self.program, self.paths, rank) for rank in ranks]
        running = [running_file(self.paths, rank) for rank in ranks]
        saved = [saved_file(self.paths, rank) for rank in ranks]
        return lambda: SealProgress(
            *([read_step(p) for p in files] for files in (beats, running, saved))
        )

    def _lineage(self, staged: StageRecord, placement: Placement) -> SealLineage:
        """Artifacts and code that make the checkpoints of this launch."""
        source, inputs, config = self.program.source, self._inputs, self.config
        digest = ""
        if source:
            outputs = (config.results, config.data)
            digest = staged.source_digest or source_digest(Path(source), outputs)
        return SealLineage.of(
            config,
            self.program,
            source_digest=digest,
            inputs_digest=inputs.digest if inputs else "",
            world_size=self.layout.world_size,
            environment=placement.recorded_environment(),
        )

    def _judged(self, record: RankRecord) -> RankRecord:
        """The record of the launch, by the checkpoints that are there now."""
        if self.program.checkpoints is None:
            return replace(record, step=0)
        step, goal = self.resumable_step() or 0, self.config.goal
        if record.all_exited_with_0 and step >= goal:
            return RankRecord("completed", step=step)
        if record.status == "completed":
            message = f"the program ended by itself at step {step} of {goal}, with exit status 0"
            return RankRecord("failed", code=Exit.FAILED, cause="ended early", message=message)
        if record.status == "stopped" and record.exit_status:
            say(f"warning: asked to stop, the program {how_it_ended(record.exit_status)}")
        return record

    def trained(self, step: int) -> Trained:
        latest = self.checkpoints.latest()
        digest = latest.manifest.digest if latest else ""
        # Also where a launch was cut off between its last seal and this.
        done = events.Completed(step=step, weights_digest=digest)
        last = events.last(events.read(self.paths.events), events.Completed, events.Launch)
        if not isinstance(last, events.Completed) or last.step != step:
            events.record(self.paths.events, done)
        return Trained(
            run=self.config.run,
            goal_step=self.config.goal,
            step=step,
            checkpoint=f"checkpoints/{latest.folder.name}" if latest else "",
            weights_digest=digest,
            config_digest=provenance.config_digest(self.config),
        )
