"""The plan of a save: which rank writes which part of which tensor, and where. Kept for the next save.

torch.distributed.checkpoint (DCP) makes a plan in each save: rank 0 reads the pickled plans of all ranks.
Its own cache belongs to the class of a planner, and compares no types: a state of another process, or one
in another precision, could be saved by a plan that is not its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from forge.launch.process_group import World

# Of each part of a tensor that a rank holds: name, offset, type of entry, sizes, dtype. A plan depends on
# nothing else but on the numbers before them: rank, ranks, files of a rank.
Layout = tuple[tuple[int, int, int], list[tuple[Any, ...]]]


def named_tensors(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dictionaries, each with its path as DCP writes it: keys joined by dots."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from named_tensors(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class KeptPlan:
    """The plan of a save that has succeeded, as one rank knows it."""

    number: int  # the same on all ranks
    layout: Layout
    share: SavePlan  # what this rank writes
    results: list[WriteResult]  # where that is in its files
    index: bytes  # content of index.json, on rank 0; b"" on other ranks


class KeptPlans:
    """Keeps the plan of the last save, for saves of one kind: each Saver has one."""

    def __init__(self) -> None:
        self._kept: KeptPlan | None = None
        self._made = 0  # plans, the same number on all ranks

    def planner(self, state: dict[str, Any], world: World, threads: int) -> Planner:
        """The planner of this save. All ranks call it. threads: files that a rank writes.

        It has the kept plan where every rank has the same plan, for tensors laid out as they are now.
        """
        planner = Planner(state, world, threads)
        fits = self._kept is not None and self._kept.layout == planner.layout
        own = self._kept.number if self._kept and fits else 0
        numbers = {int(row[0]) for row in world.gather([float(own)], "agreement on the plan")}
        if numbers == {own} and own:
            planner.kept = self._kept
        else:
            self._made += 1
        return planner

    def keep(self, planner: Planner, results: list[WriteResult], index: bytes) -> None:
        """Keep the plan of a save that has succeeded. All ranks call it."""
        if planner.kept is None:
            self._kept = KeptPlan(self._made, planner.layout, planner.plan, results, index)


class Planner(DefaultSavePlanner):
    """DCP's planner for a state of nested dictionaries of tensors. kept: the plan to use again."""

    def __init__(self, state: dict[str, Any], world: World, threads: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.kept: KeptPlan | None = None
        rank = world.rank
        super().set_up_planner(dict(named_tensors(state)), is_coordinator=rank.is_main)
        self._local = create_default_local_save_plan(self.state_dict, rank.is_main)
        self.layout: Layout = ((rank.rank, rank.world_size, threads), _layout(self._local))

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """DCP's hook, which has nothing left to do."""

    def create_local_plan(self) -> SavePlan:
        """DCP's hook: what rank 0 must know of this rank's tensors, nothing with a kept plan."""
        self.plan = SavePlan([]) if self.kept else self._local
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP's hook, on rank 0: the share of each rank, and the list of all parts."""
        if self.kept:
            return all_plans, Metadata({})
        plans, metadata = super().create_global_plan(all_plans)
        return plans, _MetadataHere(metadata.state_dict_metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """DCP's hook: the share of this rank."""
        self.plan = self.kept.share if self.kept else new_plan
        return self.plan


class _MetadataHere(Metadata):
    """The list of all parts. DCP sends it to all ranks, which do not need it: an empty one is sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, ({},)


def _layout(plan: SavePlan) -> list[tuple[Any, ...]]:
    rows = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, f"{item.index.fqn} is no tensor"
        place = (item.index.fqn, item.index.offset, item.type)
        rows.append((*place, data.chunk.sizes, data.size, data.properties.dtype))
    return rows
