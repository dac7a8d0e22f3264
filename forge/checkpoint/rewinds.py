"""Rewinding from a loss spike (train.spike=rewind): the run resumes from its newest checkpoint and leaves
out the batches from there to the spike, as the authors of PaLM did by hand (Chowdhery et al. 2022,
arXiv:2204.02311, section 5.1).

The decision is an event of the run, recorded before the ranks end; the manifest of each later checkpoint
has all decisions that it depends on. So a kill or a requeue in between changes nothing. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from forge.checkpoint.manifest import LeftOutBatches, Manifest
from forge.core import events
from forge.core.config import ResolvedConfig
from forge.data.left_out import LeftOut

# Cause in the records of ranks that end so that the launcher starts them again.
CAUSE = "loss spike"
# From one checkpoint. Where the batches that follow have spikes too, the batches are not the cause.
MOST_FROM_ONE_CHECKPOINT = 3

# (number, step, batches): the fields of an event, for the ranks.
Decision = tuple[int, int, int]


class RewindDecided(Exception):
    """Raised on all ranks when they have decided to rewind: the launcher starts them again."""


def decided(log: Path, config: ResolvedConfig) -> list[Decision]:
    """The decisions in a run's event log about the order of samples that this config has. Decisions
    made under another seed, or with other tokens, belong to an earlier, deleted start."""
    order = config.train.seed, config.ids.tokens
    return [
        (event.number, event.to_step, event.batches)
        for event in events.read(log)
        if isinstance(event, events.Rewind) and (event.seed, event.tokens) == order
    ]


def left_out(manifest: Manifest | None, decisions: Iterable[Decision] = ()) -> LeftOut:
    """Batches that a run leaves out when it resumes from a checkpoint: those in the manifest, and those
    of decisions after the save. manifest: None for a run from step 0."""
    recorded = [(rewind.step, rewind.batches) for rewind in manifest.left_out] if manifest else []
    later = sorted(decision for decision in decisions if decision[0] > len(recorded))
    return LeftOut((*recorded, *((step, batches) for _, step, batches in later)))


def to_record(left_out: LeftOut) -> list[LeftOutBatches]:
    """The batches left out, as the manifest of a checkpoint records them."""
    return [LeftOutBatches(step=step, batches=batches) for step, batches in left_out.entries]


def refusal(left_out: LeftOut, saved_step: int, spike_step: int, stages: Iterable[int]) -> str:
    """Why a run may not rewind; "" if it may.

    saved_step: of its newest checkpoint, or where it began. spike_step: of the spike, counted from 0.
    stages: the steps at which the weights of train.mix change.
    """
    times = sum(step == saved_step for step, _ in left_out.entries)
    if times >= MOST_FROM_ONE_CHECKPOINT:
        return f"{times} rewinds to step {saved_step} did not help"
    # The next stage would draw again from each source what the left-out batches have drawn.
    for stage in stages:
        if saved_step < stage <= spike_step:
            return (
                f"a stage of train.mix began at step {stage}, after the checkpoint at {saved_step}"
            )
    return ""


def decide(
    left_out: LeftOut, saved_step: int, spike_step: int, *, reason: str, config: ResolvedConfig
) -> events.Rewind:
    """The event that leaves out the batches of all steps from saved_step to spike_step, both counted from
    0."""
    return events.Rewind(
        number=len(left_out.entries) + 1,
        to_step=saved_step,
        batches=left_out.batch(spike_step) + 1 - left_out.batch(saved_step),
        spike=spike_step + 1,
        reason=reason,
        seed=config.train.seed,
        tokens=config.ids.tokens,
    )
