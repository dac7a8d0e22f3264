"""Put token shards on the nodes that lack them: inspect, copy or send, verify. This host alone is one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forge.cluster import slurm
from forge.cluster.nodes import Answer, NodePool, Trouble, named
from forge.cluster.placement import Placement
from forge.core.config import Config
from forge.core.errors import UnfitError
from forge.core.machine import Machine, Stage
from forge.core.process import hostname
from forge.core.terminal import progress, say
from forge.data.shards import MANIFEST, ShardSet
from forge.staging import on_node
from forge.staging.archive import Member, Pack, make_pack
from forge.staging.environment import stage_project
from forge.staging.on_node import PARTS, SPARE_BYTES
from forge.staging.sbcast import COMPRESS_SHARDS_BELOW, Broadcast, Broken, is_slower
from forge.staging.staged import StageRecord

ASK_SEC = 30.0
MIN_DISK_BYTES_PER_SEC = 50 * 2**20  # a node's own disk that is slower counts as broken


def stage_nodes(
    source: ShardSet, config: Config, machine: Machine, placement: Placement, *, min_nodes: int
) -> StageRecord:
    """Put the set on every node of the placement that needs it.

    At least min_nodes must serve; nodes in trouble beyond that raise UnfitError that names them.
    """
    if placement.is_here:
        here = ThisHost(placement)
        return _stage(_Staging(here, source, config, machine.stage, min_nodes=min_nodes))
    python = stage_project(config, machine, placement) if machine.stage.project else None
    with NodePool(placement, python=python or sys.executable) as pool:
        record = _stage(_Staging(pool, source, config, machine.stage, min_nodes=min_nodes))
    return record.model_copy(update={"python": python})


class ThisHost:
    """This host alone, asked in this process: a NodePool without srun. An error is raised as it is."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def ask(
        self,
        question: str,
        *,
        timeout_sec: float,
        hosts: Iterable[str] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> dict[str, Answer]:
        """As `NodePool.ask`, but nothing ends it after timeout_sec."""
        answer = on_node.QUESTIONS[question]
        wanted = self.placement.hosts if hosts is None else hosts
        return {host: answer(**{**arguments, **(each or {}).get(host, {})}) for host in wanted}


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
    """The nodes that still take part, and what is known of each."""

    def __init__(
        self,
        pool: NodePool | ThisHost,
        source: ShardSet,
        config: Config,
        settings: Stage,
        *,
        min_nodes: int,
    ) -> None:
        job = pool.placement.job
        self._pool, self._source, self._config = pool, source, config
        self._job = job.id if job else slurm.this_job_id()  # None outside of Slurm
        self.settings, self._min_nodes = settings, min_nodes
        self._hosts = list(pool.placement.hosts)
        self._found: dict[str, dict[str, Any]] = {}  # by node, what `look` said
        self._folders: dict[str, str] = {}  # by node, what its ranks read
        self._sent: list[str] = []
        self._seconds = {"pack": 0.0, "send": 0.0, "check": 0.0}

    # --- what there is ---------------------------------------------------------------------------

    def look(self) -> None:
        """Ask every node what it has and what it can read, and say what follows."""
        self._found = self._ask(
            "look",
            "looking for the shards",
            self._read_all_sec,
            base=self.settings.folder,
            digest=self._source.digest,
            job=None if self.settings.keep else self._job,
            sender=None if self._is_here else hostname(),
            shared=str(self._source.folder.resolve()),
            mode=self.settings.mode,
        )
        unseen: dict[str, Trouble] = {}
        told: dict[str, list[str]] = {}
        for host, found in self._found.items():
            if found["in_place"]:
                self._folders[host] = str(self._source.folder.resolve())
                told.setdefault(f"reading in place ({found['why']})", []).append(host)
            elif self.settings.mode == "never":
                fix = "set stage.mode to auto, or mount the data folder there"
                unseen[host] = Trouble(found["why"], "stage.mode is never", fix)
            elif found["whole"]:
                self._folders[host] = found["folder"]
                told.setdefault(f"has the shards in {found['folder']}", []).append(host)
            else:
                why = found["damage"] and f"replacing a damaged copy: {found['damage']}"
                told.setdefault(why or f"gets the shards: {found['why']}", []).append(host)
        for what, hosts in told.items():
            say(f"stage: {', '.join(hosts)}: {what}")
        self._drop(unseen, "reading the shards in place")
        if self._is_here and any(found["in_place"] for found in self._found.values()):
            # Not on many nodes: each rank checks its share when it starts.
            self._source.verify()

    def claim(self) -> None:
        """Note on each node that this run uses the job's folder there."""
        if self._job:
            self._ask("mark", "staging", ASK_SEC, each=self._roots(), **self._claim)

    def withdraw(self) -> None:
        """Give up the job's folder on every node that has answered; what is kept lies elsewhere."""
        if self._job:
            each = {host: {"root": found["root"]} for host, found in self._found.items()}
            self._pool.ask("unmark", timeout_sec=ASK_SEC, hosts=each, each=each, **self._claim)

    @property
    def _claim(self) -> dict[str, Any]:
        return {"job": self._job, "run": self._config.run}

    def forget_ended_jobs(self) -> None:
        """Remove what jobs have left that Slurm no longer knows, or that have ended."""
        if self._job is None or not slurm.is_here():
            return
        left = {job for found in self._found.values() for job in found["jobs"]} - {self._job}
        ended = [f"job-{job}" for job in left if not _may_run(job)]
        if ended:
            free = self._ask(
                "forget", "removing old sets", ASK_SEC, each=self._roots(), names=ended
            )
            for host, bytes_free in free.items():
                self._found[host]["free"] = bytes_free
            say(f"stage: removed what ended jobs had left ({', '.join(sorted(ended))})")

    def lacking(self) -> list[str]:
        """Nodes that are still to get the set."""
        return [host for host in self._hosts if host not in self._folders]

    # --- to the nodes ----------------------------------------------------------------------------

    def send(self, hosts: list[str]) -> None:
        """One attempt to put the set on these nodes. Nodes that fail are dropped, for the next one."""
        hosts = self._with_space(hosts)
        if not hosts:
            return
        if self._is_here:
            self._copy(hosts)
            return
        pack = self._pack(hosts)
        for root in sorted({self._found[host]["root"] for host in hosts}):
            self._send_below(root, [h for h in hosts if self._found[h]["root"] == root], pack)

    def _with_space(self, hosts: list[str]) -> list[str]:
        # The parts of the pack may wait beside all that is unpacked already.
        pack, times = ("", 1) if self._is_here else (" and their pack", 2)
        needed = times * self._source.num_bytes + SPARE_BYTES
        full = {
            host: Trouble(
                f"{found['root']} has {found['free'] / 2**30:.2f} GiB free, the shards{pack} need"
                f" {needed / 2**30:.2f} GiB",
                "other jobs or older staged sets fill this disk",
                "remove old sets there, choose another stage.folder, or set stage.mode to never",
            )
            for host in hosts
            if (found := self._found[host])["free"] < needed
        }
        self._drop(full, "staging")
        return [host for host in hosts if host not in full]

    def _copy(self, hosts: list[str]) -> None:
        """Where the shared folder is read by one host, it copies by itself, without an archive."""
        shared, digest = str(self._source.folder.resolve()), self._source.digest
        each = {host: {"folder": self._found[host]["folder"]} for host in hosts}
        told = {"shared": shared, "digest": digest}
        copied = self._ask("copy", "copying", self._read_all_sec, hosts, each=each, **told)
        self._arrived(copied)

    def _pack(self, hosts: list[str]) -> Pack:
        started = time.monotonic()
        compress = is_slower((self._found[h]["link_mbit"] for h in hosts), COMPRESS_SHARDS_BELOW)
        source = self._source
        folder = Path(self._config.data) / "packs" / (source.digest[:32] + "-zstd" * compress)
        pack = Pack.open(folder)
        if pack is None:
            source.verify()
            shards = [Member(s.path, s.path.name, s.num_bytes) for s in source.train + source.val]
            manifest = source.folder / MANIFEST
            shards.append(Member(manifest, MANIFEST, manifest.stat().st_size))
            pack = make_pack(folder, shards, compress=compress)
        self._seconds["pack"] += time.monotonic() - started
        return pack

    def _send_below(self, root: str, hosts: list[str], pack: Pack) -> None:
        """Send to nodes that have the same root, unpack each part as it comes, check, rename."""
        assert self._job
        name = f"job-{self._job}/writing-{hostname()}-{os.getpid()}"
        temporary = f"{root}/{name}"
        hosts = list(self._ask("begin", "staging", ASK_SEC, hosts, temporary=temporary))
        started = time.monotonic()
        try:
            with (
                Broadcast(self._job, hosts) as broadcast,
                progress("stage", pack.num_bytes / 2**20, "MiB") as report,
            ):
                done = 0
                files = [pack.folder / part for part in pack.parts]
                for part in broadcast.send(files, f"{temporary}/{PARTS}"):
                    deadline = ASK_SEC + pack.parts[part] * 8 / MIN_DISK_BYTES_PER_SEC
                    here = [host for host in hosts if host in self._hosts]
                    self._ask("unpack", "unpacking", deadline, here, temporary=temporary, part=part)
                    done += pack.parts[part]
                    report(done / 2**20)
        except Broken as broken:
            free = self._pool.ask(
                "forget", timeout_sec=ASK_SEC, hosts=hosts, root=root, names=[name]
            )
            self._drop(_with_free(broken.troubles, free, root), "sbcast")
            return
        self._seconds["send"] += time.monotonic() - started
        self._finish(temporary, [host for host in hosts if host in self._hosts])

    def _finish(self, temporary: str, hosts: list[str]) -> None:
        started = time.monotonic()
        each = {host: {"folder": self._found[host]["folder"]} for host in hosts}
        told = {"temporary": temporary, "digest": self._source.digest}
        done = self._ask("finish", "checking", self._read_all_sec, hosts, each=each, **told)
        self._seconds["check"] += time.monotonic() - started
        self._arrived(dict.fromkeys(done, True))

    def _arrived(self, hosts: Mapping[str, bool]) -> None:
        """These nodes have the set, with right digests; False where another run has put it there."""
        for host, is_ours in hosts.items():
            self._folders[host] = self._found[host]["folder"]
            if is_ours:
                self._sent.append(host)
        if hosts:
            say(
                f"stage: {self._source.num_bytes / 2**20:.1f} MiB on {', '.join(hosts)},"
                f" digests are right"
            )

    def record(self) -> StageRecord:
        """What was done."""
        roots = {host: self._found[host]["root"] for host in self._hosts}
        return StageRecord(
            digest=self._source.digest,
            bytes=self._source.num_bytes,
            folders={host: self._folders[host] for host in self._hosts},
            sent=self._sent,
            job=self._job,
            roots={} if self.settings.keep or self._job is None else roots,
            parts_sec={n: round(seconds, 3) for n, seconds in self._seconds.items() if seconds},
        )

    @property
    def _is_here(self) -> bool:
        return self._pool.placement.is_here

    @property
    def _read_all_sec(self) -> float:
        """A node that has not read the whole set by then has a broken disk."""
        return ASK_SEC + self._source.num_bytes / MIN_DISK_BYTES_PER_SEC

    def _roots(self) -> dict[str, dict[str, str]]:
        return {host: {"root": self._found[host]["root"]} for host in self._hosts}

    def _ask(
        self,
        question: str,
        doing: str,
        timeout_sec: float,
        hosts: list[str] | None = None,
        **arguments: Any,
    ) -> dict[str, Answer]:
        """What nodes in order answer; those in trouble are dropped."""
        asked = self._hosts if hosts is None else hosts
        answers = self._pool.ask(question, timeout_sec=timeout_sec, hosts=asked, **arguments)
        self._drop({h: a for h, a in answers.items() if isinstance(a, Trouble)}, doing)
        return {host: reply for host, reply in answers.items() if host in self._hosts}

    def _drop(self, troubles: Mapping[str, Trouble], doing: str) -> None:
        """Go on without these nodes; UnfitError that names them where too few are left."""
        if not troubles:
            return
        left = [host for host in self._hosts if host not in troubles]
        error = named(troubles, doing)
        if len(left) < self._min_nodes:
            raise error
        say(f"stage: going on without {', '.join(troubles)}: {error.what}")
        self._hosts = left
        self._folders = {host: f for host, f in self._folders.items() if host in left}


def _with_free(
    troubles: Mapping[str, Trouble], free: Mapping[str, Answer], root: str
) -> dict[str, Trouble]:
    """sbcast says only `Unspecified error` of a full disk: add what the node knows of its space."""
    fix = "free space there, choose another stage.folder, or leave this node out (slurm.exclude)"
    return {
        host: Trouble(
            f"{trouble.message} ({free[host] / 2**30:.2f} GiB are free in {root})"
            if isinstance(free.get(host), int)
            else trouble.message,
            "its disk filled up meanwhile, or its connection broke",
            fix,
        )
        for host, trouble in troubles.items()
    }


def _may_run(job_id: str) -> bool:
    """Whether Slurm still has this job; yes while it does not answer."""
    try:
        job = slurm.show_job(job_id)
    except UnfitError:
        return True
    return job is not None and (job.is_living or job.is_waiting)
