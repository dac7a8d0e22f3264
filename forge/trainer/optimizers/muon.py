"""Muon for matrices whose rows are sharded over ranks, or not: each rank orthogonalizes a share of them.

torch.optim.Muon does the same step for a sharded matrix on every rank, with fifteen collectives for each
matrix, and cannot leave out an update without that the host waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge.core.train_settings import Train
from forge.launch.process_group import named

# Coefficients of the quintic iteration, its steps, and the least norm that a matrix is divided by: Jordan
# et al. 2024 (kellerjordan.github.io/posts/muon), as in torch.optim.Muon.
LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315
ITERATIONS, LEAST_NORM = 5, 1e-7


def make(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks."""
    return Muon(groups, lr=train.lr, weight_decay=train.weight_decay, momentum=train.muon_momentum)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized, scaled to the size of AdamW's updates (Liu et al. 2025,
    arXiv:2502.16982, section 2.2), and decoupled weight decay. The state of a matrix is
    `momentum_buffer`, as in torch.optim.Muon.

    grad_scale, found_inf: as fused AdamW has them, tensors on the device or None: the gradients are
    divided by the one; where the other is not 0, weights and state stay as they are. All ranks that share
    the matrices call `step`.
    """

    _step_supports_amp_scaling = True  # as fused AdamW says of itself
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
    ) -> None:
        """params: matrices, or groups of them, all plain or all sharded by rows over one mesh (FSDP2)."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all matrices that have gradients."""
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            updates = [self._momentum(matrix, group["momentum"]) for matrix in matrices]
            shapes = [matrix.shape for matrix in matrices]
            whole = _exchanged(updates, shapes, _shard_group(matrices))
            for matrix, update in zip(matrices, whole, strict=True):
                lr = 0.2 * math.sqrt(max(matrix.shape)) * group["lr"]
                decayed = _local(matrix) * (1 - group["lr"] * group["weight_decay"])
                self._assign(_local(matrix), decayed.add_(update, alpha=-lr))

    def _momentum(self, matrix: Tensor, momentum: float) -> Tensor:
        """Add a gradient to the momentum; this rank's rows of what is to be orthogonalized, in bf16."""
        state = self.state[matrix]
        assert matrix.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        gradient, before = _local(matrix.grad), _local(state["momentum_buffer"])
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        after = before.lerp(gradient, 1 - momentum)
        self._assign(before, after)
        return gradient.lerp(after, momentum).bfloat16()

    def _assign(self, old: Tensor, new: Tensor) -> None:
        """Replace the values of a tensor, unless `found_inf` says that the update is left out."""
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf > 0, old, new))


def orthogonalized(update_MN: Tensor) -> Tensor:
    """A matrix with about the singular vectors of this one, and singular values between 0.7 and 1.2, by
    the Newton-Schulz iteration in bf16."""
    wide = update_MN.T if update_MN.shape[0] > update_MN.shape[1] else update_MN
    x = wide / wide.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=CUBIC, alpha=QUINTIC)
        x = torch.addmm(x, polynomial, x, beta=LINEAR)
    return x.T if wide is not update_MN else x


# --- sharded matrices --------------------------------------------------------------------------------


def _exchanged(
    rows: Sequence[Tensor], shapes: Sequence[torch.Size], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """This rank's rows of the orthogonalized matrices. rows: those of the matrices, in bf16. shapes: of
    the whole matrices. group: the ranks that share them, None for matrices that are whole.

    One exchange gives each rank all rows of its share of the matrices, a second one gives them back.
    """
    if group is None:
        return [orthogonalized(matrix) for matrix in rows]
    owners = shares(shapes, group.size())
    whole = _to_owners(rows, shapes, owners, group)
    return _from_owners([orthogonalized(one) for one in whole], shapes, owners, rows[0], group)


def shares(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """The rank that orthogonalizes each matrix, so that all have about the same number of products to
    compute: the largest matrices first, each to the rank with the least so far."""
    work = [min(shape) ** 2 * max(shape) for shape in shapes]
    given, owners = [0] * ranks, [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda n: -work[n]):
        owners[number] = given.index(min(given))
        given[owners[number]] += work[number]
    return owners


def rows_of(shape: torch.Size, rank: int, ranks: int) -> int:
    """Rows of a matrix that FSDP2 gives to a rank: equal numbers, the last ranks fewer or none."""
    chunk = -(-shape[0] // ranks)
    return max(0, min(chunk, shape[0] - rank * chunk))


def _to_owners(
    rows: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    owners: Sequence[int],
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """The matrices of this rank, whole."""
    me, ranks = group.rank(), group.size()
    own = [shape for shape, owner in zip(shapes, owners, strict=True) if owner == me]
    sent = [
        [part for part, owner in zip(rows, owners, strict=True) if owner == r] for r in range(ranks)
    ]
    heights = [[rows_of(shape, rank, ranks) for shape in own] for rank in range(ranks)]
    came = _all_to_all(sent, [_shapes(own, of_rank) for of_rank in heights], rows[0], group)
    return [torch.cat(parts) for parts in zip(*came, strict=True)]


def _from_owners(
    whole: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    owners: Sequence[int],
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """This rank's rows of all matrices, from those that each rank has whole, which may be none. like: as
    for `_all_to_all`."""
    me, ranks = group.rank(), group.size()
    split = [matrix.split(_heights(matrix.shape, ranks)) for matrix in whole]
    sent = [[parts[rank] for parts in split] for rank in range(ranks)]
    theirs = [[n for n, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
    wanted = [
        _shapes([shapes[n] for n in numbers], [rows_of(shapes[n], me, ranks) for n in numbers])
        for numbers in theirs
    ]
    came = _all_to_all(sent, wanted, like, group)
    by_number = {
        number: part
        for numbers, parts in zip(theirs, came, strict=True)
        for number, part in zip(numbers, parts, strict=True)
    }
    return [by_number[number] for number in range(len(shapes))]


def _all_to_all(
    sent: Sequence[Sequence[Tensor]],
    wanted: Sequence[Sequence[tuple[int, int]]],
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """Tensors that each rank sends to this one. sent: tensors for each rank. wanted: shapes of those from
    each rank. like: a tensor of their type and device, where this rank sends none."""
    parts_sent = [part.reshape(-1) for parts in sent for part in parts]
    flat = torch.cat([like.new_empty(0), *parts_sent])
    sizes = [[height * width for height, width in shapes] for shapes in wanted]
    received = flat.new_empty(sum(map(sum, sizes)))
    with named("exchange of matrices for Muon"):
        dist.all_to_all_single(
            received,
            flat,
            output_split_sizes=[sum(of_rank) for of_rank in sizes],
            input_split_sizes=[sum(part.numel() for part in parts) for parts in sent],
            group=group,
        )
    parts = iter(received.split([size for of_rank in sizes for size in of_rank]))
    return [[next(parts).view(shape) for shape in shapes] for shapes in wanted]


def _shapes(shapes: Sequence[torch.Size], heights: Sequence[int]) -> list[tuple[int, int]]:
    return [(height, shape[1]) for shape, height in zip(shapes, heights, strict=True)]


def _heights(shape: torch.Size, ranks: int) -> list[int]:
    return [rows_of(shape, rank, ranks) for rank in range(ranks)]


def _shard_group(matrices: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """The ranks that share the rows of the matrices; None where each has all of them."""
    if not matrices or not isinstance(matrices[0], DTensor):
        return None
    group: dist.ProcessGroup = matrices[0].device_mesh.get_group("shard")
    return group if group.size() > 1 else None


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
