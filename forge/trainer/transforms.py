"""Transformations of a decoder before training: float8 products (train.fp8), activation checkpointing
(train.recompute), and FSDP2: weights and optimizer state sharded over ranks, or a copy on each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from forge.core.errors import ConfigError
from forge.core.process import hostname
from forge.core.train_settings import Recompute, Train
from forge.launch.process_group import World
from forge.trainer.models.decoder import Decoder

# Compute capability from which on torch._scaled_mm has kernels: Ada scales a tensor as a whole, Hopper
# also its rows.
ADA, HOPPER = (8, 9), (9, 0)


def use_float8(decoder: Decoder, settings: Train, device: torch.device) -> None:
    """Have the linear layers of the blocks multiply in float8 in training mode, as the recipe train.fp8
    says. In evaluation mode they multiply as without it, so that validation losses, reference losses and
    exported weights mean the same with and without float8.

    The weights stay as they are, under their names; they and the activations are rounded for each
    product, with scales of that moment. Embedding, output layer and attention are not changed. A CPU
    emulates the products: the same rounding, then fp32. Before the decoder is sharded, recomputed or
    compiled. ConfigError where this GPU has no such products. All ranks call it.
    """
    if settings.fp8 is None:
        return
    _refuse_old_gpu(settings.fp8, device)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as err:
        raise ConfigError(
            f"train.fp8 is {settings.fp8}, and Python cannot import torchao on {hostname()}: {err}",
            fix="make setup EXTRAS=fp8 there, or remove train.fp8",
        ) from err

    recipe = Float8LinearConfig.from_recipe_name(settings.fp8)
    recipe = replace(recipe, emulate=device.type == "cpu")
    for block in decoder.blocks:
        convert_to_float8_training(block, config=recipe)
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.forward = _in_training(module, module.forward)  # type: ignore[method-assign, assignment]


def _in_training(
    linear: nn.Linear, scaled: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The forward method of a linear layer, float8 in training mode only. scaled: the method in
    float8."""

    def forward(x: Tensor) -> Tensor:
        if not linear.training:
            return F.linear(x, linear.weight, linear.bias)
        # torchao would cast to the type of autocast on GPUs, also on a CPU.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return scaled(x)

    return forward


def _refuse_old_gpu(recipe: str, device: torch.device) -> None:
    if device.type != "cuda":
        return
    needed = ADA if recipe == "tensorwise" else HOPPER
    capability = torch.cuda.get_device_capability(device)
    if capability < needed:
        raise ConfigError(
            f"train.fp8 is {recipe}, which needs compute capability {needed[0]}.{needed[1]}, and"
            f" {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}",
            cause="this GPU cannot multiply in float8",
            fix="remove train.fp8, or ask for H100, H200 or newer GPUs",
        )


def recompute_activations(decoder: Decoder, how: Recompute) -> None:
    """Have the blocks of a decoder recompute their forward pass in the backward pass, with the same
    dropout masks and so the same gradients, bit by bit. Before the decoder is sharded or compiled.

    full: a block keeps its input only. selective: also the outputs of attention and of the matrix
    products that the decoder calls narrow; those of the feed-forward's wide half, which are most of the
    memory, are computed again.
    """
    if how == "none":
        return
    options: dict[str, Any] = {}
    if how == "selective":
        policy = partial(_recompute_policy, decoder.narrow_width)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for block in decoder.blocks:
        # The forward inside of the module, so that hooks of FSDP2 run once, around it.
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            # A copy of the generator's state for each block, which only dropout needs.
            preserve_rng_state=decoder.settings.dropout > 0,
            **options,
        )


def _recompute_policy(
    narrow: int, _: Any, operator: Any, *args: Any, **__: Any
) -> CheckpointPolicy:
    """Policy for the output of an operator: kept for attention and narrow products, else recomputed."""
    is_attention = any(name in str(operator) for name in ("scaled_dot_product", "varlen_attn"))
    is_product = operator in (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
    )  # with a bias
    is_narrow = is_product and args[-1].shape[1] <= narrow
    keep = is_attention or is_narrow
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def replicates(world: World, precision: str) -> bool:
    """Return whether FSDP2 keeps the copies of an unsharded model alike; else DDP and autocast do.

    In bf16 on GPUs: the weights are cast once, for forward and backward, and activations between
    blocks are bf16, which autocast leaves in fp32. In fp32 FSDP2 would keep a second copy of the
    weights; on Gloo a step takes twice the time of DDP, and Gloo has no average on GPUs.
    """
    return precision == "bf16" and world.device.type == "cuda" and world.backend != "gloo"


def shard_decoder(
    decoder: Decoder, world: World, settings: Train, ranks: int, precision: str
) -> None:
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
    for block in decoder.blocks:
        shard(block, reshard_after_forward=ranks > 1)
    if ends := decoder.ends():
        embedding, last = ends
        # The backward pass of an embedding does not read it.
        shard(embedding, reshard_after_forward=True).set_unshard_in_backward(False)
        # The backward pass begins here.
        shard(last, reshard_after_forward=False)
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
    if copies == 1:  # all ranks: the group that they have joined
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device, (copies, ranks), mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():
        world.limit_timeout(group)
    return mesh
