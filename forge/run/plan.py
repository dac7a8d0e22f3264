"""`forge plan`: what a run will need, before it is submitted: memory, checkpoints, time."""

from __future__ import annotations

from forge.checkpoint.parent import first_step
from forge.cluster.placement import WorldLayout
from forge.core import memory
from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.machine import Machine
from forge.core.memory import GIB, WEIGHT, Shape
from forge.core.mix import stages
from forge.core.terminal import Table, duration, print_plain
from forge.trainer.metrics import PEAK_BF16_FLOPS

# What well-tuned trainers reach (torchtitan, KempnerForge: 40 to 58 % on H100 and H200).
UTILIZATION = 0.4
# The GPU of times, and of memory where machine.yaml has no gpu_memory_gib.
GPU, GPU_GIB = "H100", 79.0


def plan(config: Config, machine: Machine, layout: WorldLayout) -> None:
    """Print what a run needs on these ranks. Raises ConfigError where they cannot share its batch, and
    for another training program."""
    if config.program:
        raise ConfigError(
            "forge plan knows Forge's own trainer only, and this config has a program"
        )
    vocab_size = config.tokenizer.expected_vocab_size
    shape = Shape.of(config, vocab_size, layout.world_size, layout.ranks_per_node)
    gpu_gib = machine.gpu_memory_gib or GPU_GIB
    print_plain(
        "\n".join([*_facts(config, memory.with_micro_batch(shape, gpu_gib * GIB), layout), ""])
    )
    _table(shape, gpu_gib).print()
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
    saved = (WEIGHT * shape.num_parameters + shape.optimizer_bytes) / 1e9
    is_known = model.vocab_size or config.tokenizer.source == "train"
    known = "" if is_known else " (the tokenizer's is not known yet)"
    ranks = f"{layout.nodes} x {layout.ranks_per_node} (nodes x ranks per node)"
    chosen = " (auto)" if train.micro_batch_size == "auto" else ""
    return [
        f"run {config.run}: {shape.num_parameters:,} parameters, vocabulary {shape.vocab_size:,}{known}",
        f"step: {train.batch_size} samples of {train.seq_len} = {tokens:,} tokens, {flops:.3g} FLOPs",
        f"goal: step {train.max_steps:,} = {train.max_steps * tokens:,} tokens",
        f"checkpoint: {saved:,.3g} GB, every {train.checkpoint_every} steps, {train.keep_last} kept",
        *_sources(config),
        f"ranks: {ranks}; micro-batch of {shape.micro_samples} samples{chosen}",
        f"time on {GPU} GPUs at {UTILIZATION:.0%} of their peak: {seconds:.3g} s a step,"
        f" {duration(seconds * train.max_steps)} in all",
    ]


def _sources(config: Config) -> list[str]:
    """Number of tokens that each source contributes, by train.mix."""
    sources, train = sorted(config.tokenize.sources or ()), config.train
    if not sources:
        return []
    if train.mix is None:
        return [f"sources: {', '.join(sources)}, in proportion to their tokens"]
    samples = dict.fromkeys(sources, 0.0)
    all_stages = stages(train.mix)
    ends = [stage.step for stage in all_stages[1:]] + [train.max_steps]
    for stage, end in zip(all_stages, ends, strict=True):
        steps = max(0, min(end, train.max_steps) - max(stage.step, first_step(config)))
        for name, share in stage.shares.items():
            samples[name] += float(share) * steps * train.batch_size
    shares = (f"{name} {train.seq_len * number:,.0f}" for name, number in samples.items())
    return [f"sources: {', '.join(shares)} tokens up to the goal"]


def _table(shape: Shape, gpu_gib: float) -> Table:
    fits = f"fits {gpu_gib:g} GiB"
    heads = (
        *("train.shard", "train.recompute", "micro-batch"),
        *("state", "activations", "other", "total", fits),
    )
    table = Table(heads, numbers=heads[2:7])
    own = shape.train.shard, shape.train.recompute
    rows = memory.alternatives(shape)
    if own not in [(row.train.shard, row.train.recompute) for row in rows]:
        rows.insert(0, shape)
    for row in (memory.with_micro_batch(row, gpu_gib * GIB) for row in rows):
        need = memory.estimate(row)
        state = need.weights + need.optimizer + need.gradients
        parts = (state, need.activations, need.total - state - need.activations, need.total)
        is_own = (row.train.shard, row.train.recompute) == own
        verdict = "yes" if need.total <= gpu_gib * GIB else "no"
        name = f"{row.train.shard}{' (config)' if is_own else ''}"
        samples = f"{row.micro_samples}"
        cells = (name, row.train.recompute, samples, *(f"{part / GIB:,.1f}" for part in parts))
        table.add((*cells, verdict), {fits: {"yes": "green", "no": "red"}[verdict]})
    return table
