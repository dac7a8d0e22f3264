"""The estimate of GPU memory, compared with what torch allocates for a step of the real model: on the
CPU, with tensors without storage and a process group without peers. What a GPU adds is not seen here."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge.core import memory
from forge.core.memory import GIB, Shape
from forge.core.models.architectures import ARCHITECTURES
from forge.core.models.base import Model
from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.launch.process_group import World
from forge.launch.rank import Rank
from forge.trainer import transforms
from forge.trainer.models.decoder import Decoder, make_decoder
from forge.trainer.optim import make_optimizers
from forge.trainer.parallel import ParallelModel

WIDE = Llama(dim=2048, layers=4, heads=16, ffn_dim=5504, tie_embeddings=False)
GROUPED = Llama(dim=2048, layers=3, heads=16, kv_heads=4, ffn_dim=5504, tie_embeddings=True)
SMALL = Llama(dim=1024, layers=6, heads=16, ffn_dim=4096)
EACH = [
    model(architecture=name, dim=1024, layers=6, heads=16) for name, model in ARCHITECTURES.items()
]
VOCAB = 32000


class FusedNorm(torch.autograd.Function):
    """RMSNorm as on a GPU, where it keeps its input; the one of CPUs keeps fp32 copies, too."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        return grad * weight * scale, (grad * x * scale).flatten(0, -2).sum(0), None


@pytest.fixture
def world_of(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    monkeypatch.setattr(
        torch.nn.RMSNorm, "forward", lambda norm, x: FusedNorm.apply(x, norm.weight, norm.eps)
    )
    # The chunks of linear_cross_entropy are inside of an operator that tensors without storage skip.
    monkeypatch.setattr(memory, "CHUNK_BYTES", 0)
    monkeypatch.setattr(transforms, "replicates", lambda world, precision: precision == "bf16")

    def world_of(world_size: int) -> World:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        return World(Rank(0, 0, world_size, 8), torch.device("cpu"), "gloo", dist.group.WORLD)

    yield world_of
    dist.destroy_process_group()


def peak_bytes(shape: Shape, world: World, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of all tensors during the second step, up to its update; in the first one caches are filled."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    decoder, to_empty = make_decoder(shape.model, shape.vocab_size), Decoder.to_empty

    def to_empty_fake(decoder: Decoder, *, device: torch.device) -> Decoder:
        with fake:
            return to_empty(decoder, device=device)

    monkeypatch.setattr(Decoder, "to_empty", to_empty_fake)
    parallel = ParallelModel(decoder, shape.train, world, "bf16")
    with fake:
        (optimizer,) = make_optimizers(decoder, shape.train)
        tokens = torch.zeros(parallel.micro_size, shape.train.seq_len, dtype=torch.int64)

        tracker = MemTracker()

        def gradients() -> None:
            for last in (False, True) if shape.accumulates else (True,):
                tracker.reset_mod_stats()  # else it refuses a second forward pass
                with parallel._synchronized(last), parallel._autocast():
                    parallel.forward(tokens, tokens).backward()

        gradients()
        # Updates in place. Not tracked: torch 2.11 lays it out anew each time, with tensors of the sizes
        # before sharding, and MemTracker counts these.
        assert optimizer.defaults["fused"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tracker.track_external(decoder, optimizer)
        with tracker:
            gradients()
    [found] = tracker.get_tracker_snapshot("peak").values()
    return found["Total"]


@pytest.mark.parametrize(
    ("model", "ranks", "train"),
    [
        (WIDE, 8, {"seq_len": 2048, "batch_size": 32}),
        (WIDE, 8, {"seq_len": 2048, "batch_size": 32, "recompute": "selective"}),
        (WIDE, 8, {"seq_len": 2048, "batch_size": 32, "recompute": "full"}),
        (WIDE, 1, {"seq_len": 2048, "batch_size": 1}),
        (GROUPED, 16, {"seq_len": 2048, "batch_size": 64, "recompute": "selective"}),
        (SMALL, 1, {"seq_len": 1024, "batch_size": 8, "recompute": "full"}),
        (WIDE, 8, {"seq_len": 2048, "batch_size": 16, "micro_batch_size": 1, "shard": "none"}),
        (WIDE, 8, {"seq_len": 2048, "batch_size": 64, "micro_batch_size": 4}),
        (SMALL, 8, {"seq_len": 1024, "batch_size": 64, "shard": "node"}),
        *((model, 1, {"seq_len": 1024, "batch_size": 8}) for model in EACH),
        *(
            (model, 8, {"seq_len": 1024, "batch_size": 64, "recompute": "selective"})
            for model in EACH
        ),
        *((model, 1, {"seq_len": 1024, "batch_size": 8, "recompute": "full"}) for model in EACH),
    ],
)
def test_estimate_is_near_what_torch_allocates(
    world_of, monkeypatch, model: Model, ranks: int, train: dict
) -> None:
    values = {"shard": "all" if ranks > 1 else "none", **train}
    shape = Shape(model, VOCAB, Train(**values), ranks, 8)
    found = peak_bytes(shape, world_of(ranks), monkeypatch)
    assert memory.estimate(shape).allocated == pytest.approx(found, rel=0.15)


def test_settings_that_save_memory_are_ordered() -> None:
    train = Train(seq_len=2048, batch_size=64, micro_batch_size=2)
    totals = {
        (one.train.shard, one.train.recompute): memory.estimate(one).total / GIB
        for one in memory.alternatives(Shape(WIDE, VOCAB, train, 16, 8))
    }
    for shard in ("none", "node", "all"):
        assert totals[shard, "none"] > totals[shard, "selective"] > totals[shard, "full"]
    for recompute in ("none", "selective", "full"):
        assert totals["none", recompute] > totals["node", recompute] > totals["all", recompute]


def test_a_larger_micro_batch_and_accumulation_need_more() -> None:
    def total(batch_size: int, micro: int) -> float:
        train = Train(seq_len=2048, batch_size=batch_size, micro_batch_size=micro, shard="all")
        return memory.estimate(Shape(WIDE, VOCAB, train, 8, 8)).total

    assert total(16, 2) > total(8, 1)
    assert total(16, 1) > total(8, 1)  # gradients are kept from one micro-batch to the next


@pytest.mark.parametrize(
    ("world_size", "shard", "gib"),
    # A block of 7B is 0.38 GiB in bf16, one of 70B would be 1.6. Communicators: of all ranks; of the
    # copies too; of the ranks of a copy as well.
    [(1, "none", 0.0), (8, "all", 2.377), (8, "none", 2.5), (16, "node", 3.377)],
)
def test_collectives_need_a_second_gathered_block_and_the_buffers_of_nccl(
    world_size: int, shard: str, gib: float
) -> None:
    model = Llama(dim=4096, layers=2, heads=32, ffn_dim=11008, tie_embeddings=False)
    train = Train(seq_len=2048, batch_size=16, micro_batch_size=1, shard=shard)
    shape = Shape(model, VOCAB, train, world_size, 8)
    need = memory.estimate(shape)
    assert need.buffers / GIB == pytest.approx(gib, abs=0.001)
    assert need.total == pytest.approx(1.05 * need.allocated + need.buffers + 1.5 * GIB)
    assert memory.least(shape) > need.buffers
