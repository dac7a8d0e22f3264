"""The training program of a run, Forge's own trainer or the config's, behind one interface."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from forge.checkpoint import compatibility, directory, family, parent, resume
from forge.checkpoint.sealed import ProgramCheckpoints, SealLineage
from forge.checkpoint.sealer import Sealer, SealProgress
from forge.cluster.placement import Placement, WorldLayout
from forge.core import events, provenance
from forge.core.config import ResolvedConfig
from forge.core.errors import ConfigError, DataError, Exit
from forge.core.paths import MANIFEST, RunPaths, inputs_folder, tokens_folder
from forge.core.program_settings import Program
from forge.core.records import Trained
from forge.core.terminal import say
from forge.data import model
from forge.data.input_set import InputSet
from forge.data.inputs import source_digest
from forge.launch.launcher import LaunchPlan, run_ranks
from forge.launch.program_rank import (
    heartbeat_file,
    how_it_ended,
    read_step,
    running_file,
    saved_file,
)
from forge.launch.rank_records import ProgramTask, RankRecord, TrainTask
from forge.staging.staged import (
    program_folders,
    staged_folders,
    staged_python,
    staged_source_digest,
)
from forge.trainer.metrics import StepLog


class TrainingProgram(Protocol):
    """The training program of a run. The launcher calls all methods, under the run's lock."""

    @property
    def config(self) -> ResolvedConfig: ...

    @property
    def paths(self) -> RunPaths: ...

    @property
    def first_step(self) -> int:
        """The step at which a run without checkpoints begins."""

    def prepare(self, start: LaunchPlan) -> int | None:
        """Repair what an interrupted launch has left, and give the step of the checkpoint that training
        resumes from; None for a fresh start. Raises ConfigError where the config does not fit it, or
        as `family.check_parent`."""

    def is_complete(self, step: int) -> bool:
        """Whether the run needs no launch any more, with its checkpoint at this step."""

    def resume_step(self) -> int | None:
        """The step of the checkpoint that the next launch resumes from."""

    def warnings(self) -> list[str]:
        """Warnings before the first launch."""

    def launch(self, start: LaunchPlan, placement: Placement, step: int | None) -> RankRecord:
        """Run the ranks to their end; one record for all of them, by evidence. step: of the checkpoint to
        resume from; None without one."""

    def committed_step(self) -> int:
        """The step of the newest checkpoint that counts; `first_step` without one."""

    def trained(self, step: int) -> Trained:
        """The completion record of a run whose checkpoint at this step is its goal. Where the event log
        does not tell of its completion yet, it does so afterwards."""


def program_of(config: ResolvedConfig, start: LaunchPlan) -> TrainingProgram:
    """The training program of this run."""
    if config.program:
        return OtherProgram(config, RunPaths.of(config), config.program, start.layout)
    return ForgeTrainer(config, RunPaths.of(config))


def resumable_step(config: ResolvedConfig) -> int | None:
    """The step of the checkpoint that this config will resume from; None for a fresh start. Changes
    nothing, and reads no digests. Raises ConfigError where the config does not fit the checkpoint."""
    paths = RunPaths.of(config)
    if config.program is None:
        checkpoint = resume.check_resumable(config, paths)
        return checkpoint.step if checkpoint else None
    layout = WorldLayout()  # without effect on what is sealed already
    checkpoints = OtherProgram(config, paths, config.program, layout).checkpoints
    sealed = checkpoints.sealed() if checkpoints else []
    return sealed[0].step if sealed else None


# --- Forge's own trainer ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ForgeTrainer:
    """Forge's own trainer, whose ranks commit their checkpoints and verify them themselves."""

    config: ResolvedConfig
    paths: RunPaths

    @property
    def first_step(self) -> int:
        return parent.first_step(self.config)

    def prepare(self, start: LaunchPlan) -> int | None:
        for line in family.check_parent(self.config, {}):
            say(f"{self.config.run}: {line}")
        checkpoint = resume.repaired_latest(self.paths)
        if checkpoint is None:
            parent.find(self.config)
            model.check_tokenizer(self.config)
            resume.begin_afresh(self.paths, start.require_checkpoint, self.config.starts_from)
        else:
            compatibility.check_compatible(self.config, checkpoint)
        directory.clean(self.paths)
        return checkpoint.step if checkpoint else None

    def is_complete(self, step: int) -> bool:
        return step == self.config.goal and bool(self._recorded_digest(step))

    def resume_step(self) -> int | None:
        checkpoint = resume.repaired_latest(self.paths)
        return checkpoint.step if checkpoint else None

    def warnings(self) -> list[str]:
        return compatibility.schedule_warnings(self.config, resume.latest(self.paths))

    def launch(self, start: LaunchPlan, placement: Placement, step: int | None) -> RankRecord:
        staged, shared = self._shards()
        task = TrainTask(
            step=self.first_step if step is None else step,
            started=time.time(),
            staged=staged,
            shared=shared,
            require_checkpoint=start.require_checkpoint,
            deadline=start.deadline,
            own_deadline=start.own_deadline,
        )
        return _run(task, self.paths, start, placement)

    def committed_step(self) -> int:
        committed = resume.latest(self.paths)
        return committed.step if committed else self.first_step

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
        """The weights digest of the completed run at this step, from the event log."""
        for event in reversed(events.read(self.paths.events)):
            if isinstance(event, events.Completed) and event.step == step:
                return event.weights_digest
        return None

    def _shards(self) -> tuple[dict[str, str], str]:
        """Directories from which ranks read: the staged ones by host, and the shared one for other hosts.
        DataError without shards."""
        staged = staged_folders(self.paths)
        folder = tokens_folder(self.config.data, self.config.ids.tokens)
        if not staged and not (folder / MANIFEST).exists():
            made = f"forge tokenizer {self.paths.config} && forge tokenize {self.paths.config}"
            raise DataError(
                f"{folder} has no complete shards",
                cause="the corpus has not been tokenized for this config",
                fix=f"run: {made}",
            )
        return staged, str(folder)


