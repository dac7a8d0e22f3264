"""Async checkpointing: copy the state, then write, digest and commit the copy in a background thread."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint import directory, storage
from forge.checkpoint.manifest import Manifest
from forge.checkpoint.save_plan import KeptPlans
from forge.core import failpoints
from forge.core.errors import DiskFull, TrainingError, UnfitError
from forge.core.file_list import FileList
from forge.core.paths import RunPaths, checkpoint_name
from forge.core.terminal import say
from forge.hosts.network import available_memory
from forge.launch.process_group import Background, World

# Niceness of the writer thread: weight 110 against training's 1024 (man 7 sched). A higher one makes
# saves longer and costs training as much: a thread that waits for a core may hold Python's GIL.
WRITER_NICE = 10
# The copy must leave memory for what training itself allocates meanwhile.
MEMORY_MARGIN = 1.25


# For parts from other nodes, which come with Slurm's connection to each of them.
ARRIVE_SEC, ARRIVE_BYTES_PER_SEC, ARRIVE_POLL_SEC = 60.0, 5 * 2**20, 0.1


@dataclass
class AsyncSave:
    """One save, in progress or finished. Times in seconds."""

    step: int
    size: int  # bytes of the state, over all ranks
    started: float
    stall: float = 0.0  # time for which training waited
    seconds: float | None = None  # from start to commit
    checkpoint: directory.Checkpoint | None = None
    work: Background[directory.Checkpoint] = field(init=False, repr=False)


class Saver:
    """Saves one rank's part of the state; at most one save is in progress.

    All ranks call `start` and `finish` at the same steps. The writer thread has a process group of
    its own, so that its collectives never mix with those of training.
    """

    def __init__(
        self,
        world: World,
        paths: RunPaths,
        *,
        async_save: bool,
        check_may_write: Callable[[], None],
        parts_arrive: bool = False,
    ) -> None:
        """async_save: copy the state, so that training continues while the copy is written.
        check_may_write: called on rank 0 before the first file and once all files are written; an
        exception fails the save.
        parts_arrive: whether the files of other nodes are yet to come then (`stage.results`)."""
        self.world, self.writer_world, self.paths = world, world.with_own_group(), paths
        self.async_save, self.check_may_write = async_save, check_may_write
        self.parts_arrive = parts_arrive
        self.in_progress: AsyncSave | None = None
        self._stager = storage.Stager(world.device)
        self._plans = KeptPlans()
        self._has_copied = False

    def start(
        self,
        state: dict[str, Any],
        manifest: Manifest,
        *,
        keep_last: int,
        keep_every: int | None = None,
        last: bool = False,
    ) -> AsyncSave:
        """Begin to save this state; the previous save must be finished.

        manifest: without files, which are known once they are written. last: nothing changes the
        state any more, so no copy is made.
        """
        assert self.in_progress is None
        save = AsyncSave(manifest.step, storage.state_bytes(state), time.perf_counter())
        live = last or not self._has_room(state)
        if not live:
            state = self._stager.stage(state)
            self._has_copied = True
        failpoints.reach("save.staged")

        commit = partial(directory.commit, keep_last=keep_last, keep_every=keep_every)

        def work() -> directory.Checkpoint:
            if not live:
                self._stager.wait()
                # Training has priority where cores are short. Threads started here inherit this.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICE)
            written = self._write(state, manifest, save.size, commit)
            save.seconds = time.perf_counter() - save.started
            return written

        save.work = Background(work, f"save-{save.step}")
        self.in_progress = save
        if live and not last:
            self._wait(save)
        save.stall = time.perf_counter() - save.started
        return save

    def hold_updates(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let the updates of optimizers wait for a copy of their state that the GPU still makes; the host
        waits for neither. Called once."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._stager.hold_device())

    def is_done(self) -> bool:
        """Return whether this rank's part of a save is written and waits for `finish`."""
        return self.in_progress is not None and self.in_progress.work.is_done

    def finish(self) -> AsyncSave | None:
        """Wait until the save in progress is committed; None if there is none.

        Raises UnfitError (disk) or TrainingError (state not finite) on the ranks that failed, PeerFailed
        on the others.
        """
        save, self.in_progress = self.in_progress, None
        if save is None:
            return None
        before = time.perf_counter()
        save.checkpoint = self._wait(save)
        save.stall += time.perf_counter() - before
        return save

    def drain(self, timeout_sec: float) -> None:
        """Wait for this rank's writer thread before the process exits with an error.

        Without a collective in the main thread. If every rank does the same, the save is committed.
        """
        if self.in_progress is not None:
            self.in_progress.work.join(timeout_sec)

    def _wait(self, save: AsyncSave) -> directory.Checkpoint:
        return self.world.wait_for(save.work, f"wait for the save of step {save.step}")

    def _has_room(self, state: dict[str, Any]) -> bool:
        """Return whether to save from a copy: asynchronous saving is on, and every rank has memory for
        the copy. Not asked after the first copy, whose memory is used again."""
        if not self.async_save or self._has_copied:
            return self.async_save
        short = self.world.gather([float(not self._has_own_room(state))], "room for a copy")
        self.async_save = not any(row[0] for row in short)
        return self.async_save

    def _has_own_room(self, state: dict[str, Any]) -> bool:
        needed = MEMORY_MARGIN * storage.state_bytes(state, local=True)
        room = available_memory() / self.world.rank.local_world_size
        if needed <= room:
            return True
        say(
            f"warning: training waits for each save: a copy of the state needs"
            f" {needed / 2**20:,.0f} MiB of memory, {room / 2**20:,.0f} MiB are left for this rank"
        )
        return False

    def _write(
        self,
        state: dict[str, Any],
        manifest: Manifest,
        size: int,
        commit: Callable[[RunPaths, Path, Manifest], directory.Checkpoint],
    ) -> directory.Checkpoint:
        """Write and commit the state. The writer thread of every rank calls it. commit: also prunes."""
        world = self.writer_world
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # a new thread starts with device 0
        step = manifest.step
        world.together(lambda: _refuse_non_finite(state, step), "check of numbers")

        def begin() -> None:
            self.check_may_write()
            directory.begin(self.paths, step, size)

        world.on_main(begin, "begin of the save")
        folder = directory.temporary_folder(self.paths, step)
        if self.parts_arrive:
            folder.mkdir(parents=True, exist_ok=True)  # rank 0 has made that of its own node
        try:
            files = storage.write_state(state, folder, world, self._plans)
        except UnfitError:
            if world.rank.is_main:  # else a full disk would stay full
                shutil.rmtree(folder, ignore_errors=True)
            raise
        complete = manifest.with_files(files).sealed()

        def finish() -> None:
            if self.parts_arrive:
                _wait_for_parts(folder, complete)
            self.check_may_write()
            try:
                commit(self.paths, folder, complete)
            except DiskFull:  # else it would stay full
                shutil.rmtree(folder, ignore_errors=True)
                raise

        world.on_main(finish, "commit")
        return directory.Checkpoint(self.paths.checkpoints / checkpoint_name(step), complete)


