"""A save by the plan of the last one. Against a plan kept for tensors that are laid out otherwise, for
another checkpoint of the same process, or from a save that failed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.forked import DEADLINE_SEC, LEFT_OVER
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from forge.checkpoint import storage
from forge.checkpoint.save_plan import KeptPlans, Planner
from forge.core.errors import UnfitError
from forge.launch.process_group import World
from forge.launch.rank import Rank

State = dict[str, Any]


@dataclass
class Saves:
    """The saves of one rank, and how many plans it has sent to rank 0."""

    folder: Path
    world: World
    sent: int = 0
    saved: int = 0
    plans: KeptPlans = field(default_factory=KeptPlans)

    def save(self, state: State, plans: KeptPlans | None = None) -> tuple[bool, dict[str, Any]]:
        """Whether a plan was made, and the files: all as a save without any kept plan writes them."""
        before = self.sent
        files = self._write(state, plans or self.plans)
        made = self.sent > before
        assert files == self._write(state, KeptPlans())
        return made, files

    def _write(self, state: State, plans: KeptPlans) -> dict[str, Any]:
        self.saved += 1
        folder = self.folder / str(self.saved)
        local_plan = Planner.create_local_plan

        def counted(planner: Planner) -> Any:
            plan = local_plan(planner)
            self.sent += bool(plan.items)
            return plan

        with mock.patch.object(Planner, "create_local_plan", counted):
            written = storage.write_state(state, folder, self.world, plans)
        self.world.barrier()
        read = {name: torch.zeros_like(tensor) for name, tensor in flat(state).items()}
        storage.read_tensors(read, folder, process_group=self.world.control)
        for name, tensor in flat(state).items():
            assert torch.equal(local(read[name]), local(tensor)), name
        return written


def flat(state: State) -> dict[str, torch.Tensor]:
    return {f"{part}.{name}": t for part, tensors in state.items() for name, t in tensors.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def state_of(
    *, rows: int = 7, seed: int = 0, dtype: torch.dtype = torch.float32, place: Any = None
) -> State:
    """A sharded and a replicated weight, and a scalar."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weights = {"w": distribute_tensor(full, mesh, [place or Shard(0)]), "norm": full[0].clone()}
    return {"model": weights, "optimizer": {"step": torch.tensor(float(seed))}}


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., list]]:
    """on_ranks(function, ranks): what function(saves) returns on each rank."""
    for name in LEFT_OVER:
        monkeypatch.delenv(name, raising=False)
    context = multiprocessing.get_context("forkserver")

    def run(function: Callable[[Saves], Any], ranks: int) -> list:
        with context.Pool(ranks, maxtasksperchild=1) as pool:
            jobs = [(function, tmp_path, rank, ranks) for rank in range(ranks)]
            return pool.starmap_async(on_rank, jobs, chunksize=1).get(DEADLINE_SEC)

    yield run


def on_rank(function: Callable[[Saves], Any], folder: Path, rank: int, ranks: int) -> Any:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    world = World(Rank(rank, rank, ranks, ranks), torch.device("cpu"), "gloo", group)
    return function(Saves(folder, world))


def whether_made(saves: Saves, *states: State) -> list[bool]:
    return [saves.save(state)[0] for state in states]


# --- the plan is kept -----------------------------------------------------------------------------


