"""`train.mix`: the weight of each source in the samples, the same for all steps or by stages."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from forge.core.values import shown

# Weights by source, or a list of stages: the same with the key `step`.
Mix = dict[str, float | int] | list[dict[str, float | int]]

STEP = "step"
# Smallest share of all samples. A smaller share would need blocks of more samples (data/sample_order.py).
MIN_SHARE = Fraction(1, 100_000)


@dataclass(frozen=True)
class MixStage:
    """Weights by source from a step on, in any unit; a source without one has weight 0."""

    step: int
    weights: dict[str, float]

    @property
    def shares(self) -> dict[str, Fraction]:
        """The share of each source in the samples, sorted by name; they sum to 1. A weight counts as the
        decimal number that the config has: 0.7 is 7/10."""
        exact = {name: Fraction(str(self.weights[name])) for name in sorted(self.weights)}
        total = sum(exact.values())
        return {name: weight / total for name, weight in exact.items()}

    @property
    def trouble(self) -> str:
        """Message that names each source whose share is too small to be drawn; "" for none."""
        return "; ".join(
            f"source {name} has {float(share):.2g} of the samples from step {self.step} on, which is less"
            f" than {float(MIN_SHARE):g}"
            for name, share in self.shares.items()
            if 0 < share < MIN_SHARE
        )

    def has_shares_of(self, other: MixStage) -> bool:
        """Return whether both draw each source with the same share."""
        own, others = (
            {name: share for name, share in stage.shares.items() if share}
            for stage in (self, other)
        )
        return own == others


def stages(mix: Mix) -> list[MixStage]:
    """The stages of a checked `train.mix`, with ascending steps."""
    if isinstance(mix, Mapping):
        return [MixStage(0, dict(mix))]
    return [
        MixStage(int(entry[STEP]), {name: weight for name, weight in entry.items() if name != STEP})
        for entry in mix
    ]


def stage_at(all_stages: Sequence[MixStage], step: int) -> MixStage:
    """The stage by which a step, counted from 0, draws its samples; the first stage before all of
    them."""
    return next((stage for stage in reversed(all_stages) if stage.step <= step), all_stages[0])


# --- checks of the config: ValueError with a sentence for people -----------------------------------


def check_mix(value: Any) -> Any:
    """`value`, if it is the value of train.mix or None."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        _check_weights(value)
    elif isinstance(value, list) and value:
        _check_stages(value)
    else:
        raise ValueError(
            "must be weights by source, such as {web: 0.7, code: 0.3}, or a list of stages, such as"
            " [{step: 0, web: 0.7, code: 0.3}, {step: 8000, web: 0.3, code: 0.7}]"
        )
    return value


def _check_stages(entries: list[Any]) -> None:
    before = -1
    for number, entry in enumerate(entries, start=1):
        step = entry.get(STEP) if isinstance(entry, Mapping) else None
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
            raise ValueError(
                f"stage {number} is {shown(entry)}; it needs the step at which it begins, as in"
                " {step: 8000, web: 0.3, code: 0.7}"
            )
        if step <= before:
            raise ValueError(
                f"stage {number} begins at step {step}, the one before it at {before}: steps must ascend"
            )
        before = step
        _check_weights({name: weight for name, weight in entry.items() if name != STEP})


def _check_weights(weights: Mapping[Any, Any]) -> None:
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight <= sys.float_info.max:
            raise ValueError(
                f"the weight of {name} is {shown(weight)}; it must be a number, 0 or more, of at most"
                f" {sys.float_info.max:.0e}"
            )
    if not any(weights.values()):
        raise ValueError("at least one source must have a weight above 0")
    if trouble := MixStage(0, dict(weights)).trouble:
        raise ValueError(f"{trouble}; give it a larger weight, or 0")


def require_sources(mix: Mix, sources: Iterable[str], first_step: int) -> None:
    """Every stage has a weight for each of these sources and for no other, and the first one has begun
    when a run starts at `first_step`."""
    names = sorted(sources)
    if not names:
        raise ValueError(
            "train.mix has weights of sources, and tokenize.sources names none: write"
            " `tokenize: {sources: {NAME: {inputs: […]}, …}}`, or remove train.mix"
        )
    in_order = stages(mix)
    for stage in in_order:
        unknown = [name for name in stage.weights if name not in names]
        if unknown:
            close = difflib.get_close_matches(unknown[0], names, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(
                f"train.mix names the source {unknown[0]}{hint}; tokenize.sources has {', '.join(names)}"
            )
        if missing := [name for name in names if name not in stage.weights]:
            where = f" in the stage of step {stage.step}" if len(in_order) > 1 else ""
            raise ValueError(
                f"train.mix has no weight of {', '.join(missing)}{where}; write 0 for a source that is"
                " not to be drawn"
            )
    if in_order[0].step > first_step:
        raise ValueError(
            f"the first stage of train.mix begins at step {in_order[0].step}, but the run at step"
            f" {first_step}: add a stage from step {first_step} on"
        )
