"""`forge compare`: runs side by side, with the config keys in which they differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.core.config import FOLDERS, as_recorded
from forge.core.errors import ConfigError
from forge.core.files import atomic_open, read_object_or_empty
from forge.core.paths import RunPaths
from forge.core.terminal import Table, duration, say
from forge.plugins.pages.curves import device_hours, facts, read_curves_or_empty
from forge.plugins.pages.node_load import read_loads
from forge.plugins.pages.run_tree import TreeRun, families
from forge.reporting.run_rows import ScoreRow, read_scores
from forge.reporting.run_state import COLORS, RunState
from forge.reporting.summary import summarize

NONE = "–"


def _number(digits: str) -> Callable[[float], str]:
    return lambda value: format(value, digits)


# Fact of a run -> its label, and how a value is written.
FACTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "state": ("state", str),
    "step": ("step", _number(",")),
    "goal": ("of steps", _number(",")),
    "train_loss": ("loss of the last training batch", _number(".4f")),
    "validation_loss": ("validation loss", _number(".4f")),
    "tokens": ("tokens", _number(",.0f")),
    "tokens_per_sec": ("tokens per second", _number(",.0f")),
    "mfu": ("MFU", _number(".1%")),
    "gpu_hours": ("GPU hours", _number(",.3g")),
    "energy_kwh": ("energy of the GPUs (kWh)", _number(",.3g")),
    "core_hours": ("core hours", _number(",.3g")),
    "rank_hours": ("rank hours", _number(",.3g")),
    "wall_sec": ("wall time", lambda sec: duration(sec, precise=True)),
    "goodput": ("goodput", _number(".0%")),
    "launches": ("launches", str),
    "checkpoint_digest": ("checkpoint digest", lambda digest: digest[:12]),
    "weights_digest": ("weights digest", lambda digest: digest[:12]),
}


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison. facts: by the names in FACTS, None for what is not known. config: by
    dotted name."""

    state: RunState
    facts: dict[str, Any]
    scores: list[ScoreRow]
    config: dict[str, Any]


@dataclass(frozen=True)
class ComparedRow:
    """A line of the comparison: its label and a text for each run."""

    label: str
    texts: list[str]


@dataclass(frozen=True)
class Comparison:
    """The runs, and the lines below them: what came of them, their scores, and their changed keys."""

    runs: list[ComparedRun]
    results: list[ComparedRow]
    scores: list[ComparedRow]
    keys: list[ComparedRow]


def compare(runs: Sequence[RunPaths], *, as_json: bool = False, page: Path | None = None) -> None:
    """Print a comparison of runs to standard output, or write it as a page that opens offline.

    Raises ConfigError without runs, or where one does not exist, and UnfitError on a full disk.
    """
    if not runs:
        raise ConfigError(
            "there are no runs to compare", fix="train some, or name their directories"
        )
    compared = comparison(runs)
    if page:
        _write_page(page, compared, families(runs))
        say(f"comparison of {len(runs)} runs: {page}")
    if as_json:
        print(json.dumps(to_json(compared), indent=2))
    elif not page:
        _table(compared).print()


def comparison(runs: Sequence[RunPaths]) -> Comparison:
    """The comparison of these runs. Lines that no run has a value for are left out."""
    compared = [_run(paths) for paths in runs]
    results = [
        ComparedRow(label, [_text(run.facts[name], write) for run in compared])
        for name, (label, write) in FACTS.items()
        if any(run.facts[name] is not None for run in compared)
    ]
    return Comparison(compared, results, _scores(compared), _changed_keys(compared))


def _run(paths: RunPaths) -> ComparedRun:
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
    return ComparedRun(summary.state, values, read_scores(paths), config)


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
    return [ComparedRow(name, texts) for name, texts in rows.items() if len(set(texts)) > 1]


def _config_text(config: dict[str, Any], name: str) -> str:
    if name not in config:
        return NONE
    return config[name] if isinstance(config[name], str) else json.dumps(config[name])


def _scores(runs: list[ComparedRun]) -> list[ComparedRow]:
    by_run = [{row.label: row for row in run.scores} for run in runs]
    names = dict.fromkeys(name for rows in by_run for name in rows)
    return [
        ComparedRow(n, [rows[n].text() if n in rows else NONE for rows in by_run]) for n in names
    ]


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
    """A number of pandas as one of Python."""
    return value.item() if hasattr(value, "item") else value


def _table(compared: Comparison) -> Table:
    names = [run.state.run for run in compared.runs]
    table = Table(("", *names), wrapped=names)
    for row in (*compared.results, *compared.scores, *compared.keys):
        is_state = row.label == FACTS["state"][0]
        tones = {run.state.run: COLORS[run.state.tone] for run in compared.runs} if is_state else {}
        table.add((row.label, *row.texts), tones)
    return table


def _write_page(path: Path, compared: Comparison, family: list[TreeRun]) -> None:
    from forge.plugins.pages.report import environment, family_context

    template = environment().get_template("compare.html.j2")
    page = template.render(compared=compared, phases=[], **family_context(family))
    with atomic_open(path, "w") as file:
        file.write(page)
