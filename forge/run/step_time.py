"""Estimate of the time of a training step on GPUs, from shapes, for `forge plan`.

Computing takes as long as matrix products at a fixed share of the peak, and passes of all else over
the GPU's memory, which weigh more in a narrow model. Collectives run beside it; the ranks wait where
they take longer. Left out: Python, the first gathering and the last reduction of a step, Muon's
products, and what float8 saves. Not compared with a GPU; tests/unit/run/test_step_time.py compares it
with steps that others have published.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from forge.core import collectives
from forge.core.collectives import Collectives
from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.machine import Machine
from forge.core.memory import GIB, GRADIENT, WEIGHT, Shape, estimate, with_micro_batch
from forge.hosts.placement import WorldLayout
from forge.trainer.metrics import PEAK_BF16_FLOPS, flop_utilization, peak_flops

GPU = "H100"  # where machine.yaml names none
GPU_GIB = 79.0  # of an H100, where machine.yaml has no gpu_memory_gib
NETWORK_GBITS = 400  # a GPU, where machine.yaml has no fabric.node_gbits: NDR InfiniBand

# Bytes/s of a GPU's memory, and of its links to the others of its node, one way: NVLink, else PCIe.
# Source: NVIDIA's data sheets. Names, and their order, as in PEAK_BF16_FLOPS.
BANDWIDTHS = {
    "A100": (1.555e12, 300e9),  # 40 GB; with 80 GB 2.04e12
    "H100 PCIe": (2.0e12, 64e9),
    "H100 NVL": (3.9e12, 64e9),  # NVLink between pairs only
    "H100": (3.35e12, 450e9),
    "H200 NVL": (4.8e12, 450e9),
    "H200": (4.8e12, 450e9),
    "GH200": (4.0e12, 450e9),
    "B200": (8.0e12, 900e9),
    "GB200": (8.0e12, 900e9),
    "L40S": (0.864e12, 32e9),
    "RTX PRO 6000": (1.597e12, 64e9),
}

# Share of the bf16 peak of all products of a step, attention with them. Large products alone reach 0.72
# on an H100 and 0.70 on an H200, and a copy 0.91 and 0.90 of the memory's bandwidth (Kempner Computing
# Handbook, "Choosing a GPU partition"). With 0.6 the steps of KempnerForge (7B and 13B on H200) are
# estimated at most 27 % too long, and those of torchtitan (8B on H100 limited to 500 W) 23 % too short.
PRODUCTS, MEMORY = 0.6, 0.9
# Share of a link's bandwidth that NCCL's rings reach with messages of this size (nccl-tests on 8 H100 and
# on several nodes: 0.8 to 0.9).
LINKS = 0.8
# What a block keeps passes through memory so often: written and read forward; read backward, and its
# gradient written and read. torch.compile fuses about half of it away.
PASSES, PASSES_AGAIN, COMPILED = 5, 2, 0.5
# Bytes of a logit that pass through memory in the loss (trainer/loss): with torch.compile, and without.
LOGIT_BYTES = {True: 14, False: 34}
# Share of a block's products with weights that train.recompute: selective computes again: the wide half
# of Llama's feed-forward.
WIDE = 0.45


class Speed(NamedTuple):
    """Speed of one GPU (FLOP/s, bytes/s), and of its node's network (bytes/s one way)."""

    peak: float
    memory: float
    link: float
    network: float

    @classmethod
    def of(cls, machine: Machine, ranks_per_node: int) -> Speed:
        """Raises ConfigError for a GPU that is not known."""
        name = machine.gpu or GPU
        peak = peak_flops(name)
        if peak is None:
            known = (name for name, value in PEAK_BF16_FLOPS.items() if value)
            raise ConfigError(
                f"the speed of the GPU {name} is not known (gpu in machine.yaml)",
                fix=f"name one of {', '.join(known)}, or remove the key",
            )
        of_memory, link = next(
            value for key, value in BANDWIDTHS.items() if re.search(rf"\b{key}\b", name)
        )
        gbits = machine.fabric.node_gbits or NETWORK_GBITS * ranks_per_node
        return cls(peak, of_memory, link, gbits * 1e9 / 8)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. computing: forward, backward and update. waiting: for collectives that take
    longer than what they run beside. backward: of all its micro-batches, computing alone; between_nodes:
    of what runs beside it and leaves the node. mfu: model FLOP utilization."""

    computing: float
    waiting: float
    backward: float
    between_nodes: float
    mfu: float

    @property
    def total(self) -> float:
        return self.computing + self.waiting

    @property
    def is_slowed_by_network(self) -> bool:
        """Return whether gathering and reducing between nodes takes longer than the backward pass."""
        return self.between_nodes > self.backward


def step_seconds(config: Config, machine: Machine, layout: WorldLayout) -> float | None:
    """Seconds of a step of Forge's own trainer on the GPUs that machine.yaml names; None where the ranks
    are on CPUs, it names no GPU, or one whose speed is not known. Raises ConfigError where the ranks
    cannot share the batch."""
    if machine.device == "cpu" or peak_flops(machine.gpu or "") is None:
        return None
    vocab_size = config.tokenizer.expected_vocab_size
    shape = Shape.of(config, vocab_size, layout.world_size, layout.ranks_per_node)
    shape = with_micro_batch(shape, (machine.gpu_memory_gib or GPU_GIB) * GIB)
    return step_time(shape, Speed.of(machine, layout.ranks_per_node)).total


def step_time(shape: Shape, speed: Speed) -> StepTime:
    """The time of a step. Where train.micro_batch_size is auto, the whole share counts as one."""
    micro = shape.share // shape.micro_samples
    forward, backward = (micro * seconds for seconds in _passes(shape, speed))
    inside, between = _Network(shape, speed), _Network(shape, speed)
    for entry in collectives.of_step(shape):
        (inside if entry.nodes == 1 else between).add(entry)
    # What stays in a node and what leaves it run beside each other. The copies of the model are averaged
    # beside the last of the backward passes only.
    last = max(net.last + net.backward / micro for net in (inside, between)) - backward / micro
    others = max(net.backward for net in (inside, between)) - backward
    waiting = (
        max(0.0, max(inside.forward, between.forward) - forward)
        + max(0.0, others * (micro - 1) / micro)
        + max(0.0, last)
        + inside.update
        + between.update
    )
    computing = forward + backward + _update(shape, speed)
    tokens = shape.train.batch_size * shape.train.seq_len
    mfu = flop_utilization(
        tokens / (computing + waiting),
        shape.model.flops_per_token(shape.vocab_size, shape.train.seq_len),
        shape.world_size,
        speed.peak,
    )
    assert mfu is not None
    return StepTime(computing, waiting, backward, between.backward + between.last, mfu)


class _Network:
    """Seconds of the collectives of a step on one network, by what they run beside."""

    def __init__(self, shape: Shape, speed: Speed) -> None:
        self._shape, self._speed = shape, speed
        self.forward = self.backward = self.last = self.update = 0.0

    def add(self, entry: Collectives) -> None:
        seconds = entry.sent_bytes / (LINKS * self._bandwidth(entry))
        if entry.phase == "forward":
            self.forward += seconds
        elif entry.phase == "backward":
            self.backward += seconds
        elif entry.phase == "last backward":
            self.last += seconds
        elif entry.phase == "update":
            self.update += seconds

    def _bandwidth(self, entry: Collectives) -> float:
        """Bytes/s between two ranks of the ring. The ring of all ranks of a node has its whole network;
        several rings side by side share it."""
        if entry.nodes == 1:
            return self._speed.link
        on_node = entry.ranks / entry.nodes
        share = self._speed.network * on_node / self._shape.ranks_per_node
        return min(self._speed.link, share)


def _passes(shape: Shape, speed: Speed) -> tuple[float, float]:
    """Seconds of computing the forward and the backward pass of one micro-batch."""
    model, train, tokens = shape.model, shape.train, shape.micro_tokens
    forward = model.flops_per_token(shape.vocab_size, train.seq_len) / 3
    weights = 2 * model.layers * model.block_parameters
    in_blocks = weights + 4 * model.layers * model.query_dim * train.seq_len
    again = {"none": 0.0, "selective": WIDE * weights, "full": in_blocks}[train.recompute]
    compiled = train.compile is not False  # null: on GPUs
    kept = model.layers * model.activations(2).whole * (COMPILED if compiled else 1)
    moved = PASSES * kept + (PASSES_AGAIN * kept if train.recompute != "none" else 0)
    moved += LOGIT_BYTES[compiled] * shape.vocab_size
    per_flop = tokens / (PRODUCTS * speed.peak)
    passing = tokens * moved / (MEMORY * speed.memory)
    return per_flop * forward + passing / 3, per_flop * (2 * forward + again) + passing * 2 / 3


def _update(shape: Shape, speed: Speed) -> float:
    """Seconds of the gradient norm and of the optimizer: it reads a gradient twice and writes it once,
    clipped, and reads and writes weights and optimizer state."""
    state = WEIGHT * shape.num_parameters + shape.optimizer_bytes
    num_bytes = 2 * state + 3 * GRADIENT * shape.num_parameters
    return num_bytes / shape.ranks_per_copy / (MEMORY * speed.memory)


def remedies(shape: Shape, speed: Speed, gpu_bytes: float) -> list[str]:
    """The settings of which each alone ends the waiting between nodes, and fits into a GPU; else the
    recomputation and the micro-batch that do so together."""
    micro = [n for n in range(shape.micro_samples + 1, shape.share + 1) if shape.share % n == 0]
    larger: list[dict[str, object]] = [{"micro_batch_size": number} for number in micro]

    def first(changes: list[dict[str, object]]) -> list[str]:
        for change in changes:
            changed = shape.changed(**change)
            fits = estimate(changed).total <= gpu_bytes
            if fits and not step_time(changed, speed).is_slowed_by_network:
                return [" with ".join(f"train.{key}: {value}" for key, value in change.items())]
        return []

    alone = [*first([{"reduce_dtype": "bf16"}]), *first([{"shard": "node"}]), *first(larger)]
    ways = ("selective", "full")
    return alone or first([{"recompute": how, **change} for how in ways for change in larger])
