"""The micro-batch of each rank: as the config says, or the largest that fits into the GPUs."""

from __future__ import annotations

import torch

from forge.core.memory import Shape, with_micro_batch
from forge.core.terminal import say
from forge.core.train import Train
from forge.launch.process_group import World
from forge.trainer.llama import Decoder


def choose(decoder: Decoder, settings: Train, world: World, precision: str) -> int:
    """Samples of one forward pass on a rank, the same on all ranks. All ranks call it.

    Raises ConfigError where the ranks cannot share the batch.
    """
    vocab_size = decoder.model.embed_tokens.num_embeddings
    rank = world.rank
    shape = Shape(
        decoder.settings, vocab_size, settings, rank.world_size, rank.local_world_size, precision
    )
    if settings.micro_batch_size == "auto" and world.device.type == "cuda":
        _, total = torch.cuda.mem_get_info(world.device)
        smallest = min(row[0] for row in world.gather([float(total)], "memory of the GPUs"))
        shape = with_micro_batch(shape, smallest)
        if rank.is_main:
            say(f"train.micro_batch_size: auto is {shape.micro_samples} of {shape.share} samples")
    return shape.micro_samples
