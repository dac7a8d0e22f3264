"""One storm: a contender trains, the events of a trace hit it, and what happens is recorded.

The same rules for every contender. The clock starts with its first step. An event hits whatever is there
at its time: a job that waits in the queue is not hit, nor is a rank that is not there; such an event is
missed, and so is one that is not seen to happen. A time limit comes within two minutes; where another
event comes first, it is missed. A job that has ended for good is submitted again HAND_SEC later, as by a
person.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from bench.storm import record
from bench.storm.chain import SAMPLES_PER_RANK
from bench.storm.contender import Contender
from bench.storm.raw import Raw, Strike
from bench.storm.trace import KINDS, Trace
from tools.slurm_cluster.machines import ClusterError, wait_until

HAND_SEC = 60.0  # until a person has seen that the job has ended; favourable, people sleep
LOOK_SEC = 0.2
ASK_SEC = 2.0  # between two questions to Slurm
FIRST_STEP_SEC = 300.0
# Kinds that end a job, or its start, so that its time limit no longer comes.
ENDING = ("preemption", "power-cut", "cable")
# Of a cluster whose slurmctld is away, or of a job that has just left the queue.
NO_ANSWER = (ClusterError, KeyError, subprocess.TimeoutExpired)


@dataclass
class Storm:
    """A storm on one contender."""

    contender: Contender
    trace: Trace
    minutes: float
    say: Callable[[str], object] = print
    strikes: list[Strike] = field(default_factory=list)
    hands: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    _repairs: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    # Events land beside each other: a contender that ignores the signal before a time limit must not be
    # spared the events of the two minutes until its end.
    _landing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))
    _begun: list[tuple[float, str]] = field(default_factory=list)  # (due, kind), landed or not yet
    _struck: list[Future[None]] = field(default_factory=list)
    _ended_at: float | None = None
    _asked_at: float = 0.0
    _begin: float = 0.0  # seconds since the epoch

    def run(self, seed: int) -> Raw:
        """What was seen. Raises ClusterError where the contender never trains, and as its parts do."""
        contender = self.contender
        contender.prepare()
        contender.start()
        try:
            self._wait_for_first_step()
            self._weather()
        finally:
            self._repair(at_end=True)  # slurmctld is back, which ends jobs
            contender.end()
            self._landing.shutdown()  # a time limit waits for the end of its job at most
            self._repair(at_end=True)
        for struck in self._struck:
            struck.result()  # raises what no event may
        return self._raw(seed)

    def _wait_for_first_step(self) -> None:
        contender = self.contender

        def has_trained() -> bool:
            return record.last_step_time(contender.step_log) is not None

        wait_until(
            has_trained, FIRST_STEP_SEC, f"training: {contender.name}", contender.said, LOOK_SEC
        )
        self._begin = time.time()

    def _weather(self) -> None:
        """Until the minutes are over."""
        due = [event for event in self.trace.events if event.at < 60 * self.minutes]
        while due or self._now() < 60 * self.minutes:  # a busy machine skips no event
            if len(self.loads) <= self._now() // 60:
                self.loads.append(round(os.getloadavg()[0], 1))
            if due and due[0].at <= self._now():
                event = due.pop(0)
                self._struck.append(self._landing.submit(self._strike, event.kind, event.at))
            self._repair()
            if time.time() - self._asked_at >= ASK_SEC:
                self._look_after_job()
                self._asked_at = time.time()
            time.sleep(LOOK_SEC)

    def _now(self) -> float:
        return time.time() - self._begin

    # ------------------------------------------------------------------ events

    def _strike(self, kind: str, due: float) -> None:
        at = self._now()
        strike = Strike(kind=kind, due=due, at=round(at, 2))
        try:
            missed = self._nothing_to_hit(kind)
            if not missed:
                self._begun.append((due, kind))
                repair = KINDS[kind].fault(self.contender, self.contender.ranks())
                if (wait := KINDS[kind].repaired_sec) is not None:
                    self._repairs.append((at + wait, repair))
                else:
                    repair()
                missed = self._came_first(kind, due)
                strike = strike.model_copy(
                    update={"landed": None if missed else round(self._now(), 2)}
                )
        except NO_ANSWER as err:
            missed = str(err).splitlines()[0][:200]
        except (IndexError, OSError) as err:  # the rank or the node has gone meanwhile
            missed = f"gone meanwhile: {err}"
        strike = strike.model_copy(update={"missed": missed})
        self.strikes.append(strike)
        self.say(f"{at:7.1f} s  {kind}" + (f": missed, {missed}" if missed else ""))

    def _came_first(self, kind: str, due: float) -> str:
        """What ended the job before its time limit did; "" where nothing, or for another kind."""
        if kind != "time-limit":
            return ""
        others = [other for its, other in self._begun if its > due and other in ENDING]
        if others:
            return f"{others[0]} came first"
        return "the end of the storm came first" * (self._now() > 60 * self.minutes)

    def _nothing_to_hit(self, kind: str) -> str:
        """Why the event cannot hit anything now; "" where it can."""
        if kind == "slurmctld":
            return ""
        state = self.contender.cluster.job(self.contender.job)["JobState"]
        if state != "RUNNING":
            return f"the job was {state}"
        if KINDS[kind].needs_ranks and not self.contender.ranks():
            return "no rank was there"
        return ""

    def _repair(self, *, at_end: bool = False) -> None:
        """What is due; at the end of the storm, everything."""
        for entry in list(self._repairs):
            if at_end or entry[0] <= self._now():
                self._repairs.remove(entry)
                try:
                    entry[1]()
                except NO_ANSWER as err:
                    self.say(f"{self._now():7.1f} s  not repaired: {err}")

    # ------------------------------------------------------------------ a person

    def _look_after_job(self) -> None:
        """Note the job, and submit again where it ended for good HAND_SEC ago."""
        contender = self.contender
        with contextlib.suppress(*NO_ANSWER):
            if contender.job not in self.jobs:
                self.jobs.append(contender.job)
        try:
            has_ended = contender.has_ended()
        except NO_ANSWER:
            return
        if not has_ended:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = self._now()
        elif self._now() - self._ended_at >= HAND_SEC:
            self._submit_again()

    def _submit_again(self) -> None:
        """As a person does, who removes the newest checkpoint where the start before trained nothing."""
        now = self._now()
        last = record.last_step_time(self.contender.step_log)
        if self.hands and last is not None and last - self._begin < self.hands[-1]:
            self.contender.remove_newest_checkpoint()
        self.say(f"{now:7.1f} s  ended for good; a person submits again")
        with contextlib.suppress(*NO_ANSWER):  # slurmctld is away: tried again
            self.contender.start()
            self.hands.append(round(now, 1))
            self._ended_at = None

    # ------------------------------------------------------------------ what was seen

    def _raw(self, seed: int) -> Raw:
        contender, layout = self.contender, self.contender.layout
        launches = contender.launches(self._begin)
        step_sec, save_every_sec = contender.pace(launches)
        return Raw(
            contender=contender.name,
            what=contender.what,
            is_ranked=contender.is_ranked,
            seed=seed,
            minutes=self.minutes,
            step_sec=step_sec,
            save_every_sec=save_every_sec,
            num_nodes=layout.nodes,
            trace=self.trace,
            strikes=sorted(self.strikes, key=lambda strike: strike.at),
            launches=launches,
            samples=contender.samples(self._begin),
            samples_per_step=layout.nodes * SAMPLES_PER_RANK,
            allocations=record.allocations(contender.cluster, self.jobs, self._begin),
            hands=self.hands,
            versions=contender.versions(),
            cores=os.cpu_count() or 0,
            loads=self.loads,
        )
