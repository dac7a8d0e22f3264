"""Runs that start from each other: on which run of the sheet does one wait, and is its start still true?

A parent on the same sample sheet may have its checkpoint yet to make. What can be checked before that is
checked by the two configs (`check_start`). A run that has started keeps the digest of the parent's
checkpoint; where that checkpoint is another one now, the run does not train on (`check_parent`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from forge.checkpoint import directory, parent
from forge.checkpoint.manifest import ParentCheckpoint, RecordedConfig
from forge.checkpoint.parent import LATEST, MERGED, Parent
from forge.core.config import Config, ResolvedConfig, checked
from forge.core.errors import ConfigError, DataError
from forge.core.paths import RunPaths, checkpoint_step
from forge.core.records import Trained

# --- order ----------------------------------------------------------------------------------------


def with_steps(runs: Mapping[str, Config]) -> dict[str, Config]:
    """The runs with a step in the place of `@latest`, or behind `@merged`.

    Of a parent among these runs the latest step is the last one, train.max_steps. Of another one, and of
    a merge, it is that from which the run has started, else the newest. ConfigError without any.
    """
    return {name: _with_step(config, runs) for name, config in runs.items()}


def _with_step(config: Config, runs: Mapping[str, Config]) -> Config:
    if config.parent is None or not config.parent.endswith((LATEST, MERGED)):
        return config
    name, is_merged = config.parent.partition("@")[0], config.parent.endswith(MERGED)
    is_pending = name in runs and not is_merged
    step = runs[name].goal if is_pending else _newest_step(config, name, is_merged)
    values = {**config.to_json(), "parent": f"{name}@{'merged-' * is_merged}{step}"}
    return checked(Config, values, f"run {config.run}, parent {config.parent}")


def _newest_step(config: Config, name: str, is_merged: bool) -> int:
    made_from = started_from(RunPaths.of(config))
    if made_from and made_from.run == name:
        return made_from.step
    paths = RunPaths.of(config.model_copy(update={"run": name}))
    newest = [*directory.committed(paths.merged)][-1:] if is_merged else [directory.linked(paths)]
    step = checkpoint_step(newest[0].name) if newest and newest[0] else None
    if step:
        return step
    if is_merged:
        raise parent.no_merge(config, name)
    raise ConfigError(
        f"run {config.run}: its parent {config.parent} does not exist: {name} has no checkpoint",
        cause="a misspelled name, or the parent was never trained",
        fix=f"train {name} first, or put it on the same sample sheet",
    )


def refuse_circles(runs: Mapping[str, Config]) -> None:
    """ConfigError where runs of a sample sheet are each other's parents, so that none can start."""
    for name in runs:
        line = [name]
        while (parent_run := parent_name(runs[line[-1]])) in runs:
            line.append(str(parent_run))
            if parent_run in line[:-1]:
                raise ConfigError(
                    f"the parents of these runs form a circle: {' from '.join(line)}",
                    fix="let one of them start without a parent",
                )


def parent_name(config: Config) -> str | None:
    """Name of the parent run; None without one."""
    return config.parent.partition("@")[0] if config.parent else None


# --- before a start -------------------------------------------------------------------------------


def check_start(config: ResolvedConfig, runs: Mapping[str, ResolvedConfig]) -> None:
    """ConfigError or DataError where a new run could not start: from its parent's checkpoint, or from the
    one that its parent, which is among these runs, has yet to make."""
    of = _pending(config, runs)
    if of is None:
        parent.find(config)
        return
    parent.check_fits(config, RecordedConfig.of(of))
    step, train = parent.first_step(config), of.train
    keeps = train.keep_every and step % train.keep_every == 0
    is_made = step == of.goal or (keeps and step % train.checkpoint_every == 0 and step < of.goal)
    if not is_made:
        raise ConfigError(
            f"run {config.run}: its parent {config.parent} will not be there: {of.run} keeps"
            f" {_kept_steps(of)}",
            cause="other checkpoints are not made, or are removed while the parent trains",
            fix=f"set train.keep_every and train.checkpoint_every of {of.run} to divisors of {step},"
            f" or let {config.run} start from {of.run}@latest",
        )


def _kept_steps(config: ResolvedConfig) -> str:
    train = config.train
    last = f"the checkpoint of its last step {config.goal}"
    if not train.keep_every:
        return f"{last} (train.keep_every is null)"
    return (
        f"{last}, and those at steps that are multiples of train.keep_every {train.keep_every} and of"
        f" train.checkpoint_every {train.checkpoint_every}"
    )


