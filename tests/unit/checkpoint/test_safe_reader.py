"""The index of a checkpoint is a pickle, and a pickle runs code: a planted one must not.

Threat: somebody hands out a checkpoint whose `.metadata` names os.system. Reading it, even only to
validate it, must refuse before anything of it runs.
"""

import errno
import io
import os
import pickle
import traceback
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata

from forge.checkpoint import storage
from forge.core.errors import DataError, UnfitError
from forge.core.machine import Machine
from forge.launch.process_group import joined
from forge.launch.rank import Rank

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


class Planted:
    """Unpickled, it calls `function` with `argument`."""

    def __init__(self, function, argument):
        self.call = (function, (argument,))

    def __reduce__(self):
        return self.call


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
    with pytest.raises(DataError, match="is not stored as Forge stores tensors"):
        read(tmp_path)


def test_truncated_file_is_bad_data_that_names_it(folder):
    cut = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(cut, 5)
    with pytest.raises(DataError, match=f"{cut.name} ends before"):
        read(folder)


def test_pickle_that_runs_a_command_is_refused_and_does_not_run(folder, tmp_path):
    harm = tmp_path / "harm"
    data = pickle.dumps(Planted(os.system, f"touch {harm}"))
    pickle.loads(data)
    assert harm.exists(), "the planted pickle is harmless, so the test below would prove nothing"
    harm.unlink()
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(DataError, match=r"(posix|nt)\.system"):
        read(folder)
    assert not harm.exists()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", [eval, exec, __import__, getattr, open, torch.load])
def test_no_other_function_is_reachable(folder, function, protocol):
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(function, "1"), protocol))
    with pytest.raises(DataError, match="which no index needs"):
        read(folder)


def unpickled(function, *arguments):
    call = Planted(function, None)
    call.call = (function, arguments)
    return storage.IndexUnpickler(io.BytesIO(pickle.dumps(call))).load()


def test_enum_members_load_as_early_python_3_11_stores_them():
    # Up to Python 3.11.3 the pickle of an enum's member is a call of getattr.
    formats = metadata._MEM_FORMAT_ENCODING
    assert unpickled(getattr, formats, "TORCH_PRESERVE_FORMAT") is formats.TORCH_PRESERVE_FORMAT


@pytest.mark.parametrize("name", ["__class__", "__init__", "mro"])
def test_getattr_reaches_nothing_but_those_members(name):
    with pytest.raises(DataError, match="which no index needs"):
        unpickled(getattr, metadata._MEM_FORMAT_ENCODING, name)
    with pytest.raises(DataError, match="which no index needs"):
        unpickled(getattr, torch.Size, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "hub.load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("pathlib", "os.system"),
        ("pathlib", "Path.unlink"),
    ],
)
def test_allowed_module_does_not_lead_to_its_imports(folder, module, name):
    # Protocol 4 resolves dotted names: pathlib + "os.system" is os.system.
    call = b"\x80\x04" + b"".join(
        b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)
    )
    (folder / ".metadata").write_bytes(call + b"\x93" + b"\x8c\x01x\x85R.")
    with pytest.raises(DataError, match="which no index needs"):
        read(folder)


@pytest.mark.parametrize("content", [b"", b"\x80\x04half", b"no pickle"])
def test_corrupt_index_is_bad_data(folder, content):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(DataError, match=r"\.metadata is not the index"):
        read(folder)


