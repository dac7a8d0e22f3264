"""Two checkpoints count as bitwise equal exactly where all their tensors are, in whatever files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from support.manifests import manifest_of
from support.saved import entry_of

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.index import INDEX, StoredPart, StoredTensor, index_bytes
from forge.checkpoint.manifest import ReferenceLosses
from forge.core.errors import DataError
from forge.plugins.attestation.state_difference import StateDifference, state_difference

WEIGHT, STATE = "model.w", "optimizer.w.exp_avg"
NUMBERS = np.arange(8, dtype="<f4").reshape(4, 2)


def saved(
    folder: Path, numbers: np.ndarray, *, rows: int = 4, dtype: str = "float32", losses: float = 5.0
) -> Checkpoint:
    """A checkpoint of a weight and of its state, both in files of so many rows each."""
    folder.mkdir()
    parts = []
    for begin in range(0, len(numbers), rows):
        block = numbers[begin : begin + rows]
        file = f"__{begin}_0.distcp"
        (folder / file).write_bytes(b"before" + block.tobytes())
        parts.append(StoredPart([begin, 0], [*block.shape], file, 6, block.nbytes))
    tensor = StoredTensor(dtype, [*numbers.shape], parts)
    (folder / INDEX).write_bytes(index_bytes({WEIGHT: tensor, STATE: tensor}))
    files = {path.name: entry_of(path) for path in folder.iterdir()}
    reference = ReferenceLosses(samples=4, losses=[losses])
    manifest_of(8, files=files, reference=reference).write(folder)
    return Checkpoint.open(folder)


def difference(tmp_path, one, other, begin=None, **more) -> StateDifference:
    made, stated = saved(tmp_path / "made", one, **more), saved(tmp_path / "stated", other)
    return state_difference(made, stated, begin)


def test_same_files_are_bitwise_equal(tmp_path):
    assert difference(tmp_path, NUMBERS, NUMBERS) == StateDifference(True, 0.0, 0.0)


def test_same_numbers_in_other_files_are_bitwise_equal(tmp_path):
    assert difference(tmp_path, NUMBERS, NUMBERS, rows=1) == StateDifference(True, 0.0, 0.0)


def test_one_other_bit_is_not_bitwise_equal(tmp_path):
    other = NUMBERS.copy()
    other[3, 1] = np.nextafter(other[3, 1], 9)
    apart = difference(tmp_path, other, NUMBERS)
    assert not apart.is_bitwise
    assert 0 < apart.weights < 1e-6


def test_sign_of_zero_is_a_bit_too(tmp_path):
    assert not difference(tmp_path, NUMBERS * np.float32(-1) * 0, NUMBERS * 0).is_bitwise


def test_distance_is_a_share_of_the_way_from_where_both_began(tmp_path):
    begin = saved(tmp_path / "begin", NUMBERS)
    apart = difference(tmp_path, NUMBERS + np.float32(1.25), NUMBERS + np.float32(1), begin)
    assert apart.weights == pytest.approx(0.25)


def test_other_shapes_are_infinitely_far_apart(tmp_path):
    assert difference(tmp_path, NUMBERS[:3], NUMBERS).weights == math.inf


def test_losses_are_compared_by_rank(tmp_path):
    assert difference(tmp_path, NUMBERS, NUMBERS, losses=5.5).loss == 0.5


def test_bfloat16_is_compared_as_numbers(tmp_path):
    one = (np.full((2, 1), 1.0, "<f4").view("<u4") >> 16).astype("<u2")
    two = (np.full((2, 1), 3.0, "<f4").view("<u4") >> 16).astype("<u2")
    made = saved(tmp_path / "made", two, dtype="bfloat16")
    stated = saved(tmp_path / "stated", one, dtype="bfloat16")
    assert state_difference(made, stated, None).weights == pytest.approx(2.0)


def test_index_that_leads_beyond_its_files_takes_no_memory(tmp_path):
    huge = StoredTensor("float32", [2**40], [StoredPart([0], [2**40], "__0_0.distcp", 0, 2**42)])
    made, stated = saved(tmp_path / "made", NUMBERS), saved(tmp_path / "stated", NUMBERS + 1)
    for checkpoint in (made, stated):
        (checkpoint.folder / INDEX).write_bytes(index_bytes({WEIGHT: huge}))
    with pytest.raises(DataError, match=r"ends before what index\.json has in it"):
        state_difference(made, stated, None)
