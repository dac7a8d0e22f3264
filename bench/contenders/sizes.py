"""What the contenders of bench.gpu train on: model shapes, tokens, and their first weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, SupportsFloat

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge.core.models.llama import Llama
from forge.core.train_settings import Recompute, Train
from forge.launch.process_group import World

# Learning rate, weight decay and clipping of all contenders; small enough for every width.
TRAIN = Train(lr=3e-4, warmup_steps=0)


class Step(NamedTuple):
    """A training step of one rank.

    take: trains on the batch once; float() of what it returns waits for the step and gives its loss.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    take: Callable[[], SupportsFloat]


@dataclass(frozen=True)
class Sizes:
    """What all contenders train on in one step of one rank.

    samples: of this rank; ranks: that share the model's weights, of which this one is rank 0. recompute:
    train.recompute of Forge's step. others_recompute: activation checkpointing of the others.
    """

    name: str
    model: Llama
    vocab_size: int
    seq_len: int
    samples: int
    ranks: int = 1
    recompute: Recompute = "none"
    others_recompute: Recompute = "none"

    @property
    def tokens(self) -> int:
        """Tokens of this rank in a step."""
        return self.samples * self.seq_len

    @property
    def flops(self) -> float:
        """FLOPs of this rank in a step, by the formula of Model.flops_per_token."""
        return self.tokens * self.model.flops_per_token(self.vocab_size, self.seq_len)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets of every step, int64 [samples, seq_len], on the CPU as from a loader;
        pinned for a GPU."""
        generator = torch.Generator().manual_seed(0)
        size = (self.samples, self.seq_len + 1)
        tokens = torch.randint(self.vocab_size, size, generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if device.type == "cuda":
            return inputs.pin_memory(), targets.pin_memory()
        return inputs, targets


# 124M: GPT-2's shape; 1.1B: TinyLlama's; 2.8B: as wide and deep as Pythia's; the others: Llama 2's. The
# batches of those that train on one GPU are about as large as its 80 GiB allow, by forge.core.memory.
FULL = (
    Sizes("124M", Llama(dim=768, layers=12, heads=12, ffn_dim=2048), 50304, 1024, 16),
    Sizes(
        "1.1B",
        Llama(dim=2048, layers=22, heads=32, kv_heads=4, ffn_dim=5632, tie_embeddings=False),
        *(32000, 2048, 8),
    ),
    Sizes(
        "2.8B",
        Llama(dim=2560, layers=32, heads=20, ffn_dim=6912, tie_embeddings=False),
        *(50304, 2048, 4),
        recompute="selective",
        others_recompute="selective",
    ),
    Sizes(
        "7B/8",
        Llama(dim=4096, layers=32, heads=32, ffn_dim=11008, tie_embeddings=False),
        *(32000, 4096, 1),
        ranks=8,
        others_recompute="selective",
    ),
    Sizes(
        "13B/32",
        Llama(dim=5120, layers=40, heads=40, ffn_dim=13824, tie_embeddings=False),
        *(32000, 4096, 1),
        ranks=32,
        others_recompute="selective",
    ),
    Sizes(
        "70B/128",
        Llama(dim=8192, layers=80, heads=64, kv_heads=8, ffn_dim=28672, tie_embeddings=False),
        *(32000, 4096, 1),
        ranks=128,
        recompute="selective",
        others_recompute="full",
    ),
)

_TINY = Llama(dim=64, layers=2, heads=2, kv_heads=1, ffn_dim=192, tie_embeddings=False)
QUICK = (
    Sizes("tiny", Llama(dim=64, layers=2, heads=2, ffn_dim=192), 512, 32, 4),
    Sizes(
        *("tiny/4", _TINY, 512, 32, 4),
        ranks=4,
        recompute="selective",
        others_recompute="full",
    ),
)


# Makes the step of one rank, with a model of its own.
Contender = Callable[[Sizes, World], Step]


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """First weights, drawn on the device of the model: matrices normal with std 0.02, vectors 1. Of a
    sharded model this rank's part."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            own_part(parameter).fill_(1)
        else:
            own_part(parameter).normal_(std=0.02)


def own_part(tensor: Tensor) -> Tensor:
    """Of a sharded tensor what this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
