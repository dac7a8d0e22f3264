"""Estimates of how much of a checkpoint validation recomputes, and of the cost. No torch."""

from __future__ import annotations

from forge.core.config import ResolvedConfig
from forge.core.optimizers import moments

# Ranks hold the same weights, so the losses of a few of them say as much as those of all.
MAX_RECOMPUTED = 8
VALIDATION_BATCH = 8  # samples in one forward pass

# Memory by that of the fp32 weights, of ranks that train from a checkpoint: these, gradients and AdamW's
# two states, a quarter more for activations. `_state` has it of any optimizer.
BYTES_OF_STATE = 4 * 1.25
# FLOPs a second of a core in a forward pass, cautious: 50e9 to 95e9 in fp32 with AVX-512.
CORE_FLOPS = 20e9
# Time for the recorded losses of a model that GPUs trained, and again for its validation loss.
CPU_SEC = 300.0

BASE_BYTES = 10**9  # Python and torch take 0.4 GB of it


def recomputed_ranks(world_size: int, most: int = MAX_RECOMPUTED) -> list[int]:
    """The ranks whose recorded losses are recomputed: the first, the last, and others spread evenly.

    most: how many at most; 1 is the first rank alone.
    """
    num_ranks = min(world_size, most)
    return [index * (world_size - 1) // max(1, num_ranks - 1) for index in range(num_ranks)]


def memory_bytes(config: ResolvedConfig, world_size: int) -> float:
    """Memory of the host that validation needs on its CPUs, an estimate from above.

    The fp32 weights, activations of a batch, and twice the largest tensor, which is how optimizer state
    is read; with validate.depth `digests` none of these. world_size: of the training. What one rank has
    trained is also loaded by two, and replayed.
    """
    if config.validation.depth == "digests":
        return BASE_BYTES
    model = config.model
    vocab_size = model.num_rows(config.tokenizer.expected_vocab_size)
    weights = 4 * model.num_parameters(vocab_size)
    largest = 4 * vocab_size * model.dim
    tokens = VALIDATION_BATCH * config.train.seq_len
    ranks = _state(config) * weights if world_size == 1 else 0
    return BASE_BYTES + weights + 2 * largest + tokens * _activation_bytes(config) + ranks


def training_bytes(config: ResolvedConfig, ranks: int) -> float:
    """Memory of the host that training on its CPUs needs for weights, optimizer and activations, without
    what each process takes."""
    rows = config.model.num_rows(config.tokenizer.expected_vocab_size)
    copies = 1 if config.train.shard == "all" else ranks
    return _state(config) * 4 * config.model.num_parameters(rows) * copies


def _state(config: ResolvedConfig) -> float:
    """BYTES_OF_STATE, or more for an optimizer with more than two states for each weight."""
    return BYTES_OF_STATE * (2 + max(2, *moments(config.train.optimizer))) / 4


def _activation_bytes(config: ResolvedConfig) -> int:
    """Bytes per token in the forward pass of a block, in fp32. The factors cover what was measured with
    samples of 256 and of 2048 tokens (profiles/README.md)."""
    model = config.model
    return 4 * (4 * model.inner_dim + 12 * max(model.dim, model.query_dim))


def cpu_seconds(parameters: float, tokens: float, cores: int) -> float:
    """Time of a forward pass on cores of a CPU: 2 FLOPs for each weight and token."""
    return 2 * parameters * tokens / (CORE_FLOPS * cores)


def affordable(parameters: float, tokens: int, cores: int) -> int:
    """Number of forward passes of so many tokens that fit into CPU_SEC; at least 1."""
    return max(1, int(CPU_SEC / cpu_seconds(parameters, tokens, cores)))
