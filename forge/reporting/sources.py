"""The sources of a run in words and numbers, from the manifest of its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from forge.checkpoint.manifest import Manifest, RecordedMix
from forge.core.mix import Stage


@dataclass(frozen=True)
class SourceRow:
    """A source. tokens: of its training split. samples: drawn by the run and its parents."""

    name: str
    tokens: int
    weight: str
    samples: int
    epochs: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.tokens:,} tokens, {self.weight}, {self.samples:,} samples drawn"
            f" = {self.epochs:.2f} epochs"
        )


def source_rows(manifest: Manifest | None) -> list[SourceRow]:
    """One row for each source, sorted by name; none for a run without sources."""
    if manifest is None or manifest.mix is None:
        return []
    mix = manifest.mix
    return [
        SourceRow(name, use.tokens, _weight(mix, name), use.samples, use.samples / use.windows)
        for name, use in sorted(mix.sources.items())
    ]


def _weight(mix: RecordedMix, name: str) -> str:
    """`70 %, 30 % from step 8000`; a stage that leaves the share as it was is passed over."""
    shares = [
        (stage.step, Stage(stage.step, stage.weights).shares.get(name, 0)) for stage in mix.stages
    ]
    changes = [
        f"{100 * float(after):.3g} % from step {step}"
        for (_, before), (step, after) in pairwise(shares)
        if after != before
    ]
    first = f"{100 * float(shares[0][1]):.3g} %"
    return ", ".join([first, *changes])
