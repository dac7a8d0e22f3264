"""Initial weights. Each rank draws its own rows only, with the same bits for every number of ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge.core.models.base import INIT_STD, Model
from forge.launch.heartbeat import heartbeat
from forge.trainer.models.decoder import Decoder, make_decoder

# A rank draws whole blocks of rows, each with its own seed. With larger blocks a rank that has few rows
# of a matrix draws more that it does not keep; with smaller ones seeding costs more.
BLOCK_NUMBERS = 2**20


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Fill every parameter of a decoder, of a sharded one this rank's rows. Without communication.

    Matrices are normal with INIT_STD; those whose output is added to the residual stream are scaled by
    1/sqrt(2 layers), as in GPT-2 (Radford et al. 2019, section 2.3). Weights of norms are 1, biases 0. A
    number depends on the seed, the
    name of its parameter and its position in it. Drawn on the CPU, so that it does not depend on the
    device either.
    """
    heartbeat.beat("draw of the initial weights")
    residual_std = INIT_STD / math.sqrt(2 * len(model.blocks))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        drawn = []
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0 if name.endswith("bias") else 1)
                continue
            std = residual_std if model.adds_to_residual(name) else INIT_STD
            first_seed = _seed(seed, name)
            for block, target in _blocks(*own_rows(parameter)):
                drawn.append(pool.submit(_draw, target, block, std, first_seed + block.number))
        for done in drawn:
            done.result()


def initialized(settings: Model, vocab_size: int, seed: int = 0) -> Decoder:
    """A decoder on the CPU with its initial weights."""
    model = make_decoder(settings, vocab_size).to_empty(device="cpu")
    initialize(model, seed)
    return model


def own_rows(parameter: Tensor) -> tuple[Tensor, int, int]:
    """The rows of a parameter that this rank has, the number of the first, and the number of all rows."""
    if not isinstance(parameter, DTensor):
        return parameter, 0, len(parameter)
    mesh = parameter.device_mesh
    (axis,) = (axis for axis, place in enumerate(parameter.placements) if place.is_shard(0))
    place = mesh.get_coordinate()
    assert place is not None  # every rank is in the mesh
    # As torch.chunk shares out the rows: the last ranks may have none.
    rows = -(-len(parameter) // mesh.size(axis))
    return parameter.to_local(), min(rows * place[axis], len(parameter)), len(parameter)


class RowBlock(NamedTuple):
    """A block of rows of a matrix, and which of them this rank has."""

    number: int
    height: int
    own: slice


def _blocks(local: Tensor, first: int, num_rows: int) -> Iterator[tuple[RowBlock, Tensor]]:
    """The blocks with rows of this rank, and the part of `local` that these rows fill."""
    height = max(1, BLOCK_NUMBERS // local.shape[1])
    end = first + len(local)
    for number in range(first // height, -(-end // height) if len(local) else 0):
        top, bottom = number * height, min(num_rows, (number + 1) * height)
        start, stop = max(first, top), min(end, bottom)
        block = RowBlock(number, bottom - top, slice(start - top, stop - top))
        yield block, local[start - first : stop - first]


@torch.no_grad()  # which is a state of each thread
def _draw(target: Tensor, block: RowBlock, std: float, seed: int) -> None:
    """Fill the target with its rows of a block. The whole block is drawn: torch draws the last 16
    numbers of a tensor in another way."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(block.height, target.shape[1]).normal_(0, std, generator=generator)
    target.copy_(drawn[block.own])


def _seed(seed: int, name: str) -> int:
    """Seed of a parameter's first block; the following blocks have the following seeds. torch's
    generator uses 32 bits of a seed, in which hashes of all blocks of a large model would collide."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
