"""Training metrics: rates, model FLOP utilization, and the metrics file, also of another program."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from forge.core import events, json_lines
from forge.core.json_lines import last_lines
from forge.core.paths import RunPaths

PROGRAM_STEPS_EVERY_SEC = 5.0
# Dense bf16 tensor-core peaks in FLOP/s. Source: NVIDIA's data sheets, most of which give the peak with
# sparsity, twice as much (B200: HGX B200, 36 PFLOP/s for 8 GPUs; GB200: NVL72, 360 PFLOP/s for 72).
# Longer names first, since "H100" is in "H100 NVL" too. None: known to differ, and not published.
PEAK_BF16_FLOPS = {
    "RTX PRO 6000 Blackwell Max-Q": None,
    "RTX PRO 6000": 503.8e12,
    "L40S": 362.05e12,
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989.4e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
    "GB200": 2500e12,
}


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of one GPU by its name; None for a CPU, an unknown GPU, and a MIG slice.

    The peak of a slice is not its share: 1g of an H100 has 16 of 132 multiprocessors, not 1/7.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    for name, peak in PEAK_BF16_FLOPS.items():
        if re.search(rf"\b{name}\b", device_name):  # not the A100 in "RTX A1000"
            return peak
    return None


def flop_utilization(
    tokens_per_sec: float, flops_per_token: float, world_size: int, peak: float | None
) -> float | None:
    """Model FLOP utilization in [0, 1]; None without a known peak.

    tokens_per_sec: over all ranks. peak: FLOP/s of one rank's GPU. Formula: Chowdhery et al., PaLM
    (arXiv 2204.02311), appendix B.
    """
    return tokens_per_sec * flops_per_token / (world_size * peak) if peak else None


@dataclass
class Throughput:
    """Speed of training, measured from one metrics line to the next.

    tokens_per_step: of all ranks together. peak_flops: FLOP/s of one rank's GPU, None if unknown.
    """

    tokens_per_step: int
    flops_per_token: float
    world_size: int
    peak_flops: float | None
    _steps: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)

    def add_step(self, seconds: float) -> None:
        self._steps += 1
        self._seconds += seconds

    def measure(self) -> tuple[float, float | None]:
        """Tokens per second over all ranks, and model FLOP utilization, since the previous call. Needs
        one step since then."""
        tokens_per_sec = self._steps * self.tokens_per_step / self._seconds
        self._steps, self._seconds = 0, 0.0
        mfu = flop_utilization(
            tokens_per_sec, self.flops_per_token, self.world_size, self.peak_flops
        )
        return tokens_per_sec, mfu


# --- the metrics file ------------------------------------------------------------------------------


@dataclass(kw_only=True)  # not frozen, which takes twice as long to make
class Line:
    """A line of metrics.jsonl. time: seconds since the epoch. launch: of which it is a part. loss: nats
    per token, None where it was not finite."""

    time: float = field(default_factory=lambda: round(time.time(), 3))
    kind: str
    launch: str
    step: int
    loss: float | None


@dataclass(kw_only=True)
class TrainLine(Line):
    """A training step. loss: of the batch. tokens_per_sec: of all ranks since the line before. tokens:
    of the run up to this step. compiled: whether its blocks were compiled; the `init` event of the launch
    says why they were not."""

    kind: Literal["train"] = "train"
    grad_norm: float | None
    lr: float
    tokens_per_sec: float | None
    mfu: float | None
    tokens: int
    compiled: bool = False


@dataclass(kw_only=True)
class EvalLine(Line):
    """An evaluation. loss: on the validation split; with several sources the mean over them, by the
    weights of the mix. sources: the loss of each, left out of the file without sources. bpb: the loss in
    bits per byte of text, left out where bytes are not known; bpb_estimated: these were estimated."""

    kind: Literal["eval"] = "eval"
    sources: dict[str, float] | None = None
    bpb: float | None = None
    bpb_estimated: bool | None = None


@dataclass(kw_only=True)
class StepLine(Line):
    """A step that all ranks of another program have reached by their heartbeats. It has no numbers."""

    kind: Literal["step"] = "step"
    loss: None = None
    tokens_per_sec: None = None


_ANY: TypeAdapter[TrainLine | EvalLine | StepLine] = TypeAdapter(
    Annotated[TrainLine | EvalLine | StepLine, Field(discriminator="kind")]
)


OPTIONAL = ("sources", "bpb", "bpb_estimated")  # left out where they are None


def write(path: Path, line: Line) -> None:
    """Append one line to metrics.jsonl. Rank 0. A number that is not finite becomes null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in vars(line).items()
        if key not in OPTIONAL or value is not None
    }
    json_lines.append(path, clean)


def read(path: Path) -> list[TrainLine | EvalLine | StepLine]:
    """All lines, oldest first; those that a crash has cut or a person has edited are passed over."""
    return parse(json_lines.lines(path))


def read_last(path: Path, num_bytes: int) -> list[TrainLine | EvalLine | StepLine]:
    """Read the lines in the last `num_bytes` of the file, as `read` does."""
    return parse(last_lines(path, num_bytes)[0])


def parse(lines: Iterable[str]) -> list[TrainLine | EvalLine | StepLine]:
    """The typed lines of metrics.jsonl; others are passed over."""
    parsed = []
    for line in lines:
        with suppress(ValidationError):
            parsed.append(_ANY.validate_json(line, strict=True))
    return parsed


@dataclass
class StepLog:
    """Writes the steps that another program tells by its heartbeats to metrics.jsonl, from which status,
    rate and badput of its run come. One launch; the launcher calls it each time that it looks at the
    ranks."""

    paths: RunPaths
    _step: int = field(default=-1, init=False)
    _written: float = field(default=float("-inf"), init=False)

    def tell(self, steps: list[int | None], *, is_last: bool) -> None:
        """Write the last step that all ranks have reached, at most every PROGRAM_STEPS_EVERY_SEC; the
        last step at once. Raises UnfitError when the disk cannot be written."""
        reached = [step for step in steps if step is not None]
        now = time.monotonic()
        if len(reached) < len(steps) or not reached or min(reached) <= self._step:
            return
        if now - self._written < PROGRAM_STEPS_EVERY_SEC and not is_last:
            return
        launch = events.last(events.read(self.paths.events), events.Launch)
        if isinstance(launch, events.Launch):
            self._step, self._written = min(reached), now
            write(self.paths.metrics, StepLine(launch=launch.launch, step=self._step))
