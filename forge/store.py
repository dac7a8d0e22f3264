"""Checkpoint folders: what makes one valid, how it is committed, found, checked and pruned. No torch.

A checkpoint is a folder `step-00000100` with the files of torch.distributed.checkpoint and a
`checkpoint.json` that names each with its digest. It is written under a temporary name; the rename
is the commit; then `latest` is swapped. A committed folder is never written into.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.config import Config, Model, Section, Train, is_free
from forge.errors import ConfigError, DataError
from forge.manifest import digest_file, disk_trouble, fsync_folder, read_json, write_json
from forge.paths import CHECKPOINT_PREFIX, RunPaths, checkpoint_name
from forge.progress import say

FORMAT = 1
MANIFEST = "checkpoint.json"
TEMPORARY = ".writing-"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its folder and its manifest."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read a folder's manifest. Raises DataError where it is none of ours."""
        manifest = read_json(folder / MANIFEST)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise DataError(
                f"{folder} is not a checkpoint of format {FORMAT}",
                cause="written by another version of Forge, or not by Forge",
            )
        return cls(folder, manifest)

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    def bad_files(self, threads: int = 4) -> Iterator[str]:
        """What is wrong with the files, one sentence each; reads and digests all of them."""
        files: dict[str, dict[str, Any]] = self.manifest["files"]
        with ThreadPoolExecutor(threads) as pool:
            yield from filter(None, pool.map(self._bad_file, files, files.values()))
        extra = {p.name for p in self.folder.iterdir()} - set(files) - {MANIFEST}
        for name in sorted(extra):
            yield f"{name} is not in the manifest"

    def _bad_file(self, name: str, expected: dict[str, Any]) -> str | None:
        path = self.folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, the manifest says {expected['bytes']}"
        if digest_file(path) != expected["digest"]:
            return f"{name} has another digest than the manifest: its content has changed"
        return None

    def verify(self) -> None:
        """DataError that lists every damaged file."""
        if bad := list(self.bad_files()):
            raise DataError(
                f"checkpoint {self.folder} is damaged: " + "; ".join(bad),
                cause="a disk error, a copy that broke off, or an edit",
                fix=f"move it away and point latest to an older one: {_others(self.folder)}",
            )


def committed(checkpoints: Path) -> list[Path]:
    """All committed checkpoint folders of a run, oldest first."""
    found = checkpoints.glob(f"{CHECKPOINT_PREFIX}*/{MANIFEST}")
    return sorted(path.parent for path in found)


def _others(folder: Path) -> str:
    names = [path.name for path in committed(folder.parent) if path != folder]
    if not names:
        return "there is none; start again with a new run name"
    return f"ln -sfn {names[-1]} {folder.parent / 'latest'}"


def latest(paths: RunPaths) -> Checkpoint | None:
    """What `latest` points to; None for a run without checkpoints. Raises DataError when it dangles."""
    link = paths.latest
    if link.is_dir():
        return Checkpoint.open(link.resolve())
    there = committed(paths.checkpoints)
    if not link.is_symlink() and not there:
        return None
    target = f"points to {link.readlink()}, which is not there" if link.is_symlink() else "is gone"
    fix = f"ln -sfn {there[-1].name} {link}" if there else f"rm {link}   (starts at step 0)"
    raise DataError(
        f"{link} {target}",
        cause="a checkpoint was removed or moved by hand",
        fix=fix,
    )