def test_error_of_the_disk_while_the_index_is_read_is_no_bad_data(folder, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(storage, "read_index", fail)
    with pytest.raises(UnfitError, match=r"\.metadata: Input/output error"):
        read(folder)


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


def with_parts(index, **parts):
    """The index with some of its parts replaced."""
    for name, value in parts.items():
        setattr(index, name, value)
    return index


def of_one_entry(index, **parts):
    """The index with parts of the entry of one tensor replaced."""
    with_parts(index.state_dict_metadata["model.w"], **parts)
    return index


OTHER_INDEXES = {
    "empty": lambda _: b"",
    "no pickle": lambda _: b"{}",
    "cut": lambda index: pickle.dumps(index)[:-20],
    "a number": lambda _: pickle.dumps(7),
    "a dict": lambda index: pickle.dumps(index.state_dict_metadata),
    "no tensors": lambda index: pickle.dumps(with_parts(index, state_dict_metadata=None)),
    "no places": lambda index: pickle.dumps(with_parts(index, storage_data=[])),
    "no entry": lambda index: pickle.dumps(with_parts(index, state_dict_metadata={"model.w": 7})),
    "no size": lambda index: pickle.dumps(of_one_entry(index, size="2 x 3")),
    "no type": lambda index: pickle.dumps(of_one_entry(index, properties=None)),
    "no chunks": lambda index: pickle.dumps(of_one_entry(index, chunks=[None])),
    "no place": lambda index: pickle.dumps(
        with_parts(index, storage_data=dict.fromkeys(index.storage_data))
    ),
    "another name": lambda index: pickle.dumps(
        with_parts(
            index,
            storage_data={
                replace(key, fqn="model.v"): place for key, place in index.storage_data.items()
            },
        )
    ),
    "before the file": lambda index: pickle.dumps(
        with_parts(
            index,
            storage_data={
                key: replace(place, offset=-1) for key, place in index.storage_data.items()
            },
        )
    ),
    "a path": lambda index: pickle.dumps(
        with_parts(
            index,
            storage_data={
                key: replace(place, relative_path=f"../saved/{place.relative_path}")
                for key, place in index.storage_data.items()
            },
        )
    ),
    "text for a call": lambda _: b"cforge\nnothing\n(tR.",
}


@pytest.mark.parametrize("kind", OTHER_INDEXES)
def test_file_that_is_not_an_index_is_bad_data_that_names_it(folder, kind):
    index = storage.SafeReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(OTHER_INDEXES[kind](index))
    for reading in (storage.SafeReader(folder).read_metadata, lambda: read(folder)):
        with pytest.raises(DataError, match=r"\.metadata is not the index|which no index needs"):
            reading()


# --- between ranks ------------------------------------------------------------------------------------


@pytest.fixture
def exchanged(tmp_path, monkeypatch):
    """exchanged(value): the value as another rank gets it in an object collective, after a save."""
    # So that what the save sets is taken back.
    monkeypatch.setattr(dist.distributed_c10d, "_unpickler", pickle.Unpickler)
    with joined(Rank(0, 0, 1, 1), Machine(device="cpu")) as world:
        storage.write_state({"model": {"w": WEIGHTS}}, tmp_path / "by-ranks", world)

        def exchange(value):
            values = [None]
            dist.all_gather_object(values, value, group=world.control)
            return values[0]

        yield exchange


def test_pickle_of_a_stranger_in_the_place_of_a_rank_does_not_run(exchanged, tmp_path):
    harm = tmp_path / "harm"
    with pytest.raises(UnfitError, match=r"a pickle with (posix|nt)\.system") as caught:
        exchanged(Planted(os.system, f"touch {harm}"))
    assert not harm.exists()
    assert "docs/environment.md says who can connect" in caught.value.fix


@pytest.mark.parametrize("function", [eval, exec, __import__, open, torch.load, torch.hub.load])
def test_ranks_reach_no_function_of_each_other(exchanged, function):
    with pytest.raises(UnfitError, match="which no save and no load needs"):
        exchanged(Planted(function, "1"))


def test_errors_of_other_ranks_arrive_with_their_words(exchanged):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/results/a.distcp")
    bad = DataError("a.distcp is truncated", cause="a full disk", fix="restore it")
    for error in (full, bad, RuntimeError("no"), EOFError("it ends"), torch.OutOfMemoryError("no")):
        try:
            raise error
        except Exception as err:
            found, trace = exchanged((err, traceback.extract_tb(err.__traceback__)))
        assert (type(found), str(found)) == (type(error), str(error))
        assert trace[0].name == "test_errors_of_other_ranks_arrive_with_their_words"
    failed = exchanged(dcp.CheckpointException("save", {1: (bad, trace)}))
    assert str(failed.failures[1][0]) == str(bad)
