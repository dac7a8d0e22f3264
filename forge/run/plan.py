"""`forge plan`: what a run will need, before it is submitted: memory, checkpoints, network, time."""

from __future__ import annotations

import time
from collections.abc import Iterator

from forge.checkpoint.parent import first_step
from forge.core import collectives, memory
from forge.core.collectives import Collectives
from forge.core.config import Config
from forge.core.errors import ConfigError, DataError
from forge.core.goodput import SaveTimes
from forge.core.machine import Machine
from forge.core.memory import GIB, WEIGHT, Shape
from forge.core.mix import stages
from forge.core.paths import MANIFEST, RunPaths, tokens_folder
from forge.core.terminal import Table, duration, gpu_and_node_hours, print_plain
from forge.core.train_settings import Train
from forge.data.content_ids import resolve_ids
from forge.data.shards import ShardManifest
from forge.data.sources import unused_warnings
from forge.hosts.placement import WorldLayout, layouts_on, refuse_no_ranks
from forge.run.forecast import end_at, expected_of
from forge.run.interruptions import known_here, readable_events
from forge.run.step_time import GPU, GPU_GIB, Speed, remedies, step_seconds, step_time

MOST_NUMBERS = 8  # of nodes, in one line
LITTLE = 0.6  # of a GPU, which train.micro_batch_size: auto leaves half empty


def plan(config: Config, machine: Machine, layout: WorldLayout) -> None:
    """Print what a run needs on these ranks. Raises ConfigError where there are none or they cannot
    share its batch, and for another training program."""
    if config.program:
        raise ConfigError(
            "forge plan knows Forge's own trainer only, and this config has a program"
        )
    refuse_no_ranks(layout)
    vocab_size = config.tokenizer.expected_vocab_size
    shape = Shape.of(config, vocab_size, layout.world_size, layout.ranks_per_node)
    gpu_gib = machine.gpu_memory_gib or GPU_GIB
    chosen = memory.with_micro_batch(shape, gpu_gib * GIB)
    steps = max(0, config.train.max_steps - first_step(config))
    lines = [*_facts(config, chosen, layout), *_shrink(machine, layout, config), *_network(chosen)]
    lines += _half_empty(config, chosen, gpu_gib)
    lines += _times(chosen, machine, gpu_gib, steps)
    lines += _forecast(config, machine, layout, steps)
    print_plain("\n".join([*lines, ""]))
    _table(shape, gpu_gib).print()
    print_plain(
        "GiB of GPU memory on each rank at the peak of a step, as PyTorch keeps it without torch.compile."
        "\nMemory and times are estimated from shapes, and not compared with a GPU yet."
    )


def _shrink(machine: Machine, layout: WorldLayout, config: Config) -> Iterator[str]:
    """On how many nodes a run resumes that loses some."""
    if machine.slurm.shrink and layout.nodes > 1:
        numbers = [str(one.nodes) for one in layouts_on(machine, layout, config, layout.nodes - 1)]
        if len(numbers) > MOST_NUMBERS:
            numbers = [*numbers[: MOST_NUMBERS - 1], f"… {numbers[-1]}"]
        follows = f"resumes on {', '.join(numbers)}" if numbers else "is requeued"
        yield f"shrink: a run that loses some of its {layout.nodes} nodes {follows} (slurm.shrink)"


def _facts(config: Config, shape: Shape, layout: WorldLayout) -> list[str]:
    train, model = config.train, config.model
    tokens = train.batch_size * train.seq_len
    flops = tokens * model.flops_per_token(shape.vocab_size, train.seq_len)
    saved = (WEIGHT * shape.num_parameters + shape.optimizer_bytes) / 1e9
    is_known = model.vocab_size or config.tokenizer.source == "train"
    known = "" if is_known else " (the tokenizer's is not known yet)"
    ranks = f"{layout.nodes} x {layout.ranks_per_node} (nodes x ranks per node)"
    chosen = " (auto)" if train.micro_batch_size == "auto" else ""
    goal = train.max_steps * tokens
    return [
        f"run {config.run}: {shape.num_parameters:,} parameters, vocabulary {shape.vocab_size:,}{known}",
        f"step: {train.batch_size} samples of {train.seq_len} = {tokens:,} tokens, {flops:.3g} FLOPs",
        f"goal: step {train.max_steps:,} = {goal:,} tokens,"
        f" {goal / shape.num_parameters:.3g} a parameter",
        f"checkpoint: {saved:,.3g} GB, every {train.checkpoint_every} steps{_by_the_clock(train)},"
        f" {train.keep_last} kept",
        *_sources(config),
        *_data(config),
        f"ranks: {ranks}; micro-batch of {shape.micro_samples} samples{chosen}",
    ]


