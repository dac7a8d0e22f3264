"""GPU memory that a rank needs to train a model: an estimate from shapes, without torch.

Counted as PyTorch keeps it, without torch.compile, which needs less. Each architecture says what a block
keeps (core/models).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.models.base import Model
from forge.core.optimizers import moments
from forge.core.train_settings import (
    Recompute,
    Shard,
    Train,
    ranks_per_copy,
    samples_per_rank,
)

GIB = 2**30
WEIGHT, GRADIENT, MOMENT = 4, 4, 4  # bytes a parameter, in fp32
# CUDA context, kernels and cuBLAS workspaces; and the share that the allocator cannot use.
FIXED_BYTES, FRAGMENTS = 1.5 * GIB, 1.05
# Buffers of NCCL: of the communicator of all ranks, and of those of a copy and of the copies beside it.
# Reported are 1.6 GB for the first and 6 GB for three or more (github.com/NVIDIA/nccl/issues/864), 0.5 to
# 0.7 GB for one within a node (issue 964 there).
NCCL_BYTES, NCCL_BYTES_MORE = 2 * GIB, 0.5 * GIB
# The loss: fp32 probabilities of a chunk of logits on a GPU (loss.LOGITS_BYTES_GPU), and its logits.
CHUNK_BYTES = 2**29
# Fraction of a GPU that train.micro_batch_size: auto fills: the estimate is within 15 % of what torch
# allocates, on either side.
FILLED = 0.87


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank at one moment of a step; `total` adds fragments, buffers and `fixed` to the
    parts."""

    weights: float
    optimizer: float  # its moments
    gradients: float  # those that this rank keeps
    gathered: float  # copies of weights in the precision of the forward pass
    activations: float  # kept for the backward pass
    working: float  # of the loss or the computed block, and gradients before they are reduced
    buffers: float  # of collectives
    fixed: float = FIXED_BYTES

    @property
    def allocated(self) -> float:
        """Bytes that PyTorch allocates: all but `buffers`, `fixed` and fragments."""
        parts = self.gradients + self.gathered + self.activations + self.working
        return self.weights + self.optimizer + parts

    @property
    def total(self) -> float:
        return self.allocated * FRAGMENTS + self.buffers + self.fixed


