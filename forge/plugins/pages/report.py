"""`forge report`: one self-contained HTML page per run that opens offline."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from forge.core import events
from forge.core.files import atomic_open, read_json
from forge.core.paths import RunPaths
from forge.core.records import Check, PreflightResult, Validation
from forge.core.terminal import duration
from forge.plugins.pages.charts import (
    family_chart,
    load_chart,
    loss_chart,
    source_chart,
    throughput_chart,
    time_blocks,
    time_ticks,
)
from forge.plugins.pages.curves import Curves, device_hours, facts, read_curves
from forge.plugins.pages.node_load import read_loads
from forge.plugins.pages.run_tree import TreeRun, family_of
from forge.reporting.history import PHASES, History
from forge.reporting.run_rows import read_scores
from forge.reporting.summary import Summary, summarize
from forge.run.launches import LaunchHistory

TEMPLATES = Path(__file__).parent / "templates"


def write_report(paths: RunPaths) -> Path:
    """Write `report.html` of a run from whatever files are there, and give its path.

    Works for a failed or unfinished run too: the page then says what is missing. Equal files of a run
    that nothing works on give equal bytes. Raises ConfigError where there is no such run,
    UnfitError on a full disk.
    """
    page = render(paths)
    with atomic_open(paths.report, "w") as file:
        file.write(page)
    return paths.report


def render(paths: RunPaths) -> str:
    """The page as text."""
    return environment().get_template("report.html.j2").render(**_context(paths))


def environment() -> Environment:
    """The templates of pages, with filters for numbers and times."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "duration": partial(duration, precise=True),
        "count": "{:,.0f}".format,
        "utc": utc,
    }
    return made


def _context(paths: RunPaths) -> dict[str, Any]:
    summary, history = summarize(paths), read_curves(paths)
    return {
        "summary": summary,
        "facts": facts(history),
        "missing": _missing(paths, summary, history),
        "charts": _charts(history),
        "loads": _loads(paths, history),
        **family_context(family_of(paths), here=paths.root.name),
        "scores": read_scores(paths),
        "restarts": history.restarts,
        "phases": list(PHASES),
        "time": _time(history),
        "launches": [_launch_row(launch) for launch in history.launches],
        "preflight_checks": _preflight_checks(summary.preflight),
        "validation_checks": _validation_checks(summary.validation),
        "config": _config_text(paths),
        "paths": paths,
    }


def family_context(family: list[TreeRun], here: str = "") -> dict[str, Any]:
    """Contents of family.html.j2. here: the run of the page."""
    has_losses = any(len(member.evals) for member in family)
    chart = Markup(family_chart(family)) if has_losses else ""
    return {"family": family, "family_chart": chart, "here": here}


def _config_text(paths: RunPaths) -> str:
    """The resolved config as YAML, as people write it; empty where there is none."""
    if not paths.config.exists():
        return ""
    return yaml.safe_dump(read_json(paths.config), sort_keys=False, allow_unicode=True)


# --- pieces of the page -------------------------------------------------------------------------


def _missing(paths: RunPaths, summary: Summary, history: Curves) -> list[str]:
    """Parts that a report lacks, each with the reason or what to do."""
    evaluated = history.evals["loss"].notna().any()
    absent = [
        (not paths.config.exists(), "config.json: the run's config was never resolved"),
        (not summary.preflight, "preflight: no node was checked yet"),
        (not history.launches, "launches: training has not started"),
        (not len(history.train), "training curve: no step was logged"),
        (not evaluated, "validation loss: no evaluation was logged"),
        (summary.step is None, "checkpoint: none is committed, so there is no lineage"),
        (not summary.validation, "validation: not done yet, so there are no samples either"),
    ]
    return [text for is_absent, text in absent if is_absent]


