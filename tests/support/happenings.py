"""Events of a run with the facts that a test does not ask for filled in."""

from __future__ import annotations

from typing import Any

from forge.core import events
from forge.core.events import Event


def launch(step: int = 0, **facts: Any) -> events.Launch:
    """On two nodes, outside of Slurm."""
    usual = {"launch": "launch-1", "world_size": 2, "launcher": "torchrun", "host": "laptop"}
    return events.Launch(**{**usual, "nodes": ["laptop"], "step": step, **facts})


def init(step: int = 0, **facts: Any) -> events.Init:
    usual = {"launch": "launch-1", "seconds": 4.0, "world_size": 2, "parameters": 10_000}
    made = {"versions": {"torch": "2.13.0"}, "numerics": {"device": "cpu", "precision": "fp32"}}
    return events.Init(**{**usual, **made, "step": step, **facts})


def save(step: int = 0, seconds: float = 0.5, **facts: Any) -> events.Save:
    usual = {"seconds": seconds, "stall": seconds, "bytes": 40_000_000}
    return events.Save(**{**usual, "step": step, **facts})


def stage(**facts: Any) -> events.Stage:
    usual = {"seconds": 2.0, "bytes": 10_000_000, "digest": "0" * 64, "folders": {}, "sent": []}
    return events.Stage(**{**usual, **facts})


def preflight(**facts: Any) -> events.Preflight:
    usual = {"seconds": 3.0, "status": "ok", "failed": [], "nodes": ["laptop"], "left_out": {}}
    return events.Preflight(**{**usual, **facts})


def completed(step: int = 0) -> events.Completed:
    return events.Completed(step=step, weights_digest=f"{step:064x}")


def stop(cause: str = "SIGTERM", step: int = 0) -> events.Stop:
    return events.Stop(cause=cause, step=step)


def rank_error(message: str = "no room", **facts: Any) -> events.RankError:
    return events.RankError(**{"ranks": [1], "host": "laptop", "message": message, **facts})


def lost(message: str = "rank 1 is gone") -> events.Lost:
    return events.Lost(message=message, attempt=0, silent=[])


def failed(message: str = "loss nan", **facts: Any) -> events.Failed:
    usual = {"code": 70, "rank": 1, "diverged": False, "config_digest": "0" * 64}
    return events.Failed(**{**usual, "message": message, **facts})


def preempted(step: int = 0) -> events.Preempted:
    return events.Preempted(job="12", step=step)


def requeue(cause: str = "SIGUSR1", step: int = 0) -> events.Requeue:
    return events.Requeue(job="12", cause=cause, step=step)


def forecast(interval: float = 60.0, **facts: Any) -> events.Forecast:
    usual = {"step": 10, "stall": 0.5, "ettr": 0.97, "basis": "2 interruptions in 3 h"}
    return events.Forecast(**{**usual, "interval": interval, **facts})


def validate(step: int = 0, **facts: Any) -> events.Validate:
    return events.Validate(**{"seconds": 6.0, "status": "valid", "step": step, **facts})


ALL: list[Event] = [
    stage(),
    preflight(),
    launch(),
    launch(job="12", restart=1),
    events.Plugins(used={"lab_file": "a" * 64}),
    init(),
    events.Eval(seconds=1.0, step=0, loss=3.5),
    save(),
    events.Skipped(step=1, in_a_row=1, reason="loss nan"),
    events.Budget(needed=41.5),
    forecast(),
    events.Quarantine(checkpoint="step-00000050", reasons=["a file is missing"]),
    completed(),
    stop(),
    lost(),
    rank_error(),
    failed(),
    preempted(),
    requeue(),
    validate(),
]