@dataclass(frozen=True)
class Shape:
    """The model, its training settings and the world layout. precision: of forward and backward, fp32
    or bf16."""

    model: Model
    vocab_size: int
    train: Train
    world_size: int
    ranks_per_node: int
    precision: str = "bf16"

    @classmethod
    def of(cls, config: Config, vocab_size: int, world_size: int, ranks_per_node: int) -> Shape:
        """Shape of the training that a config describes, on GPUs."""
        precision = config.train.precision or "bf16"
        rows = config.model.num_rows(vocab_size)
        return cls(config.model, rows, config.train, world_size, ranks_per_node, precision)

    @property
    def ranks_per_copy(self) -> int:
        return ranks_per_copy(self.train.shard, self.world_size, self.ranks_per_node)

    @property
    def share(self) -> int:
        """Samples of a step on a rank."""
        return samples_per_rank(self.train.batch_size, self.world_size)

    @property
    def micro_samples(self) -> int:
        """Samples of a rank's micro-batch; the whole share where train.micro_batch_size is auto."""
        size = self.train.micro_batch_size
        return min(size, self.share) if isinstance(size, int) else self.share

    @property
    def uses_fsdp2(self) -> bool:
        """Return whether FSDP2 gathers the weights, as it does for copies in bf16
        (trainer/transforms.replicates)."""
        return self.ranks_per_copy > 1 or self.precision == "bf16"

    @property
    def micro_tokens(self) -> int:
        """Tokens of a rank's micro-batch."""
        return self.micro_samples * self.train.seq_len

    @property
    def accumulates(self) -> bool:
        """Return whether a step has several micro-batches."""
        return self.micro_samples < self.share

    def changed(self, **train: object) -> Shape:
        """The same with other settings of `train`."""
        return replace(self, train=self.train.model_copy(update=train))

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters(self.vocab_size)

    @property
    def of_block(self) -> int:
        """Parameters of one block."""
        return self.model.block_parameters

    @property
    def outside(self) -> int:
        """Parameters outside of the blocks."""
        return self.model.outer_parameters(self.vocab_size)

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of the optimizer state of one copy of the model."""
        in_blocks, outside = moments(self.train.optimizer)
        numbers = in_blocks * (self.num_parameters - self.outside) + outside * self.outside
        return MOMENT * numbers


def estimate(shape: Shape) -> Memory:
    """Memory of one rank at the peak of a training step."""
    return max(_moments(shape), key=lambda moment: moment.total)


def least(shape: Shape) -> float:
    """Bytes that a rank needs at the very least, whatever its micro-batch and recomputation."""
    of_weights = (WEIGHT + GRADIENT) * shape.num_parameters
    state = (of_weights + shape.optimizer_bytes) / shape.ranks_per_copy
    return state + _buffer_bytes(shape) + FIXED_BYTES


def _moments(shape: Shape) -> Iterator[Memory]:
    """The moments of a step that may be its peak."""
    size = 2 if shape.precision == "bf16" else 4  # bytes of an activation
    numbers, ranks, tokens = shape.num_parameters, shape.ranks_per_copy, shape.micro_tokens
    kept, whole = _kept_per_token(shape, size)
    activations = tokens * shape.model.layers * kept
    own = {
        "weights": WEIGHT * numbers / ranks,
        "optimizer": shape.optimizer_bytes / ranks,
        "buffers": _buffer_bytes(shape),
    }
    gradients = GRADIENT * numbers / ranks
    before = gradients if shape.accumulates else 0.0
    # FSDP2 gathers the block that a sharded model computes, and in the backward pass the next block
    # too. Without sharding it keeps the copy of each block until its backward pass is over; the output
    # layer stays in both cases. A tied matrix stays to the end.
    tied = shape.model.tie_embeddings
    table = shape.vocab_size * shape.model.dim
    gathered = size if shape.uses_fsdp2 else 0
    blocks = gathered * (numbers - shape.outside)
    block = blocks / shape.model.layers
    last = gathered * table if tied else 0
    # A gradient in the precision of the forward pass, its copy that is reduced, and, where there is a
    # sum of micro-batches already, what is added to it.
    added = GRADIENT / ranks if shape.accumulates else 0.0
    reduced = 2 if shape.train.reduce_dtype == "bf16" else 4
    unreduced = size + reduced + added if shape.uses_fsdp2 else 0.0
    at_loss = tokens * 2 * size * shape.model.dim + _loss_bytes(shape, size)
    # One block: what is computed again, and gradients of its widest activations.
    again = whole - kept
    passing = 2 * size * (shape.model.inner_dim + shape.model.dim)
    # The output layer: its gradient, or the copy that is being reduced, which a tied matrix has later.
    of_table = table * (reduced if shape.uses_fsdp2 and not tied else size)
    yield Memory(  # the loss
        **own,
        gradients=before,
        gathered=gathered * table + (block if ranks > 1 else blocks),
        activations=activations,
        working=at_loss,
    )
    yield Memory(  # the backward pass of the last block
        **own,
        gradients=before,
        gathered=last + (2 * block if ranks > 1 else blocks),
        activations=activations,
        working=tokens * (again + passing) + of_table + unreduced * shape.of_block,
    )
    yield Memory(  # the end of the backward pass
        **own,
        gradients=gradients,
        gathered=last,
        activations=tokens * kept,
        working=unreduced * table,
    )


def _buffer_bytes(shape: Shape) -> float:
    """Bytes of collectives that PyTorch does not count as allocated: buffers of NCCL, and the second one
    that all-gathers write into. FSDP2 frees the first only when the next is copied out, and the allocator
    gives memory of the stream of all-gathers to no other one."""
    if shape.world_size == 1:
        return 0.0
    if shape.ranks_per_copy == shape.world_size:
        communicators = 1
    else:
        communicators = 2 if shape.ranks_per_copy == 1 else 3
    of_nccl = NCCL_BYTES + (communicators - 1) * NCCL_BYTES_MORE
    size = 2 if shape.precision == "bf16" else 4
    return of_nccl + (size * shape.of_block if shape.ranks_per_copy > 1 else 0.0)


def _kept_per_token(shape: Shape, size: int) -> tuple[float, float]:
    """Bytes that a block keeps for its backward pass, per token: with train.recompute, and without."""
    whole, narrow = shape.model.activations(size)
    by_setting = {"none": whole, "selective": narrow, "full": size * shape.model.dim}
    return by_setting[shape.train.recompute], whole


def _loss_bytes(shape: Shape, size: int) -> float:
    """Bytes of linear_cross_entropy, beside its inputs: chunks of logits and probabilities, and the
    gradient of the output layer, in fp32 and in the precision of the weight."""
    chunk = min(CHUNK_BYTES, 4 * shape.micro_tokens * shape.vocab_size)
    table = shape.vocab_size * shape.model.dim
    return chunk * (1 + size / 4) + table * (4 + 2 * size)


# --- does it fit? ----------------------------------------------------------------------------------


def alternatives(shape: Shape) -> list[Shape]:
    """The same training with each way to shard and to recompute, fastest first."""
    shards: dict[int, Shard] = {}  # the first name for each number of ranks
    for shard in ("none", "node", "all"):
        ranks = ranks_per_copy(shard, shape.world_size, shape.ranks_per_node)
        shards.setdefault(ranks, shard)
    ways: list[Recompute] = ["none", "selective", "full"]
    return [
        shape.changed(shard=shard, recompute=recompute)
        for shard, recompute in itertools.product(shards.values(), ways)
    ]


def with_micro_batch(shape: Shape, gpu_bytes: float) -> Shape:
    """The shape, with train.micro_batch_size: auto replaced by the largest micro-batch that fits, else
    by 1. It divides a rank's share of the batch, so that all micro-batches of a step are alike."""
    if shape.train.micro_batch_size != "auto":
        return shape
    share = shape.share
    sizes = [shape.changed(micro_batch_size=n) for n in range(1, share + 1) if share % n == 0]
    fitting = [changed for changed in sizes if estimate(changed).total <= FILLED * gpu_bytes]
    return fitting[-1] if fitting else sizes[0]


