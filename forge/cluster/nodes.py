"""Run functions on all nodes at once; a node that does not answer is reported and blocks nobody."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Self, cast

from forge.cluster import slurm
from forge.cluster.placement import Place
from forge.core.errors import UnfitError
from forge.core.process import stop_with_parent

END_SEC = 5.0  # a node's process that has not ended by then after its input was closed is killed
LAST_LINES = 3  # of what a process wrote before it ended
BLOCK = 2**16
ANSWER_SEC = 20.0  # for a node to start a process that does nothing
ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class Trouble:
    """Why a node gave no answer, with cause and fix where the node knows them."""

    message: str
    cause: str = ""
    fix: str = ""


Answer = Any  # what a question returns, or a Trouble


class NodePool:
    """One process on each host of a place that answers questions (`forge.node_agent`). A context manager.

    Without srun where the place is this host alone, else by one srun for each host, so that a node
    which is dead or frozen holds up nobody else. A node whose process has not said hello within
    `start_sec`, or has ended, answers every question with that Trouble at once.
    """

    def __init__(
        self, place: Place, *, python: str = sys.executable, start_sec: float = 30
    ) -> None:
        self.place = place
        self._python, self._start_sec = python, start_sec
        self._name = f"pool-{os.getpid()}"  # of the Slurm steps
        self._members: dict[str, _Member] = {}
        self._asked = 0

    def __enter__(self) -> Self:
        try:
            for host in self.place.hosts:
                self._members[host] = _Member(self._command(host))
            for host, reply in self.ask("hello", timeout_sec=self._start_sec).items():
                if isinstance(reply, Trouble):
                    self._members[host].give_up(reply)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(
        self,
        question: str,
        *,
        timeout_sec: float,
        hosts: Iterable[str] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> dict[str, Answer]:
        """Answers by host, in the place's order, within `timeout_sec`.

        hosts: who is asked; all where None. each: arguments by host, beside those for all.
        """
        self._asked += 1
        wanted = self.place.only(list(hosts)).hosts if hosts is not None else self.place.hosts
        for host in wanted:
            values = {**arguments, **(each or {}).get(host, {})}
            self._members[host].put(self._asked, question, values)
        members = [self._members[host] for host in wanted]
        _exchange(members, self._asked, time.monotonic() + timeout_sec)
        late = Trouble(f"no answer to {question!r} within {timeout_sec:g} s")
        return {host: self._members[host].take(self._asked, late) for host in wanted}

    def _command(self, host: str) -> list[str]:
        entry = [self._python, "-m", "forge.node_agent"]
        if self.place.is_here:
            return entry
        assert self.place.job
        options = ("--overlap", "--gres=none", f"--job-name={self._name}")
        return [*slurm.srun(self.place.job.id, [host], options=options), *entry]

    def _end(self) -> None:
        """End all processes: by the end of their input, else by force."""
        end = time.monotonic() + END_SEC
        members = self._members.values()
        for member in members:
            member.close()
        stuck = [member for member in members if not member.has_ended(end - time.monotonic())]
        if stuck and self.place.job and not self.place.is_here:
            slurm.cancel_step(self.place.job.id, self._name)  # tasks outlive an srun that is killed
        for member in members:
            member.release()


def values(answers: Mapping[str, Answer], doing: str) -> dict[str, Any]:
    """The answers of all nodes; UnfitError that names every node in trouble."""
    troubles = {host: a for host, a in answers.items() if isinstance(a, Trouble)}
    if troubles:
        raise named(troubles, doing)
    return dict(answers)


def named(troubles: Mapping[str, Trouble], doing: str) -> UnfitError:
    """An error for what these nodes could not do, with the causes and fixes that they know."""
    return UnfitError(
        f"{doing} failed on "
        + "; ".join(f"node {host}: {trouble.message}" for host, trouble in troubles.items()),
        cause="; ".join(dict.fromkeys(t.cause for t in troubles.values() if t.cause)),
        fix="; ".join(dict.fromkeys(t.fix for t in troubles.values() if t.fix))
        or "leave these nodes out (slurm.exclude in machine.yaml), or repair them",
    )


def unresponsive(place: Place) -> list[str]:
    """Nodes of this place that do not start a process any more. A node that is only slow is asked twice:
    the caller leaves the others out of the run from now on.

    Slurm is asked to start `true` there, not a NodePool: whether a node is blamed must not depend on the
    project's file system, nor on a controller that is away.
    """
    if place.job is None or place.is_here:
        return []
    job_id = place.job.id
    return _without_answer(job_id, _without_answer(job_id, place.hosts))


def _without_answer(job_id: str, hosts: Sequence[str]) -> list[str]:
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        well = pool.map(lambda host: slurm.answers(job_id, host, ANSWER_SEC), hosts)
        return [host for host, answered in zip(hosts, well, strict=True) if not answered]


class _Member:
    """The process for one host: what is still to be sent, and what came back."""

    def __init__(self, command: list[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the member
        self._outbox, self._inbox = b"", b""
        self._answers: dict[int, Answer] = {}
        self._gone: Trouble | None = None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=slurm.environment(),
            start_new_session=True,  # Ctrl-C is for us: we end them in order
            preexec_fn=stop_with_parent,  # noqa: PLW1509  no threads run here
        )
        self.questions = cast("IO[bytes]", self._process.stdin)
        self.replies = cast("IO[bytes]", self._process.stdout)
        for pipe in (self.questions, self.replies):
            os.set_blocking(pipe.fileno(), False)  # a frozen node must not freeze us

    def put(self, number: int, question: str, values: Mapping[str, Any]) -> None:
        if self._gone is None:
            line = json.dumps({"id": number, "do": question, "with": dict(values)}, allow_nan=False)
            self._outbox += line.encode() + b"\n"

    def is_waiting_for(self, number: int) -> bool:
        return self._gone is None and number not in self._answers

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._outbox)

    def send(self) -> None:
        try:
            self._outbox = self._outbox[os.write(self.questions.fileno(), self._outbox) :]
        except BrokenPipeError:
            self._outbox = b""  # the end of its output says why

    def receive(self) -> None:
        data = os.read(self.replies.fileno(), BLOCK)
        if not data:
            self._gone = self._last_words()
            return
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        for line in lines:
            if not line.startswith(b'{"id"'):
                continue  # a site's task prolog may print here, too
            reply = json.loads(line)
            self._answers[reply["id"]] = (
                Trouble(reply["error"], reply["cause"], reply["fix"])
                if "error" in reply
                else reply["value"]
            )

    def take(self, number: int, late: Trouble) -> Answer:
        """The answer, and forget it with those that came too late for earlier questions."""
        found = self._answers.get(number, self._gone or late)
        self._answers.clear()
        return found

    def give_up(self, trouble: Trouble) -> None:
        self._gone = self._gone or trouble

    def _last_words(self) -> Trouble:
        """Why it ended: the last lines that it, or its srun, has written."""
        self.has_ended(END_SEC)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return Trouble(
            f"its process ended: {' | '.join(lines[-LAST_LINES:]) or 'no output'}",
            cause="the node is down, or does not see this Python and the project",
            fix="see that the node is up and sees the project folder (or set stage.project: true)",
        )

    def close(self) -> None:
        self._outbox = b""
        with contextlib.suppress(BrokenPipeError):
            self.questions.close()

    def has_ended(self, timeout_sec: float) -> bool:
        try:
            self._process.wait(max(0, timeout_sec))
        except subprocess.TimeoutExpired:
            return False
        return True

    def release(self) -> None:
        """Kill it if it is still there, and close what we hold of it."""
        self._process.kill()
        self._process.wait()
        self.replies.close()
        self._errors.close()


def _exchange(members: list[_Member], number: int, end: float) -> None:
    """Send what waits to be sent and collect answers until all have come or time is up."""
    with selectors.DefaultSelector() as selector:
        while waiting := [member for member in members if member.is_waiting_for(number)]:
            for member in waiting:
                selector.register(member.replies, selectors.EVENT_READ, member.receive)
                if member.has_more_to_send:
                    selector.register(member.questions, selectors.EVENT_WRITE, member.send)
            ready = selector.select(max(0, end - time.monotonic()))
            for key, _ in ready:
                key.data()
            for key in list(selector.get_map().values()):
                selector.unregister(key.fileobj)
            if not ready:
                return
