"""Curves and time bar of the report, as inline SVG in the colors of the page."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from forge.plugins.pages.curves import Curves
from forge.plugins.pages.node_load import LoadCurve
from forge.plugins.pages.run_tree import TreeRun
from forge.reporting.history import PHASES, Phase

if TYPE_CHECKING:
    import pandas as pd

# What matplotlib draws -> what the page decides, so that light and dark both read well.
# Each colour is a placeholder that no figure uses otherwise.
PAINT = {
    "#010101": "currentColor",
    "#010102": "var(--train)",
    "#010103": "var(--eval)",
    "#010104": "var(--mark)",
    "#010105": "var(--p-recomputed)",
    "#010106": "var(--p-save)",
    "#010107": "var(--p-preflight)",
}
INK, TRAIN, EVAL, MARK, *MORE = PAINT
COLORS = (TRAIN, EVAL, *MORE)  # of figures with many lines
DASHES = ("-", "--", ":", "-.")  # where there are more lines than colors
MOST_NAMED = 12  # lines in a legend that still has room in the figure

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, selectable, in the page's font
    "font.sans-serif": ["DejaVu Sans"],  # for the layout; the page's font is put in its place
    "font.size": 10.5,  # points in a figure of 360: about 10 px on a phone
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "text.parse_math": False,  # a name with $ is not a formula
    "path.simplify_threshold": 0.5,  # a long run has more points than pixels
}
SIZE_INCHES = (5.0, 3.2)
TIME_COLUMNS = 240


def loss_chart(history: Curves) -> str:
    """Training and validation loss over steps, restarts as dashed lines. Source of every number:
    the surviving lines of metrics.jsonl."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": "loss"}):
        figure, axes = _axes("loss (nats per token)", history)
        line(axes, history.train, "loss", TRAIN, "training batch", lw=1.2, alpha=0.75)
        line(axes, history.evals, "loss", EVAL, "validation", lw=2, marker="o", ms=4)
        axes.legend(loc="upper right")
        return svg(figure, "loss")


def family_chart(family: Sequence[TreeRun]) -> str:
    """Validation loss over steps of runs that start from each other; each line begins at its parent's
    point. What comes before the first branch may lie above the figure."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": "family"}):
        figure, axes = empty_axes("validation loss")
        lines = {member.run: _from_parent(member, family) for member in family}
        for number, (name, frame) in enumerate(lines.items()):
            label = name if number < MOST_NAMED else None
            line(axes, frame, "loss", label=label, **_style_of(number))
        # Where the lines of the children begin: at the parent's last loss before the start.
        children = [lines[member.run]["step"] for member in family if member.start]
        first = min((steps.min() for steps in children if len(steps)), default=0)
        late = [frame.loc[frame["step"] >= first, "loss"] for frame in lines.values()]
        late = [losses for losses in late if len(losses)]
        if late:
            low, high = min(map(min, late)), max(map(max, late))
            margin = 0.08 * (high - low) or 0.1
            axes.set_ylim(low - margin, high + margin)
        axes.legend(loc="upper right")
        return svg(figure, "family")


def _from_parent(member: TreeRun, family: Sequence[TreeRun]) -> pd.DataFrame:
    """The losses of a run, preceded by the parent's last loss before the start, if it is recorded."""
    import pandas as pd

    parents = [other for other in family if other.run == member.parent_run]
    before = [other.evals[other.evals["step"] <= member.start].tail(1) for other in parents]
    return pd.concat([*before, member.evals])


def source_chart(history: Curves) -> str:
    """Validation loss of each source over steps, restarts as dashed lines."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": "sources"}):
        figure, axes = _axes("validation loss", history)
        for number, (name, frame) in enumerate(history.source_evals.items()):
            line(axes, frame, "loss", label=name, **_style_of(number))
        axes.legend(loc="upper right")
        return svg(figure, "sources")


def _style_of(number: int) -> dict[str, Any]:
    """Color, dashes and marker of the line with this number in a figure of many lines."""
    again, color = divmod(number, len(COLORS))
    dashes = DASHES[again % len(DASHES)]
    return {"color": COLORS[color], "lw": 1.6, "marker": "o", "ms": 3, "ls": dashes}


def throughput_chart(history: Curves) -> str:
    """Tokens per second over all ranks against steps, from zero, restarts as dashed lines."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": "throughput"}):
        figure, axes = _axes("tokens per second", history)
        line(axes, history.train, "tokens_per_sec", TRAIN, "all ranks", lw=1.2)
        axes.set_ylim(0, 1.1 * history.train["tokens_per_sec"].max())
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(loc="lower right")
        return svg(figure, "throughput")


