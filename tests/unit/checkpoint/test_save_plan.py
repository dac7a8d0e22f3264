"""Against a Saver that makes a plan in each save, and a list of all parts that is sent to every rank."""

import pickle

import pytest
import torch
from support.manifests import manifest_of
from torch.distributed.checkpoint import Metadata

from forge.checkpoint.async_saver import Saver
from forge.checkpoint.save_plan import KeptPlans, Planner, named_tensors
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.launch.process_group import joined
from forge.launch.rank import Rank


@pytest.fixture
def world():
    with joined(Rank(0, 0, 1, 1), Machine(device="cpu")) as alone:
        yield alone


def state_of(step: int) -> dict:
    weights = {"w": torch.full((2, 3), float(step)), "norm": torch.ones(3)}
    return {"model": weights, "optimizer": {"w": {"step": torch.tensor(float(step))}}}


@pytest.mark.parametrize("async_save", [True, False])
def test_saver_makes_one_plan_for_all_its_saves(tmp_path, world, monkeypatch, async_save):
    sent, local_plan = [], Planner.create_local_plan

    def counted(planner):
        plan = local_plan(planner)
        sent.append(len(plan.items))
        return plan

    monkeypatch.setattr(Planner, "create_local_plan", counted)
    saver = Saver(world, RunPaths(tmp_path), async_save=async_save, check_may_write=lambda: None)
    for step in (1, 2, 3):
        # The last one saves the state itself, and not a copy.
        saver.start(state_of(step), manifest_of(step), keep_last=3, last=step == 3)
        assert saver.finish().checkpoint.step == step
    assert sent == [3, 0, 0]


def test_list_of_all_parts_stays_on_rank_0(world):
    planner = KeptPlans().planner(state_of(1), world, threads=1)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    assert list(metadata.state_dict_metadata) == [name for name, _ in named_tensors(state_of(1))]
    assert pickle.loads(pickle.dumps(metadata)) == Metadata({})
