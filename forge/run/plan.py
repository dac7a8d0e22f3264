"""`forge plan`: what a run will need, before it is submitted: memory, checkpoints, time."""

from __future__ import annotations

from forge.cluster.placement import WorldLayout
from forge.core import memory
from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.machine import Machine
from forge.core.memory import ADAM, GIB, WEIGHT, Shape
from forge.core.terminal import Table, duration, print_plain
from forge.trainer.metrics import PEAK_BF16_FLOPS

# What well-tuned trainers reach (torchtitan, KempnerForge: 40 to 58 % on H100 and H200).
UTILIZATION = 0.4
GPU = "H100"


def plan(config: Config, machine: Machine, layout: WorldLayout) -> None:
    """Print what a run needs on these ranks. Raises ConfigError where they cannot share its batch, and
    for another training program."""
    if config.program:
        raise ConfigError(
            "forge plan knows Forge's own trainer only, and this config has a program"
        )
    vocab_size = config.tokenizer.expected_vocab_size
    shape = Shape.of(config, vocab_size, layout.world_size, layout.ranks_per_node)
    print_plain("\n".join([*_facts(config, shape, layout), ""]))
    _table(shape, machine.gpu_memory_gib).print()
    print_plain(
        "GiB of GPU memory on each rank at the peak of a step, as PyTorch keeps it without torch.compile."
        "\nEstimated from shapes; not compared with a GPU yet."
    )


def _facts(config: Config, shape: Shape, layout: WorldLayout) -> list[str]:
    train, model = config.train, config.model
    tokens = train.batch_size * train.seq_len
    flops = tokens * model.flops_per_token(shape.vocab_size, train.seq_len)
    peak = PEAK_BF16_FLOPS[GPU]
    assert peak is not None
    seconds = flops / (layout.world_size * peak * UTILIZATION)
    saved = (WEIGHT + ADAM) * shape.num_parameters / 1e9
    known = "" if config.tokenizer.source == "train" else " (the tokenizer's is not known yet)"
    ranks = f"{layout.nodes} x {layout.ranks_per_node} (nodes x ranks per node)"
    return [
        f"run {config.run}: {shape.num_parameters:,} parameters, vocabulary {shape.vocab_size:,}{known}",
        f"step: {train.batch_size} samples of {train.seq_len} = {tokens:,} tokens, {flops:.3g} FLOPs",
        f"goal: step {train.max_steps:,} = {train.max_steps * tokens:,} tokens",
        f"checkpoint: {saved:,.3g} GB, every {train.checkpoint_every} steps, {train.keep_last} kept",
        f"ranks: {ranks}; micro-batch of {shape.micro_tokens // train.seq_len} samples",
        f"time on {GPU} GPUs at {UTILIZATION:.0%} of their peak: {seconds:.3g} s a step,"
        f" {duration(seconds * train.max_steps)} in all",
    ]


def _table(shape: Shape, gpu_memory_gib: float | None) -> Table:
    fits = f"fits {gpu_memory_gib:g} GiB" if gpu_memory_gib else ""
    heads = ("train.shard", "train.recompute", "state", "activations", "other", "total", fits)
    table = Table(heads, numbers=heads[2:6])
    own = shape.train.shard, shape.train.recompute
    rows = memory.alternatives(shape)
    if own not in [(row.train.shard, row.train.recompute) for row in rows]:
        rows.insert(0, shape)
    for row in rows:
        found = memory.estimate(row)
        state = found.weights + found.optimizer + found.gradients
        parts = (state, found.activations, found.total - state - found.activations, found.total)
        is_own = (row.train.shard, row.train.recompute) == own
        verdict = ""
        if gpu_memory_gib:
            verdict = "yes" if found.total <= gpu_memory_gib * GIB else "no"
        name = f"{row.train.shard}{' (config)' if is_own else ''}"
        cells = (name, row.train.recompute, *(f"{part / GIB:,.1f}" for part in parts), verdict)
        table.add(cells, {fits: {"yes": "green", "no": "red"}.get(verdict, "")})
    return table
