"""A manifest for parts of the bench that write checkpoints without a training."""

from forge.checkpoint.manifest import Lineage, Manifest, ReferenceLosses, SkippedSteps
from forge.core.config import Config, Ids

NUMERICS = {
    **{"device": "cpu", "device_name": "cpu", "precision": "fp32", "threads": 1},
    **{"gpu_products": "ieee", "cpu_products": "default", "cpu_capability": "default"},
}


def manifest_of(step: int) -> Manifest:
    """With the lineage of this host, and without files."""
    config = Config(ids=Ids(tokenizer="0" * 12, tokens="0" * 12))
    lineage = Lineage.of(
        config, tokenizer_digest="0" * 64, tokens_digest="0" * 64, numerics=NUMERICS
    )
    return Manifest(
        step=step,
        world_size=1,
        decay_steps=config.train.max_steps,
        why_not_compiled="a manifest of nothing",
        next_sample=step * config.train.batch_size,
        skipped=SkippedSteps(steps=0, in_a_row=0),
        reference=ReferenceLosses(samples=1, losses=[1.0]),
        lineage=lineage,
        files={},
        mix=None,
        spike_window=[],
    )
