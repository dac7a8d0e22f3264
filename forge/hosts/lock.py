"""Locks: one writer at a time for an output directory. The lock names the process that holds it."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from forge.core.errors import DataError, ForgeError, OtherFormat, UnfitError
from forge.core.files import disk_trouble, short_id
from forge.core.process import INITIAL_NAMESPACE, Process, hostname, slurm_start, user_name
from forge.core.records import Lock
from forge.core.terminal import say
from forge.slurm import slurm

LOCK = ".lock"
# Held by the Snakemake that looks after a run: a second one would submit the same job again.
WORKFLOW_LOCK = ".workflow-lock"
# For a holder that makes the same shared artifact; tokenizing a large corpus may take this long.
SHARED_WAIT_SEC = 24 * 3600.0
POLL_SEC = 1.0


class LockHeld(UnfitError):
    """The holder of a lock is alive."""


def shared_lock(folder: Path, command: str) -> contextlib.AbstractContextManager[None]:
    """Hold `lock` on a directory that several runs and users share: waits while a living holder makes the
    same artifact, for SHARED_WAIT_SEC at most."""
    return lock(folder, command, wait_sec=SHARED_WAIT_SEC)


@contextmanager
def lock(folder: Path, command: str, *, name: str = LOCK, wait_sec: float = 0.0) -> Iterator[None]:
    """Hold the right to write `folder`; LockHeld names a living holder, a dead one is replaced.
    wait_sec: how long to wait for a living holder first.

    Made with link(2) and rename(2), which are atomic on NFS too, unlike flock. A holder on another
    host, or in another pid namespace, is judged by its Slurm job: whether that runs, and in which
    restart; without one it counts as living, and is refused at once with an UnfitError. Raises
    OtherFormat for the lock of another version of Forge.
    """
    path = folder / name
    process = Process.current()
    job = slurm.own_job()
    cluster = slurm.this_cluster() or (slurm.cluster_name() if job else None)
    restart = job.restarts if job else slurm_start()[1]
    own = Lock(
        **process.to_json(),
        # Without the number of its start, nobody may judge the job by it.
        cluster=None if restart is None else cluster,
        command=command,
        restart=restart or 0,
    )
    _wait_and_acquire(path, own, time.monotonic() + wait_sec)
    try:
        yield
    finally:
        _give_back(path, own)


def holder(folder: Path, name: str = LOCK) -> Lock | None:
    """Who may write a directory; None where nobody may. Raises OtherFormat, and UnfitError where the disk
    does not let it be read. name: of the lock."""
    lock = _read(folder / name)
    return lock if isinstance(lock, Lock) else None


def check_held(folder: Path, writer: Process) -> None:
    """UnfitError when `writer` does not hold the folder any more: whoever has taken
    over writes there now, or has ended, and must not find its files changed.

    A successor that sees our processes does no harm: it waits for them.
    """
    held = holder(folder)
    if writer.is_here and (not held or held.process.is_here):
        return
    if not held or held.process != writer:
        now = f"held by {_who(held)} now" if held else "no longer held by the command that began"
        raise UnfitError(
            f"{folder} is {now}: nothing was committed",
            cause="this node was cut off, and the run has gone on without it",
        )


def _wait_and_acquire(path: Path, own: Lock, end: float) -> None:
    """end: on the monotonic clock, until when a living holder is waited for."""
    said = ""
    while True:
        try:
            return _acquire(path, own)
        except LockHeld as err:
            if time.monotonic() >= end:
                raise
            if said != err.what:
                say(f"waiting: {err.what}")
            said = err.what
        time.sleep(POLL_SEC)


def _acquire(path: Path, own: Lock) -> None:
    draft = path.with_name(f".lock.{uuid.uuid4().hex}")
    with disk_trouble(path):
        own.write(draft)
        try:
            _take(path, draft)
        finally:
            draft.unlink(missing_ok=True)


def _give_back(path: Path, own: Lock) -> None:
    """Best effort: a lock whose process has exited counts as released."""
    try:
        if _read(path) == own:
            path.unlink(missing_ok=True)
    except (OSError, ForgeError) as err:
        say(f"{path} stays behind: {err.strerror if isinstance(err, OSError) else err.what}")


def _take(path: Path, draft: Path) -> None:
    """Make `draft` the lock at `path`; UnfitError if the holder lives or cannot be asked.

    Many may find the same holder dead. The right to replace it is a lock itself, named after that
    holder, so one of them has it; and the rename that replaces uses it up in the same moment, so
    that nobody comes between, and somebody killed before it is replaced in turn.
    """
    while True:
        try:
            os.link(draft, path)
            return
        except FileExistsError:
            if _is_same_file(draft, path):
                return  # made, but the answer was lost on the network and the question asked again
            held = _read(path)
        if held is None:
            continue  # given back meanwhile
        _refuse_living(path, held)
        values = held.model_dump() if isinstance(held, Lock) else held
        right = path.with_name(f"{path.name}.{short_id(values)}")
        try:
            _take(right, draft)
        except UnfitError:
            if _read(path) == held:
                raise
            continue  # replaced meanwhile: judge the new holder
        if _read(path) == held:
            right.rename(path)
            before = f"{_who(held)} that is gone" if isinstance(held, Lock) else f"{held} lock"
            say(f"{path.parent}: took over from a {before}")
            return
        right.unlink()


def _is_same_file(path: Path, other: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.samefile(other)
    return False


def _read(path: Path) -> Lock | Literal["corrupt"] | None:
    """The lock; None where there is none, `corrupt` where nobody can hold it. Raises OtherFormat."""
    try:
        return Lock.read(path)
    except OtherFormat:
        raise
    except DataError:
        return "corrupt" if os.path.lexists(path) else None


def _refuse_living(path: Path, held: Lock | Literal["corrupt"]) -> None:
    if not isinstance(held, Lock):
        return
    life = held.process.life()
    if life == "gone" or (life == "unknown" and _job_has_ended(path, held)):
        return
    if life == "alive":
        _refuse_of_array(path, held)
        stop = (
            f"stop it with: kill {held.pid}"
            if held.process.is_here
            else "kill it inside of its container"
        )
        raise LockHeld(
            f"{path.parent} is being written by {_who(held)}{_of_user(path)}",
            cause="the same command was given twice",
            fix=f"wait for it, or {stop if _is_own(path) else 'ask that user'}",
        )
    raise UnfitError(
        f"{path.parent} is being written by {_who(held)}{_of_user(path)}, which {hostname()} cannot ask",
        cause=_why_unknown(held),
        fix=f"if nothing of it runs on {held.host} any more, which {_look(held)} shows there: rm {path}",
    )


def _why_unknown(held: Lock) -> str:
    if held.host != hostname():
        return "it was started on another host and is running there, or died there"
    if held.boot_id == Process.current().boot_id:
        return (
            "it was started in another container of this host and is running there, or died there"
        )
    return "it runs on another machine of this name, or ran here before this one was started again"


def _look(held: Lock) -> str:
    if held.pid_namespace == INITIAL_NAMESPACE:
        return f"`ps -p {held.pid}`"
    return f"`lsns -t pid` (as root, by pid namespace {held.pid_namespace})"


def _job_has_ended(path: Path, held: Lock) -> bool:
    """Return whether this start of the holder's job is over, as a later start of the same job knows, or
    Slurm says; False where it cannot be asked. Raises UnfitError for a job that runs, or waits to start
    again."""
    if not held.slurm_job or not held.cluster:
        return False
    with contextlib.suppress(slurm.SlurmSilent):
        if _is_earlier_start(held):
            return True
        if not slurm.is_here() or held.cluster != slurm.cluster_name():
            return False
        job = slurm.show_job(held.slurm_job)
        if job is None:
            # A job that this user may not see is as unknown to Slurm as one that ended.
            return _is_own(path) or not slurm.hides_jobs()
        _refuse_living_job(path, held, job)
        return True
    return False


def _is_earlier_start(held: Lock) -> bool:
    """Return whether this process is of a later start of the holder's job. Raises SlurmSilent."""
    job_id, restart = slurm_start()
    is_later = restart is not None and restart > held.restart
    return is_later and held.slurm_job == job_id and held.cluster == slurm.this_cluster()


