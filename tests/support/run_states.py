"""Runs in every state that a run can be in, made as their commands and Slurm would leave them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from support import happenings
from support.recorded_run import RecordedRun

from forge.core.files import write_json
from forge.core.process import Process
from forge.core.records import Check, Lock, Validation
from forge.slurm.jobs import QueuedJob

GOAL = 100


def new_run(root: Path) -> RecordedRun:
    """A run that has its config, whose clock stands shortly before now."""
    made = RecordedRun(root, time=time.time() - 1000)
    write_json(made.paths.config, {"run": root.name, "train": {"max_steps": GOAL}})
    return made


def train(run: RecordedRun, last: int = 40, ago: float = 0.0, job: str | None = None) -> None:
    """Steps up to `last`, the newest of them `ago` seconds before now."""
    run.time = time.time() - ago - 4 - last * 0.5
    run.launch(0, job=job)
    run.steps(1, last)


def hold(
    run: RecordedRun, process: Process | None = None, command: str = "train", ago: float = 1000
) -> None:
    """The lock of a process, of this one if None, taken so many seconds ago."""
    lock = run.paths.root / ".lock"
    holder = process or Process.current()
    cluster = "forge" if holder.slurm_job else None
    Lock(**holder.to_json(), cluster=cluster, command=command, restart=0).write(lock)
    os.utime(lock, (time.time() - ago,) * 2)


def dead() -> Process:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        return Process.of(child.pid)


def elsewhere(job: str | None = None) -> Process:
    return replace(Process.current(), host="node07", boot_id="of-node07", slurm_job=job)


def queued(state: str = "RUNNING", run: str = "base", **facts: Any) -> QueuedJob:
    usual = {"id": "17", "folder": Path.cwd(), "reason": "None", "submitted": None, "start": None}
    nodes, batch = ("", "n/a") if state == "PENDING" else ("node[01-02]", "node01")
    usual |= {"nodes": nodes, "batch_host": batch}
    return QueuedJob(**{**usual, "state": state, "run": run, **facts})


# --- one of each kind ------------------------------------------------------------------------------


def _validated(run: RecordedRun) -> None:
    _done(run)
    run.validate(GOAL)


def _done(run: RecordedRun) -> None:
    train(run, GOAL)
    run.save(GOAL)
    run.complete(GOAL)


def _invalid(run: RecordedRun) -> None:
    _done(run)
    run.validate(GOAL, "a bit has flipped")


def _failed(run: RecordedRun) -> None:
    train(run)
    run.event(happenings.failed("step 41: loss nan\n  fix:   lower train.lr"))


def _preflight_failed(run: RecordedRun) -> None:
    run.preflight(status="failed", trouble=[Check("disk", "fail", "0.1 GiB free", "free space")])


def _unstaged(run: RecordedRun) -> None:
    """Staging leaves its error in its log alone."""
    run.paths.logs.mkdir()
    (run.paths.logs / "stage.log").write_text("forge stage: no space on node02\n  fix: free some\n")


def _not_downloaded(run: RecordedRun) -> None:
    """The log of the download tells, not the newer one of `forge config`."""
    data, name = run.paths.root.parent / "data", "a" * 12
    write_json(run.paths.config, {"data": str(data), "ids": {"inputs": name}})
    log = data / f"logs/inputs-{name}.log"
    log.parent.mkdir(parents=True)
    log.write_text("forge inputs: cannot download hf://o/n/x.bin: 404\n  fix:   correct it\n")
    os.utime(log, (time.time() - 5,) * 2)
    run.paths.logs.mkdir()
    (run.paths.logs / "config.log").write_text("wrote config.json\n")


def _without_checkpoints(run: RecordedRun) -> None:
    """Of another program, of which Forge knows nothing but that it has ended."""
    write_json(run.paths.config, {"run": run.paths.root.name, "program": {"command": ["x"]}})
    run.launch(0)
    run.complete(0)
    facts = {"status": "valid", "step": 0, "depth": "program", "checkpoint_digest": ""}
    result = Validation(**facts, checks=[])
    result.write(run.paths.validation)
    result.short.write(run.paths.validated)


def _without_loss(run: RecordedRun) -> None:
    _done(run)
    run.validate(GOAL)
    result = Validation.read_if_there(run.paths.validation)
    assert result
    result.short.model_copy(update={"loss": None}).write(run.paths.validated)


def _stopped(run: RecordedRun) -> None:
    train(run)
    run.event(happenings.stop("SIGTERM", 40))


def _cut_off(run: RecordedRun) -> None:
    train(run)
    hold(run, dead())


def _waiting(run: RecordedRun) -> None:
    """Preempted: the job is back in the queue, the event log has no end."""
    train(run, job="17")


def _running(run: RecordedRun) -> None:
    train(run)
    hold(run)


def _unreadable(run: RecordedRun) -> None:
    _validated(run)
    run.paths.validation.write_text('{"format": 9, "status": "valid"}')


def _not_started(run: RecordedRun) -> None:
    run.preflight()


KINDS: dict[str, tuple[Callable[[RecordedRun], None], str, str]] = {
    "validated": (_validated, "validated", "validation loss 4.5"),
    "done": (_done, "done", "not validated yet"),
    "invalid": (_invalid, "invalid", "a bit has flipped"),
    "failed": (_failed, "failed", "rank 1: step 41: loss nan"),
    "preflight-failed": (_preflight_failed, "failed", "preflight: disk"),
    "not-downloaded": (_not_downloaded, "failed", "inputs: cannot download hf://o/n/x.bin: 404"),
    "without-checkpoints": (_without_checkpoints, "finished", "nothing to validate"),
    "without-loss": (_without_loss, "validated", "checked: digests"),
    "unstaged": (_unstaged, "failed", "stage: no space on node02"),
    "stopped": (_stopped, "stopped", "SIGTERM"),
    "cut-off": (_cut_off, "cut off", "its process is gone"),
    "waiting": (_waiting, "waiting", "PENDING (Priority)"),
    "running": (_running, "running", "training"),
    "unreadable": (_unreadable, "unknown", "validation.json has format 9"),
    "not-started": (_not_started, "not started", "preflight passed, nothing has trained yet"),
}
"""Name of the run -> what makes it, its state, and its reason or a part of it."""

QUEUE = [queued("PENDING", run="waiting", reason="Priority")]
