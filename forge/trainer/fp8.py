"""Float8 in training steps (train.fp8): the matrix products of the blocks, by torchao."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.core.errors import ConfigError
from forge.core.process import hostname
from forge.core.train import Train
from forge.trainer.llama import Decoder

# Compute capability from which on torch._scaled_mm has kernels: Ada scales a tensor as a whole, Hopper
# also its rows.
ADA, HOPPER = (8, 9), (9, 0)


def apply(decoder: Decoder, settings: Train, device: torch.device) -> None:
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
    for block in decoder.model.layers:
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
            return F.linear(x, linear.weight)
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
