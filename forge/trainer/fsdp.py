"""FSDP2: weights and optimizer state of a decoder sharded over ranks, or a copy on each rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from forge.core.errors import ConfigError
from forge.core.train import Train
from forge.launch.process_group import World
from forge.trainer.llama import Decoder


def replicates(world: World, precision: str) -> bool:
    """Whether FSDP2 keeps the copies of a model alike that is not sharded; else DDP and autocast do.

    In bf16 on GPUs: the weights are cast once, for forward and backward, and activations between
    blocks are bf16, which autocast leaves in fp32. In fp32 FSDP2 would keep a second copy of the
    weights; on Gloo a step takes twice the time of DDP, and Gloo has no average on GPUs.
    """
    return precision == "bf16" and world.device.type == "cuda" and world.backend != "gloo"


def apply(decoder: Decoder, world: World, settings: Train, ranks: int, precision: str) -> None:
    """Apply FSDP2 to a decoder on the meta device. All ranks call it.

    Units, whose weights are gathered and whose gradients are reduced together: each block; the embedding;
    and the last norm with the output layer. Tied embeddings stay with the decoder, as both use them. The
    next unit is gathered while one is computed: forward because Python is ahead of the GPU, backward
    because FSDP2 prefetches it. (Explicit prefetching of one unit only starts it earlier on the CPU.)

    ranks: those that hold a copy of the model together; with 1 the copy of the weights that forward
    and backward use stays from one to the other. With bf16 the weights are fp32, and cast when they are
    gathered; gradients are reduced in train.reduce_dtype. Raises ConfigError where the backend cannot
    shard.
    """
    if ranks > 1:
        _refuse_gloo_on_gpus(world, settings)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.bfloat16 if settings.reduce_dtype == "bf16" else torch.float32,
    )
    shard: Any = partial(fully_shard, mesh=_mesh(world, ranks), mp_policy=policy)
    for block in decoder.model.layers:
        shard(block, reshard_after_forward=ranks > 1)
    if decoder.lm_head is not None:
        # The backward pass of an embedding does not read it.
        shard(decoder.model.embed_tokens, reshard_after_forward=True).set_unshard_in_backward(False)
        # The backward pass begins here.
        shard([decoder.model.norm, decoder.lm_head], reshard_after_forward=False)
    shard(decoder)


def reshard(decoder: Decoder) -> None:
    """Free all gathered weights, which FSDP2 keeps for a backward pass. After a forward pass that none
    follows: what reads the weights next, as the optimizer does, must find the shards."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _refuse_gloo_on_gpus(world: World, settings: Train) -> None:
    if world.backend == "gloo" and world.device.type == "cuda":
        raise ConfigError(
            f"train.shard is {settings.shard}, and Gloo cannot shard a model over GPUs",
            cause="fabric.backend is gloo; Gloo has no all-gather for GPUs",
            fix="set fabric.backend to nccl or auto, or train.shard to none",
        )


def _mesh(world: World, ranks: int) -> DeviceMesh:
    """Ranks that hold a copy of the model together are neighbors: on a node first."""
    copies, device = world.rank.world_size // ranks, world.device.type
    if copies == 1:
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (copies, ranks), mesh_dim_names=("replicate", "shard"))
