"""Checkpoints that are merged: those of one trunk, known by their digests."""

from __future__ import annotations

from collections.abc import Sequence

from forge.checkpoint import compatibility, directory, resume
from forge.checkpoint.directory import Checkpoint
from forge.core import events
from forge.core.errors import ConfigError, DataError
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
        found = _newest(run, trunk, most if last is None else last)
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
    _refuse_other_trunks(found, trunk)
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
            saved.setdefault(event.step, "")  # a crash may have kept its save out of the log
        elif isinstance(event, events.Save):
            saved[event.step] = event.digest
    return saved


def _refuse_other_trunks(checkpoints: Sequence[Checkpoint], trunk: dict[int, str]) -> None:
    """ConfigError for a checkpoint that is not of the same training as the newest one."""
    newest = checkpoints[-1]
    for one in checkpoints:
        if why := _difference(one, newest) or (trunk and _other_digest(one, trunk)):
            raise ConfigError(
                f"{one.folder} and {newest.folder} are not of one trunk: {why}",
                cause="it was copied here, or `latest` was set back and the run trained on from there",
                fix=f"leave out step {one.step}: --steps",
            )


def _difference(one: Checkpoint, newest: Checkpoint) -> str:
    ours, theirs = one.manifest.lineage, newest.manifest.lineage
    try:
        compatibility.check_compatible(newest.config({}), one)
        compatibility.check_same_data(one, theirs.data_digests)
    except (ConfigError, DataError) as err:
        return err.what
    same_start = (ours.parent, ours.model) == (theirs.parent, theirs.model)
    return "" if same_start else "they began with different checkpoints or weights"


def _other_digest(one: Checkpoint, trunk: dict[int, str]) -> str:
    logged = trunk.get(one.step, "none")
    return (
        ""
        if logged in ("", one.digest)
        else f"its digest is {one.digest[:12]}, the log has {logged[:12]}"
    )
