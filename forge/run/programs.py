"""The training program of a run, Forge's own trainer or the config's, behind one interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from forge.core.config import ResolvedConfig
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.core.records import Trained
from forge.hosts.placement import Placement, WorldLayout
from forge.launch.launcher import LaunchPlan
from forge.launch.rank_records import RankRecord
from forge.run.forge_trainer import ForgeTrainer
from forge.run.other_program import OtherProgram
from forge.validation.checkpoint_checks import SavedRun


class TrainingProgram(SavedRun, Protocol):
    """The training program of a run, and what only it knows of the run."""

    @property
    def config(self) -> ResolvedConfig: ...

    # --- before a start, without the run's lock ---

    def check_start(self, runs: Mapping[str, ResolvedConfig]) -> list[str]:
        """Warnings before the run is started or resumed. runs: the others of its sample sheet. Raises
        ForgeError where it can be neither."""

    def resumable_step(self) -> int | None:
        """The step of the checkpoint that the run will resume from; None for a fresh start. Changes
        nothing, and reads no digests. Raises ConfigError where the config does not fit the checkpoint."""

    def validation_bytes(self, world_size: int) -> float | None:
        """Memory that validation needs of a run that was trained by so many ranks; None where the size of
        the model is not known."""

    def seconds_left(self, machine: Machine, layout: WorldLayout) -> float | None:
        """Estimated time on the machine's GPUs from the checkpoint that the run will resume from, or its
        first step, up to its goal, without restarts; None where it cannot be estimated. Raises as
        `resumable_step`."""

    # --- the life of the run: the launcher calls these under the run's lock ---

    @property
    def first_step(self) -> int:
        """The step at which a run without checkpoints begins."""

    def prepare(self, start: LaunchPlan) -> int | None:
        """Repair what an interrupted launch has left, and give the step of the checkpoint that training
        resumes from; None for a fresh start. Raises ConfigError where the config does not fit it, or
        as `family.check_parent`."""

    def is_complete(self, step: int) -> bool:
        """Return whether the run needs no launch any more, with its checkpoint at this step."""

    def warnings(self) -> list[str]:
        """Warnings before the first launch."""

    def on(self, layout: WorldLayout) -> TrainingProgram:
        """The same program, for launches with this layout."""

    def launch(self, start: LaunchPlan, placement: Placement, step: int | None) -> RankRecord:
        """Run the ranks to their end; one record for all of them, by evidence. step: of the checkpoint to
        resume from; None without one."""

    def trained(self, step: int) -> Trained:
        """The completion record of a run whose checkpoint at this step is its goal. Where the event log
        does not tell of its completion yet, it does so afterwards."""


def program_of(config: ResolvedConfig, layout: WorldLayout | None = None) -> TrainingProgram:
    """The training program of this run. layout: of its ranks, for one that launches them."""
    paths = RunPaths.of(config)
    if program := config.program:
        return OtherProgram(config, paths, program, layout or WorldLayout())
    return ForgeTrainer(paths, config)