def _half_empty(config: Config, shape: Shape, gpu_gib: float) -> Iterator[str]:
    """A note where train.micro_batch_size: auto fills little of a GPU, since a rank's share of the batch
    has no larger divisor that fits. shape: with the micro-batch that is chosen."""
    filled = memory.estimate(shape).total / (gpu_gib * GIB)
    larger = [n for n in range(shape.micro_samples + 1, shape.share + 1) if shape.share % n == 0]
    if config.train.micro_batch_size == "auto" and larger and filled < LITTLE:
        yield (
            f"note: a micro-batch of {shape.micro_samples} fills {filled:.0%} of a GPU, the next divisor"
            f" of a rank's {shape.share} samples, {larger[0]}, does not fit; a train.batch_size with more"
            " divisors fills more"
        )


def _by_the_clock(train: Train) -> str:
    """Interval by the clock at which checkpoints are saved, beside that of checkpoint_every steps."""
    if train.checkpoint_minutes is None:
        return ""
    if train.checkpoint_minutes == "auto":
        return " and as often as is best (train.checkpoint_minutes: auto)"
    return f" and {train.checkpoint_minutes:g} min"


# --- the network, and time -----------------------------------------------------------------------


def _network(shape: Shape) -> Iterator[str]:
    """Bytes that a rank sends in a step, without the few numbers that the ranks tell each other."""
    sent = [entry for entry in collectives.of_step(shape) if entry.phase != "end"]
    inside = [entry for entry in sent if entry.nodes == 1]
    between = [entry for entry in sent if entry.nodes > 1]
    for where, entries in (("within its node", inside), ("between nodes", between)):
        if entries:
            yield f"network: {where} a rank sends in a step {_summed(entries)}"


def _summed(entries: list[Collectives]) -> str:
    parts = []
    for name in dict.fromkeys(entry.name for entry in entries):
        same = [entry for entry in entries if entry.name == name]
        number, num_bytes = sum(e.number for e in same), sum(e.sent_bytes for e in same)
        parts.append(f"{num_bytes / 1e9:,.3g} GB by {number:,} {name}{'s' * (number > 1)}")
    return ", ".join(parts)


def _times(shape: Shape, machine: Machine, gpu_gib: float, steps: int) -> Iterator[str]:
    """The time of a step and of the run, its cost, and a warning where the network slows it down."""
    speed = Speed.of(machine, shape.ranks_per_node)
    step = step_time(shape, speed)
    yield (
        f"time on {machine.gpu or GPU} GPUs: {step.total:.3g} s a step, {step.waiting:.3g} s of it"
        f" waiting for the network; {step.mfu:.0%} of their peak;"
        f" {duration(step.total * steps)} in all"
    )
    yield from _cost(shape, machine, step.total * steps, steps)
    if step.is_slowed_by_network:
        helping = remedies(shape, speed, gpu_gib * GIB)
        yield (
            f"warning: gathering and reducing between nodes takes {step.between_nodes:.3g} s of a step,"
            f" the backward pass beside it {step.backward:.3g} s: set"
            f" {', or '.join(helping) or 'a larger train.batch_size, or use fewer nodes'}"
        )


def _forecast(config: Config, machine: Machine, layout: WorldLayout, steps: int) -> Iterator[str]:
    """The goodput that is expected, and the date at which a start now would end. Queues are in it as far
    as requeued runs have waited; the first queue is not."""
    paths = RunPaths.of(config)
    known = known_here(paths, partition="" if machine.launcher == "srun" else None)
    saves = SaveTimes(readable_events(paths))
    step_sec = step_seconds(config, machine, layout)
    expected = expected_of(config.train, step_sec, known, saves)
    if expected is None:
        yield f"forecast: not known, as the time of a step is not; {known}"
        return
    stall = "" if saves.cost else " (stall assumed)"
    yield f"forecast: goodput (ETTR) {expected}{stall}"
    if step_sec is not None and expected.ettr > 0:
        yield f"forecast: a start now ends {end_at(time.time(), step_sec * steps / expected.ettr)}"
    elif expected.ettr == 0:
        yield "warning: by this forecast the run never ends: restarts take all of the time"
    else:
        yield "forecast: the end is not known, since machine.yaml names no GPU whose speed is known"


