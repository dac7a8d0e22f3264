"""Figures of a sweep: the curves of all runs, and the last loss against each key that differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import quantiles

import matplotlib as mpl
from matplotlib.ticker import AutoLocator

from forge.plugins.pages.charts import COLORS, MARK, STYLE, TRAIN, empty_axes, line, svg
from forge.plugins.pages.sweep import SEED, Column, Sweep, SweepSetting, loss_of

BEST = len(COLORS)  # settings that are drawn in colour and named
EARLY = 0.25  # share of the steps in which losses fall so far that the rest would look equal
CURVES_INCHES = (6.0, 4.2)
MOST_TICKS = 6  # values that are named on an axis
MOST_KEYS = 5  # of which a figure is drawn
WIDE = 8.0  # ratio of the largest value to the least from which an axis is logarithmic


@dataclass(frozen=True)
class SweepChart:
    """A figure: its title, a description for those who do not see it, SVG, and a note below it."""

    title: str
    alt: str
    svg: str
    note: str


def sweep_charts(sweep: Sweep) -> list[SweepChart]:
    """The figures of a sweep; [] without losses."""
    keys = [column for column in sweep.columns if column.is_key and column.label != SEED]
    measured = any(loss_of(run) is not None for run in sweep.runs)
    against = [_against(sweep, key) for key in keys[:MOST_KEYS] if measured]
    return [*curves_of(sweep.settings), *against]


def curves_of(settings: Sequence[SweepSetting]) -> list[SweepChart]:
    """The figure with the validation losses of all runs over steps, the first ones in colour; [] without
    losses."""
    frames = [run.evals for setting in settings for run in setting.runs if len(run.evals)]
    if not frames:
        return []
    last = max(frame["step"].max() for frame in frames)
    late = [loss for frame in frames for loss in frame.loc[frame["step"] >= EARLY * last, "loss"]]
    low, high, note = _limits([loss for loss in late if isfinite(loss)], "lines")
    with mpl.rc_context({**STYLE, "svg.hashsalt": "sweep"}):
        figure, axes = empty_axes("validation loss (nats per token)")
        figure.set_size_inches(CURVES_INCHES)
        for number, setting in reversed([*enumerate(settings)]):  # the best ones on top
            color, style = COLORS[min(number, BEST - 1)], {"lw": 1.7, "zorder": 3.0}
            label: str | None = setting.name
            if number >= BEST:
                color, style = MARK, {"lw": 0.9, "alpha": 0.45}
                label = f"{len(settings) - BEST} more" if number == BEST else None
            for run in setting.runs:
                line(axes, run.evals, "loss", color, label, **style)
                label = None if len(run.evals) else label
        axes.set_ylim(low, high)
        lines, labels = axes.get_legend_handles_labels()
        figure.legend(lines[::-1], labels[::-1], loc="outside lower left", ncols=2)
        drawn = svg(figure, "sweep")
    alt = f"validation loss over steps of {len(frames)} runs; the lowest is that of {settings[0].name}"
    return [SweepChart("Validation loss", alt, drawn, note)]


def _against(sweep: Sweep, key: Column) -> SweepChart:
    """The last validation loss of each run against its value of a key."""
    pairs = zip(key.texts, sweep.runs, strict=True)
    known = [(text, loss) for text, run in pairs if (loss := loss_of(run)) is not None]
    low, high, note = _limits([loss for _, loss in known], "runs")
    places, are_names = _places([text for text, _ in known])
    by_value: dict[float, list[float]] = defaultdict(list)
    for text, loss in known:
        by_value[places[text]].append(min(loss, high))  # those above lie on the upper edge
    with mpl.rc_context({**STYLE, "svg.hashsalt": key.label}):
        figure, axes = empty_axes("validation loss")
        axes.set_xlabel(key.label)
        in_order = sorted(by_value)
        lowest = [min(by_value[at]) for at in in_order]
        axes.plot(in_order, lowest, color=TRAIN, lw=1.2, alpha=0.6)
        for at, losses in by_value.items():
            axes.plot(
                [at] * len(losses), losses, "o", color=TRAIN, ms=4.5, alpha=0.7, clip_on=False
            )
        if not are_names and in_order[0] > 0 and in_order[-1] >= WIDE * in_order[0]:
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(AutoLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if len(places) <= MOST_TICKS:
            axes.set_xticks([*places.values()], [*places])
            axes.set_xticks([], minor=True)
        axes.set_ylim(low, high)
        drawn = svg(figure, key.label)
    value, loss = min(known, key=lambda pair: pair[1])
    alt = f"last validation loss against {key.label}; the lowest, {loss:.4f}, at {value}"
    return SweepChart(f"Loss by {key.label}", alt, drawn, note)


def _places(texts: Sequence[str]) -> tuple[dict[str, float], bool]:
    """Place of each value on the axis, and whether the values are names and no numbers."""
    try:
        return {text: float(text) for text in texts}, False
    except ValueError:
        return {name: float(number) for number, name in enumerate(sorted(set(texts)))}, True


def _limits(losses: Sequence[float], what: str) -> tuple[float, float, str]:
    """The limits of the axis, and a note where losses lie above. The upper one is the outer fence of
    Tukey (Exploratory Data Analysis, 1977): three interquartile ranges above the upper quartile; one run
    that diverged would hide what tells the others apart."""
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    if len(losses) > 3:
        lower, _, upper = quantiles(losses, method="inclusive")
        high = min(high, upper + 3 * (upper - lower))
    margin = 0.06 * (high - low) or 0.1
    above = sum(loss > high for loss in losses)
    note = f"Some {what} leave the figure above {high:.2f}." if above and what == "lines" else ""
    if above and what == "runs":
        note = f"{above} runs lie above {high:.2f}, and are drawn on the upper edge."
    return low - margin, high + margin, note
