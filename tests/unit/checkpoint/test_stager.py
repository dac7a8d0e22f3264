"""What an asynchronous save copies from a GPU has the numbers, types and files of the state itself."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from forge.checkpoint import storage
from forge.launch.torch_private import StateDictStager


@pytest.fixture
def state():
    """Weights, and of three parameters AdamW's step and first moments, and a scalar of another type."""
    optimizer = {
        name: {"step": torch.tensor(float(step)), "exp_avg": torch.full((2, 3), step / 7)}
        for step, name in enumerate("abc", 5)
    }
    return {
        "model": {
            "a": torch.arange(6.0).reshape(2, 3),
            "scale": torch.tensor(3, dtype=torch.int64),
        },
        "optimizer": optimizer,
    }


def numbers(state):
    return [(tensor.dtype, tensor.tolist()) for tensor in storage._tensors(state)]


def test_scalars_become_elements_of_one_tensor_for_each_type(state):
    joined, kept = storage.with_joined_scalars(state)
    assert numbers(joined) == numbers(state)
    steps = [joined["optimizer"][name]["step"] for name in "abc"]
    assert len({step.untyped_storage().data_ptr() for step in steps}) == 1
    assert {tensor.dtype: len(tensor) for tensor in kept} == {torch.float32: 3, torch.int64: 1}
    assert joined["model"]["a"] is state["model"]["a"]  # not a scalar: the tensor itself


def test_copy_of_a_state_with_joined_scalars_is_written_as_the_state_itself(state, tmp_path):
    joined, _ = storage.with_joined_scalars(state)
    copy = StateDictStager(pin_memory=False, share_memory=False).stage(joined)
    assert numbers(copy) == numbers(state)
    written = {}
    for name, saved in (("state", state), ("copy", copy)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # saving in a single process is meant
            writer = storage.TensorWriter(tmp_path / name, threads=2)
            dcp.save(saved, storage_writer=writer, no_dist=True)
        written[name] = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    assert written["copy"] == written["state"]
