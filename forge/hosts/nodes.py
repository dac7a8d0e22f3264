"""Run functions on all nodes at once. A node that does not respond is reported and delays no other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeVar, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from forge.core.errors import UnfitError
from forge.core.process import hostname, stop_with_parent
from forge.hosts.container import START_SEC, inside
from forge.hosts.placement import Placement
from forge.slurm import slurm

END_SEC = 5.0  # an agent that still runs this long after its input was closed is killed
LAST_LINES = 3  # of the output of an agent that has ended
BLOCK = 2**16
# In the failure of a node whose own disk is full, read-only or broken; sbcast gives no reason for that.
_OF_DISK = re.compile(
    r"No space left on device|Read-only file system|Input/output error|GiB free"
    r"|REQUEST_FILE_BCAST|sbcast: Unspecified error"
)
ANSWER_SEC = 20.0  # for a node to start a process that does nothing
ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class NodeFailure:
    """Why a call failed on a node, with cause and fix where they are known."""

    message: str
    cause: str = ""
    fix: str = ""


T = TypeVar("T")


@dataclass(frozen=True)
class Agent:
    """The process of an agent."""

    host: str
    pid: int


def hello() -> Agent:
    """The agent that runs this: the call that only asks whether it has started."""
    return Agent(hostname(), os.getpid())


class NodePool:
    """One agent process (`forge.node_agent`) on each host of a placement. A context manager.

    Each agent is started by an srun of its own, so that a dead or frozen node delays no other; without
    srun where the placement is this host alone. The response of an agent that has not started within
    `start_sec` (START_SEC at least, in a container), or has ended, is that NodeFailure, at once. One that
    was killed is started again, once for each call: that is no evidence about its node. Raises
    SlurmSilent where Slurm itself starts none.
    """

    def __init__(
        self, placement: Placement, *, python: str = sys.executable, start_sec: float = 30
    ) -> None:
        self.placement = placement
        self._python = python
        self._start_sec = max(start_sec, START_SEC) if placement.container else start_sec
        self._name = f"pool-{os.getpid()}"  # of the Slurm steps
        self._members: dict[str, _Member] = {}
        self._asked = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(
        self,
        call: Callable[..., T],
        *,
        timeout_sec: float,
        hosts: Collection[str] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        again: bool = True,
        **arguments: Any,
    ) -> dict[str, T | NodeFailure]:
        """Value of the function on each host, in the placement's order, within `timeout_sec`.

        call: one of forge.node_agent.CALLS, or of the hook `agent_functions`. hosts: None for all.
        each: more arguments, by host. again: whether a new agent is asked, in the same time again, where
        the agent was killed; False for a call that leaves something in the agent. Several threads may
        ask, each of them other hosts.
        """
        wanted = [host for host in self.placement.hosts if hosts is None or host in hosts]
        answers = self._ask(call, timeout_sec, wanted, each, arguments)
        killed = [host for host in wanted if again and self._members[host].was_killed]
        for host in killed:
            self._members[host].release()
            self._members[host] = _Member(self._command(host), self.placement)
        return answers | self._ask(call, timeout_sec + self._start_sec, killed, each, arguments)

    def _ask(
        self,
        call: Callable[..., T],
        timeout_sec: float,
        wanted: Sequence[str],
        each: Mapping[str, Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> dict[str, T | NodeFailure]:
        """Ask these hosts once, as `ask`, without a new agent where one was killed."""
        name = call.__name__
        number = self._asked = self._asked + 1  # of each host's calls, each number once
        for host in wanted:
            values = {**arguments, **(each or {}).get(host, {})}
            self._members[host].put(number, name, values)
        members = [self._members[host] for host in wanted]
        _exchange(members, number, time.monotonic() + timeout_sec)
        late = NodeFailure(f"no answer to {name!r} within {timeout_sec:g} s")
        taken = {host: self._members[host].take(number, late) for host in wanted}
        return {host: _typed(call, response) for host, response in taken.items()}

    def _start(self) -> None:
        """Start the agents; again where Slurm itself is the reason that there is none. Raises SlurmSilent
        when it stays that."""
        patience = slurm.Patience("asking the nodes")
        errors = self._start_on(self.placement.hosts)
        while errors:
            error = next(iter(errors.values()))
            if not patience.again(error):
                raise slurm.silent(error)
            for host in errors:
                self._members[host].close()
                self._members[host].release()
            errors = self._start_on(errors)

    def _start_on(self, hosts: Iterable[str]) -> dict[str, str]:
        """Start agents on these hosts; by host, the error where Slurm itself started none. An agent that
        fails otherwise is given up."""
        for host in hosts:
            self._members[host] = _Member(self._command(host), self.placement)
        answers = self.ask(hello, timeout_sec=self._start_sec, hosts=list(hosts))
        failures = {h: a for h, a in answers.items() if isinstance(a, NodeFailure)}
        errors = {host: self._members[host].error() for host in failures}
        if self.placement.job and not all(errors.values()):
            away = slurm.controller_trouble()  # an srun that waits for it says nothing
            errors = {host: error or away for host, error in errors.items()}
        for host, failure in failures.items():
            if not slurm.is_slurms_own(errors[host]):
                self._members[host].give_up(failure)
        return {host: error for host, error in errors.items() if slurm.is_slurms_own(error)}

    def _command(self, host: str) -> list[str]:
        placement = self.placement
        entry = [placement.python(self._python), "-m", "forge.node_agent"]
        entry = inside(placement.container, entry)
        if placement.is_here:
            return entry
        assert placement.job
        # With the GPUs and all cores, for preflight to see and for copies. A number of cores would be
        # refused where it is not what Slurm counts: it lists each thread of a core.
        options = ("--overlap", f"--job-name={self._name}", *placement.srun_options)
        line = slurm.srun(placement.job.id, [host], cpus_per_task=None, options=options)
        return [*line, *entry]

    def _end(self) -> None:
        """End all agents: by closing their input, else by SIGKILL."""
        end = time.monotonic() + END_SEC
        members = self._members.values()
        for member in members:
            member.close()
        stuck = [member for member in members if not member.has_ended(end - time.monotonic())]
        if stuck and self.placement.job and not self.placement.is_here:
            # A task survives when its srun is killed.
            slurm.cancel_step(self.placement.job.id, self._name)
        for member in members:
            member.release()


def _typed(call: Callable[..., T], response: Any) -> T | NodeFailure:
    """The response, which came as JSON, as the type that the function returns."""
    if isinstance(response, NodeFailure):
        return response
    try:
        return TypeAdapter(get_type_hints(call)["return"]).validate_python(response)
    except ValidationError as err:
        return NodeFailure(
            f"its answer to {call.__name__!r} cannot be read: {' '.join(str(err).split()):.200}",
            cause="it has another version of Forge",
            fix="install the same version on all nodes",
        )


class NodesFailed(UnfitError):
    """An action failed on these nodes."""

    failures: Mapping[str, NodeFailure]


def failed_on(failures: Mapping[str, NodeFailure], action: str) -> NodesFailed:
    """The error for an action that failed on these nodes, with their causes and fixes."""
    error = NodesFailed(
        f"{action} failed on "
        + "; ".join(f"node {host}: {failure.message}" for host, failure in failures.items()),
        cause="; ".join(dict.fromkeys(f.cause for f in failures.values() if f.cause)),
        fix="; ".join(dict.fromkeys(f.fix for f in failures.values() if f.fix))
        or "leave these nodes out (slurm.exclude in machine.yaml), or repair them",
    )
    error.failures = failures
    return error


def at_fault(
    failures: Mapping[str, NodeFailure], placement: Placement, folder: Path
) -> dict[str, str]:
    """The nodes that failed for a reason of their own, and why: a disk that fails on them, and not on all
    of several nodes, or they do not start a process. folder: on the disks of the nodes."""
    broken = {host: f.message for host, f in failures.items() if _OF_DISK.search(f.message)}
    if placement.is_here:  # the shared file system may fail there, too
        broken = {host: message for host, message in broken.items() if str(folder) in message}
    if len(broken) == len(placement.hosts) > 1:
        broken = {}  # it is not their own disk, or too much was asked for
    others = placement.only([host for host in failures if host not in broken])
    return broken | dict.fromkeys(unresponsive(others), "does not start a process")


def unresponsive(placement: Placement) -> list[str]:
    """Nodes of the placement that start no process any more. A node that is only slow is asked twice:
    the caller leaves the others out of the run from now on.

    Slurm is asked to start `true` there, not a NodePool: whether a node is blamed must not depend on the
    project's file system, nor on a controller that is away.
    """
    if placement.job is None or placement.is_here:
        return []
    job_id = placement.job.id
    return _without_answer(job_id, _without_answer(job_id, placement.hosts))


def _without_answer(job_id: str, hosts: Sequence[str]) -> list[str]:
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        well = pool.map(lambda host: slurm.answers(job_id, host, ANSWER_SEC), hosts)
        return [host for host, answered in zip(hosts, well, strict=True) if not answered]


class UnresponsiveNodes:
    """The nodes of `unresponsive`, which are asked once, while the caller does something else."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._answer: Future[list[str]] | None = None

    def ask(self) -> None:
        """Begin to ask; the second call does nothing."""
        if self._answer is None:
            self._answer = Future()
            threading.Thread(target=self._run, args=(self._answer,), daemon=True).start()

    def _run(self, answer: Future[list[str]]) -> None:
        try:
            answer.set_result(unresponsive(self._placement))
        except BaseException as err:
            answer.set_exception(err)

    def names(self) -> list[str]:
        """Wait for the answers. Raises as `unresponsive`."""
        self.ask()
        assert self._answer
        return self._answer.result()


