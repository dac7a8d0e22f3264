"""Tracking: numbers of a run in TensorBoard, Weights & Biases and MLflow. docs/plugins/tracking.md."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from forge.core.hooks import hook
from forge.plugins.tracking.settings import Tracking

if TYPE_CHECKING:
    from forge.core.config import Config
    from forge.core.paths import RunPaths
    from forge.core.records import RunSettings
    from forge.core.section import Section


@hook
def sections() -> dict[str, type[Section]]:
    return {"tracking": Tracking}


@hook
def check_run(config: Config, where: str, trains: bool) -> None:
    if config.of(Tracking).trackers:
        from forge.plugins.tracking.tracker import refuse_missing_packages

        refuse_missing_packages(config.of(Tracking), where)


@hook
def run_files() -> Sequence[str]:
    from forge.plugins.tracking.places import SENT, TENSORBOARD, WANDB

    return [SENT, TENSORBOARD, WANDB]


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.tracking.command import add_sync

    add_sync(subcommands)


@hook
def while_training(
    paths: RunPaths, settings: RunSettings, data: str
) -> AbstractContextManager[None]:
    from forge.plugins.tracking.feed_process import tracked

    return tracked(paths, settings.of(Tracking))
