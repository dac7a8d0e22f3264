"""A run of the tiny config on forked ranks: how it is disturbed, and what is told of it afterwards."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from injection import STRIKES, Fault
from plans import SAMPLES, Plan
from support import forked
from support.live_run import Run
from support.processes import Outcome

from forge.checkpoint import directory, resume

GOAL, INTERVAL = 20, 4
MACHINE = ("--machine.fabric.timeout_sec=20", "--machine.stop_grace_sec=20")
# For ranks that are put to sleep: the others give up soon.
IMPATIENT_SEC = 3
IMPATIENT = (f"--machine.fabric.timeout_sec={IMPATIENT_SEC}",)


@dataclass(frozen=True)
class Story:
    """All that must be the same, whatever happened on the way. Samples: numbers and contents."""

    weights: str
    losses: dict[int, float]
    samples: dict[int, list[tuple[int, int]]]


@dataclass(frozen=True)
class FaultyRun(Run):
    """One run whose commands are children of the fork server."""

    @classmethod
    def make(
        cls, tiny_project: Path, results: Path, name: str, ranks: int, more: tuple[str, ...]
    ) -> FaultyRun:
        where = (f"--run={name}", f"--results={results}")
        return cls(tiny_project / "config.yaml", results / name, (*where, *MACHINE, *more)).on(
            ranks
        )

    def on(self, ranks: int) -> FaultyRun:
        """The same run on so many ranks from now on."""
        launcher = "torchrun" if ranks > 1 else "single"
        layout = (f"--machine.launcher={launcher}", f"--ranks-per-node={ranks}")
        return dataclasses.replace(self, overrides=(*self.overrides, *layout))

    def copy(self, folder: Path) -> FaultyRun:
        return cast(FaultyRun, super().copy(folder))

    def start_train(
        self, *faults: Fault, plan: Plan | None = None, more: tuple[str, ...] = ()
    ) -> Any:
        output = self.folder.parent / f"{self.folder.name}.out"
        return forked.start(self.arguments("train", *more), output, (plan or Plan(faults)).arm)

    def train(
        self, *faults: Fault, plan: Plan | None = None, more: tuple[str, ...] = ()
    ) -> Outcome:
        """`forge train` to its end, with these faults in its first start of ranks."""
        return self.start_train(*faults, plan=plan, more=more).end()

    def command(self, verb: str) -> Outcome:
        return forked.start(self.arguments(verb), self.folder.parent / f"{verb}.out").end()

    # --- what became of it --------------------------------------------------------------------

    def strikes(self) -> list[dict[str, Any]]:
        """The faults that struck, each with the newest committed step of that moment."""
        return _lines(self.folder / STRIKES)

    def story(self) -> Story:
        losses: dict[int, float] = {}
        for step, loss in self.losses():
            assert losses.setdefault(step, loss) == loss, f"step {step} was not repeated exactly"
        return Story(self.weights_digest(), losses, self.samples())

    def samples(self) -> dict[int, list[tuple[int, int]]]:
        """Numbers and contents of the samples of each step, in the start that went on with it."""
        lines = _lines(self.folder / SAMPLES)
        steps: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        for line in sorted(lines, key=lambda line: (line["start"], line["rank"])):
            start, pairs = steps.get(line["step"], (0.0, []))
            # A later start, be it on fewer ranks, replaces what an earlier one did in this step.
            before = pairs if start == line["start"] else []
            mine = list(zip(line["numbers"], line["contents"], strict=True))
            steps[line["step"]] = (line["start"], before + mine)
        return {step: pairs for step, (_, pairs) in sorted(steps.items())}

    def steps_lost(self) -> int:
        """Steps that were retrained."""
        steps = [step for step, _ in self.losses()]
        return len(steps) - len(set(steps))

    def starts(self) -> list[int]:
        """The step at which each start of ranks began."""
        return [event["step"] for event in self.events("launch")]

    def quarantined(self) -> list[str]:
        return sorted(path.name for path in self.paths.quarantine.glob("step-*"))

    def assert_whole(self) -> None:
        """`latest` is a valid checkpoint with the digests of its manifest, and no temporary files are
        left."""
        newest = resume.latest(self.paths)
        assert newest is not None
        assert list(newest.bad_files()) == []
        assert list(self.paths.checkpoints.glob(f"{directory.TEMPORARY}*")) == []
        assert list(self.paths.launches.glob("*")) == []


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