def three_states(saves: Saves) -> list[bool]:
    return whether_made(saves, *(state_of(seed=seed) for seed in range(3)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_later_saves_send_no_plan_and_write_the_same_files(on_ranks, ranks):
    assert on_ranks(three_states, ranks) == [[True, False, False]] * ranks


def sent_bytes(saves: Saves) -> list[int]:
    """Bytes of all objects that ranks send each other in a first and in a second save."""
    found, to_tensor = [], dist.distributed_c10d._object_to_tensor
    state = state_of()
    for _ in range(2):
        sizes = []

        def counted(*arguments: Any, sizes: list[int] = sizes) -> Any:
            tensor, size = to_tensor(*arguments)
            sizes.append(int(size))
            return tensor, size

        saves.saved += 1
        with mock.patch.object(dist.distributed_c10d, "_object_to_tensor", counted):
            folder = saves.folder / str(saves.saved)
            storage.write_state(state, folder, saves.world, saves.plans)
        saves.world.barrier()
        found.append(sum(sizes))
    return found


def test_objects_of_a_later_save_do_not_grow_with_the_tensors(on_ranks):
    (first, later), (first_1, later_1) = on_ranks(sent_bytes, 2)
    assert later < 0.5 * first and later_1 < 0.5 * first_1
    assert max(later, later_1) < 1000


# --- another state, another kind of save ----------------------------------------------------------


def changed_states(saves: Saves) -> list[bool]:
    return whether_made(
        saves,
        *(state_of(), state_of(rows=9), state_of(rows=9, seed=1)),
        state_of(rows=9, dtype=torch.bfloat16),  # in the places of before
        state_of(rows=9, place=Replicate()),
        {"model": state_of(rows=9, place=Replicate())["model"]},
        state_of(),
    )


def test_state_that_is_laid_out_otherwise_gets_a_new_plan(on_ranks):
    assert on_ranks(changed_states, 2) == [[True, True, False, True, True, True, True]] * 2


def changed_on_one_rank(saves: Saves) -> list[bool]:
    """Seven rows of eight fit one of two ranks alike, and the other not."""
    return whether_made(saves, state_of(rows=8), state_of(rows=7), state_of(rows=7))


def test_change_on_one_rank_makes_a_new_plan_on_all(on_ranks):
    assert on_ranks(changed_on_one_rank, 2) == [[True, True, False]] * 2


def of_two_kinds(saves: Saves) -> list[bool]:
    other, state = KeptPlans(), state_of()
    made = [saves.save(state)[0], saves.save(state_of(rows=5), other)[0]]
    return [*made, saves.save(state)[0], saves.save(state_of(rows=5), other)[0]]


def test_saves_of_another_kind_have_plans_of_their_own(on_ranks):
    assert on_ranks(of_two_kinds, 2) == [[True, True, False, False]] * 2


# --- a save that fails ----------------------------------------------------------------------------


def with_failures(saves: Saves) -> list[bool]:
    """Rank 1 cannot write: in the first save, in one by a kept plan, and in one with another layout."""
    made = []
    for state, other in ((state_of(), state_of()), (state_of(), state_of(rows=9))):
        for failing in (other, state):
            fails(saves, failing)
        made += whether_made(saves, state, state_of(seed=2))
        fails(saves, other)
        made += whether_made(saves, state, other)
    return made


def fails(saves: Saves, state: State) -> None:
    def broken(*_: Any) -> None:
        raise OSError(5, os.strerror(5))

    saves.saved += 1
    if saves.world.rank.rank == 1:
        arm = mock.patch.object(storage, "bytes_of", broken)
    else:
        arm = mock.patch.object(storage, "FULL_MIB", 0)
    with pytest.raises(UnfitError, match=r"rank 1: \[Errno 5\] Input/output error"), arm:
        folder = saves.folder / str(saves.saved)
        storage.write_state(state, folder, saves.world, saves.plans)


def test_save_that_failed_leaves_the_plan_of_the_one_before(on_ranks):
    same, other = [True, False, False, False], [False, False, False, True]
    assert on_ranks(with_failures, 2) == [same + other] * 2


def other_names(saves: Saves) -> list[bool]:
    """Rank 1 has lost its plan, as after a save that only others have completed."""
    made = whether_made(saves, state_of())
    if saves.world.rank.rank == 1:
        saves.plans._kept = None
    return made + whether_made(saves, state_of(), state_of())


def test_ranks_agree_whether_the_plan_is_kept(on_ranks):
    assert on_ranks(other_names, 2) == [[True, True, False]] * 2
