"""Training on several sources: the weights by which a run draws its samples (its own, after those of its
parent), their order, and the weights of losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import RecordedMix, RecordedStage, SourceUse
from forge.core.config import ResolvedConfig
from forge.core.mix import MixStage, stage_at, stages
from forge.core.records import BitsPerByte, TextBytes
from forge.core.train_settings import Train
from forge.data.sample_order import MixedOrder
from forge.data.sources import SourceSet, Tokens
from forge.data.windows import windows_by_source


@dataclass(frozen=True)
class MixAtStart:
    """stages: ascending steps, the first of which is not after the start. drawn_before: samples by source
    before the first stage."""

    stages: list[MixStage]
    drawn_before: dict[str, int]

    @classmethod
    def of(
        cls,
        config: ResolvedConfig,
        num_windows: Mapping[str, int],
        own: Checkpoint | None,
        parent: Checkpoint | None,
    ) -> MixAtStart:
        """num_windows: in an epoch of each source; their proportion without train.mix.

        A run that resumes draws on as its own checkpoint has recorded. A child draws by its own weights
        from the parent's step on, and from each source the windows that follow on those that the parent
        has drawn. With the parent's weights and seed it is the parent's own continuation.
        """
        if own is not None:
            return cls.recorded(own)
        mix = config.train.mix
        configured = [MixStage(0, dict(num_windows))] if mix is None else stages(mix)
        if parent is None:
            return cls(configured, dict.fromkeys(num_windows, 0))
        return _after(parent, configured, same_seed=config.train.seed == _seed_of(parent))

    @classmethod
    def recorded(cls, checkpoint: Checkpoint) -> MixAtStart:
        """The mix with which a checkpoint with sources was trained."""
        mix = checkpoint.manifest.mix
        assert mix, "the ids of a run without sources do not fit (compatibility.changed_ids)"
        return cls([MixStage(stage.step, stage.weights) for stage in mix.stages], mix.drawn_before)

    def record(self, sources: dict[str, SourceUse]) -> RecordedMix:
        """The record of the mix for the manifest of a checkpoint."""
        recorded = [
            RecordedStage(step=stage.step, weights={n: float(w) for n, w in stage.weights.items()})
            for stage in self.stages
        ]
        return RecordedMix(stages=recorded, drawn_before=self.drawn_before, sources=sources)


def _after(parent: Checkpoint, configured: list[MixStage], *, same_seed: bool) -> MixAtStart:
    step, before = parent.step, MixAtStart.recorded(parent)
    begun = [stage for stage in configured if stage.step <= step]
    first = MixStage(step, begun[-1].weights)
    following = [first, *(stage for stage in configured if stage.step > step)]
    kept = [stage for stage in before.stages if stage.step < step]
    if same_seed and kept and kept[-1].has_shares_of(first):
        return MixAtStart([*kept, *following[1:]], before.drawn_before)
    assert parent.manifest.mix
    drawn = {name: use.samples for name, use in parent.manifest.mix.sources.items()}
    return MixAtStart(following, drawn)


def _seed_of(checkpoint: Checkpoint) -> object:
    return checkpoint.manifest.lineage.config.train.to_json()["seed"]


class SourceMix:
    """The mix of a run from its start on, the same on all ranks. ConfigError for a share that is too
    small."""

    def __init__(self, tokens: SourceSet, settings: Train, at_start: MixAtStart) -> None:
        self.at_start, self._tokens, self._batch_size = at_start, tokens, settings.batch_size
        self._num_windows = num_windows(tokens, settings.seq_len)
        self.order = MixedOrder(
            at_start.stages,
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
    ) -> Self | None:
        """The mix at a start; None for a run without sources. own, parent: as for `MixAtStart.of`."""
        if not isinstance(tokens, SourceSet):
            return None
        windows = num_windows(tokens, config.train.seq_len)
        return cls(tokens, config.train, MixAtStart.of(config, windows, own, parent))

    @classmethod
    def recorded(cls, tokens: Tokens, settings: Train, checkpoint: Checkpoint) -> Self | None:
        """The mix with which a checkpoint was trained; None without sources."""
        if not isinstance(tokens, SourceSet):
            return None
        return cls(tokens, settings, MixAtStart.recorded(checkpoint))

    def record(self, step: int) -> RecordedMix:
        """The record of the mix in the manifest of a checkpoint of this step."""
        drawn = self.order.drawn(step * self._batch_size)
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
    return sum(share * losses[name] for name, share in _shares(mix, step).items())


def bits_per_byte(
    losses: Mapping[str, float], sizes: Mapping[str, TextBytes], mix: MixAtStart | None, step: int
) -> BitsPerByte | None:
    """`mean_loss` in bits per byte of text: nats of all targets over ln 2 and their bytes, both summed
    over the sources by their shares. None where the bytes of a source are not known."""
    shares = {"": 1.0} if mix is None else _shares(mix, step)
    used = {name: sizes[name] for name in shares if name in sizes and sizes[name].bytes}
    if used.keys() != shares.keys():
        return None
    per_target = sum(
        share * used[name].bytes / used[name].targets for name, share in shares.items()
    )
    value = mean_loss(losses, mix, step) / (math.log(2) * per_target)
    return BitsPerByte(value, any(size.estimated for size in used.values()))


def _shares(mix: MixAtStart, step: int) -> dict[str, float]:
    """Shares of the sources in the last of `step` steps, without those of 0."""
    shares = stage_at(mix.stages, max(step - 1, 0)).shares
    return {name: float(share) for name, share in shares.items() if share}
