"""results/ladder.html: rungs, curve, forecasts and outcomes, on a page that opens offline."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from forge.core.files import atomic_open
from forge.plugins.ladder.fit import Curve
from forge.plugins.ladder.outcome import Outcome, outcome_of
from forge.plugins.ladder.records import LadderFit

INK = "#010101"  # in its place is the color of the page's text, light or dark
# Okabe-Ito: told apart with every kind of colour vision.
COLORS = ("#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ladder",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}


def write_page(path: Path, fit: LadderFit) -> None:
    """Write the page of a fit, with what the logs of its larger runs have. Raises UnfitError on a full
    disk."""
    curve, rows = Curve(**fit.curve), fit.rows
    found = {run: outcome_of(rows.paths(run), place) for run, place in rows.forecasts.items()}
    outcomes = {run: outcome for run, outcome in found.items() if outcome}
    folder = Path(__file__).parent / "templates"
    made = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined)
    residuals = [
        point.bpb - float(curve.at(point.parameters, point.tokens)) for point in fit.points
    ]
    page = made.get_template("ladder.html.j2").render(
        fit=fit,
        outcomes=outcomes,
        points=list(zip(fit.points, residuals, strict=True)),
        plot=_svg(plot(fit, curve, outcomes)),
    )
    with atomic_open(path, "w") as file:
        file.write(page)


def plot(fit: LadderFit, curve: Curve, outcomes: dict[str, Outcome]) -> Figure:
    """Bits per byte over tokens: the rungs of each size with the curve, forecasts, and outcomes."""
    sizes: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for point in fit.points:
        sizes[point.parameters].append((point.tokens, point.bpb))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes = figure.add_subplot(
            xscale="log", yscale="log", xlabel="tokens", ylabel="bits per byte"
        )
        every = [tokens for own in sizes.values() for tokens, _ in own]
        every += [one.forecast.tokens for one in outcomes.values()]
        tokens = np.geomspace(min(every), max(every), 100)
        for number, (size, own) in enumerate(sorted(sizes.items())):
            color, name = COLORS[number % len(COLORS)], EngFormatter(places=1, sep="")(size)
            axes.plot(tokens, [curve.at(size, one) for one in tokens], color=color, lw=1, alpha=0.6)
            axes.plot(*zip(*own, strict=True), "o", ms=4, color=color, label=f"{name} parameters")
        for run, one in outcomes.items():
            told = one.forecast
            below, above = told.bpb - told.low, told.high - told.bpb
            name = f"{run}, {told.level:.0%} interval{' (late)' if one.is_late else ''}"
            bars: dict[str, Any] = {"yerr": [[below], [above]], "capsize": 5, "color": INK}
            own_curve = [curve.at(told.parameters, one) for one in tokens]
            axes.plot(tokens, own_curve, color=INK, lw=1, ls=":")
            axes.errorbar(told.tokens, told.bpb, fmt="_", ms=8, lw=1.4, label=name, **bars)
            if one.bpb is not None:
                name = f"outcome, {'inside' if one.is_inside else 'outside'}"
                axes.plot(told.tokens, one.bpb, "D", ms=6, mfc="none", color=COLORS[2], label=name)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
        axes.grid(axis="y", which="both", color=INK, alpha=0.12, lw=0.6)
        axes.legend(fontsize=8, loc="upper right")
    return figure


def _svg(figure: Figure) -> str:
    """The figure as an element of the page: same data, same bytes."""
    out = io.StringIO()
    with mpl.rc_context(STYLE):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = re.sub(r' (width|height)="[^"]*"', "", text[text.index("<svg") :], count=2)
    return text.replace(INK, "currentColor").replace("'DejaVu Sans'", "system-ui, sans-serif")