def _run(
    task: TrainTask | ProgramTask, paths: RunPaths, start: LaunchPlan, placement: Placement
) -> RankRecord:
    return run_ranks(
        task,
        paths,
        start.machine,
        start.layout,
        placement=placement,
        python=staged_python(paths),
    )


# --- another program -------------------------------------------------------------------------------


@dataclass(frozen=True)
class OtherProgram:
    """The program of the config. Its checkpoints are sealed by the launcher, and verified before each
    launch; how a launch ended is decided by the sealed ones, since exit statuses of programs vary."""

    config: ResolvedConfig
    paths: RunPaths
    program: Program
    layout: WorldLayout

    @property
    def first_step(self) -> int:
        return 0

    @property
    def checkpoints(self) -> ProgramCheckpoints | None:
        settings = self.program.checkpoints
        if settings is None:
            return None
        return ProgramCheckpoints(self.paths, settings, self.layout.world_size)

    def prepare(self, start: LaunchPlan) -> int | None:
        if inputs := self._inputs:
            inputs.check_unchanged()
        if self.checkpoints:
            self.checkpoints.refuse_other_pattern()
        step = self.resume_step()
        if step is None:
            resume.begin_afresh(self.paths, start.require_checkpoint)
        elif changed := self._changed():
            raise ConfigError(
                f"the config does not fit {self.paths.latest}: {changed}",
                cause="the list of input files has changed after the run had begun",
                fix="restore them, or give the changed run a new name",
            )
        directory.clean(self.paths)
        return step

    def _changed(self) -> str:
        """Name of the artifact that differs from the one that made the checkpoint; "" for none."""
        latest = self.checkpoints and self.checkpoints.latest()
        if not latest:
            return ""
        made_with, now = latest.seal.lineage.inputs, self.config.ids.inputs
        then = made_with.id if made_with else ""
        return compatibility.differs("ids.inputs", now, then) if now != then else ""

    def is_complete(self, step: int) -> bool:
        return self.checkpoints is not None and step >= self.config.goal

    def resume_step(self) -> int | None:
        checkpoint = self.checkpoints and self.checkpoints.newest_verified()
        return checkpoint.step if checkpoint else None

    def warnings(self) -> list[str]:
        return []

    def launch(self, start: LaunchPlan, placement: Placement, step: int | None) -> RankRecord:
        task = self._task(start, step)
        sealer = self._sealer()
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
            record = _run(task, self.paths, replace(start, machine=machine), placement)
            orderly = record.all_exited_with_0
        finally:
            if sealer:
                sealer.finish(orderly=orderly)
        return self._judged(record)

    def _task(self, start: LaunchPlan, step: int | None) -> ProgramTask:
        latest = None if step is None else self.checkpoints and self.checkpoints.latest()
        staged, shared = program_folders(self.config, self.program)
        launches = [e for e in events.read(self.paths.events) if isinstance(e, events.Launch)]
        return ProgramTask(
            program=self.program,
            step=latest.step if latest else 0,
            resume=str(latest.path.absolute()) if latest else "",
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

    def _sealer(self) -> Sealer | None:
        checkpoints = self.checkpoints
        if checkpoints is None:
            return None
        self.paths.checkpoints.mkdir(parents=True, exist_ok=True)
        log = StepLog(self.paths)
        return Sealer(
            checkpoints,
            self._progress(),
            self._lineage(),
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

    def _lineage(self) -> SealLineage:
        """Artifacts and code that make the checkpoints of this launch."""
        source, inputs, config = self.program.source, self._inputs, self.config
        digest = ""
        if source:
            outputs = (config.results, config.data)
            digest = staged_source_digest(self.paths) or source_digest(Path(source), outputs)
        return SealLineage.of(
            config,
            source_digest=digest,
            inputs_digest=inputs.digest if inputs else "",
            world_size=self.layout.world_size,
        )

    def _judged(self, record: RankRecord) -> RankRecord:
        """The record of the launch, by the checkpoints that are there now."""
        if self.checkpoints is None:
            return replace(record, step=0)
        step, goal = self.committed_step(), self.config.goal
        if record.all_exited_with_0 and step >= goal:
            return RankRecord("completed", step=step)
        if record.status == "completed":
            message = f"the program ended by itself at step {step} of {goal}, with exit status 0"
            return RankRecord("failed", code=Exit.FAILED, cause="ended early", message=message)
        if record.status == "stopped" and record.exit_status:
            say(f"warning: asked to stop, the program {how_it_ended(record.exit_status)}")
        return record

    def committed_step(self) -> int:
        latest = self.checkpoints and self.checkpoints.latest()
        return latest.step if latest else 0

    def trained(self, step: int) -> Trained:
        latest = self.checkpoints and self.checkpoints.latest()
        digest = latest.seal.digest if latest else ""
        # Also where a launch was cut off between its last seal and this.
        done = events.Completed(step=step, weights_digest=digest)
        last = events.last(events.read(self.paths.events), events.Completed, events.Launch)
        if not isinstance(last, events.Completed) or last.step != step:
            events.record(self.paths.events, done)
        return Trained(
            run=self.config.run,
            goal_step=self.config.goal,
            step=step,
            checkpoint=f"checkpoints/{latest.path.name}" if latest else "",
            weights_digest=digest,
            config_digest=provenance.config_digest(self.config),
        )