def begin(paths: RunPaths, step: int) -> Path:
    """An empty temporary folder for the checkpoint of this step. Rank 0."""
    folder = paths.checkpoints / f"{TEMPORARY}{checkpoint_name(step)}"
    with disk_trouble(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    return folder


def commit(paths: RunPaths, folder: Path, manifest: dict[str, Any], keep_last: int) -> Checkpoint:
    """Make a written temporary folder the newest checkpoint, durably, then prune. Rank 0."""
    final = paths.checkpoints / checkpoint_name(manifest["step"])
    with disk_trouble(final):
        for name in manifest["files"]:
            _fsync(folder / name)
        write_json(folder / MANIFEST, {"format": FORMAT, **manifest})
        if final.exists():  # the same step again, after a dangling or older `latest`
            final.rename(paths.checkpoints / f"{TEMPORARY}replaced-{final.name}")
        folder.rename(final)
        fsync_folder(paths.checkpoints)
        _point_latest(paths, final)
    prune(paths, keep_last)
    return Checkpoint(final, {"format": FORMAT, **manifest})


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _point_latest(paths: RunPaths, folder: Path) -> None:
    """Swap the relative symlink `latest` by rename, so that it always resolves."""
    temporary = paths.checkpoints / f"{TEMPORARY}latest"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    temporary.replace(paths.latest)
    fsync_folder(paths.checkpoints)


def prune(paths: RunPaths, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints, never the one behind `latest`."""
    keep = paths.latest.resolve()
    for folder in committed(paths.checkpoints)[:-keep_last]:
        if folder.resolve() != keep:
            _remove(folder)
    clean(paths)


def _remove(folder: Path) -> None:
    # The rename first: a removal that is cut off must not leave half a checkpoint under its name.
    doomed = folder.with_name(f"{TEMPORARY}pruned-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clean(paths: RunPaths) -> None:
    """Remove what a killed save or prune left behind. Under the run's lease only."""
    for leftover in paths.checkpoints.glob(f"{TEMPORARY}*"):
        if leftover.is_symlink():
            leftover.unlink()
        else:
            shutil.rmtree(leftover, ignore_errors=True)


# --- does this config go on from this checkpoint? --------------------------------------------------


def frozen_decay_steps(config: Config, checkpoint: Checkpoint | None) -> int:
    """Length of the schedule: as the config says, else as at the run's first start."""
    if config.train.decay_steps is not None:
        return config.train.decay_steps
    if checkpoint is not None:
        return int(checkpoint.manifest["decay_steps"])
    return config.train.max_steps


def check_compatible(config: Config, checkpoint: Checkpoint) -> None:
    """ConfigError that names each key by which the config no longer fits the checkpoint."""
    made_by = checkpoint.manifest["lineage"]["config"]
    problems = [
        *_changed("model", Model, config.model, made_by["model"]),
        *_changed("train", Train, config.train, made_by["train"]),
    ]
    decay_steps = frozen_decay_steps(config, checkpoint)
    if decay_steps != checkpoint.manifest["decay_steps"]:
        problems.append(
            _differs("train.decay_steps", decay_steps, checkpoint.manifest["decay_steps"])
        )
    for name in ("tokenizer", "tokens"):
        now = getattr(config.ids, name) if config.ids else None
        if now and now != made_by["ids"][name]:
            problems.append(_differs(f"ids.{name}", now, made_by["ids"][name]))
    if problems:
        raise ConfigError(
            f"the config does not fit {checkpoint.folder}: " + "; ".join(problems),
            cause="it was edited after the run had begun, or the list of corpus files has changed",
            fix="restore these values, or give the changed run a new name",
        )
    if config.train.max_steps < checkpoint.step:
        raise ConfigError(
            f"train.max_steps is {config.train.max_steps}, but {checkpoint.folder} is at step"
            f" {checkpoint.step} already",
            fix=f"set train.max_steps to {checkpoint.step} or more, or give the run a new name",
        )


def _changed(
    section: str, model: type[Section], now: Section, then: dict[str, Any]
) -> Iterator[str]:
    for key in model.model_fields:
        if key == "decay_steps" or is_free(model, key):
            continue
        if getattr(now, key) != then.get(key):
            yield _differs(f"{section}.{key}", getattr(now, key), then.get(key))


def _differs(key: str, now: object, then: object) -> str:
    return f"{key} is {now!r}, the checkpoint has {then!r}"


def warn_if_decayed(config: Config, checkpoint: Checkpoint) -> None:
    """Say that steps beyond a finished decay run at the minimum rate."""
    decay_steps = frozen_decay_steps(config, checkpoint)
    if config.train.max_steps > decay_steps:
        say(
            f"warning: train.max_steps {config.train.max_steps} is beyond decay_steps {decay_steps}:"
            f" steps after {decay_steps} run at the minimum learning rate"
        )


def check_resumable(config: Config, paths: RunPaths) -> Checkpoint | None:
    """The checkpoint that this config goes on from, None for a fresh start.

    Raises ConfigError and DataError as `latest` and `check_compatible` do; changes nothing.
    """
    checkpoint = latest(paths)
    if checkpoint is not None:
        check_compatible(config, checkpoint)
    return checkpoint