def _charts(history: Curves) -> list[dict[str, Any]]:
    """Title, description for those who do not see it, and SVG of each curve that has data."""
    train, evals = history.train.dropna(subset=["loss"]), history.evals.dropna(subset=["loss"])
    speed = history.train.dropna(subset=["tokens_per_sec"])
    charts = []
    if len(train) or len(evals):
        alt = ", ".join(
            f"{name} loss from {frame['loss'].iloc[0]:.2f} to {frame['loss'].iloc[-1]:.2f} "
            f"over steps {frame['step'].iloc[0]} to {frame['step'].iloc[-1]}"
            for name, frame in (("training", train), ("validation", evals))
            if len(frame)
        )
        charts.append({"title": "Loss", "alt": alt, "svg": Markup(loss_chart(history))})
    if history.source_evals:
        alt = ", ".join(
            f"{name} from {frame['loss'].iloc[0]:.2f} to {frame['loss'].iloc[-1]:.2f}"
            for name, frame in history.source_evals.items()
        )
        svg = Markup(source_chart(history))
        charts.append({"title": "Validation loss by source", "alt": alt, "svg": svg})
    if len(speed):
        rate = speed["tokens_per_sec"]
        alt = f"tokens per second: median {rate.median():,.0f}, least {rate.min():,.0f}"
        charts.append({"title": "Throughput", "alt": alt, "svg": Markup(throughput_chart(history))})
    return charts


def _loads(paths: RunPaths, history: History) -> dict[str, Any]:
    """Curves and rows on the nodes while they trained; without curves where nothing was recorded."""
    loads = read_loads(paths, history.launches)
    charts = []
    for number, curve in enumerate(loads.curves):
        alt = (
            f"median {curve.median:,.3g} {curve.unit}, from {curve.least:,.3g} to {curve.most:,.3g}"
        )
        svg = Markup(load_chart(curve, f"load{number}"))
        charts.append({"title": curve.title, "alt": alt, "svg": svg})
    hours = device_hours(history.launches)
    gpu_hours = hours.get("gpu_hours", hours.get("rank_hours"))  # a rank of a program has one GPU
    energy = loads.energy_kwh
    return {
        "charts": charts,
        "curves": loads.curves,
        "energy_kwh": energy,
        "gpu_hours": None if energy is None else gpu_hours,
    }


def _time(history: History) -> dict[str, Any]:
    """The bar's blocks and ticks, and one row per phase: name, seconds, share, meaning."""
    wall = history.wall_sec
    return {
        "blocks": time_blocks(history.phases),
        "ticks": time_ticks(wall) if wall else [],
        "rows": [
            {"phase": name, "seconds": sec, "share": sec / wall, "meaning": PHASES[name]}
            for name, sec in history.seconds.items()
        ],
    }


def _launch_row(launch: LaunchHistory) -> dict[str, Any]:
    start: events.Launch | None = launch.begun
    return {
        "start": launch.start,
        "seconds": launch.end - launch.start,
        "resumed_step": launch.resumed_step,
        "last_step": launch.last_step,
        "world_size": start and start.world_size,
        "where": _where(start) if start else "",
        "outcome": launch.outcome,
    }


def _where(start: events.Launch) -> str:
    """`job 17 on node01, node02`; without Slurm the host."""
    return f"job {start.job} on {', '.join(start.nodes)}" if start.job else start.host


# --- checks ---------------------------------------------------------------------------------------


def _preflight_checks(preflight: PreflightResult | None) -> list[dict[str, str]]:
    """Checks of all nodes and of the ranks, worst first: where, name, status, message, fix."""
    checks = preflight.all_checks if preflight else []
    return _worst_first([_row(check, where) for where, check in checks])


def _validation_checks(validation: Validation | None) -> list[dict[str, str]]:
    """Validation's checks, worst first: name, status, message, fix."""
    return _worst_first([_row(check, "") for check in validation.checks] if validation else [])


def _row(check: Check, where: str) -> dict[str, str]:
    return {"where": where, **asdict(check)}


def _worst_first(checks: list[dict[str, str]]) -> list[dict[str, str]]:
    return sorted(checks, key=lambda check: {"ok": 2, "warn": 1}.get(check["status"], 0))


# --- words for numbers --------------------------------------------------------------------------


def utc(seconds: float) -> str:
    """A time since the epoch as `2026-01-31 14:05:09`, in UTC wherever the page is made."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
