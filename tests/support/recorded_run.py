"""Builds a run's folder as its commands leave it: event log, metrics, checkpoint and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from support import happenings
from support.manifests import IDS, manifest_of

from forge.core import events
from forge.core.config import ResolvedConfig
from forge.core.events import Event
from forge.core.files import write_json
from forge.core.paths import RunPaths, checkpoint_name
from forge.core.records import (
    Check,
    Evaluated,
    Evaluation,
    NodeResult,
    PreflightResult,
    RanksIdentity,
    RanksResult,
    Sample,
    Score,
    Trained,
    Validation,
)
from forge.trainer import metrics

START = 1_750_000_000.0
STEP_SEC = 0.5


@dataclass
class RecordedRun:
    """A run with a clock. Each call writes what the real thing writes and moves the clock on."""

    root: Path
    time: float = START
    launches: int = 0
    paths: RunPaths = field(init=False)

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.root)
        self.root.mkdir(parents=True, exist_ok=True)

    def event(self, event: Event, *, after: float = 0.0) -> None:
        """An event that comes so many seconds later, or as much later as it says that it took."""
        self.time += getattr(event, "seconds", after)
        events.record(self.paths.events, event.model_copy(update={"time": self.time}))

    def launch(
        self, step: int, *, init_sec: float = 4.0, job: str | None = None, **facts: Any
    ) -> None:
        self.launches += 1
        where = {"nodes": ["node01", "node02"], "job": job, "restart": 0} if job else {}
        said = happenings.launch(step, launch=self.id, **{**where, **facts})
        self.event(said)
        started = {"launch": self.id, "seconds": init_sec, "world_size": said.world_size}
        self.event(happenings.init(step, **started))

    @property
    def id(self) -> str:
        return f"launch-{self.launches}"

    def steps(self, first: int, last: int, *, every: int = 5) -> None:
        """Steps first..last with a metrics line at each multiple of `every`."""
        for step in range(first, last + 1):
            self.time += STEP_SEC
            if step % every == 0:
                self.metric("train", step, loss=loss_at(step), tokens_per_sec=20_000 + step)

    def metric(self, kind: str, step: int, loss: float | None, **values: Any) -> None:
        facts = {"time": self.time, "launch": self.id, "step": step, "loss": loss}
        line: metrics.Line
        if kind == "eval":
            line = metrics.EvalLine(**facts, **values)
        if kind == "train":
            usual = {"grad_norm": 1.0, "lr": 1e-3, "tokens_per_sec": None, "mfu": None}
            line = metrics.TrainLine(**{**facts, **usual, "tokens": step * 4096, **values})
        metrics.write(self.paths.metrics, line)

    def evaluate(self, step: int, *, seconds: float = 1.0) -> None:
        loss = loss_at(step) + 0.1
        self.event(events.Eval(seconds=seconds, step=step, loss=loss))
        self.metric("eval", step, loss=loss)

    def save(self, step: int, *, seconds: float = 0.5) -> None:
        self.event(happenings.save(step, seconds))
        folder = self.paths.checkpoints / checkpoint_name(step)
        manifest_of(step).write(folder)
        self.paths.latest.unlink(missing_ok=True)
        self.paths.latest.symlink_to(folder.name)

    def complete(self, step: int) -> None:
        completed = happenings.completed(step)
        self.event(completed, after=0.2)
        Trained(
            **{"run": self.root.name, "goal_step": step, "step": step, "config_digest": "c" * 64},
            checkpoint=f"checkpoints/{checkpoint_name(step)}",
            weights_digest=completed.weights_digest,
        ).write(self.paths.trained)

    def freeze_config(self) -> None:
        write_json(self.paths.config, ResolvedConfig(run=self.root.name, ids=IDS).training_json())

    def preflight(
        self, *, status: Literal["ok", "failed"] = "ok", trouble: Sequence[Check] = ()
    ) -> None:
        fine = Check("python", "ok", "Python 3.11.9")
        failed = [check.name for check in trouble if check.status == "fail"]
        self.event(happenings.preflight(status=status, failed=failed))
        checks = [fine, *trouble]
        PreflightResult(
            status=status,
            nodes=[NodeResult(node="node02", line="NODE", checks=checks)],
            ranks=RanksResult(world_size=2, checks=[replace(fine, name="all-reduce")]),
            **{"chosen": ["node02"], "left_out": {}, "restart": 0},
            identity=RanksIdentity(
                **{"job": None, "nodes": {"node02": None}, "ranks_per_node": 2},
                **{"launcher": "single", "fabric": {}, "staged": []},
            ),
        ).write(self.paths.preflight)

    def validate(self, step: int, reason: str = "") -> None:
        """reason: why the checkpoint is invalid."""
        status: Literal["valid", "invalid"] = "invalid" if reason else "valid"
        self.event(happenings.validate(step, status=status))
        result = Validation(
            status=status,
            step=step,
            depth="probe",
            loss=loss_at(step) + 0.1,
            weights_digest=f"{step:064x}",
            checkpoint_digest="d" * 64,
            reasons=[reason] if reason else [],
            checks=[Check("digests", "ok", "12 files")],
            samples=[
                Sample(prompt="def ", text="__init__(self):\n        self.x = x\n"),
                Sample(prompt="class ", text="class Reader(Base):\n    pass"),
                Sample(prompt="import ", text="os\nimport sys\x1b[31m"),
            ],
        )
        result.write(self.paths.validation)
        if not reason:
            result.short.write(self.paths.validated)


def score_words(
    run: RecordedRun, step: int, acc: float | None, *, data_digest: str = "", **changed: object
) -> None:
    """Write the evaluation of this step, by the task `words` with 1000 documents. changed: of what it is
    of."""
    usual = {"checkpoint_digest": "d" * 64, "tasks": ["words"], "task_files": ""}
    made = Evaluated(
        **{**usual, "num_fewshot": None, "limit": None, "harness": "0.4.13", **changed}
    )
    facts: Any = {"stderr": 0.01, "num_documents": 1000, "data_digest": data_digest}
    score = Score(task="words", metric="acc", value=acc, **facts)
    Evaluation(
        **{"step": step, "of": made, "scores": [score], "device": "cpu", "precision": "fp32"},
        **{"seconds": 1.0, "versions": {}},
    ).write(run.paths.evaluation_of(Path(checkpoint_name(step))))


def loss_at(step: int) -> float:
    """A loss that falls as one does: the same step gives the same loss."""
    return 3.5 + 4.9 * math.exp(-step / 60) + 0.08 * math.sin(step * 1.7)


def interrupted_run(root: Path) -> RecordedRun:
    """Killed at step 84 with a checkpoint at 50, resumed there, trained to 200 and validated."""
    run = RecordedRun(root)
    run.freeze_config()
    run.event(happenings.stage())
    run.preflight()
    run.launch(0)
    run.evaluate(0)
    run.steps(1, 50)
    run.evaluate(50)
    run.save(50)
    run.steps(51, 84)  # 84: between two metrics lines; then kill -9
    run.time += 30
    run.event(happenings.stage(seconds=0.1))
    run.preflight()
    run.launch(50)
    for step in range(50, 200, 50):
        run.steps(step + 1, step + 50)
        run.evaluate(step + 50)
        run.save(step + 50)
    run.complete(200)
    run.time += 2
    run.validate(200)
    return run