def _is_own(path: Path) -> bool:
    """Return whether this user made the lock; also true where it has been released meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_uid == os.getuid()
    return True


def _refuse_living_job(path: Path, held: Lock, job: slurm.Job) -> None:
    if job.restarts > held.restart:
        return  # restarted since: that start of it is dead
    if job.is_living or (job.is_waiting and job.id != slurm.this_job_id()):
        _refuse_of_array(path, held)
        end = f"end it with: scancel {job.id}" if _is_own(path) else "ask that user"
        raise LockHeld(
            f"{path.parent} is being written by {_who(held)}{_of_user(path)}: job {job.id} is"
            f" {job.state}",
            cause="the same run was started twice",
            fix=f"wait for job {job.id}, or {end}",
        )


def _refuse_of_array(path: Path, held: Lock) -> None:
    """LockHeld for the holder in another task of this process's job array."""
    if slurm.tasks_of_one_array(held.slurm_job):
        raise LockHeld(
            f"{path.parent} is being written by {_who(held)}, another task of this job array",
            cause="each task of the array gives the same command, which does the work of all runs itself",
            fix="submit the command once, without --array: config/runs.tsv has a line for each run",
        )


def _of_user(path: Path) -> str:
    """Whose lock it is, where another user made it."""
    with contextlib.suppress(FileNotFoundError):
        owner = path.stat().st_uid
        return "" if owner == os.getuid() else f" of user {user_name(owner)}"
    return ""


def _who(held: Lock) -> str:
    job = f", Slurm job {held.slurm_job}" if held.slurm_job else ""
    cluster = f" of cluster {held.cluster}" if job and held.cluster else ""
    elsewhere = held.host == hostname() and not held.process.is_here
    space = f" of pid namespace {held.pid_namespace}" if elsewhere else ""
    command = held.command if held.command == "snakemake" else f"forge {held.command}"
    return f"`{command}` (pid {held.pid}{space} on {held.host}{job}{cluster})"