def _wait_for_parts(folder: Path, manifest: Manifest) -> None:
    """Wait until all files of a checkpoint have come from their nodes, with the digests that their ranks
    have computed. UnfitError where they take too long."""
    files = FileList(folder, {name: file.entry for name, file in manifest.files.items()})
    num_bytes = sum(file.bytes for file in manifest.files.values())
    end = time.monotonic() + ARRIVE_SEC + num_bytes / ARRIVE_BYTES_PER_SEC
    while bad := list(files.bad_files(content=False)) or list(files.bad_files()):
        if time.monotonic() > end:
            raise UnfitError(
                f"parts of the checkpoint of step {manifest.step} have not come to this node:"
                f" {'; '.join(bad)}",
                cause="the connection to a node is slow or broken, or the disk here is full",
                fix="rerun the same command; the last checkpoint is intact",
            )
        time.sleep(ARRIVE_POLL_SEC)


def _refuse_non_finite(state: dict[str, Any], step: int) -> None:
    if not storage.is_finite(state):
        raise TrainingError(
            f"step {step}: weights or optimizer state are not finite; this step was not committed",
            cause="a learning rate too high, or broken data",
            fix="start a new run with parent: RUN@STEP, an earlier checkpoint of this one, and a lower"
            " train.lr (config/README.md)",
        )
