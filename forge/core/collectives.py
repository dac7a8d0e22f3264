"""Messages that the ranks send each other in a training step: number and bytes of the collectives, from
shapes, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from forge.core.memory import Shape
from forge.core.optimizers import known

# When they run: beside the forward or the backward pass of every micro-batch, beside the last backward
# pass of a step, or after it: in the optimizer's update, or for a few numbers.
Phase = Literal["forward", "backward", "last backward", "update", "end"]
Name = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]

BUCKET_BYTES = 25 * 2**20  # of DDP
# What the ranks tell each other with a step (trainer/step): loss, gradient norm and three flags.
NUMBERS = 5


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """All collectives of one kind in a step.

    num_bytes: of the tensors that one rank gives to them, together. ranks: that take part in each;
    nodes: on which these are.
    """

    name: Name
    phase: Phase
    number: int
    num_bytes: float
    ranks: int
    nodes: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in a ring, as NCCL does for large tensors (PERFORMANCE.md of
        github.com/NVIDIA/nccl-tests)."""
        factors = {"all-gather": self.ranks, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}
        return factors[self.name] * self.num_bytes * (self.ranks - 1) / self.ranks


def of_step(shape: Shape) -> list[Collectives]:
    """The collectives of a step of one rank; [] for a single rank.

    FSDP2 has a unit for each block and one or two for the rest (transforms.shard_decoder): gathered for
    the forward pass, blocks again for the backward pass; their gradients are reduced in every micro-batch
    over the ranks of a copy, and over the copies in the last one.
    """
    if shape.world_size == 1:
        return []
    return [entry for entry in _of_step(shape) if entry.ranks > 1]


def _of_step(shape: Shape) -> Iterator[Collectives]:
    micro, copies = shape.share // shape.micro_samples, shape.world_size // shape.ranks_per_copy
    ranks, layers, numbers = shape.ranks_per_copy, shape.model.layers, shape.num_parameters
    units = layers + (1 if shape.model.tie_embeddings else 2)
    weight = 2 if shape.precision == "bf16" else 4
    gradient = 2 if shape.train.reduce_dtype == "bf16" else 4
    of_copy = {"ranks": ranks, "nodes": _nodes_of_copy(shape)}
    of_copies = {"ranks": copies, "nodes": _nodes_of_copies(shape)}
    yield Collectives(
        name="all-gather",
        phase="forward",
        number=micro * units,
        num_bytes=micro * weight * numbers / ranks,
        **of_copy,
    )
    yield Collectives(
        name="all-gather",
        phase="backward",
        number=micro * layers,
        num_bytes=micro * weight * layers * shape.of_block / ranks,
        **of_copy,
    )
    yield Collectives(
        name="reduce-scatter",
        phase="backward",
        number=micro * units,
        num_bytes=micro * gradient * numbers,
        **of_copy,
    )
    num_bytes = gradient * numbers / ranks
    yield Collectives(
        name="all-reduce",
        phase="last backward",
        number=units if shape.uses_fsdp2 else -(-int(num_bytes) // BUCKET_BYTES),
        num_bytes=num_bytes,
        **of_copies,
    )
    if exchanged := known()[shape.train.optimizer].exchanged_bytes:
        # Of the matrices of the blocks. The norms, which stay, are a thousandth of a block.
        num_bytes = exchanged * layers * shape.of_block / ranks
        yield Collectives(
            name="all-to-all", phase="update", number=2, num_bytes=num_bytes, **of_copy
        )
    # The gradient norm: in truth that of each weight tensor, a few KB.
    yield Collectives(name="all-reduce", phase="end", number=1, num_bytes=4, **of_copy)
    everyone = {"ranks": shape.world_size, "nodes": -(-shape.world_size // shape.ranks_per_node)}
    yield Collectives(name="all-gather", phase="end", number=1, num_bytes=4 * NUMBERS, **everyone)


def _nodes_of_copy(shape: Shape) -> int:
    """Nodes with the ranks of one copy of the model, which are neighbors."""
    ranks, on_node = shape.ranks_per_copy, shape.ranks_per_node
    return 1 if on_node % ranks == 0 else max(2, -(-ranks // on_node))


def _nodes_of_copies(shape: Shape) -> int:
    """Nodes with the ranks that hold the same part of each copy."""
    copies = shape.world_size // shape.ranks_per_copy
    on_node = max(1, shape.ranks_per_node // shape.ranks_per_copy)
    return -(-copies // on_node)
