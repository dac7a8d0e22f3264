"""Copy a set of files to the nodes, or to this host, if it is the only one: inspect, send, verify."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from forge.core.config import Config
from forge.core.errors import UnfitError
from forge.core.files import private_root
from forge.core.machine import Machine, StageSettings
from forge.core.paths import MANIFEST
from forge.core.process import hostname
from forge.core.records import StageRecord
from forge.core.terminal import progress, say
from forge.data.shards import FileSet, Member
from forge.hosts.nodes import NodeFailure, NodePool, failed_on
from forge.hosts.placement import Placement
from forge.slurm import slurm
from forge.staging import on_node
from forge.staging.archive import Archive, make_archive
from forge.staging.environment import stage_project
from forge.staging.on_node import CHUNKS, SPARE_BYTES, StageAnswer
from forge.staging.sbcast import COMPRESS_SHARDS_BELOW, Broadcast, SbcastFailed, is_slower

T = TypeVar("T")

ASK_SEC = 30.0
MIN_DISK_BYTES_PER_SEC = 50 * 2**20  # a local disk that is slower counts as broken


def stage_nodes(
    source: FileSet | None,
    config: Config,
    machine: Machine,
    placement: Placement,
    *,
    min_nodes: int,
) -> StageRecord:
    """Copy the files to every node of the placement that needs a copy; with `stage.project`, Forge,
    its Python and the program's directory, too. source: None for a program without inputs.

    A node that fails is left out. Raises UnfitError that names those nodes when fewer than min_nodes
    remain.
    """
    job = placement.job.id if placement.job else slurm.this_job_id()
    project = None
    if machine.stage.project and not placement.is_here:
        project = stage_project(config, machine, placement)
    if source is None:
        record = StageRecord(job=job, roots=project.roots if project else {})
    elif placement.is_here:
        here = ThisHost(placement)
        record = _stage(_Staging(here, source, config, machine.stage, min_nodes=min_nodes))
    else:
        with NodePool(placement, python=project.python if project else sys.executable) as pool:
            record = _stage(_Staging(pool, source, config, machine.stage, min_nodes=min_nodes))
    if project is None:
        return record
    copied = {name: getattr(project, name) for name in ("python", "source", "source_digest")}
    return record.model_copy(update=copied)


class ThisHost:
    """In place of a NodePool where this is the only host: runs calls in this process."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def ask(
        self,
        call: Callable[..., T],
        *,
        timeout_sec: float,
        hosts: Collection[str] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> dict[str, T | NodeFailure]:
        """Ask as `NodePool.ask` does, but without the timeout, and DataError is raised."""
        wanted = self.placement.hosts if hosts is None else hosts
        answers: dict[str, T | NodeFailure] = {}
        for host in wanted:
            try:
                answers[host] = call(**{**arguments, **(each or {}).get(host, {})})
            except UnfitError as err:
                answers[host] = NodeFailure(err.what, err.cause, err.fix)
        return answers


def _stage(staging: _Staging) -> StageRecord:
    try:
        staging.look()
        staging.claim()
        staging.forget_ended_jobs()
        while lacking := staging.lacking():
            staging.send(lacking)
    except BaseException:
        staging.withdraw()
        raise
    if staging.settings.keep:
        staging.withdraw()
    return staging.record()