class _Member:
    """The agent of one host: calls to be sent, and its responses."""

    def __init__(self, command: list[str], placement: Placement) -> None:
        self._container = placement.container
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the member
        self._outbox, self._inbox = b"", b""
        self._responses: dict[int, Any] = {}  # JSON values, or NodeFailures
        self._gone: NodeFailure | None = None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**slurm.environment(), **placement.variables},
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the agents
            preexec_fn=stop_with_parent,  # noqa: PLW1509  no threads run here
        )
        self.calls = cast("IO[bytes]", self._process.stdin)
        self.responses = cast("IO[bytes]", self._process.stdout)
        for pipe in (self.calls, self.responses):
            os.set_blocking(pipe.fileno(), False)  # a frozen node must not block this process

    def put(self, number: int, call: str, values: Mapping[str, Any]) -> None:
        if self._gone is None:
            message = {"id": number, "do": call, "with": to_jsonable_python(values)}
            self._outbox += json.dumps(message, allow_nan=False).encode() + b"\n"

    @property
    def was_killed(self) -> bool:
        """Return whether the agent's process was killed, or its srun, or the task of that srun."""
        return self._process.poll() in (-signal.SIGKILL, 128 + signal.SIGKILL)

    def is_waiting_for(self, number: int) -> bool:
        return self._gone is None and number not in self._responses

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._outbox)

    def send(self) -> None:
        try:
            self._outbox = self._outbox[os.write(self.calls.fileno(), self._outbox) :]
        except BrokenPipeError:
            self._outbox = b""  # `receive` finds the end of the output, and the reason

    def receive(self) -> None:
        data = os.read(self.responses.fileno(), BLOCK)
        if not data:
            self._gone = self._why_ended()
            return
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        for line in lines:
            if not line.startswith(b'{"id"'):
                continue  # output of a site's task prolog
            reply = json.loads(line)
            self._responses[reply["id"]] = (
                NodeFailure(reply["error"], reply["cause"], reply["fix"])
                if "error" in reply
                else reply["value"]
            )

    def take(self, number: int, late: NodeFailure) -> Any:
        """The response to this call; late responses to earlier ones are dropped."""
        response = self._responses.get(number, self._gone or late)
        self._responses.clear()
        return response

    def give_up(self, failure: NodeFailure) -> None:
        self._gone = self._gone or failure

    def _why_ended(self) -> NodeFailure:
        """The last lines that the agent or its srun wrote to standard error."""
        self.has_ended(END_SEC)
        lines = self.error().splitlines()
        said = f"its process ended: {' | '.join(lines[-LAST_LINES:]) or 'no output'}"
        if self._container:
            return NodeFailure(
                said,
                cause=f"{self._container.settings.image} does not start there, or has no Forge at"
                f" {self._container.python}",
                fix="run forge preflight in this allocation, which says what is missing on which node",
            )
        return NodeFailure(
            said,
            cause="the node is down, or does not see this Python and the project",
            fix="check that the node is up and sees the project directory (or set stage.project: auto)",
        )

    def error(self) -> str:
        """Text that the agent and its srun have written to standard error so far."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode(errors="replace").strip()

    def close(self) -> None:
        self._outbox = b""
        with contextlib.suppress(BrokenPipeError):
            self.calls.close()

    def has_ended(self, timeout_sec: float) -> bool:
        try:
            self._process.wait(max(0, timeout_sec))
        except subprocess.TimeoutExpired:
            return False
        return True

    def release(self) -> None:
        """Kill the process if it still runs, and close its files."""
        self._process.kill()
        self.has_ended(END_SEC)  # not for ever: it may wait in the kernel, for a file system
        self.responses.close()
        self._errors.close()


def _exchange(members: list[_Member], number: int, end: float) -> None:
    """Send and receive until every member has responded, or until `end` (monotonic clock)."""
    with selectors.DefaultSelector() as selector:
        while waiting := [member for member in members if member.is_waiting_for(number)]:
            for member in waiting:
                selector.register(member.responses, selectors.EVENT_READ, member.receive)
                if member.has_more_to_send:
                    selector.register(member.calls, selectors.EVENT_WRITE, member.send)
            ready = selector.select(max(0, end - time.monotonic()))
            for key, _ in ready:
                key.data()
            for key in list(selector.get_map().values()):
                selector.unregister(key.fileobj)
            if not ready:
                return