def refuse_what_cannot_fit(shape: Shape, gpu_memory_gib: float) -> None:
    """ConfigError where weights, gradients and optimizer state alone are larger than a GPU."""
    if (needed := least(shape) / GIB) <= gpu_memory_gib:
        return
    gpu_bytes = gpu_memory_gib * GIB
    ways = [with_micro_batch(way, gpu_bytes) for way in alternatives(shape)]
    fitting = [way for way in ways if estimate(way).total <= gpu_bytes]
    setting = (
        f"set train.shard: {fitting[0].train.shard} and train.recompute: {fitting[0].train.recompute}"
        if fitting
        else "use more ranks"
    )
    raise ConfigError(
        f"a rank needs more than {needed:,.0f} GiB for weights, gradients and optimizer state"
        f" of {shape.num_parameters:,} parameters, a GPU has {gpu_memory_gib:g} GiB",
        cause=f"train.shard is {shape.train.shard}: a copy of the model is held by"
        f" {shape.ranks_per_copy} of {shape.world_size} ranks",
        fix=f"{setting}; forge plan CONFIG shows every combination",
    )


def warning(shape: Shape, gpu_memory_gib: float) -> str:
    """A warning that a step may not fit into a GPU; "" where it should."""
    shape = with_micro_batch(shape, gpu_memory_gib * GIB)
    needed = estimate(shape).total / GIB
    if needed <= gpu_memory_gib:
        return ""
    smaller = "train.micro_batch_size, " if shape.micro_samples > 1 else ""
    return (
        f"a step may need {needed:,.0f} GiB on each GPU of {gpu_memory_gib:g} GiB (an estimate): see"
        f" forge plan CONFIG, and set {smaller}train.shard or train.recompute"
    )
