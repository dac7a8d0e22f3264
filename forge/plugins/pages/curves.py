"""Curves of a run without recomputed steps, its restarts, and its numbers in short."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isnan, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from forge.core import events
from forge.core.errors import DataError
from forge.core.events import Event
from forge.core.paths import RunPaths
from forge.core.records import BitsPerByte
from forge.reporting.history import History, history_of, kept_steps
from forge.run.launches import LaunchHistory
from forge.trainer import metrics
from forge.trainer.metrics import EvalLine, Line

if TYPE_CHECKING:
    import pandas as pd

TRAIN_COLUMNS = ["loss", "grad_norm", "lr", "tokens_per_sec", "mfu", "tokens"]
EVAL_COLUMNS = ["loss", "bpb", "bpb_estimated"]


class Restart(NamedTuple):
    """A launch that resumed from a checkpoint: at which step, when, and how the previous launch ended."""

    step: int
    time: float
    cause: str


@dataclass
class Curves(History):
    """A run's surviving curves (frames indexed 0.., sorted by step) and its history.

    train: step, loss, grad_norm, lr, tokens_per_sec, mfu, tokens, time, launch.
    evals: step, loss, bpb, bpb_estimated, time, launch. source_evals: the same of each source, without
    bpb; {} without a surviving loss of one.
    """

    train: pd.DataFrame
    evals: pd.DataFrame
    source_evals: dict[str, pd.DataFrame]
    restarts: list[Restart]


def read_curves(paths: RunPaths) -> Curves:
    """The curves of a run; empty frames where a file is missing. Raises DataError where another version
    of Forge wrote the log."""
    return _curves(events.read(paths.events), metrics.read(paths.metrics))


def read_curves_or_empty(paths: RunPaths) -> Curves:
    """Read the curves as `read_curves` does; empty ones where the log cannot be read: for pages on
    several runs, which one of them must not hide. `run_state.judge` says of that run why its state is
    unknown."""
    try:
        return read_curves(paths)
    except DataError:
        return _curves([], [])


def _curves(log: list[Event], lines: Sequence[Line]) -> Curves:
    history = history_of(log, lines)
    kept = kept_steps(history.launches)
    return Curves(
        history.launches,
        history.phases,
        train=_frame(lines, "train", TRAIN_COLUMNS, kept),
        evals=_frame(lines, "eval", EVAL_COLUMNS, kept),
        source_evals={  # without those of which each loss was lost work
            name: frame
            for name, its_lines in sorted(_by_source(lines).items())
            if len(frame := _frame(its_lines, "eval", EVAL_COLUMNS, kept))
        },
        restarts=_restarts(history.launches),
    )


def facts(curves: Curves) -> dict[str, Any]:
    """The numbers of a run in short; None for what was not measured."""
    train, evals = curves.train, curves.evals["loss"].dropna()
    speed, mfu = train["tokens_per_sec"].dropna(), train["mfu"].dropna()
    return {
        "step": int(train["step"].iloc[-1]) if len(train) else _last_step(curves),
        "tokens": train["tokens"].max() if train["tokens"].notna().any() else None,
        "train_loss": train["loss"].dropna().iloc[-1] if train["loss"].notna().any() else None,
        "loss_from": evals.iloc[0] if len(evals) else None,
        "loss_to": evals.iloc[-1] if len(evals) else None,
        "bits_per_byte": _bits(curves.evals.dropna(subset=["loss"])),
        # The median: the first steps after a start are slow (compilation, cold caches).
        "tokens_per_sec": speed.median() if len(speed) else None,
        "mfu": mfu.median() if len(mfu) else None,
        "wall_sec": curves.wall_sec,
        "goodput": curves.goodput,
    }


def _bits(evals: pd.DataFrame) -> BitsPerByte | None:
    """Bits per byte of the last evaluation; None where bytes are not known."""
    last = evals["bpb"].iloc[-1] if len(evals) else nan
    if isnan(last):
        return None
    return BitsPerByte(float(last), bool(evals["bpb_estimated"].iloc[-1] == 1))


def _last_step(curves: Curves) -> int | None:
    """The last step of a program that records no losses; None before its first step."""
    return curves.launches[-1].last_step or None if curves.launches else None


def device_hours(launches: Iterable[LaunchHistory]) -> dict[str, float]:
    """Hours that GPUs, and cores of CPUs, have spent in launches, from their start to their end; of a
    program, which does not tell what it uses, ranks. Keys: gpu_hours, core_hours, rank_hours."""
    hours: dict[str, float] = defaultdict(float)
    inits = [(launch, launch.first(events.Init)) for launch in launches]
    # Of a launch that ended before its ranks were ready: those of another launch.
    usual: dict[str, Any] = next((init.numerics for _, init in inits if init), {})
    for launch, init in inits:
        start = launch.begun
        if start is None:
            continue
        numerics = init.numerics if init else usual
        name = {"cuda": "gpu_hours", "cpu": "core_hours"}.get(
            numerics.get("device", ""), "rank_hours"
        )
        cores = numerics.get("threads", 1) if name == "core_hours" else 1
        hours[name] += start.world_size * cores * (launch.end - launch.start) / 3600
    return dict(hours)


def _restarts(launches: list[LaunchHistory]) -> list[Restart]:
    return [
        Restart(launch.resumed_step, launch.start, before.outcome)
        for before, launch in pairwise(launches)
        if launch.resumed_step is not None
    ]


def _by_source(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines of evaluations with the loss of one source, by source."""
    by_source: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if isinstance(line, EvalLine):
            for name, loss in (line.sources or {}).items():
                by_source[name].append(replace(line, loss=loss, bpb=None, bpb_estimated=None))
    return by_source


def _frame(
    lines: Sequence[Line], kind: str, columns: list[str], kept: dict[str, float]
) -> pd.DataFrame:
    """The lines of one kind on the surviving line of history, one per step."""
    import pandas as pd

    names = ["step", *columns, "time", "launch"]
    rows = [
        [getattr(line, name) for name in names]
        for line in lines
        if line.kind == kind and line.step <= kept.get(line.launch, inf)
    ]
    frame = pd.DataFrame(rows, columns=names)
    types = {"step": "int64", "time": "float64"} | dict.fromkeys(columns, "float64")
    frame = frame.astype(types).drop_duplicates("step", keep="last")  # the later line wins
    return frame.sort_values("step", ignore_index=True)
