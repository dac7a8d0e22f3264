"""The weights by which a run with sources draws its samples: its own, after those of its parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import RecordedMix, RecordedStage, SourceUse
from forge.core.config import ResolvedConfig
from forge.core.mix import Stage, stages


@dataclass(frozen=True)
class MixAtStart:
    """stages: ascending steps, the first of which is not after the start. drawn_before: samples by source
    before the first stage."""

    stages: list[Stage]
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
        configured = [Stage(0, dict(num_windows))] if mix is None else stages(mix)
        if parent is None:
            return cls(configured, dict.fromkeys(num_windows, 0))
        return _after(parent, configured, same_seed=config.train.seed == _seed_of(parent))

    @classmethod
    def recorded(cls, checkpoint: Checkpoint) -> MixAtStart:
        """The mix with which a checkpoint with sources was trained."""
        mix = checkpoint.manifest.mix
        assert mix, "the ids of a run without sources do not fit (compatibility.changed_ids)"
        return cls([Stage(stage.step, stage.weights) for stage in mix.stages], mix.drawn_before)

    def record(self, sources: dict[str, SourceUse]) -> RecordedMix:
        """The record of the mix for the manifest of a checkpoint."""
        recorded = [
            RecordedStage(step=stage.step, weights={n: float(w) for n, w in stage.weights.items()})
            for stage in self.stages
        ]
        return RecordedMix(stages=recorded, drawn_before=self.drawn_before, sources=sources)


def _after(parent: Checkpoint, configured: list[Stage], *, same_seed: bool) -> MixAtStart:
    step, before = parent.step, MixAtStart.recorded(parent)
    begun = [stage for stage in configured if stage.step <= step]
    first = Stage(step, begun[-1].weights)
    following = [first, *(stage for stage in configured if stage.step > step)]
    kept = [stage for stage in before.stages if stage.step < step]
    if same_seed and kept and kept[-1].has_shares_of(first):
        return MixAtStart([*kept, *following[1:]], before.drawn_before)
    assert parent.manifest.mix
    drawn = {name: use.samples for name, use in parent.manifest.mix.sources.items()}
    return MixAtStart(following, drawn)


def _seed_of(checkpoint: Checkpoint) -> object:
    return checkpoint.manifest.lineage.config.train.to_json()["seed"]