def load_chart(curve: LoadCurve, name: str) -> str:
    """Median of nodes or GPUs over time, between the least and the most of them."""
    points = curve.points
    hours = points["hours"]
    unit, at = ("hours", hours) if hours.max() >= 2 else ("minutes", 60 * hours)
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure, axes = empty_axes(curve.unit)
        axes.set_xlabel(f"{unit} since the first line")
        axes.fill_between(at, points["min"], points["max"], color=TRAIN, alpha=0.2, lw=0)
        axes.plot(
            at, points["median"], color=TRAIN, lw=1.4, marker="o" if len(at) < 3 else "", ms=4
        )
        axes.set_ylim(bottom=0)
        return svg(figure, name)


def empty_axes(ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel=ylabel)
    axes.grid(axis="y", color=INK, alpha=0.15, lw=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, axes


def _axes(ylabel: str, history: Curves) -> tuple[Figure, Axes]:
    figure, axes = empty_axes(ylabel)
    last = max(frame["step"].max() for frame in (history.train, history.evals) if len(frame))
    axes.set_xlim(-0.02 * last, max(1.03 * last, 1))  # both charts alike, also for a single point
    for number, restart in enumerate(history.restarts):
        label = "restart" if number == 0 else None
        axes.axvline(restart.step, color=MARK, lw=1.2, ls=(0, (4, 3)), label=label)
    return figure, axes


def line(
    axes: Axes, frame: pd.DataFrame, column: str, color: str, label: str | None, **style: Any
) -> None:
    points = frame.dropna(subset=[column])
    if len(points) == 1:
        style = {**style, "marker": "o", "ms": 5}  # a line through one point is invisible
    if len(points):
        axes.plot(points["step"], points[column], color=color, label=label, **style)


def svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element for the page `name`d figure: same data, same bytes.

    Ids get a prefix, because all figures share the page's name space.
    """
    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' (xmlns(:\w+)?|width|height|version)="[^"]*"', "", text, count=5)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for placeholder, paint in PAINT.items():
        text = text.replace(placeholder, paint)
    text = text.replace("'DejaVu Sans'", "system-ui, sans-serif")
    return text.replace("<svg", '<svg aria-hidden="true"', 1)


# --- time bar -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeBlock:
    """A rectangle of the time bar, in shares of its width and height."""

    phase: str
    x: float
    width: float
    y: float
    height: float


def time_blocks(phases: list[Phase], columns: int = TIME_COLUMNS) -> list[TimeBlock]:
    """The wall time cut into equal columns, each stacked by what it was spent on.

    So an evaluation of a second still shows in a run of weeks, and the page stays small.
    Time that belongs to no phase (a finished run that was taken up again) is left out.
    """
    blocks: list[TimeBlock] = []
    for column, shares in enumerate(_columns(phases, columns)):
        y, x = 0.0, column / columns
        for phase, share in ((name, shares[name]) for name in PHASES if name in shares):
            last = blocks[-1] if blocks else None
            if share > 0.999 and last and last.phase == phase and last.height > 0.999:
                blocks[-1] = TimeBlock(phase, last.x, x + 1 / columns - last.x, 0.0, 1.0)
            else:
                blocks.append(TimeBlock(phase, x, 1 / columns, y, share))
            y += share
    return blocks


def _columns(phases: list[Phase], columns: int) -> list[dict[str, float]]:
    total = sum(phase.end - phase.start for phase in phases)
    shares: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
    cursor = 0.0  # in columns
    for phase in phases:
        end = min(cursor + (phase.end - phase.start) / total * columns, columns)
        while end - cursor > 1e-9:
            column = int(cursor + 1e-9)
            step = min(end, column + 1) - cursor
            shares[column][phase.name] += step
            cursor += step
    return shares


def time_ticks(total_sec: float) -> list[tuple[float, str]]:
    """(share of the width, label) at round times: seconds, minutes, hours or days."""
    units = [(86400, "d"), (3600, "h"), (60, "min"), (1, "s")]
    size, unit = next((u for u in units if total_sec >= 3 * u[0]), (1, "s"))
    values = MaxNLocator(5, steps=[1, 2, 3, 5, 10]).tick_values(0, total_sec / size)
    return [
        (value * size / total_sec, f"{value:g} {unit}")
        for value in values
        if 0 <= value * size <= total_sec
    ]
