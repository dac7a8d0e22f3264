"""The curve of loss over parameters and tokens, and the interval in which a larger run will end.

bpb = A / N**alpha + B / D**beta + E for N parameters without embeddings and D tokens, fitted as in
approach 3 of Hoffmann et al. 2022 (arXiv 2203.15556): Huber's loss of the logarithms, several starts.
Losses are summed, not averaged: with a mean their solver stopped early (Besiroglu et al. 2024, arXiv
2404.10102).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from forge.core.errors import ConfigError, DataError
from forge.plugins.ladder.records import WithheldSize

DELTA = 1e-3  # of Hoffmann et al.: what is more than 0.1 % off the curve counts linearly
TOLERANCE = (
    1e-8  # a step that promises to lower the summed loss by a smaller part than this is the last
)


class Point(NamedTuple):
    """A run that has ended. trunk: run that it branched from, with whose other branches it shares noise.
    parameters: without embeddings. bpb: validation loss in bits per byte."""

    trunk: str
    parameters: int
    tokens: int
    bpb: float


class Curve(NamedTuple):
    """The fitted constants. E: bits per byte that no number of parameters and tokens removes."""

    A: float
    alpha: float
    B: float
    beta: float
    E: float

    def at(self, parameters: float, tokens: float) -> float:
        """Bits per byte of a model of so many parameters, without embeddings, after so many tokens."""
        return self.A / parameters**self.alpha + self.B / tokens**self.beta + self.E


class Prediction(NamedTuple):
    """Bits per byte on the curve, and the bounds of the interval for one new run."""

    bpb: float
    low: float
    high: float


def forecast(
    points: Sequence[Point],
    targets: Sequence[tuple[int, int]],
    *,
    floor: float | None = None,
    level: float = 0.9,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[Curve, list[Prediction]]:
    """Curve through the points, and for each target (parameters, tokens) the interval that holds one new
    run with probability `level`. floor: E in bits per byte, fixed; None: fitted like the others.

    Bootstrap by cluster (Cameron, Gelbach & Miller 2008, doi:10.1162/rest.90.3.414): trunks are drawn
    with replacement, all points of a trunk together. To each draw's value every residual is added, with
    both signs: the noise of the new run. Residuals are scaled by sqrt(n / (n - p)) for n trunks and p
    fitted constants, since the curve is nearer to its own points than to others (HC1 of MacKinnon & White
    1985, doi:10.1016/0304-4076(85)90158-7).

    ConfigError where the floor is not below all points, DataError where there are not more trunks than
    constants.
    """
    ladder = _Ladder(points, floor)
    best = ladder.best()
    names, trunk = np.unique([point.trunk for point in points], return_inverse=True)
    if len(names) <= len(best):
        raise DataError(
            f"{len(names)} trunks do not give an interval for a curve of {len(best)} constants",
            fix="add seeds or sizes to the ladder",
        )
    picked = np.random.default_rng(seed).integers(len(names), size=(draws, len(names)))
    times = (picked[:, :, None] == np.arange(len(names))).sum(1)  # that a draw has each trunk
    drawn, _ = ladder.solve(np.tile(best, (draws, 1)), times[:, trunk])
    noise = ladder.residuals(best[None])[0] * np.sqrt(len(names) / (len(names) - len(best)))
    curve, told = ladder.curve(best), []
    for target in targets:
        values = ladder.terms(drawn, *(np.log([size]) for size in target)).sum(0)
        outcomes = np.add.outer(np.log(values[:, 0]), np.concatenate([noise, -noise]))
        low, high = np.exp(np.quantile(outcomes, ((1 - level) / 2, (1 + level) / 2)))
        told.append(Prediction(curve.at(*target), float(low), float(high)))
    return curve, told


def withheld(points: Sequence[Point], floor: float | None, **options: Any) -> list[WithheldSize]:
    """The largest size as the smaller ones forecast it, at each of its lengths: a curve that does not
    follow the sizes of a ladder does not lead beyond them. [] where the smaller ones are too few for an
    interval. options: of `forecast`."""
    largest = max(point.parameters for point in points)
    smaller = [point for point in points if point.parameters < largest]
    if len({point.trunk for point in smaller}) <= (5 if floor is None else 4):
        return []
    own: dict[int, list[float]] = {}
    for point in points:
        if point.parameters == largest:
            own.setdefault(point.tokens, []).append(point.bpb)
    _, told = forecast(smaller, [(largest, tokens) for tokens in own], floor=floor, **options)
    return [
        WithheldSize(
            parameters=largest,
            tokens=tokens,
            bpb=float(np.mean(losses)),
            low=one.low,
            high=one.high,
        )
        for (tokens, losses), one in zip(own.items(), told, strict=True)
    ]


class _Ladder:
    """Points to which curves are fitted, many at once.

    logs[curve, constant]: logarithms of the constants, so that none is negative. Those of A / N**alpha
    and B / D**beta are at the means of log N and log D, where they depend least on their exponents. With
    a floor, that of E is left out.
    """

    def __init__(self, points: Sequence[Point], floor: float | None) -> None:
        sizes, tokens, self.bpb = np.array([point[1:] for point in points], float).T
        if floor is not None and not 0 < floor < self.bpb.min():
            raise ConfigError(
                f"a floor of {floor:g} bits per byte is not between 0 and the lowest loss,"
                f" {self.bpb.min():g}",
                fix="give a lower one, or none",
            )
        self.floor = floor
        self.mean_n, self.mean_d = np.log(sizes).mean(), np.log(tokens).mean()
        self.n, self.d = np.log(sizes), np.log(tokens)

    def curve(self, logs: Any) -> Curve:
        """Curve of the logarithms of one curve."""
        size, alpha, data, beta, *rest = (float(value) for value in np.exp(logs))
        a, b = size * np.exp(alpha * self.mean_n), data * np.exp(beta * self.mean_d)
        return Curve(float(a), alpha, float(b), beta, rest[0] if rest else float(self.floor or 0))

    def terms(self, logs: Any, n: Any, d: Any) -> Any:
        """The three terms of each curve at logarithms of N and D, in bits per byte: shape [3, curves,
        points]."""
        size, alpha, data, beta, *rest = np.exp(logs.T)[:, :, None]
        n, d = n - self.mean_n, d - self.mean_d
        left = np.zeros_like(size * n) + (rest[0] if rest else self.floor)
        return np.stack([size * np.exp(-alpha * n), data * np.exp(-beta * d), left])

    def residuals(self, logs: Any) -> Any:
        """Logarithm of each point over each curve: shape [curves, points]."""
        return np.log(self.bpb / self.terms(logs, self.n, self.d).sum(0))

    def _slopes(self, logs: Any) -> Any:
        """Change of the logarithm of each curve with its constants: shape [curves, points, constants]."""
        size, data, left = (terms := self.terms(logs, self.n, self.d)) / terms.sum(0)
        _, alpha, _, beta, *_ = np.exp(logs.T)[:, :, None]
        n, d = self.n - self.mean_n, self.d - self.mean_d
        columns = size, -alpha * n * size, data, -beta * d * data, left
        return np.stack(columns[: logs.shape[1]], axis=2)

    def best(self) -> Any:
        """Logarithms of the best curve from several starts. The exponents begin near those of Hoffmann et
        al., 0.34 and 0.28; the shares of the three terms in the losses differ."""
        starts = []
        for share, of_size in product((0.3, 0.8), (0.2, 0.5, 0.8)):
            left = self.floor or share * self.bpb.min()
            term = self.bpb.mean() - left
            start = [of_size * term, 0.3, (1 - of_size) * term, 0.3, left]
            starts.append(start[: 5 if self.floor is None else 4])
        found, losses = self.solve(np.log(starts), np.ones((len(starts), 1)))
        return found[losses.argmin()]

    def solve(self, logs: Any, times: Any) -> tuple[Any, Any]:
        """Logarithms and summed losses of the curves that are reached from `logs`. times[curve, point]:
        how often each point counts.

        Least squares with weights that make them Huber's loss (Holland & Welsch 1977,
        doi:10.1080/03610927708827533), damped (Marquardt 1963, doi:10.1137/0111030).
        """

        def loss(residuals: Any) -> Any:
            size = np.abs(residuals)
            return (times * np.where(size < DELTA, size**2 / 2, DELTA * (size - DELTA / 2))).sum(1)

        residuals = self.residuals(logs)
        losses, damping = loss(residuals), np.full(len(logs), 1e-3)
        # Most end within 100 steps; a draw whose alpha goes to 0 never does, and 0.1 % is left there.
        for _ in range(300):
            slopes = self._slopes(logs)
            weights = times * DELTA / np.maximum(np.abs(residuals), DELTA)
            down = np.einsum("cpk,cp->ck", slopes, weights * residuals)
            bend = np.einsum("cpk,cp,cpl->ckl", slopes, weights, slopes)
            # Added to the diagonal, with a least value for an E that goes to 0.
            extra = np.einsum("ckk->ck", bend) * damping[:, None] + 1e-14
            bend += extra[:, :, None] * np.eye(logs.shape[1])
            # Of a logarithm: the slopes say nothing about a longer step.
            step = np.linalg.solve(bend, down[:, :, None])[:, :, 0].clip(-2, 2)
            if ((down * step).sum(1) <= TOLERANCE * (losses + 1e-12)).all():
                break
            tried = self.residuals(logs + step)
            is_better = loss(tried) < losses
            damping = (damping * np.where(is_better, 0.2, 5)).clip(1e-12, 1e12)
            logs = np.where(is_better[:, None], logs + step, logs)
            residuals = np.where(is_better[:, None], tried, residuals)
            losses = loss(residuals)
        return logs, losses
