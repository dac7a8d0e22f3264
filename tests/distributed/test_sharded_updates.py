"""Updates of weights that ranks share, by each optimizer of the table. Against one that mixes up rows,
sums over a rank's rows what is meant of the whole matrix, or fails on a rank without a row."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked import DEADLINE_SEC, LEFT_OVER
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from forge.core.models.llama import Llama
from forge.core.optimizers import OPTIMIZERS
from forge.core.train_settings import Train
from forge.trainer.initialize import initialized
from forge.trainer.models.decoder import Decoder
from forge.trainer.optim import make_optimizers, update

# One key head of two numbers: of three ranks the last one has no row of it.
MODEL = Llama(dim=8, layers=1, heads=4, kv_heads=1, head_dim=2, ffn_dim=10, tie_embeddings=False)
VOCAB, STEPS, SKIPPED = 13, 4, 2


def stepped(model: Decoder, optimizer: str) -> None:
    """Train with equal gradients on every rank: clipped in odd steps, left out in one."""
    optimizers = make_optimizers(model, Train(optimizer=optimizer, lr=0.01))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for weight in model.parameters():
            gradient = torch.randn(weight.shape, generator=generator)
            weight.grad = (
                distribute_tensor(gradient, weight.device_mesh, weight.placements)
                if isinstance(weight, DTensor)
                else gradient
            )
        norm = torch.tensor(50.0 if step % 2 else 0.5)
        update(optimizers, norm, largest=1.0, unless=torch.tensor(step == SKIPPED))


def sharded(folder: Path, optimizer: str, rank: int, copies: int, ranks: int) -> dict[str, Any]:
    """The weights after these steps, held by `ranks` ranks together, in so many copies."""
    torch.set_num_threads(1)
    world = copies * ranks
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (copies, ranks), mesh_dim_names=("replicate", "shard"))
    model = initialized(MODEL, VOCAB)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh if copies > 1 else mesh["shard"])
    stepped(model, optimizer)
    return {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """on_ranks(optimizer, copies, ranks): what `sharded` returns on each rank."""
    for name in LEFT_OVER:  # the fork server stays, so it must not have the mark of what does not
        monkeypatch.delenv(name, raising=False)
    context = multiprocessing.get_context("forkserver")
    with context.Pool(4, maxtasksperchild=1) as pool:
        yield lambda optimizer, copies, ranks: pool.starmap_async(
            sharded,
            [(tmp_path, optimizer, rank, copies, ranks) for rank in range(copies * ranks)],
            chunksize=1,
        ).get(DEADLINE_SEC)


@pytest.mark.parametrize(("copies", "ranks"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_that_ranks_share_move_as_whole_ones(
    on_ranks, optimizer: str, copies: int, ranks: int
) -> None:
    model = initialized(MODEL, VOCAB)
    first = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    stepped(model, optimizer)
    of_ranks = on_ranks(optimizer, copies, ranks)
    for name, weight in model.named_parameters():
        assert not torch.equal(weight, first[name]), name
        for found in of_ranks:
            torch.testing.assert_close(
                torch.from_numpy(found[name]), weight.detach(), rtol=1e-5, atol=1e-6, msg=name
            )
            assert (found[name] == of_ranks[0][name]).all()
