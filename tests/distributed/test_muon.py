"""Muon for sharded matrices, against that of PyTorch on one rank. Against a rank that gets the rows of
another one, or other rows than it gave."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.forked import DEADLINE_SEC, LEFT_OVER
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from forge.trainer.optimizers.muon import Muon, rows_of, shares

# Rows that ranks do not share evenly, fewer rows than ranks, tall and wide ones.
SHAPES = [(7, 12), (3, 5), (12, 7), (8, 8), (1, 4)]
SETTINGS = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
STEPS, SCALE = 3, 4.0  # a power of two, by which bits do not change


def matrices() -> torch.nn.ParameterList:
    generator = torch.Generator().manual_seed(1)
    return torch.nn.ParameterList(torch.randn(*shape, generator=generator) for shape in SHAPES)


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(*shape, generator=generator) for shape in SHAPES]


def of_torch() -> list[torch.Tensor]:
    """The matrices after some steps of torch.optim.Muon."""
    plain = matrices()
    optimizer = torch.optim.Muon(plain.parameters(), adjust_lr_fn="match_rms_adamw", **SETTINGS)
    for step in range(STEPS):
        for matrix, gradient in zip(plain, gradients(step), strict=True):
            matrix.grad = gradient
        optimizer.step()
    return [matrix.detach() for matrix in plain]


def stepped(module: torch.nn.ParameterList) -> Muon:
    """After the same steps, whose gradients are SCALE times as large and scaled down."""
    optimizer = Muon(module.parameters(), **SETTINGS)
    optimizer.grad_scale = torch.tensor(SCALE)
    for step in range(STEPS):
        grads = gradients(step)[: len(module)]
        _step(module, optimizer, [SCALE * gradient for gradient in grads])
    return optimizer


def _step(module: torch.nn.ParameterList, optimizer: Muon, grads: list[torch.Tensor]) -> None:
    for matrix, gradient in zip(module, grads, strict=True):
        matrix.grad = (
            distribute_tensor(gradient, matrix.device_mesh, matrix.placements)
            if isinstance(matrix, DTensor)
            else gradient
        )
    optimizer.step()


def test_whole_matrices_move_as_with_torch() -> None:
    module = matrices()
    stepped(module)
    assert all(map(torch.equal, module, of_torch()))


def test_update_that_is_left_out_changes_nothing() -> None:
    module = matrices()
    optimizer = stepped(module)
    state = [optimizer.state[matrix]["momentum_buffer"] for matrix in module]
    before = [tensor.clone() for tensor in (*module, *state)]
    optimizer.found_inf = torch.tensor(1.0)
    _step(module, optimizer, [torch.full_like(matrix, torch.nan) for matrix in module])
    assert all(map(torch.equal, (*module, *state), before))


def sharded(folder: Path, rank: int, copies: int, ranks: int, number: int) -> list[Any]:
    """The first matrices, so many, after the same steps, held by `ranks` ranks together, in so many
    copies."""
    torch.set_num_threads(1)
    world = copies * ranks
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (copies, ranks), mesh_dim_names=("replicate", "shard"))
    module = matrices()[:number]
    fully_shard(module, mesh=mesh if copies > 1 else mesh["shard"])
    stepped(module)
    return [matrix.full_tensor().detach().numpy() for matrix in module]


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """on_ranks(copies, ranks, number): what `sharded` returns on each rank."""
    for name in LEFT_OVER:  # the fork server stays, so it must not have the mark of what does not
        monkeypatch.delenv(name, raising=False)
    context = multiprocessing.get_context("forkserver")
    with context.Pool(4, maxtasksperchild=1) as pool:
        yield lambda copies, ranks, number: pool.starmap_async(
            sharded,
            [(tmp_path, rank, copies, ranks, number) for rank in range(copies * ranks)],
            chunksize=1,
        ).get(DEADLINE_SEC)


@pytest.mark.parametrize(("copies", "ranks"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2)])
def test_sharded_matrices_move_as_whole_ones(on_ranks, copies: int, ranks: int) -> None:
    expected = [matrix.numpy() for matrix in of_torch()]
    for found in on_ranks(copies, ranks, len(SHAPES)):
        assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_that_orthogonalize_no_matrix_have_their_rows_moved(on_ranks, ranks: int) -> None:
    expected = [matrix.numpy() for matrix in of_torch()[:2]]
    for found in on_ranks(1, ranks, 2):
        assert len(found) == 2 and all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_rows_of_a_rank_are_those_that_torch_gives_it(ranks: int) -> None:
    for rows, columns in SHAPES:
        chunks = torch.zeros(rows, columns).chunk(ranks)
        heights = [len(chunk) for chunk in chunks] + [0] * (ranks - len(chunks))
        assert [
            rows_of(torch.Size((rows, columns)), rank, ranks) for rank in range(ranks)
        ] == heights


def test_ranks_have_about_the_same_work() -> None:
    block = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3
    shapes = [torch.Size(shape) for shape in block * 32]
    given = [0] * 8
    for shape, owner in zip(shapes, shares(shapes, 8), strict=True):
        given[owner] += min(shape) ** 2 * max(shape)
    assert max(given) < 1.02 * sum(given) / 8
