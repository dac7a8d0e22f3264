"""Ranking of runs by their validation at one step, while the learning rate is constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.paths import RunPaths
from forge.core.values import shown
from forge.reporting.run_files import RunFiles
from forge.reporting.run_rows import measured_by, validation_text
from forge.reporting.run_state import ask_slurm, ids_of, judge
from forge.trainer import metrics

TOKENS, BYTES = "nats per token", "bits per byte"


class Contender(NamedTuple):
    """A run of the sheet. value: of its validation at the common step; infinite for one that failed."""

    run: str
    value: float


def contenders_of(configs: Mapping[str, Config], named: Sequence[str]) -> list[str]:
    """The runs that are ranked: those that are named, else all with the largest train.max_steps. Raises
    ConfigError for fewer than two, and for runs of several lengths."""
    if unknown := [run for run in named if run not in configs]:
        raise ConfigError(
            f"the sample sheet has no run {', '.join(unknown)}",
            fix=f"it has {', '.join(configs)}",
        )
    longest = max(config.goal for config in configs.values())
    runs = [*named] or [run for run, config in configs.items() if config.goal == longest]
    lengths = {configs[run].goal for run in runs}
    if len(lengths) > 1 or len(runs) < 2:
        told = ", ".join(f"{run} {configs[run].goal}" for run in runs)
        raise ConfigError(
            f"train.max_steps of the runs to compare is {told}",
            cause="runs of an earlier round stay at its step, and one run cannot be halved",
            fix="name at least two runs of the same length",
        )
    return runs


def check_constant_rate(configs: Mapping[str, Config], step: int, to: int) -> None:
    """ConfigError for a run whose learning rate has begun to decay before `step`, or will have ended
    before `to`: runs that decay look better than those that go on."""
    for run, config in configs.items():
        train = config.train
        if train.schedule != "wsd" or train.decay_steps is None:
            raise ConfigError(
                f"run {run} has train.schedule {train.schedule}, train.decay_steps"
                f" {shown(train.decay_steps)}: with a learning rate that decays up to step {step}, losses"
                " there do not say how a longer run ends",
                fix="set train.schedule: wsd and train.decay_steps, beyond the last --to, before the runs"
                " begin",
            )
        begins = train.decay_begin(train.decay_steps)
        if begins < step or train.decay_steps < to:
            raise ConfigError(
                f"the learning rate of run {run} decays from step {begins} to {train.decay_steps}"
                f" (train.decay_steps); runs are compared at step {step}, and go on to {to}",
                fix=f"name a step up to {train.decay_steps}; a decay is a run of its own, with a parent",
            )


def ranked(configs: Mapping[str, Config], step: int) -> tuple[list[Contender], str]:
    """The runs, best first, and the unit: bits per byte where tokens differ, else nats per token.

    Raises ConfigError for a run that has not come to the step and has not failed, and where values do not
    compare.
    """
    files = {run: RunFiles(RunPaths.of(config)) for run, config in configs.items()}
    queue, note = ask_slurm([one.paths for one in files.values()])
    by_run: dict[str, metrics.EvalLine | None] = {run: _at(files[run], step) for run in configs}
    for run, line in by_run.items():
        state = judge(files[run], queue) if line is None else None
        if state and state.state != "failed":
            raise ConfigError(
                f"run {run} has no validation at step {step}: it is {state.state}",
                cause=note,
                fix="train the runs of the sheet to their ends first; leave it out by naming the others",
            )
    tokens = {ids_of(one.config).tokens for run, one in files.items() if by_run[run]}
    unit = TOKENS if len(tokens) <= 1 else BYTES
    texts = {validation_text(one.paths) for run, one in files.items() if by_run[run]}
    if unit == BYTES and (len(texts) > 1 or "" in texts):
        raise ConfigError(
            "the runs have different tokens, and not the same validation text: neither nats per token nor"
            " bits per byte compare",
            fix="name runs of the same text",
        )
    _check_measured_alike({run: one for run, one in files.items() if by_run[run]}, step)
    found = [Contender(run, _value(line, unit)) for run, line in by_run.items()]
    return sorted(found, key=lambda one: (one.value, one.run)), unit


def _check_measured_alike(files: Mapping[str, RunFiles], step: int) -> None:
    measured = {run: measured_by(one, step) for run, one in files.items()}
    first = next(iter(measured), "")
    for run, values in measured.items():
        for key, value in values.items():
            if value != (other := measured[first][key]):
                raise ConfigError(
                    f"the losses of runs {first} and {run} do not compare: their train.{key} at step"
                    f" {step} is {shown(other)} and {shown(value)}",
                    cause="a validation loss is the mean over its sources by the mix of the run"
                    if key == "mix"
                    else "it is measured on other samples",
                    fix="name runs that have the same",
                )


def _at(files: RunFiles, step: int) -> metrics.EvalLine | None:
    """The newest validation at this step."""
    lines = [
        line
        for line in metrics.read(files.paths.metrics)
        if isinstance(line, metrics.EvalLine) and line.step == step
    ]
    return lines[-1] if lines else None


def _value(line: metrics.EvalLine | None, unit: str) -> float:
    value = None if line is None else line.loss if unit == TOKENS else line.bpb
    return inf if value is None else value
