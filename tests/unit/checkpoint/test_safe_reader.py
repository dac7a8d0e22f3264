"""Tensors are read as they were written, and an index from elsewhere is data.

Threat: somebody hands out a checkpoint whose index was edited, and whose digests are right. What is wrong
in it is refused by name; nothing of it is run, believed as a path, or allocated.
"""

import errno
import json
import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from forge.checkpoint import storage
from forge.checkpoint.index import INDEX
from forge.core import files
from forge.core.errors import DataError, OtherFormat, UnfitError

WEIGHTS = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def folder(tmp_path):
    """A genuine checkpoint with weights, optimizer moments of other types and a scalar."""
    state = {
        "model": {"w": WEIGHTS.T.contiguous().T, "b": torch.arange(3, dtype=torch.bfloat16)},
        "optimizer": {"w": {"step": torch.tensor(7.0), "exp_avg": WEIGHTS * 2}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # saving in a single process is meant
        writer = storage.TensorWriter(tmp_path / "saved", threads=2)
        dcp.save(state, storage_writer=writer, no_dist=True)
    return tmp_path / "saved"


def read(folder):
    state = {"model": {"w": torch.zeros(2, 3)}}
    storage.read_tensors(state, folder)
    return state["model"]["w"]


def test_what_was_written_is_read_to_the_last_bit(folder):
    assert torch.equal(read(folder), WEIGHTS)
    others = {
        "model": {"b": torch.zeros(3, dtype=torch.bfloat16)},
        "optimizer": {"w": {"step": torch.tensor(0.0), "exp_avg": torch.zeros(2, 3)}},
    }
    storage.read_tensors(others, folder)
    assert torch.equal(others["model"]["b"], torch.arange(3, dtype=torch.bfloat16))
    assert others["optimizer"]["w"]["step"] == 7.0
    assert torch.equal(others["optimizer"]["w"]["exp_avg"], WEIGHTS * 2)


def test_files_hold_the_bytes_of_tensors_and_no_pickle(folder):
    size = WEIGHTS.nbytes * 2 + 3 * 2 + 4
    assert sum(path.stat().st_size for path in folder.glob("*.distcp")) == size


def test_files_of_another_writer_are_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": WEIGHTS}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(DataError, match=r"index\.json does not exist"):
        read(tmp_path)


def test_truncated_file_is_bad_data_that_names_it(folder):
    cut = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(cut, 5)
    with pytest.raises(DataError, match=f"{cut.name} ends before"):
        read(folder)


def test_error_of_the_disk_while_the_index_is_read_is_no_bad_data(folder, monkeypatch):
    def fail(path, _):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(files, "open_regular", fail)
    with pytest.raises(UnfitError, match=r"index\.json: Input/output error"):
        read(folder)


def test_equal_states_have_equal_indexes(folder, tmp_path):
    again = tmp_path / "again"
    state = {"model": {"w": WEIGHTS, "b": torch.arange(3, dtype=torch.bfloat16)}}
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = storage.TensorWriter(again, threads=2)
            dcp.save(state, storage_writer=writer, no_dist=True)
        stored = writer.fs.files[INDEX]
        assert stored.bytes == (again / INDEX).stat().st_size
        assert stored.digest == storage.blake3.blake3((again / INDEX).read_bytes()).hexdigest()
        content = (again / INDEX).read_bytes()
    assert (again / INDEX).read_bytes() == content
    assert not (again / ".metadata").exists()


def test_checkpoint_of_another_shape_is_bad_data(folder):
    with pytest.raises(DataError, match="cannot load checkpoint"):
        storage.read_tensors({"model": {"w": torch.zeros(4, 4)}}, folder)


def test_digest_of_weights_covers_name_type_shape_and_bytes():
    def digest(name, tensor):
        hasher = storage.blake3.blake3()
        storage.update_digest(hasher, name, tensor)
        return hasher.hexdigest()

    changed = WEIGHTS.clone()
    changed[1, 1] = -4.0
    same = torch.zeros(3, 2).T.copy_(WEIGHTS)  # other strides, equal values
    assert digest("w", same) == digest("w", WEIGHTS)
    others = [
        digest("v", WEIGHTS),
        digest("w", WEIGHTS.view(torch.int32)),
        digest("w", WEIGHTS.reshape(3, 2)),
        digest("w", changed),
    ]
    assert len({digest("w", WEIGHTS), *others}) == 5


def edit(**values):
    """Changes keys of the tensor model.w."""
    return lambda index: index["tensors"]["model.w"].update(values)


def edit_part(**values):
    """Changes keys of the only part of model.w."""
    return lambda index: index["tensors"]["model.w"]["parts"][0].update(values)


def rename(new):
    def change(index):
        index["tensors"][new] = index["tensors"].pop("model.w")

    return change


def twice(index):
    parts = index["tensors"]["model.w"]["parts"]
    half = {**parts[0], "shape": [1, 3], "bytes": 12}
    parts[:] = [half, half]


EDITS = {
    "no tensors": lambda index: index.pop("tensors"),
    "another key": lambda index: index.update(loader="os.system"),
    "no entry": lambda index: index["tensors"].update({"model.w": 7}),
    "no size": edit(shape="2 x 3"),
    "fractions": edit(shape=[2.0, 3.0]),
    "negative": edit(shape=[-2, -3]),
    "beyond memory": edit(shape=[2**62, 2**62]),
    "beyond 64 bits": edit(shape=[2**64, 3]),
    "thousands of digits": edit(shape=[10**4000, 3]),
    "dimensions": edit(shape=[1] * 10**5),
    "no type": edit(dtype=None),
    "another type": edit(dtype="complex64"),
    "attribute of torch": edit(dtype="load"),
    "no parts": edit(parts=[]),
    "no part": edit(parts=[None]),
    "half of it": edit_part(shape=[1, 3], bytes=12),
    "the same half twice": twice,
    "outside": edit_part(offset=[1, 0]),
    "another rank": edit_part(offset=[0], shape=[6]),
    "before the file": edit_part(start=-1),
    "true": edit_part(start=True),
    "other bytes": edit_part(bytes=12),
    "huge": edit_part(bytes=2**62),
    "a path": edit_part(file="../saved/__0_0.distcp"),
    "an absolute path": edit_part(file="/etc/passwd"),
    "the directory": edit_part(file="."),
    "a file without a name": edit_part(file=""),
    "a terminal": edit_part(file="\x1b[2J.distcp"),
    "a name for a terminal": rename("\x1b[2Jw"),
    "a name of a megabyte": rename("w" * 2**20),
}
TEXTS = {
    "empty": b"",
    "a pickle": b"\x80\x04K\x07.",
    "a number": b"7",
    "cut": b'{"format": 1, "tensors": {',
    "nested": b"[" * 10**6,
    "a number of a megabyte": b'{"format": ' + b"9" * 2**20 + b"}",
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("kind", [*EDITS, *TEXTS])
def test_file_that_is_not_an_index_is_bad_data_that_names_it(folder, kind):
    path = folder / INDEX
    index = json.loads(path.read_bytes())
    if kind in EDITS:
        before = json.dumps(index)
        EDITS[kind](index)
        assert json.dumps(index) != before
    path.write_bytes(TEXTS[kind] if kind in TEXTS else json.dumps(index).encode())
    for reading in (storage.SafeReader(folder).read_metadata, lambda: read(folder)):
        with pytest.raises(DataError, match=r"index\.json"):
            reading()


def test_index_of_terabytes_is_refused_unread(folder):
    os.truncate(folder / INDEX, 2**42)  # sparse
    with pytest.raises(DataError, match=f"index.json has {2**42} bytes, at most"):
        read(folder)


def test_index_of_another_version_of_forge_is_recognized(folder):
    index = json.loads((folder / INDEX).read_bytes())
    (folder / INDEX).write_text(json.dumps({**index, "format": 99}))
    with pytest.raises(OtherFormat, match="has format 99"):
        read(folder)


def test_place_beyond_the_end_of_a_file_is_bad_data(folder):
    index = json.loads((folder / INDEX).read_bytes())
    for start in (10**6, 2**62):
        edit_part(start=start)(index)
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(DataError, match="cannot load checkpoint"):
            read(folder)