def _cost(shape: Shape, machine: Machine, seconds: float, steps: int) -> Iterator[str]:
    """GPU-hours and node-hours of the nodes that are held, spare ones too, and a warning where they are
    more than the workflow submits."""
    if machine.device == "cpu":
        yield "cost: not known, since device is cpu in machine.yaml and the times are those of GPUs"
        return
    spare, training = machine.preflight.spare_nodes, shape.world_size // shape.ranks_per_node
    hours = (training + spare) * seconds / 3600
    gpu_hours, most = hours * shape.ranks_per_node, machine.slurm.max_gpu_hours
    beside = f", with {spare} spare node{'s' * (spare > 1)}" if spare else ""
    yield (
        f"cost: about {gpu_and_node_hours(gpu_hours, hours)} for {steps:,} steps{beside};"
        " an estimate without queue, restarts, saves and evaluation"
    )
    if most is not None and gpu_hours > most:
        yield f"warning: more than slurm.max_gpu_hours: {most:,.10g} of machine.yaml"


# --- data ------------------------------------------------------------------------------------------


def _data(config: Config) -> list[str]:
    """Tokens of the training split, and how often they are read up to the goal. Then warnings of tokens
    that are never read."""
    manifests, train = _manifests(config), config.train
    if not manifests:
        return ["data: not tokenized yet, so the number of epochs is not known"]
    tokens = {name: one.totals["train"].tokens for name, one in manifests.items()}
    used = {name: one.used_tokens("train", train.seq_len) for name, one in manifests.items()}
    if train.mix is None:
        steps = max(0, train.max_steps - first_step(config))
        drawn = {"": float(steps * train.batch_size * train.seq_len)}
        tokens, used = {"": sum(tokens.values())}, {"": sum(used.values())}
    else:
        drawn = _drawn(config)
    each = (
        f"{name} {number:,} tokens, {_epochs(drawn[name], used[name])}".strip()
        for name, number in tokens.items()
    )
    return [f"data: {'; '.join(each)}", *unused_warnings(manifests, train.seq_len)]


def _epochs(drawn: float, used: int) -> str:
    """used: tokens that are read in an epoch."""
    return f"{drawn / used:,.3g} epochs" if used else "too few for a sequence"


def _manifests(config: Config) -> dict[str, ShardManifest]:
    """Manifests of the shards by source, under "" without sources; {} where one is not there."""
    try:
        ids = config.ids or resolve_ids(config)
        folders = ids.sources or {"": ids.tokens}
        manifests = {
            name: ShardManifest.read_if_there(tokens_folder(config.data, tokens_id) / MANIFEST)
            for name, tokens_id in folders.items()
        }
    except (ConfigError, DataError):
        return {}  # `forge tokenize` says why
    found = {name: one for name, one in manifests.items() if one}
    return found if len(found) == len(folders) else {}


def _sources(config: Config) -> list[str]:
    """Number of tokens that each source contributes, by train.mix."""
    sources, train = sorted(config.tokenize.sources or ()), config.train
    if not sources:
        return []
    if train.mix is None:
        return [f"sources: {', '.join(sources)}, in proportion to their tokens"]
    shares = (f"{name} {tokens:,.0f}" for name, tokens in _drawn(config).items())
    return [f"sources: {', '.join(shares)} tokens up to the goal"]


def _drawn(config: Config) -> dict[str, float]:
    """Source -> tokens that it contributes up to the goal, by train.mix."""
    train = config.train
    assert train.mix is not None
    tokens = dict.fromkeys(sorted(config.tokenize.sources or ()), 0.0)
    all_stages = stages(train.mix)
    ends = [stage.step for stage in all_stages[1:]] + [train.max_steps]
    for stage, end in zip(all_stages, ends, strict=True):
        steps = max(0, min(end, train.max_steps) - max(stage.step, first_step(config)))
        for name, share in stage.shares.items():
            tokens[name] += float(share) * steps * train.batch_size * train.seq_len
    return tokens


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
