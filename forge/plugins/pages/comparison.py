"""Comparison of runs: their results, scores, and the config keys in which they differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge.core.config import FOLDERS, as_recorded
from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths
from forge.core.records import BitsPerByte
from forge.core.terminal import duration, say
from forge.plugins.pages.curves import device_hours, facts, read_curves_or_empty
from forge.plugins.pages.node_load import read_loads
from forge.reporting.run_rows import ScoreRow, read_scores, validation_text
from forge.reporting.run_state import RunState
from forge.reporting.summary import summarize

if TYPE_CHECKING:
    import pandas as pd

NONE = "–"


def _number(digits: str) -> Callable[[float], str]:
    return lambda value: format(value, digits)


@dataclass(frozen=True)
class Fact:
    """A fact of a run: its label, the head of its column where runs are rows ("": no column), and how a
    value is written."""

    label: str
    head: str
    write: Callable[[Any], str]


FACTS = {
    "state": Fact("state", "state", str),
    "step": Fact("step", "step", _number(",")),
    "goal": Fact("of steps", "of", _number(",")),
    "train_loss": Fact("loss of the last training batch", "batch loss", _number(".4f")),
    "validation_loss": Fact("validation loss", "validation loss", _number(".4f")),
    "bits_per_byte": Fact("bits per byte of text", "bits/byte", lambda bits: bits.number),
    "tokens": Fact("tokens", "tokens", _number(",.0f")),
    "tokens_per_sec": Fact("tokens per second", "tokens/s", _number(",.0f")),
    "mfu": Fact("MFU", "MFU", _number(".1%")),
    "gpu_hours": Fact("GPU hours", "GPU hours", _number(",.3g")),
    "energy_kwh": Fact("energy of the GPUs (kWh)", "kWh", _number(",.3g")),
    "core_hours": Fact("core hours", "core hours", _number(",.3g")),
    "rank_hours": Fact("rank hours", "rank hours", _number(",.3g")),
    "wall_sec": Fact("wall time", "wall time", lambda sec: duration(sec, precise=True)),
    "goodput": Fact("goodput", "goodput", _number(".0%")),
    "launches": Fact("launches", "launches", str),
    "checkpoint_digest": Fact("checkpoint digest", "", lambda digest: digest[:12]),
    "weights_digest": Fact("weights digest", "", lambda digest: digest[:12]),
}


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison. name: the run's, or its directory where two runs have the same. facts: by
    the names in FACTS, None for what is not known. config: by dotted name. validation_text: digest of the
    text of its validation splits; "" where it is not known. evals: step, loss of its validations."""

    name: str
    state: RunState
    facts: dict[str, Any]
    scores: list[ScoreRow]
    config: dict[str, Any]
    validation_text: str
    evals: pd.DataFrame = field(compare=False)


@dataclass(frozen=True)
class ComparedRow:
    """A line of the comparison: its label and a text for each run. head: as in `Fact`."""

    label: str
    texts: list[str]
    head: str


@dataclass(frozen=True)
class Comparison:
    """The runs, and the lines below them: what came of them, their scores, and their changed keys."""

    runs: list[ComparedRun]
    results: list[ComparedRow]
    scores: list[ComparedRow]
    keys: list[ComparedRow]


def comparison(runs: Sequence[RunPaths]) -> Comparison:
    """The comparison of these runs. Lines that no run has a value for are left out."""
    times = Counter(paths.root.name for paths in runs)
    compared = [
        _run(paths, paths.root.name if times[paths.root.name] == 1 else str(paths.root))
        for paths in runs
    ]
    results = [
        ComparedRow(f.label, [_text(run.facts[name], f.write) for run in compared], f.head)
        for name, f in FACTS.items()
        if any(run.facts[name] is not None for run in compared)
    ]
    return Comparison(compared, results, _scores(compared), _changed_keys(compared))


def _run(paths: RunPaths, name: str) -> ComparedRun:
    summary, history = summarize(paths), read_curves_or_empty(paths)
    if summary.state.state == "unknown":
        say(f"note: {summary.state.run}: {summary.state.reason}")
    measured = facts(history)
    checkpoint = summary.checkpoint
    values = {
        **dict.fromkeys(FACTS),
        **{name: measured[name] for name in FACTS.keys() & measured.keys()},
        **device_hours(history.launches),
        "energy_kwh": read_loads(paths, history.launches).energy_kwh,
        "state": summary.state.state,
        "step": checkpoint.step if checkpoint else measured["step"],
        "goal": summary.state.goal,
        "validation_loss": measured["loss_to"],
        "launches": len(history.launches),
        "checkpoint_digest": checkpoint.digest if checkpoint else None,
        "weights_digest": dict(summary.lineage).get("weights digest"),
    }
    config = _flat(as_recorded(read_object_or_empty(paths.config)))
    evals = history.evals.dropna(subset=["loss"])[["step", "loss"]]
    scores, text = read_scores(paths), validation_text(paths)
    return ComparedRun(name, summary.state, values, scores, config, text, evals)


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """The keys of a config by dotted name, without those that do not change what is trained."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if before == "" and key in FOLDERS:
            continue
        name = f"{before}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def _changed_keys(runs: list[ComparedRun]) -> list[ComparedRow]:
    """The keys in which runs differ. A key that a run does not have differs from each value."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = {name: [_config_text(run.config, name) for run in runs] for name in names}
    return [ComparedRow(name, texts, name) for name, texts in rows.items() if len(set(texts)) > 1]


def _config_text(config: dict[str, Any], name: str) -> str:
    if name not in config:
        return NONE
    return config[name] if isinstance(config[name], str) else json.dumps(config[name])


def _scores(runs: list[ComparedRun]) -> list[ComparedRow]:
    by_run = [{row.label: row for row in run.scores} for run in runs]
    names = dict.fromkeys(name for rows in by_run for name in rows)
    return [
        ComparedRow(n, [rows[n].text() if n in rows else NONE for rows in by_run], n) for n in names
    ]


def notes_on_scores(runs: Sequence[ComparedRun]) -> list[str]:
    """Warnings about scores of equal labels that do not compare."""
    asked: dict[str, dict[tuple[str, str], list[str]]] = {}
    for run in runs:
        for row in run.scores:
            # Records of earlier versions may lack both, which tells nothing.
            if any(questions := (row.last.version, row.last.data_digest)):
                asked.setdefault(row.label, {}).setdefault(questions, []).append(run.name)
    notes = []
    for label, groups in asked.items():
        most = max(groups.values(), key=len)
        if others := [name for names in groups.values() if names is not most for name in names]:
            notes.append(
                f"{label}: these runs were scored on other questions or another version of the task than"
                f" the others: {', '.join(others)}"
            )
    return notes


def _text(value: Any, write: Callable[[Any], str]) -> str:
    return NONE if value is None else write(value)


def to_json(compared: Comparison) -> list[dict[str, Any]]:
    """An object for each run: its facts, its scores, and the config keys that differ."""
    changed = [row.label for row in compared.keys]
    return [
        {
            "run": run.state.run,
            **{name: _plain(value) for name, value in run.facts.items()},
            "scores": {
                f"{row.task} {row.metric}": {"step": max(row.by_step), **row.last.model_dump()}
                for row in run.scores
            },
            "config": {name: run.config[name] for name in changed if name in run.config},
        }
        for run in compared.runs
    ]


def _plain(value: Any) -> Any:
    """A number of pandas as one of Python; bits per byte with whether they are estimated."""
    if isinstance(value, BitsPerByte):
        return value._asdict()
    return value.item() if hasattr(value, "item") else value
