"""Run a short distributed job on the nodes; if it fails, find the node at fault before a deadline."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forge.core import records
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.core.process import stop_with_parent
from forge.core.records import Check
from forge.core.terminal import say, unstamped
from forge.hosts import rendezvous
from forge.hosts.nodes import NodesFailed
from forge.hosts.placement import Placement, WorldLayout
from forge.hosts.rendezvous import EndpointError, JoinError
from forge.launch.launcher import run_ranks
from forge.launch.lost_ranks import PEER_LOST
from forge.launch.rank_records import PreflightTask, RankRecord
from forge.preflight.bisection import Group, NoTimeLeft, SearchResult, find_broken
from forge.preflight.rank_checks import rank_checks
from forge.slurm.slurm import NodeUnfit

# What each further node, and each rank on it, adds to the deadline of one node: srun starts more
# processes, and every rank reads a key of every other one from the store of rank 0 and connects to it. A
# read takes 14 µs where nobody else reads, so that rank 0 serves 512 ranks for 4 s at least.
NODE_SEC, RANK_SEC = 1.0, 0.25
# Shares of the deadline that come on top of it where the first trial fails: for a repetition, and for the
# search, which has what the trials have left of the deadline, too.
REPEAT_SHARE, SEARCH_SHARE = 0.5, 0.5
# Timeout of one collective once all ranks have joined, longer with more nodes. It is half as long in the
# search, which takes about 8 trials in a row with 16 nodes, and shorter where the deadline is short.
TALK_SEC, TALK_SHARE = 10.0, 1 / 9
# Longest and shortest time of a later trial, for which the page cache holds torch.
TRY_SEC, SHORTEST_TRY_SEC = 30.0, 8.0
# The check that fails where ranks cannot start at the endpoint that was asked for: no node is at fault.
ENDPOINT = "endpoint"
# Ranks of a preflight have nothing to save.
GRACE_SEC = 5.0


def deadline_sec(machine: Machine, layout: WorldLayout) -> float:
    """Deadline of a launch of these ranks: preflight.deadline_sec, and more for more than one node."""
    of_node = NODE_SEC + RANK_SEC * layout.ranks_per_node
    return machine.preflight.deadline_sec + (layout.nodes - 1) * of_node


@dataclass(frozen=True)
class Result:
    """Result of a trial. names_nobody: the ranks failed, and none of them is known to be the reason:
    they were too late, or lost each other. Then the start may have been slow, and the nodes healthy."""

    checks: list[Check]
    names_nobody: bool = False


@dataclass(frozen=True)
class Trial:
    """One launch of the ranks of some hosts. Can be pickled for another process."""

    folder: Path  # for files and logs, laid out as a run's directory
    machine: Machine
    ranks_per_node: int
    placement: Placement
    python: str
    talk_sec: float
    nccl_file: str
    deadline_sec: float

    def run(self) -> Result:
        """Launch the ranks; their checks, or a failed one that says why they did not complete.

        Raises SlurmSilent, and UnfitError where the fault is of none of these nodes, such as a full disk.
        """
        started = time.time()
        try:
            record = run_ranks(
                PreflightTask(patience_sec=self.talk_sec, nccl_file=self.nccl_file),
                RunPaths(self.folder),
                self.machine,
                self.layout,
                placement=self.placement,
                python=self.python,
                deadline_sec=self.deadline_sec,
            )
        except EndpointError as err:
            return Result([Check(ENDPOINT, "fail", err.what, err.fix, err.cause)])
        except NodesFailed as err:
            return Result([Check("rendezvous", "fail", err.what, err.fix, err.cause)])
        except NodeUnfit as err:
            fix = "leave the node out (slurm.exclude in machine.yaml), or repair it"
            return Result([Check("rendezvous", "fail", err.what, fix, err.cause)])
        if record.status == "completed":
            return Result(list(rank_checks(record, self.layout, self.machine)))
        late = time.time() - started >= self.deadline_sec
        limit = f"not done within {self.deadline_sec:.3g} s: " if late else ""
        logs = RunPaths(self.folder).logs
        said = f" ({error})" if (error := last_error(logs, started)) else ""
        fix = f"read the ranks' logs in {logs}"
        check = Check("rendezvous", "fail", f"{limit}{record.message}{said}", fix)
        return Result([check], late or _names_nobody(record))

    @property
    def layout(self) -> WorldLayout:
        return WorldLayout(len(self.placement.hosts), self.ranks_per_node)


def _names_nobody(record: RankRecord) -> bool:
    lost = record.cause == PEER_LOST and not record.host
    return lost or record.cause == JoinError.__name__


def last_error(logs: Path, since: float) -> str:
    """The last line in logs changed since then that Python or srun printed for an error; "" if none."""
    fresh = [path for path in logs.glob("*.log") if path.stat().st_mtime >= since]
    lines = [
        unstamped(line)[1]
        for path in fresh
        for line in path.read_text(errors="replace").splitlines()
    ]
    errors = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: |srun: error: ", line)
    ]
    return errors[-1][:300] if errors else ""


class Prober:
    """Launches the ranks of any nodes of a placement, and searches for the fault where they fail."""

    def __init__(
        self,
        paths: RunPaths,
        machine: Machine,
        ranks_per_node: int,
        placement: Placement,
        *,
        python: str,
        addresses: Mapping[str, str],
    ) -> None:
        """python: the interpreter of the ranks. addresses: of the hosts, on the interface that their
        ranks use. The deadline of the first trial counts from here."""
        self._paths, self._ranks, self._placement = paths, ranks_per_node, placement
        self._python, self._addresses = python, addresses
        self._sec = deadline_sec(machine, WorldLayout(len(placement.hosts), ranks_per_node))
        self._grown = self._sec / machine.preflight.deadline_sec
        self._end = time.monotonic() + self._sec  # of all trials
        self._machine = _with_short_timeouts(machine, self._sec)
        self.trials = paths.allocation / "trials"  # files and logs of the search
        self._tried: dict[frozenset[str], list[Check]] = {}
        shutil.rmtree(self.trials, ignore_errors=True)

    def together(self, hosts: Sequence[str]) -> list[Check]:
        """Checks of all ranks of these hosts together. In a job the first trial is repeated where it
        failed and named nobody: a healthy node that is left out costs the wait in the queue again."""
        is_first = not self._tried
        sec = self._sec if is_first else max(SHORTEST_TRY_SEC, self._end - time.monotonic())
        root = self._paths.root
        with _nccl_log(self._paths.logs):
            result = self._trial(hosts, root, sec).run()
            if is_first and result.names_nobody and self._placement.job:
                sec = REPEAT_SHARE * self._sec
                say(f"{_failure(result.checks)}\ntrying once more, for {sec:.3g} s at most …")
                result = self._trial(hosts, root, sec).run()
        return self._note(hosts, result.checks)

    def search(self, hosts: Sequence[str]) -> SearchResult:
        """Find the nodes or pairs at fault among hosts that fail together."""
        say(f"{len(hosts)} nodes fail together; looking for the node or the pair at fault …")
        self._end = max(self._end, time.monotonic() + SEARCH_SHARE * self._sec)
        context = multiprocessing.get_context("spawn")
        with (
            _nccl_log(self._paths.logs),
            ProcessPoolExecutor(2, context, _begin_trials) as pool,
        ):
            return find_broken(hosts, lambda groups: self._work(groups, pool))

    def known(self, hosts: Sequence[str]) -> list[Check] | None:
        """Checks of exactly these hosts, if they were tried together."""
        return self._tried.get(frozenset(hosts))

    @property
    def has_time(self) -> bool:
        """Return whether one more trial may start."""
        return self._end - time.monotonic() >= SHORTEST_TRY_SEC

    def reason(self, *hosts: str) -> str:
        """Why the smallest trial that has all these hosts failed."""
        failures = [
            (len(tried), failure)
            for tried, results in self._tried.items()
            if tried >= set(hosts) and (failure := _failure(results))
        ]
        return min(failures)[1] if failures else ""

    def _work(self, groups: Sequence[Group], pool: ProcessPoolExecutor) -> list[bool]:
        """Return whether each of these groups works, tried at the same time. Raises NoTimeLeft."""
        if not self.has_time:
            raise NoTimeLeft
        left = self._end - time.monotonic()
        say(f"  trying {' and '.join('+'.join(group) for group in groups)}")
        trials = [
            self._trial(group, self.trials / "+".join(group)[:100], min(left, TRY_SEC))
            for group in groups
        ]
        running = [pool.submit(trial.run) for trial in trials]
        for group, future in zip(groups, running, strict=True):
            self._note(group, future.result().checks)
        return [not _failure(self._tried[frozenset(group)]) for group in groups]

    def _trial(self, hosts: Sequence[str], folder: Path, sec: float) -> Trial:
        talk_sec, machine = min(self._grown * TALK_SEC, TALK_SHARE * self._sec), self._machine
        if folder != self._paths.root:
            talk_sec /= 2
            if rendezvous.host(machine.fabric, ""):  # which is the first node of all hosts
                machine = _with_fabric(machine, master_addr=self._addresses[hosts[0]])
        return Trial(
            folder,
            machine,
            self._ranks,
            self._placement.only(hosts),
            self._python,
            talk_sec,
            _nccl_file(self._paths.logs),
            sec,
        )

    def _note(self, hosts: Sequence[str], results: list[Check]) -> list[Check]:
        self._tried[frozenset(hosts)] = results
        return results


def _failure(results: Sequence[Check]) -> str:
    """Why a trial failed, in one line; empty where it did not."""
    return " ".join(records.summary_of_checks(records.failed_checks(results)).split())


def _with_short_timeouts(machine: Machine, sec: float) -> Machine:
    """The machine with timeouts of a preflight: a rendezvous that fails must not take minutes. sec: the
    deadline of a trial."""
    rendezvous_sec = max(TALK_SEC, sec / 3)
    machine = _with_fabric(machine, timeout_sec=min(machine.fabric.timeout_sec, rendezvous_sec))
    grace_sec = min(machine.stop_grace_sec, GRACE_SEC)
    return machine.model_copy(update={"stop_grace_sec": grace_sec})


def _with_fabric(machine: Machine, **values: object) -> Machine:
    return machine.model_copy(update={"fabric": machine.fabric.model_copy(update=values)})


def _begin_trials() -> None:
    """Start of a process for trials of some of the hosts: their machine says where the ranks meet."""
    stop_with_parent()
    os.environ.pop("MASTER_ADDR", None)


def _nccl_file(logs: Path) -> str:
    """NCCL_DEBUG_FILE, one file a process: NCCL puts the host for %h and the pid for %p."""
    return f"{logs.absolute()}/nccl.%h.%p.txt"


@contextmanager
def _nccl_log(logs: Path) -> Iterator[None]:
    """Have NCCL log which network it chose: ranks that start meanwhile inherit these variables."""
    wanted = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": _nccl_file(logs),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: before[name] or value for name, value in wanted.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