def _pending(config: Config, runs: Mapping[str, ResolvedConfig]) -> ResolvedConfig | None:
    """The config of the parent, where it is among these runs and is still to train up to the checkpoint
    from which this run starts; else None."""
    named = Parent.of(config)
    if named is None or named.is_merged or named.run not in runs or named.folder.is_dir():
        return None
    return runs[named.run] if _reached(named.paths) < named.step else None


def _reached(paths: RunPaths) -> int:
    """The step up to which a run has trained, by its record and its newest checkpoint."""
    ended, newest = _trained(paths), directory.committed(paths.checkpoints)
    return max(ended.step if ended else 0, checkpoint_step(newest[-1].name) or 0 if newest else 0)


def waiting(runs: Mapping[str, ResolvedConfig]) -> dict[str, str]:
    """Run name -> its parent, for each run that begins when a parent among these runs has trained.

    Also with a parent that has trained already, so that a plan is drawn as a tree until its runs have
    begun. Without a parent that trains on beyond the checkpoint from which the run starts.
    """
    parents = {name: Parent.of(config) for name, config in runs.items()}
    return {
        name: named.run
        for name, named in parents.items()
        if named and named.run in runs and _waits(runs[name], named, runs[named.run])
    }


def _waits(config: Config, named: Parent, of: ResolvedConfig) -> bool:
    ended = _trained(named.paths)
    is_over = ended is not None and ended.step == of.goal
    begins = started_from(RunPaths.of(config)) is None
    return begins and (is_over or not named.folder.is_dir())


# --- after a start --------------------------------------------------------------------------------


def started_from(paths: RunPaths) -> ParentCheckpoint | None:
    """The checkpoint of another run that a run has started from, by its newest readable record; None for
    one that has not begun, or started without a parent."""
    for folder in reversed(directory.committed(paths.checkpoints)):
        try:
            return directory.Checkpoint.open(folder).manifest.lineage.parent
        except DataError:
            continue
    trained = _trained(paths)
    return ParentCheckpoint(**trained.parent) if trained and trained.parent else None


def _trained(paths: RunPaths) -> Trained | None:
    """The record of a run that has ended; None for one that cannot be read, either."""
    try:
        return Trained.read_if_there(paths.trained)
    except DataError:
        return None


def check_parent(config: Config, runs: Mapping[str, ResolvedConfig]) -> list[str]:
    """Warnings about a complete run whose parent has another checkpoint now than the one that the run has
    started from, or is among these runs and will make it again. Changes nothing.

    ConfigError where such a run has steps to train: its results would be of one parent and its config
    of another. A checkpoint that is gone is not a change: a run that has started does not need it.
    """
    named, made_from = Parent.of(config), _same_start(config)
    if named is None or made_from is None:
        return []
    if _pending(config, runs):
        change = f"which is gone and will be made again: {named.run} is on the sample sheet"
    elif (digest := _digest(named)) not in ("", made_from.digest):
        change = f"which has digest {digest[:12]} now"
    else:
        return []
    paths = RunPaths.of(config)
    what = f"started from {config.parent} with digest {made_from.digest[:12]}, {change}"
    start_anew = f"to start {config.run} anew, rerun the command after {_move_aside(paths)}"
    if _reached(paths) >= config.goal:
        return [f"warning: {what}; it is complete and stays as it is ({start_anew})"]
    raise ConfigError(
        f"run {config.run} {what}",
        cause=f"{named.paths.root} was removed or replaced, and {named.run} retrained",
        fix=f"{start_anew}; to train it on from its own checkpoints, leave {named.run} out of the sample"
        " sheet" + (f", after {_move_aside(named.paths)}" if named.folder.is_dir() else ""),
    )


def _same_start(config: Config) -> ParentCheckpoint | None:
    """The checkpoint from which the run started, if its config names the same run and step."""
    named, made_from = Parent.of(config), started_from(RunPaths.of(config))
    if named is None or made_from is None:
        return None
    is_same = (named.run, named.step) == (made_from.run, made_from.step)
    return made_from if is_same else None


def _digest(named: Parent) -> str:
    """The digest of the parent's checkpoint; "" where that cannot be read."""
    try:
        return directory.Checkpoint.open_complete(named.folder).manifest.digest
    except DataError:
        return ""


def _move_aside(paths: RunPaths) -> str:
    """The command that makes room for a run of the same name."""
    aside = directory.free_name(paths.root.parent, f"{paths.root.name}.old")
    return shlex.join(["mv", str(paths.root), str(aside)])
