"""Start a run from a checkpoint of another run (`parent: base@5000`): find it, check that it fits.

Only the first launch of a run reads the parent. Once the run has a checkpoint of its own it resumes
from that, and the parent is only recorded in the lineage. Nothing is written to the parent's
directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forge.checkpoint import compatibility, directory
from forge.checkpoint.manifest import ParentCheckpoint, RecordedConfig
from forge.core.config import Config, ResolvedConfig
from forge.core.errors import ConfigError, DataError, OtherFormat
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths, checkpoint_name
from forge.core.section import all_values

LATEST = "@latest"  # in the place of @STEP; family.py puts the step there
MERGED = "@merged"  # family.py puts -STEP behind it

# Keys of `train` that must equal the parent's: the position in the data is the parent's step times its
# batch size, in samples of seq_len tokens; another optimizer could not use the state.
KEPT = ("seq_len", "batch_size", "optimizer")


@dataclass(frozen=True)
class Parent:
    """The checkpoint that a config names as its parent, or the merge of some."""

    run: str
    step: int
    paths: RunPaths  # of the parent run
    is_merged: bool = False

    @classmethod
    def of(cls, config: Config) -> Parent | None:
        if config.parent is None:
            return None
        run, _, step = config.parent.partition("@")
        kind, _, number = step.rpartition("-")
        return cls(run, int(number), RunPaths(Path(config.results) / run), bool(kind))

    @property
    def folder(self) -> Path:
        paths = self.paths
        return (paths.merged if self.is_merged else paths.checkpoints) / checkpoint_name(self.step)


def first_step(config: Config) -> int:
    """The step at which a run starts: that of its parent, else 0."""
    parent = Parent.of(config)
    return parent.step if parent else 0


def find(config: ResolvedConfig) -> directory.Checkpoint | None:
    """The checkpoint that a new run of this config starts from; None without a parent.

    Reads only the manifest and the sizes of the files: the ranks verify the digests. Raises
    ConfigError where there is no such checkpoint or the config does not fit it, DataError where it is
    corrupt.
    """
    parent = Parent.of(config)
    if parent is None:
        return None
    with disk_trouble(parent.folder, "read"):
        if not parent.folder.is_dir():
            raise _missing(config, parent)
    try:
        checkpoint = directory.Checkpoint.open_complete(parent.folder)
    except OtherFormat:
        raise
    except DataError as err:
        raise corrupt(config, [err.what]) from None
    check_fits(config, checkpoint.manifest.lineage.config)
    return checkpoint


def corrupt(config: Config, reasons: list[str]) -> DataError:
    """The error for a corrupt parent checkpoint. Forge never takes another checkpoint instead."""
    parent = Parent.of(config)
    assert parent
    if not parent.folder.is_dir():
        reasons = [f"{parent.folder} was removed while it was read"]
    return DataError(
        f"run {config.run}: its parent {config.parent} is corrupt: {'; '.join(reasons)}",
        cause="a disk error, an edit, or the parent run is training and removed it (train.keep_last)",
        fix=f"name another step: {directory.steps_there(parent.paths.checkpoints)};"
        f" `forge validate {parent.paths.root} --all` says which are valid"
        if not parent.is_merged
        else f"make it again: rm -r {parent.folder}; forge merge {parent.run}",
    )


def _missing(config: Config, parent: Parent) -> ConfigError:
    what = f"run {config.run}: its parent {config.parent} does not exist: "
    if not parent.paths.root.is_dir():
        return ConfigError(
            f"{what}there is no run {parent.run} in {parent.paths.root.parent}",
            cause="a misspelled name, or the parent was never trained",
            fix=f"train {parent.run} first, or put it on the same sample sheet",
        )
    if parent.is_merged:
        return no_merge(config, parent.run)
    return ConfigError(
        f"{what}{parent.paths.checkpoints} has {directory.steps_there(parent.paths.checkpoints)}",
        cause="not trained up to that step, removed by train.keep_last, or moved to quarantine",
        fix=f"name an existing step, or train {parent.run} up to step {parent.step} first;"
        " train.keep_every: N in its config keeps every checkpoint at a multiple of N",
    )


def no_merge(config: Config, run: str) -> ConfigError:
    """The error for a merge of another run that is not there."""
    return ConfigError(
        f"run {config.run}: its parent {config.parent} does not exist: {run} has no such merge",
        cause="the workflow makes none, or it was removed",
        fix=f"forge merge {run}",
    )


def check_fits(config: ResolvedConfig, made_by: RecordedConfig) -> None:
    """ConfigError where a run of this config cannot start from its parent's checkpoint. made_by: the
    config that makes it."""
    if problems := list(_misfits(config, made_by)):
        raise ConfigError(
            f"run {config.run} cannot start from {config.parent}: {'; '.join(problems)}",
            cause="a run must have the model, the data, the batch size and the optimizer of its parent",
            fix="give these keys the parent's values, or leave out parent to start at step 0",
        )
    step = first_step(config)
    if config.train.max_steps <= step:
        raise ConfigError(
            f"run {config.run}: train.max_steps is {config.train.max_steps}, but its parent"
            f" {config.parent} is at step {step} already",
            cause="steps are counted from the start of the parent",
            fix=f"set train.max_steps to more than {step}",
        )


def _misfits(config: ResolvedConfig, made_by: RecordedConfig) -> Iterator[str]:
    # The tensors must fit. Dropout has none; with a parent model.init gives the shape only.
    model = all_values(config.model)
    sections = {
        "model": {key: now for key, now in model.items() if key not in ("dropout", "init")},
        "train": config.train.model_dump(mode="json", include={*KEPT}),
    }
    for section, keys in sections.items():
        for key, now in keys.items():
            then = compatibility.recorded_value(section, getattr(made_by, section), key)
            if now != then:
                yield compatibility.differs(f"{section}.{key}", now, then)
    yield from compatibility.changed_ids(config, made_by)


def recorded(
    config: Config, own: directory.Checkpoint | None, start: directory.Checkpoint | None
) -> ParentCheckpoint | None:
    """The parent to record in the lineage of a run's next checkpoints; None without a parent.

    own: the run's own checkpoint that it resumes from, which has the parent recorded. start: without
    one, the parent's checkpoint.
    """
    if own is not None:
        return own.manifest.lineage.parent
    parent = Parent.of(config)
    if parent is None or start is None:
        return None
    return ParentCheckpoint(run=parent.run, step=start.step, digest=start.manifest.digest)


def fix_for_divergence(config: Config, saved_step: int) -> str:
    """Advice after a run has diverged. saved_step: of its newest checkpoint, 0 without one."""
    name = f"{config.run}@{saved_step}" if saved_step > first_step(config) else config.parent
    if name is None:
        return "lower train.lr, raise train.warmup_steps or change train.seed under a new run name"
    return (
        f"start a new run with parent: {name}, or a step from before the loss rose, and a lower"
        " train.lr or another train.seed, which draws other samples (config/README.md)"
    )
