"""The pictures of docs/measured/storm.md, one line for each contender: useful training over wall time,
and what the model says of longer times between events."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log

from bench.storm import model, score
from bench.storm.raw import Raw

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, KEY = 560, 300, 44, 40, 12, 160
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
EVERY_SEC = 5.0  # between two points of a line
# Between two events: 1 minute to 6 hours.
DISTANCES_SEC = [60.0 * 360 ** (number / 60) for number in range(61)]
LEAST = 0.5  # ETTR at the bottom of the forecast

Place = tuple[float, float]


def picture(raws: Sequence[Raw]) -> str:
    """SVG of the first seed of each ranked contender; equal raw files give equal text."""
    seed = min(one.seed for one in raws)
    shown = [one for one in raws if one.is_ranked and one.seed == seed]
    minutes = max(one.minutes for one in shown)
    shown = sorted(shown, key=_useful, reverse=True)
    return _svg(_axes(minutes), [(one.contender, _points(one, minutes)) for one in shown])


def forecast(raws: Sequence[Raw]) -> str:
    """SVG of ETTR without Slurm's queue against the mean time between events, by the model of each ranked
    contender with storms of several seeds: of one storm nobody knows how it does in another."""
    fits = [(own[0].contender, model.fit(own, without_queue=True)) for own in _by_contender(raws)]
    lines = [
        (name, [(_x(sec), _y(fit.ettr(sec))) for sec in DISTANCES_SEC]) for name, fit in fits if fit
    ]
    return _svg(_axes_of_forecast(), sorted(lines, key=lambda line: line[1][0][1]))


def _by_contender(raws: Sequence[Raw]) -> list[list[Raw]]:
    """The ranked ones with several seeds, whose steps are a chain."""
    names = sorted({one.contender for one in raws if one.is_ranked and not one.samples})
    of = [[one for one in raws if one.contender == name] for name in names]
    return [own for own in of if len(own) > 1]


def _svg(axes: str, named: Sequence[tuple[str, Sequence[Place]]]) -> str:
    """Axes, a line for each name, and their key."""
    lines = [axes]
    for number, (name, places) in enumerate(named):
        color = COLORS[number % len(COLORS)]
        pen = f'fill="none" stroke="{color}" stroke-width="1.8"'
        if number >= len(COLORS):  # the colours are used again
            pen += ' stroke-dasharray="6 3"'
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        top = TOP + 14 + 18 * number
        lines += [
            f'<polyline points="{points}" {pen}/>',
            f'<path d="M{WIDTH + 8} {top - 4}h22" {pen}/>',
            f'<text x="{WIDTH + 36}" y="{top}" fill="{color}">{escape(name)}</text>',
        ]
    size = f'width="{WIDTH + KEY}" height="{HEIGHT}" viewBox="0 0 {WIDTH + KEY} {HEIGHT}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *lines, "</svg>\n"])


def _useful(one: Raw) -> float:
    return sum(count for _, count in score.useful_steps(one)) * one.step_sec


def _place(at: float, useful: float, minutes: float) -> Place:
    """Of this many seconds of the storm and of useful training."""
    x = LEFT + (WIDTH - LEFT) * at / (60 * minutes)
    return x, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * useful / (60 * minutes)


def _points(one: Raw, minutes: float) -> list[Place]:
    found, useful, drawn, before = [_place(0, 0, minutes)], 0.0, 0.0, 0.0
    for at, count in score.useful_steps(one):
        if at - before >= EVERY_SEC:  # an outage is level, from its beginning
            found.append(_place(before, useful, minutes))
        if at - drawn >= EVERY_SEC:
            found.append(_place(at, useful, minutes))
            drawn = at
        useful, before = useful + count * one.step_sec, at
    found.append(_place(before, useful, minutes))
    return [*found, _place(score.wall(one), useful, minutes)]


def _axes(minutes: float) -> str:
    """Axes, the line of a run that nothing delays, and what both axes are."""
    (left, bottom), (right, top) = (
        _place(0, 0, minutes),
        _place(60 * minutes, 60 * minutes, minutes),
    )
    parts = [
        f'<path d="M{left} {top:.1f}V{bottom}H{right:.1f}" fill="none" stroke="#444"/>',
        f'<path d="M{left} {bottom}L{right:.1f} {top:.1f}" stroke="#bbb" stroke-dasharray="4 3"/>',
        f'<text x="{left - 6}" y="{top + 8:.1f}" text-anchor="end">{minutes:g}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{right:.1f}" y="{bottom + 15}" text-anchor="end">{minutes:g}</text>',
        f'<text x="{(left + right) / 2:.1f}" y="{bottom + 30}" text-anchor="middle">'
        "wall time, minutes (up: useful training, minutes)</text>",
    ]
    return "\n".join(parts)


def _x(seconds: float) -> float:
    """Of so many seconds between two events, in their logarithm."""
    return LEFT + (WIDTH - LEFT) * log(seconds / DISTANCES_SEC[0]) / log(DISTANCES_SEC[-1] / 60)


def _y(ettr: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (max(ettr, LEAST) - LEAST) / (1 - LEAST)


def _axes_of_forecast() -> str:
    """Axes with lines at each tenth, and at minutes and hours that people know."""
    bottom, middle = HEIGHT - BOTTOM, (LEFT + WIDTH) / 2
    parts = []
    for tenth in range(round(10 * LEAST), 11):
        y = _y(tenth / 10)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10}</text>')
    for minutes, name in ((1, "1 min"), (2, "2"), (5, "5"), (20, "20"), (60, "1 h"), (360, "6 h")):
        x = _x(60.0 * minutes)
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{name}</text>')
    parts.append(
        f'<text x="{middle:.1f}" y="{bottom + 30}" text-anchor="middle">mean time between events'
        " (up: ETTR without Slurm's queue, by the model)</text>"
    )
    return "\n".join(parts)
