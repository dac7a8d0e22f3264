"""Training on several sources: the order of their samples, and the weights of their losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from forge.checkpoint import rewinds
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import RecordedMix, SourceUse
from forge.checkpoint.mix_at_start import MixAtStart
from forge.core.config import ResolvedConfig
from forge.core.mix import stage_at
from forge.core.train import Train
from forge.data.left_out import LeftOut
from forge.data.loader import windows_by_source
from forge.data.sample_order import MixedOrder
from forge.data.sources import SourceSet, Tokens


class SourceMix:
    """The mix of a run from its start on, the same on all ranks. ConfigError for a share that is too
    small."""

    def __init__(
        self, tokens: SourceSet, settings: Train, at_start: MixAtStart, left_out: LeftOut
    ) -> None:
        self._left_out = left_out
        self.at_start, self._tokens, self._batch_size = at_start, tokens, settings.batch_size
        self._num_windows = num_windows(tokens, settings.seq_len)
        self.order = MixedOrder(
            [replace(stage, step=left_out.stage_start(stage.step)) for stage in at_start.stages],
            self._num_windows,
            drawn_before=at_start.drawn_before,
            seed=settings.seed,
            batch_size=settings.batch_size,
        )

    @classmethod
    def of_start(
        cls,
        tokens: Tokens,
        config: ResolvedConfig,
        own: Checkpoint | None,
        parent: Checkpoint | None,
        left_out: LeftOut,
    ) -> Self | None:
        """The mix at a start; None for a run without sources. own, parent: as for `MixAtStart.of`."""
        if not isinstance(tokens, SourceSet):
            return None
        windows = num_windows(tokens, config.train.seq_len)
        return cls(tokens, config.train, MixAtStart.of(config, windows, own, parent), left_out)

    @classmethod
    def recorded(cls, tokens: Tokens, settings: Train, checkpoint: Checkpoint) -> Self | None:
        """The mix with which a checkpoint was trained; None without sources."""
        if not isinstance(tokens, SourceSet):
            return None
        left_out = rewinds.left_out(checkpoint.manifest)
        return cls(tokens, settings, MixAtStart.recorded(checkpoint), left_out)

    def record(self, step: int) -> RecordedMix:
        """The record of the mix in the manifest of a checkpoint of this step."""
        drawn = self.order.drawn(self._left_out.batch(step) * self._batch_size)
        return self.at_start.record(
            {
                name: SourceUse(
                    tokens=shards.manifest.totals["train"].tokens,
                    windows=self._num_windows[name],
                    samples=drawn[name],
                )
                for name, shards in self._tokens.by_source.items()
            }
        )


def num_windows(tokens: SourceSet, seq_len: int) -> dict[str, int]:
    """Windows in an epoch of each source. DataError where one has none."""
    by_source = windows_by_source(tokens, "train", seq_len)
    return {name: windows.num_samples for name, windows in by_source.items()}


def mean_loss(losses: Mapping[str, float], mix: MixAtStart | None, step: int) -> float:
    """The validation loss of a run after `step` steps: of its only corpus, else the mean over its sources
    by the weights of the last step."""
    if mix is None:
        return losses[""]
    shares = stage_at(mix.stages, max(step - 1, 0)).shares
    return sum(float(share) * losses[name] for name, share in shares.items() if share)


def losses_text(losses: Mapping[str, float]) -> str:
    """`code 2.1034, web 3.5120`; of a single corpus the loss alone."""
    return ", ".join(f"{name} {loss:.4f}".strip() for name, loss in losses.items())
