"""The fit of a ladder. Threat: an interval that holds fewer outcomes than it says, or says nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from forge.core.errors import ConfigError, DataError
from forge.plugins.ladder.fit import Curve, Point, Prediction, forecast, withheld
from forge.plugins.ladder.records import WithheldSize

SEEDS, BUDGETS = 3, (0.5, 1, 2)


class Planted(NamedTuple):
    """A ladder made from a known curve, and how a larger run of it ended, in bits per byte."""

    curve: Curve
    points: list[Point]
    parameters: int
    tokens: int
    outcome: float


def planted(rng: np.random.Generator, sizes: int = 5, noise: float = 1.0) -> Planted:
    """Constants as in published fits (exponents 0.2 to 0.45), E of 0.5 to 1.2 bits per byte; five sizes,
    three budgets, three seeds. Noise of a trunk 0.3 to 0.5 %, of each of its points 0.1 %. The run to
    forecast has 2 to 4 times the parameters of the largest rung, at 20 tokens each."""
    alpha, beta = rng.uniform(0.2, 0.45, 2)
    of_size, of_data = rng.uniform(0.1, 0.5, 2)  # what the terms of A and B are at the middle size
    rungs = 10 ** rng.uniform(4.5, 7) * rng.uniform(1.6, 2.2) ** np.arange(sizes)
    middle = float(np.median(rungs))
    curve = Curve(
        of_size * middle**alpha, alpha, of_data * (20 * middle) ** beta, beta, rng.uniform(0.5, 1.2)
    )
    trunk_noise, point_noise = noise * rng.uniform(0.003, 0.005), noise * 0.001

    def run(trunk: str, parameters: float, tokens: float, shared: float) -> Point:
        bpb = curve.at(parameters, tokens) * np.exp(shared + rng.normal(0, point_noise))
        return Point(trunk, round(parameters), round(tokens), float(bpb))

    points = []
    for size in rungs:
        for seed in range(SEEDS):
            shared = rng.normal(0, trunk_noise)
            name = f"{size:.0f}-s{seed}"
            points += [run(name, size, 20 * budget * size, shared) for budget in BUDGETS]
    larger = rungs[-1] * rng.uniform(2, 4)
    outcome = run("larger", larger, 20 * larger, rng.normal(0, trunk_noise))
    return Planted(curve, points, outcome.parameters, outcome.tokens, outcome.bpb)


def curve_of(points: list[Point], floor: float | None = None) -> Curve:
    return forecast(points, [], floor=floor, draws=1)[0]


def forecast_of(ladder: Planted, floor: float | None, draws: int = 40) -> Prediction:
    target = ladder.parameters, ladder.tokens
    return forecast(ladder.points, [target], floor=floor, draws=draws)[1][0]


@pytest.mark.parametrize("floor_known", [False, True])
def test_interval_of_90_percent_holds_about_90_of_100_outcomes_and_is_narrow(
    floor_known: bool,
) -> None:
    rng = np.random.default_rng(2203)
    inside, widths = 0, []
    for _ in range(100):
        ladder = planted(rng)
        found = forecast_of(ladder, ladder.curve.E if floor_known else None)
        inside += found.low <= ladder.outcome <= found.high
        widths.append((found.high - found.low) / found.bpb)
    assert 85 <= inside <= 95
    assert np.median(widths) <= 0.05


def test_curve_without_noise_is_found_again() -> None:
    ladder = planted(np.random.default_rng(15556), noise=0)
    # Relative to the tokens and parameters, which are rounded.
    assert curve_of(ladder.points) == pytest.approx(ladder.curve, rel=1e-3)
    assert curve_of(ladder.points, ladder.curve.E) == pytest.approx(ladder.curve, rel=1e-3)
    found = forecast_of(ladder, None)
    assert found == pytest.approx([ladder.outcome] * 3, rel=1e-4)


@pytest.mark.parametrize("floor_known", [False, True])
def test_fit_is_as_good_as_that_of_scipy_from_the_true_curve(floor_known: bool) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(19)
    for _ in range(30):
        ladder = planted(rng)
        _, n, d, bpb = (np.array(values) for values in zip(*ladder.points, strict=True))
        free = 4 if floor_known else 5
        rest = ladder.curve[free:]

        def residuals(logs, n=n, d=d, bpb=bpb, rest=rest):
            return np.log(Curve(*np.exp(logs), *rest).at(n, d) / bpb)

        def summed(curve, residuals=residuals, free=free):
            size = np.abs(residuals(np.log(curve[:free])))
            return np.where(size < 1e-3, size**2 / 2, 1e-3 * (size - 5e-4)).sum()

        found = optimize.least_squares(
            residuals, np.log(ladder.curve[:free]), x_scale="jac", loss="huber", f_scale=1e-3
        )
        ours = curve_of(ladder.points, ladder.curve.E if floor_known else None)
        assert summed(ours) <= summed(Curve(*np.exp(found.x), *rest)) * (1 + 1e-6)


def test_one_wrong_rung_hardly_moves_the_curve() -> None:
    ladder = planted(np.random.default_rng(10102))
    wrong = [*ladder.points[:-1], ladder.points[-1]._replace(bpb=ladder.points[-1].bpb * 1.2)]
    before, after = (
        curve_of(points).at(ladder.parameters, ladder.tokens) for points in (ladder.points, wrong)
    )
    assert after == pytest.approx(before, rel=0.01)


def test_same_seed_gives_the_same_interval_and_a_higher_level_a_wider_one() -> None:
    ladder = planted(np.random.default_rng(1))
    targets = [(ladder.parameters, ladder.tokens), (ladder.parameters, 2 * ladder.tokens)]
    first, again = (forecast(ladder.points, targets, draws=40) for _ in range(2))
    assert first == again
    curve, [told, of_more] = first
    assert curve == curve_of(ladder.points) and of_more.bpb < told.bpb
    assert forecast(ladder.points, targets[:1], draws=40)[1] == [told]
    [wider] = forecast(ladder.points, targets[:1], draws=40, level=0.99)[1]
    assert wider.low < told.low < told.bpb < told.high < wider.high


def missed(points: list[Point]) -> list[WithheldSize]:
    found = withheld(points, None, draws=40)
    assert [one.tokens for one in found] == sorted({p.tokens for p in points[-3 * SEEDS :]})
    return [one for one in found if not one.low <= one.bpb <= one.high]


def test_largest_size_is_rarely_outside_of_what_the_smaller_ones_forecast_on_a_curve_and_is_on_none() -> (
    None
):
    rng = np.random.default_rng(1706)
    ladders = [planted(rng) for _ in range(60)]
    assert sum(bool(missed(ladder.points)) for ladder in ladders) <= 6
    # Where the loss falls faster between larger sizes, as in both real ladders.
    for ladder in ladders[:10]:
        smallest = ladder.points[0].parameters
        bent = [
            p._replace(bpb=p.bpb * float(np.exp(-0.05 * np.log(p.parameters / smallest) ** 2)))
            for p in ladder.points
        ]
        assert all(one.bpb < one.low for one in missed(bent)) and missed(bent)


def test_smaller_sizes_with_too_few_trunks_forecast_nothing() -> None:
    ladder = planted(np.random.default_rng(4), sizes=4)
    points = [point for point in ladder.points if not point.trunk.endswith("-s2")]
    assert withheld(points, None, draws=40)
    sizes = sorted({point.parameters for point in points})
    few = [p for p in points if p.parameters in sizes[1:] or p.trunk.endswith("-s0")]
    assert withheld(few, None, draws=40) == [] != withheld(few, 0.1, draws=40)


def test_too_few_trunks_for_an_interval_are_refused() -> None:
    ladder = planted(np.random.default_rng(2))
    points = [point._replace(trunk=str(point.parameters)) for point in ladder.points]
    with pytest.raises(
        DataError, match="5 trunks do not give an interval for a curve of 5 constants"
    ):
        forecast(points, [(ladder.parameters, ladder.tokens)])


def test_floor_above_a_loss_is_refused() -> None:
    ladder = planted(np.random.default_rng(3))
    with pytest.raises(ConfigError, match="a floor of 9 bits per byte is not between 0 and"):
        curve_of(ladder.points, 9)
