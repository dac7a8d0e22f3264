"""The picture of docs/storm.md: useful training over wall time, one line for each contender."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bench.storm import score
from bench.storm.raw import Raw

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, KEY = 560, 300, 44, 40, 12, 160
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
EVERY_SEC = 5.0  # between two points of a line


def picture(raws: Sequence[Raw]) -> str:
    """SVG of the first seed of each ranked contender; equal raw files give equal text."""
    seed = min(one.seed for one in raws)
    shown = [one for one in raws if one.is_ranked and one.seed == seed]
    minutes = max(one.minutes for one in shown)
    lines = [_axes(minutes)]
    for number, one in enumerate(sorted(shown, key=_useful, reverse=True)):
        color = COLORS[number % len(COLORS)]
        pen = f'fill="none" stroke="{color}" stroke-width="1.8"'
        if number >= len(COLORS):  # the colours are used again
            pen += ' stroke-dasharray="6 3"'
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in _points(one, minutes))
        top = TOP + 14 + 18 * number
        lines += [
            f'<polyline points="{points}" {pen}/>',
            f'<path d="M{WIDTH + 8} {top - 4}h22" {pen}/>',
            f'<text x="{WIDTH + 36}" y="{top}" fill="{color}">{escape(one.contender)}</text>',
        ]
    size = f'width="{WIDTH + KEY}" height="{HEIGHT}" viewBox="0 0 {WIDTH + KEY} {HEIGHT}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *lines, "</svg>\n"])


def _useful(one: Raw) -> float:
    return sum(count for _, count in score.useful_steps(one)) * one.step_sec


def _place(at: float, useful: float, minutes: float) -> tuple[float, float]:
    """Of this many seconds of the storm and of useful training."""
    x = LEFT + (WIDTH - LEFT) * at / (60 * minutes)
    return x, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * useful / (60 * minutes)


def _points(one: Raw, minutes: float) -> list[tuple[float, float]]:
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
