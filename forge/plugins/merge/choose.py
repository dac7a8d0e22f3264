"""Checkpoints that are merged: those of one trunk, known by their digests."""

from __future__ import annotations

from collections.abc import Sequence

from forge.checkpoint import compatibility, directory, resume
from forge.checkpoint.directory import Checkpoint
from forge.core import events
from forge.core.errors import ConfigError
from forge.core.paths import RunPaths, checkpoint_step


def chosen(
    run: RunPaths, steps: Sequence[int] | None, last: int | None, most: int
) -> list[Checkpoint]:
    """The checkpoints to merge, oldest first. steps: None for the newest `last` of the trunk, where that
    is None as many as there are, at most `most`. Only manifests and the log are read.

    Raises ConfigError for fewer than two, a step that is not there, and checkpoints of several trunks.
    """
    directory.refuse_link(run.checkpoints)
    trunk = _trunk(run)
    if steps is None:
        found = _newest(run, trunk, last or most)
    elif sorted({*steps}) == [*steps]:
        found = [resume.at_step(run, step) for step in steps]
    else:
        raise ConfigError(
            f"--steps is {','.join(map(str, steps))}", fix="name each step once, in ascending order"
        )
    if len(found) < max(2, last or 0):
        raise ConfigError(
            f"{len(found)} checkpoint{'s' * (len(found) != 1)} of {run.root} cannot be merged: a merge"
            f" needs {f'{last}, as --last says' if last and last > 2 else 'two'}",
            cause="train.keep_last and train.keep_every say which are kept",
            fix=f"{run.checkpoints} has {directory.steps_there(run.checkpoints)}",
        )
    _refuse_other_trunks(run, found, trunk)
    return found


def _newest(run: RunPaths, trunk: dict[int, str], number: int) -> list[Checkpoint]:
    folders = [
        folder
        for folder in directory.committed(run.checkpoints)
        if not trunk or checkpoint_step(folder.name) in trunk
    ]
    return [Checkpoint.open(folder) for folder in folders[-number:]] if number > 0 else []


def _trunk(run: RunPaths) -> dict[int, str]:
    """Step -> digest of the checkpoints from which the last one that the log has was trained on, and of
    that; "" where the log has none. {} without a log."""
    saved: dict[int, str] = {}
    for event in events.read(run.events) if run.events.exists() else ():
        if isinstance(event, events.Init):  # steps after it are trained anew
            saved = {step: digest for step, digest in saved.items() if step <= event.step}
        elif isinstance(event, events.Save):
            saved[event.step] = event.digest
    return saved


def _refuse_other_trunks(
    run: RunPaths, checkpoints: Sequence[Checkpoint], trunk: dict[int, str]
) -> None:
    """ConfigError for a checkpoint that is not of the same training as the newest one."""
    newest = checkpoints[-1]
    config, lineage = newest.config({}), newest.manifest.lineage
    for one in checkpoints:
        if one.manifest.merged:
            raise ConfigError(f"{one.folder} is itself a merge", fix="merge what was trained")
        compatibility.check_compatible(config, one)
        compatibility.check_same_data(one, lineage.data_digests)
        other = one.manifest.lineage
        if (other.parent, other.model) != (lineage.parent, lineage.model):
            raise ConfigError(
                f"{one.folder} and {newest.folder} began with different checkpoints or weights",
                cause="one of them was copied from another run",
                fix="merge checkpoints of one run: --steps",
            )
        if trunk and trunk.get(one.step, "none") not in ("", one.digest):
            raise ConfigError(
                f"{one.folder} has digest {one.digest[:12]}, the trunk by the log of the run has"
                f" {trunk.get(one.step, 'none')[:12]} at this step",
                cause="`latest` was set back and the run trained on from there, or it was copied here",
                fix="merge checkpoints of one trunk: --steps " + ",".join(map(str, sorted(trunk))),
            )
