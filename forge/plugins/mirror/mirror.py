"""A launch on nodes that do not see the directory of its run (`stage.results: first_node`).

On the disk of each such node a directory stands for it, at the same path on all. The node's agent says
what ranks have changed there, and this process writes that into the run's directory, and gives the node
what others have: so launcher, sealer, logs and status read the files that they always read. A node whose
connection ends counts as lost, and the launch with it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from forge.core.errors import ConfigError, Exit, ForgeError
from forge.core.files import short_id
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.core.process import hostname
from forge.core.program_settings import STEP, filled
from forge.hosts.nodes import NodeFailure, NodePool, failed_on
from forge.hosts.placement import Placement
from forge.launch.lost_ranks import PEER_LOST
from forge.launch.rank_records import STOP_ASKED, LaunchSpec, ProgramTask, RankRecord, reserves
from forge.plugins.mirror.arrivals import Arrivals, RankFiles
from forge.plugins.mirror.mirror_on_node import begin_mirror, link_mirror
from forge.plugins.mirror.mirrored_node import MirroredNode, NodeGone

EVERY_SEC = 1.0  # between two rounds, as the launcher looks at the files of ranks
BEGIN_SEC = 60.0
END_SEC = 120.0  # for what is left to come after the last rank has exited
# Files of Forge's trainer: those of other ranks come from their nodes.
TRAINER_PARTS = r"\.writing-step-[0-9]{8,}/__({ranks})_[0-9]+\.distcp"


def is_needed(machine: Machine, placement: Placement) -> bool:
    """Return whether ranks of a launch run on nodes that do not see the directory of the run."""
    return machine.stage.results == "first_node" and bool(_others(placement).hosts)


def _others(placement: Placement) -> Placement:
    return placement.without([hostname()])


class Mirror:
    """The directories of one launch on the nodes that do not see the run's. A context manager.

    lost: nodes whose connection has ended, and why.
    """

    def __init__(
        self, spec: LaunchSpec, paths: RunPaths, placement: Placement, python: str, checkpoint: str
    ) -> None:
        """python: of the agents. checkpoint: on the disks of these nodes, which ranks resume from; "" for
        none. Raises, on entry, UnfitError that names nodes which fail, ConfigError where their disks
        have other directories than this one, and SlurmSilent."""
        self._spec, self._paths, self._checkpoint = spec, paths, checkpoint
        self._placement = placement
        self._pool = NodePool(_others(placement), python=python)
        self._ending = threading.Event()
        self._nodes: list[MirroredNode] = []
        self._threads: list[threading.Thread] = []
        self.lost: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._pool.__enter__()
        try:
            self.folder = self._begin()
            self._nodes = [self._node(host) for host in _others(self._placement).hosts]
            for node in self._nodes:
                node.begin(self._files(node))
                thread = threading.Thread(
                    target=self._follow, args=[node], name=node.host, daemon=True
                )
                self._threads.append(thread)
                thread.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._pool.__exit__()

    @property
    def spec_path(self) -> Path:
        """The path of the spec on all nodes."""
        return self.folder / self._spec.path.relative_to(self._paths.root)

    def finish(self) -> None:
        """Wait for what has not come yet, after the last rank has exited; a rank whose node is lost gets
        the record that says so."""
        self._ending.set()
        end = time.monotonic() + END_SEC
        for node, thread in zip(self._nodes, self._threads, strict=True):
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.lost.setdefault(node.host, f"its last files took longer than {END_SEC:g} s")
            if why := self.lost.get(node.host):
                _record_loss(self._spec, node, why)

    def _begin(self) -> Path:
        spec, stage = self._spec, self._spec.machine.stage
        assert spec.job
        keys: dict[str, Any] = {
            "base": stage.folder,
            "job": spec.job,
            "name": short_id(os.path.realpath(self._paths.root)),
        }
        here = link_mirror(**keys, run=self._paths.root)
        answers = self._pool.ask(
            begin_mirror, timeout_sec=BEGIN_SEC, again=False, **keys, checkpoint=self._checkpoint
        )
        failures = {host: a for host, a in answers.items() if isinstance(a, NodeFailure)}
        if failures:
            raise failed_on(failures, "making a directory for the run")
        others = {host: folder for host, folder in answers.items() if folder != str(here)}
        if others:
            raise ConfigError(
                "stage.results: first_node needs the same directory on every node, but these differ: "
                + ", ".join(f"{h} {f}" for h, f in [(hostname(), str(here)), *others.items()]),
                fix="set stage.folder in machine.yaml",
            )
        return here

    def _node(self, host: str) -> MirroredNode:
        spec, per_node = self._spec, self._spec.ranks_per_node
        first = self._placement.hosts.index(host) * per_node
        ranks = range(first, first + per_node)
        files = RankFiles(
            launch=spec.launch,
            log_prefix=spec.log_prefix,
            ranks=ranks,
            parts=_parts(spec, ranks),
            begun=not isinstance(spec.task, ProgramTask),
            beats=_beats(spec, self._paths, ranks),
        )
        draft = spec.directory / f"arriving-{host}"
        arrivals = Arrivals(self._paths.root, files, draft)
        return MirroredNode(host, str(self.folder), self._pool, arrivals)

    def _files(self, node: MirroredNode) -> dict[str, bytes]:
        """Files that the node gets before its ranks start."""
        spec, paths, folder = self._spec, self._paths, self.folder
        task = spec.task
        if isinstance(task, ProgramTask) and task.resume:
            there = RunPaths(folder).checkpoints / Path(task.resume).name
            task = task.model_copy(update={"resume": str(there)})
        own = spec.model_copy(update={"run": str(folder), "kernels": "", "task": task})
        draft = spec.path.with_name(f"spec-{node.host}.json")
        own.write(draft)
        files = {
            str(spec.path.relative_to(paths.root)): draft.read_bytes(),
            **{
                str(path.relative_to(paths.root)): path.read_bytes()
                for path in reserves(spec, node.arrivals.files.ranks)
            },
        }
        with suppress(FileNotFoundError):
            files[paths.config.name] = paths.config.read_bytes()
        return files

    def _follow(self, node: MirroredNode) -> None:
        """Rounds with one node until the launch ends, and then until nothing comes any more."""
        try:
            while not self._ending.wait(EVERY_SEC):
                node.round(self._given(node))
            left = 2  # in one of them a file may have changed while it was read
            while left:
                left = 2 if node.round({}) else left - 1
        except NodeGone as err:
            self.lost[node.host] = str(err)
        except ValueError as err:  # no base64, no JSON
            self.lost[node.host] = f"its answer cannot be read: {err}"
        except BaseException as err:  # a bug: the launch must not wait for files that never come
            self.lost[node.host] = f"{type(err).__name__}: {err}"
            raise

    def _given(self, node: MirroredNode) -> dict[str, bytes]:
        """Files that others have changed and that ranks of the node read."""
        paths, spec = self._paths, self._spec
        candidates = [paths.stop, spec.directory / STOP_ASKED]
        if isinstance(spec.task, ProgramTask):
            candidates += sorted(paths.heartbeats.glob("*"))
            candidates += [
                paths.root / n for n in _beats(spec, paths, range(spec.layout.world_size))
            ]
        return node.changed(candidates)


def _record_loss(spec: LaunchSpec, node: MirroredNode, why: str) -> None:
    message = f"the connection to {node.host} has ended: {why}"
    for rank in node.arrivals.files.ranks:
        if RankRecord.read(spec, rank).status == "lost":
            record = RankRecord("lost", rank, Exit.UNFIT, cause=PEER_LOST, message=message)
            with suppress(ForgeError):  # on a full disk the missing record says the same
                replace(record, host=node.host, ended=time.time()).write(spec)


def _parts(spec: LaunchSpec, ranks: range) -> str:
    """The files of checkpoints that these ranks write."""
    if not isinstance(spec.task, ProgramTask):
        return TRAINER_PARTS.replace("{ranks}", "|".join(map(str, ranks)))
    settings = spec.task.program.checkpoints
    if settings is None:
        return ""
    before, _, after = map(re.escape, settings.pattern.partition(STEP))
    return f"{before}[0-9]+{after}(/.+)?"


def _beats(spec: LaunchSpec, paths: RunPaths, ranks: range) -> list[str]:
    """Names of the heartbeats of these ranks in the directory of the run, where the config names
    them."""
    task = spec.task
    template = (
        isinstance(task, ProgramTask) and task.program.heartbeat and task.program.heartbeat.file
    )
    if not template:
        return []
    root = paths.root.absolute()
    beats = [Path(filled(template, {"run": root, "rank": rank})) for rank in ranks]
    return [str(beat.relative_to(root)) for beat in beats if beat.is_relative_to(root)]
