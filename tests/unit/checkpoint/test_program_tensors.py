"""Tensors that another program has saved: all are read, and nothing in the checkpoint is executed."""

import io
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from test_safe_reader import Planted

from forge.checkpoint import storage
from forge.checkpoint.program_tensors import (
    ProgramIndexUnpickler,
    UnknownIndexError,
    floating_parts,
)
from forge.core.errors import DataError

STATE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer": {"lr": 0.1, "w": {"step": torch.tensor(7.0)}},
    "ids": torch.arange(3),
    "small": torch.ones(2).to(torch.float8_e4m3fn),
}


@pytest.fixture
def folder(tmp_path):
    """Saved by torch's own writer, with tensors of four types, and a number that is no tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # saving in a single process is meant
        dcp.save(STATE, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def test_floating_tensors_are_read_to_the_last_bit(folder):
    parts = {part.name: part for part in floating_parts(folder)}
    assert sorted(parts) == ["model.b", "model.w", "optimizer.w.step", "small"]
    assert torch.equal(parts["model.w"].tensor, STATE["model"]["w"])
    assert {part.file for part in parts.values()} == {"__0_0.distcp"}
    assert all(part.is_finite() for part in parts.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_what_is_not_finite_is_noticed(tmp_path, value, dtype):
    state = {"w": torch.tensor([1.0, value]).to(dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    [part] = floating_parts(tmp_path)
    assert not part.is_finite()


def test_index_that_runs_a_command_is_refused_and_does_not_run(folder, tmp_path):
    harm = tmp_path / "harm"
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(os.system, f"touch {harm}")))
    with pytest.raises(DataError, match=r"(posix|nt)\.system") as refused:
        list(floating_parts(folder))
    assert not isinstance(refused.value, UnknownIndexError) and not harm.exists()


@pytest.mark.parametrize("function", [torch.load, yaml.load])
def test_class_of_a_newer_torch_or_of_the_program_is_told_apart_and_not_called(folder, function):
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(function, "x")))
    with pytest.raises(UnknownIndexError, match=r"(torch|yaml).*load, which Forge does not know"):
        list(floating_parts(folder))


def test_tensor_that_runs_a_command_is_refused_and_does_not_run(folder, tmp_path):
    harm, planted = tmp_path / "harm", io.BytesIO()
    torch.save(Planted(os.system, f"touch {harm}"), planted)
    torch.load(io.BytesIO(planted.getvalue()), weights_only=False)
    assert harm.exists(), "the planted pickle is harmless, so the test below would prove nothing"
    harm.unlink()
    (folder / "__0_0.distcp").write_bytes(planted.getvalue())
    index = storage.read_index(folder / ".metadata", ProgramIndexUnpickler)
    index.storage_data = {
        where: replace(info, offset=0, length=len(planted.getvalue()))
        for where, info in index.storage_data.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DataError, match=r"cannot read .* in __0_0\.distcp"):
        list(floating_parts(folder))
    assert not harm.exists()


def cut(file: Path) -> None:
    os.truncate(file, 100)


@pytest.mark.parametrize(
    ("harm", "message"),
    [(cut, r"cannot read .* in __0_0"), (Path.unlink, "__0_0.distcp is missing")],
)
def test_corrupt_file_is_bad_data_that_names_it(folder, harm, message):
    harm(folder / "__0_0.distcp")
    with pytest.raises(DataError, match=message):
        list(floating_parts(folder))


def test_tensor_of_another_shape_than_in_the_index_is_bad_data(folder, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = {**STATE, "model": {**STATE["model"], "w": STATE["model"]["w"].T.contiguous()}}
        dcp.save(other, checkpoint_id=tmp_path / "other", no_dist=True)
    (tmp_path / "other/__0_0.distcp").rename(folder / "__0_0.distcp")
    with pytest.raises(DataError, match=r"model\.w is stored as torch.float32, shape \(3, 2\)"):
        list(floating_parts(folder))