class _Staging:
    """The nodes that have not failed, and the state of each."""

    def __init__(
        self,
        pool: NodePool | ThisHost,
        source: FileSet,
        config: Config,
        settings: StageSettings,
        *,
        min_nodes: int,
    ) -> None:
        job = pool.placement.job
        self._pool, self._source, self._config = pool, source, config
        self._job = job.id if job else slurm.this_job_id()  # None outside of Slurm
        self.settings, self._min_nodes = settings, min_nodes
        self._hosts = list(pool.placement.hosts)
        self._states: dict[str, StageAnswer] = {}  # node -> response to `look`
        self._folders: dict[str, str] = {}  # node -> directory that its ranks read
        self._sent: list[str] = []
        self._seconds = {"archive": 0.0, "send": 0.0, "verify": 0.0}

    # --- state of the nodes-----------------------------------------------------------------------

    def look(self) -> None:
        """Ask every node for its state, decide where its ranks read, and print that."""
        self._states = self._ask(
            on_node.look,
            f"looking for the {self._kind}",
            self._read_all_sec,
            base=self.settings.folder,
            **self._set,
            job=None if self.settings.keep else self._job,
            sender=None if self._is_here else hostname(),
            shared=str(self._source.folder.resolve()),
            mode=self.settings.mode,
            goes_away=bool(self._job) or self.settings.keep,
        )
        unseen: dict[str, NodeFailure] = {}
        messages: dict[str, list[str]] = {}
        for host, state in self._states.items():
            if state.in_place:
                self._folders[host] = str(self._source.folder.resolve())
                messages.setdefault(f"reading in place ({state.why})", []).append(host)
            elif self.settings.mode == "never":
                fix = "set stage.mode to auto, or mount the data directory there"
                unseen[host] = NodeFailure(state.why, "stage.mode is never", fix)
            elif state.complete:
                self._folders[host] = state.folder
                messages.setdefault(f"has the {self._kind} in {state.folder}", []).append(host)
            else:
                why = state.problem and f"replacing a corrupt copy: {state.problem}"
                why = why or f"gets the {self._kind}: {state.why}"
                messages.setdefault(why, []).append(host)
        for message, hosts in messages.items():
            say(f"stage: {', '.join(hosts)}: {message}")
        self._drop(unseen, f"reading the {self._kind} in place")
        if self._is_here and any(state.in_place for state in self._states.values()):
            # Only here: on several nodes, each rank verifies its part of the shards when it starts, and
            # of inputs in place only sizes and times are compared.
            self._source.verify()

    def claim(self) -> None:
        """Mark on each node that this run uses the job's directory there."""
        if self._job:
            self._ask(on_node.mark, "staging", ASK_SEC, each=self._roots(), **self._claim)

    def withdraw(self) -> None:
        """Undo `claim` on every node. What is to be kept is in another directory."""
        if self._job:
            each = {host: {"root": response.root} for host, response in self._states.items()}
            self._pool.ask(
                on_node.unmark, timeout_sec=ASK_SEC, hosts=each, each=each, **self._claim
            )

    @property
    def _claim(self) -> dict[str, Any]:
        return {"job": self._job, "run": self._config.run}

    def forget_ended_jobs(self) -> None:
        """Remove the directories of jobs that have ended."""
        if self._job is None or not slurm.is_here():
            return
        left = {job for state in self._states.values() for job in state.jobs} - {self._job}
        ended = [f"job-{job}" for job in left if not _may_run(job)]
        if ended:
            free = self._ask(
                on_node.forget, "removing old sets", ASK_SEC, each=self._roots(), names=ended
            )
            for host, bytes_free in free.items():
                self._states[host] = replace(self._states[host], free=bytes_free)
            say(f"stage: removed what ended jobs had left ({', '.join(sorted(ended))})")

    def lacking(self) -> list[str]:
        """Nodes that still need a copy."""
        return [host for host in self._hosts if host not in self._folders]

    # --- copying to nodes ------------------------------------------------------------------------

    def send(self, hosts: list[str]) -> None:
        """Try once to copy the set to these nodes. Nodes that fail are dropped before the next try."""
        hosts = self._with_space(hosts)
        if not hosts:
            return
        if self._is_here:
            self._copy(hosts)
            return
        archive = self._archive(hosts)
        for root in sorted({self._states[host].root for host in hosts}):
            self._send_below(root, [h for h in hosts if self._states[h].root == root], archive)

    def _with_space(self, hosts: list[str]) -> list[str]:
        # The archive and what is unpacked of it are on the disk at the same time.
        archive, copies = ("", 1) if self._is_here else (" and their archive", 2)
        needed = copies * self._source.num_bytes + SPARE_BYTES
        full = {
            host: NodeFailure(
                f"{state.root} has {state.free / 2**30:.2f} GiB free, the {self._kind}{archive}"
                f" need {needed / 2**30:.2f} GiB",
                "other jobs or older staged sets fill this disk",
                "remove old sets there, choose another stage.folder, or set stage.mode to never",
            )
            for host in hosts
            if (state := self._states[host]).free < needed
        }
        self._drop(full, "staging")
        return [host for host in hosts if host not in full]

    def _copy(self, hosts: list[str]) -> None:
        """Copy on this host, the only one, without an archive."""
        shared = str(self._source.folder.resolve())
        each = {host: {"folder": self._states[host].folder} for host in hosts}
        sec = self._read_all_sec  # for the copy of another run, and for our own
        copied = self._ask(
            *(on_node.copy, "copying", 2 * sec, hosts),
            each=each,
            shared=shared,
            wait_sec=sec,
            **self._set,
        )
        self._arrived(copied)
        if self._job is None and not self.settings.keep:
            folders = ", ".join(self._folders[host] for host in copied)
            say(f"stage: the copy stays in {folders}: outside of a Slurm job nothing removes it")

    def _archive(self, hosts: list[str]) -> Archive:
        started = time.monotonic()
        compress = is_slower((self._states[h].link_mbit for h in hosts), COMPRESS_SHARDS_BELOW)
        source = self._source
        archives = private_root(Path(self._config.data) / "archives")
        folder = archives / (source.digest[:32] + "-zstd" * compress)
        archive = Archive.open(folder)
        if archive is None:
            source.verify()
            manifest = source.folder / MANIFEST
            members = [*source.members, Member(manifest, MANIFEST, manifest.stat().st_size)]
            archive = make_archive(folder, members, compress=compress)
        self._seconds["archive"] += time.monotonic() - started
        return archive

    def _send_below(self, root: str, hosts: list[str], archive: Archive) -> None:
        """Send the chunks to nodes with the same root, unpack each chunk there, verify, rename."""
        assert self._job
        name = f"job-{self._job}/writing-{hostname()}-{os.getpid()}"
        temporary = f"{root}/{name}"
        hosts = list(self._ask(on_node.begin, "staging", ASK_SEC, hosts, temporary=temporary))
        if not hosts:
            return
        started = time.monotonic()
        try:
            with (
                Broadcast(self._job, hosts) as broadcast,
                progress("stage", archive.num_bytes / 2**20, "MiB") as report,
            ):
                done = 0
                files = [archive.folder / chunk for chunk in archive.chunks]
                for chunk in broadcast.send(files, f"{temporary}/{CHUNKS}"):
                    deadline = ASK_SEC + archive.chunks[chunk] * 8 / MIN_DISK_BYTES_PER_SEC
                    here = [host for host in hosts if host in self._hosts]
                    what = {"chunk": chunk, "digest": archive.digests[chunk]}
                    self._ask(
                        on_node.unpack, "unpacking", deadline, here, temporary=temporary, **what
                    )
                    done += archive.chunks[chunk]
                    report(done / 2**20)
        except SbcastFailed as broken:
            free = self._pool.ask(
                on_node.forget, timeout_sec=ASK_SEC, hosts=hosts, root=root, names=[name]
            )
            self._drop(_with_free(broken.failures, free, root), "sbcast")
            return
        self._seconds["send"] += time.monotonic() - started
        self._finish(temporary, [host for host in hosts if host in self._hosts])

    def _finish(self, temporary: str, hosts: list[str]) -> None:
        started = time.monotonic()
        each = {host: {"folder": self._states[host].folder} for host in hosts}
        common = {"temporary": temporary, **self._set}
        done = self._ask(
            on_node.finish, "verifying", self._read_all_sec, hosts, each=each, **common
        )
        self._seconds["verify"] += time.monotonic() - started
        self._arrived(dict.fromkeys(done, True))

    def _arrived(self, hosts: Mapping[str, bool]) -> None:
        """Note that these nodes have a valid copy now. hosts: node -> False where another run has made
        its copy."""
        for host, is_ours in hosts.items():
            self._folders[host] = self._states[host].folder
            if is_ours:
                self._sent.append(host)
        if hosts:
            say(
                f"stage: {self._source.num_bytes / 2**20:.1f} MiB on {', '.join(hosts)},"
                f" digests are right"
            )

    def record(self) -> StageRecord:
        """The stage record."""
        roots = {host: self._states[host].root for host in self._hosts}
        return StageRecord(
            digest=self._source.digest,
            bytes=self._source.num_bytes,
            folders={host: self._folders[host] for host in self._hosts},
            sent=self._sent,
            job=self._job,
            roots={} if self.settings.keep or self._job is None else roots,
            phase_sec={n: round(seconds, 3) for n, seconds in self._seconds.items() if seconds},
        )

    @property
    def _kind(self) -> str:
        return self._source.kind

    @property
    def _set(self) -> dict[str, Any]:
        """Arguments that every call about the set has."""
        return {"kind": self._source.kind, "digest": self._source.digest}

    @property
    def _is_here(self) -> bool:
        return self._pool.placement.is_here

    @property
    def _read_all_sec(self) -> float:
        """Timeout for reading the whole set on a node: its disk is broken if that takes longer."""
        return ASK_SEC + self._source.num_bytes / MIN_DISK_BYTES_PER_SEC

    def _roots(self) -> dict[str, dict[str, str]]:
        return {host: {"root": self._states[host].root} for host in self._hosts}

    def _ask(
        self,
        call: Callable[..., T],
        action: str,
        timeout_sec: float,
        hosts: list[str] | None = None,
        **arguments: Any,
    ) -> dict[str, T]:
        """The responses of the nodes on which the call succeeded; the others are dropped."""
        asked = self._hosts if hosts is None else hosts
        responses = self._pool.ask(call, timeout_sec=timeout_sec, hosts=asked, **arguments)
        self._drop({h: r for h, r in responses.items() if isinstance(r, NodeFailure)}, action)
        return {h: r for h, r in responses.items() if not isinstance(r, NodeFailure)}

    def _drop(self, failures: Mapping[str, NodeFailure], action: str) -> None:
        """Continue without these nodes. UnfitError that names them when fewer than min_nodes remain."""
        if not failures:
            return
        left = [host for host in self._hosts if host not in failures]
        error = failed_on(failures, action)
        if len(left) < self._min_nodes:
            raise error
        say(f"stage: continuing without {', '.join(failures)}: {error.what}")
        self._hosts = left
        self._folders = {host: f for host, f in self._folders.items() if host in left}


def _with_free(
    failures: Mapping[str, NodeFailure], free: Mapping[str, int | NodeFailure], root: str
) -> dict[str, NodeFailure]:
    """The failures with the free space of each node: for a full disk, sbcast gives no reason."""
    cause = "its disk is full now, or its connection broke"
    fix = "free space there, choose another stage.folder, or leave this node out (slurm.exclude)"
    explained = {}
    for host, failure in failures.items():
        left = free.get(host)
        known = f" ({left / 2**30:.2f} GiB are free in {root})" if isinstance(left, int) else ""
        explained[host] = NodeFailure(failure.message + known, cause, fix)
    return explained


def _may_run(job_id: str) -> bool:
    """Return whether this job is in the queue; true when Slurm does not answer."""
    try:
        job = slurm.show_job(job_id)
    except UnfitError:
        return True
    return job is not None and (job.is_living or job.is_waiting)
