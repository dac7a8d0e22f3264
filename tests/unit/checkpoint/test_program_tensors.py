"""Tensors that another program has saved: all are read, and nothing in the checkpoint is executed."""

import io
import os
import pathlib
import pickle
import random
import resource
import struct
import time
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from support import mutations
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from forge.checkpoint.pickled_index import UnknownIndexError, read_pickled_index
from forge.checkpoint.program_tensors import floating_parts
from forge.core.errors import DataError, ForgeError

STATE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer": {"lr": 0.1, "w": {"step": torch.tensor(7.0)}},
    "ids": torch.arange(3),
    "small": torch.ones(2).to(torch.float8_e4m3fn),
}


class Planted:
    """Unpickled, it calls `function` with `argument`."""

    def __init__(self, function, argument):
        self.call = (function, (argument,))

    def __reduce__(self):
        return self.call


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


def bombed(file, changed):
    """Rewrite the tensors in a file: each entry of an archive as `changed` has it."""
    parts = read_pickled_index(file.parent / ".metadata")
    data = bytearray(file.read_bytes())
    for part in parts:
        begin, end = part.start, part.start + part.bytes
        packed = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(data[begin:end])) as old,
            zipfile.ZipFile(packed, "w") as new,
        ):
            for name in old.namelist():
                changed(new, name, old.read(name))
        with zipfile.ZipFile(
            packed, "a"
        ) as new:  # as long as it was; 94 bytes are the name of this entry
            new.writestr("archive/f", bytes(part.bytes - len(packed.getvalue()) - 94))
        data[begin:end] = packed.getvalue()
    assert len(data) == file.stat().st_size
    file.write_bytes(data)


def inflated(archive, name, content):
    """64 MiB of zeros in place of the numbers, in 64 KiB."""
    numbers = bytes(2**26) if "/data/" in name else content
    archive.writestr(name, numbers, zipfile.ZIP_DEFLATED)


def asking_for_memory(archive, name, content):
    call = b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x40\x85R."  # of 2**30 bytes
    archive.writestr(name, call if name.endswith("data.pkl") else content)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (inflated, r"\d+ bytes would be unpacked to 67\d{6}"),
        (asking_for_memory, "its pickle calls __builtin__ bytearray"),
    ],
)
def test_tensor_that_takes_more_memory_than_it_has_bytes_is_not_read(tmp_path, changed, why):
    folder = tmp_path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.rand(2**15)}, checkpoint_id=folder, no_dist=True)
    bombed(folder / "__0_0.distcp", changed)
    with pytest.raises(DataError, match=f"cannot read w in __0_0.distcp: .*{why}"):
        list(floating_parts(folder))


def test_index_that_runs_a_command_is_refused_and_does_not_run(folder, tmp_path):
    harm = tmp_path / "harm"
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(os.system, f"touch {harm}")))
    with pytest.raises(DataError, match=r"(posix|nt)\.system") as refused:
        list(floating_parts(folder))
    assert not isinstance(refused.value, UnknownIndexError) and not harm.exists()


@pytest.mark.parametrize("function", [torch.load, yaml.load])
def test_class_of_a_newer_torch_or_of_the_program_is_recognized_and_not_called(folder, function):
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
    index = pickle.loads((folder / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.offset, info.length = 0, len(planted.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DataError, match=r"cannot read .* in __0_0\.distcp"):
        list(floating_parts(folder))
    assert not harm.exists()


def cut(file: Path) -> None:
    os.truncate(file, 100)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, r"__0_0\.distcp ends before .* does"),
        (Path.unlink, "__0_0.distcp, which has .*, is missing"),
    ],
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


# --- an index that was tampered with --------------------------------------------------------------


def text(value):
    return b"\x8c" + struct.pack("B", len(value)) + value.encode()


def named(module, name):
    return text(module) + text(name) + pickle.STACK_GLOBAL


SET_STR = b"N}" + text("_str") + text("/victim") + b"s\x86b0"  # BUILD: (None, {"_str": …}), POP
PLANTED = {
    "attribute of pathlib": named("pathlib", "PosixPath") + SET_STR,
    "attribute of torch": named("torch", "Size") + SET_STR,
    "attribute of the index": named(dcp_metadata.__name__, "Metadata") + SET_STR,
    "call of getattr": named("builtins", "getattr")
    + named("pathlib", "PosixPath")
    + text("unlink")
    + b"\x86R"
    + text("/victim")
    + b"\x85R0",
    "state twice": named("torch", "Size") + b")R}b}b0",
    "memo of gigabytes": b"Nr\xff\xff\xff\xff0",
    "text of gigabytes": b"\x8d" + struct.pack("<Q", 2**40),
    "array of gigabytes": b"\x96" + struct.pack("<Q", 2**40),
    "extension": b"\x82\x01",
    "persistent": text("x") + b"Q0",
    "nothing to take": b"0000",
}


@pytest.mark.parametrize("protocol", [b"", b"\x80\x02", b"\x80\x04", b"\x80\x05"])
@pytest.mark.parametrize("kind", PLANTED)
def test_instructions_that_no_index_has_change_nothing(folder, kind, protocol):
    path, before = folder / ".metadata", vars(pathlib.PosixPath).copy()
    honest = path.read_bytes()
    path.write_bytes(protocol + PLANTED[kind] + honest[2:])
    with pytest.raises(DataError, match=r"which no index needs|\.metadata is not the index"):
        read_pickled_index(path)
    assert vars(pathlib.PosixPath) == before
    assert str(Path("/x/y")) == "/x/y"
    path.write_bytes(honest)
    assert read_pickled_index(path)


def index_of(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def of_one_tensor(*, start, length):
    """An index of the tensor w, of 2**62 numbers, at this place."""
    names = dcp_metadata
    chunk = names.ChunkStorageMetadata(torch.Size([0]), torch.Size([2**62]))
    tensor = names.TensorStorageMetadata(
        names.TensorProperties(torch.float32), chunk.sizes, [chunk]
    )
    where = {names.MetadataIndex("w", [0]): _StorageInfo("__0_0.distcp", start, length)}
    return pickle.dumps(names.Metadata({"w": tensor}, storage_data=where))


def of_equal_tensors(number):
    """An index of so many tensors that have one list of as many parts."""
    names, sizes = dcp_metadata, torch.Size([1])
    chunks = [names.ChunkStorageMetadata(sizes, sizes) for _ in range(number)]
    tensor = names.TensorStorageMetadata(names.TensorProperties(torch.float32), sizes, chunks)
    many = {f"w{n}": tensor for n in range(number)}
    return pickle.dumps(names.Metadata(many, storage_data={}))


def of_equal_arguments(number, sizes):
    """An index that makes so many torch.Size of one tuple."""
    size = named("torch", "Size") + b"h\x00\x85R"
    return b"\x80\x04(" + b"K\x01" * sizes + b"t\x94" + size * number + b"."


def of_equal_hashes(number):
    """An index of a dict whose keys, of 13 bytes each, have one hash."""
    keys = ((2**61 - 1) * (2**30 + n) for n in range(number))
    longs = (b"\x8a\x0d" + key.to_bytes(13, "little") + b"N" for key in keys)
    return b"\x80\x04}(" + b"".join(longs) + b"u."


BOMBS = {
    "marks": lambda: b"\x80\x04" + b"(" * 10**5,
    "nested tuples": lambda: b"\x80\x04)" + b"\x85" * 10**5 + b".",
    "the same parts again and again": lambda: of_equal_tensors(1000),
    "a part of exabytes": lambda: of_one_tensor(start=0, length=2**62),
    "thousands of digits": lambda: of_one_tensor(start=10**4000, length=1),
    "the same arguments again and again": lambda: of_equal_arguments(20_000, 50_000),
    "keys of one hash": lambda: of_equal_hashes(60_000),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_index_that_asks_for_gigabytes_is_bad_data(folder, kind):
    (folder / ".metadata").write_bytes(BOMBS[kind]())
    begun, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"\.metadata is not the index|__0_0\.distcp ends before"):
        list(floating_parts(folder))
    assert time.process_time() - begun < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 2**18, "in KiB"


def test_index_that_was_cut_is_bad_data(folder):
    honest = (folder / ".metadata").read_bytes()
    for size in range(0, len(honest), 7):
        (folder / ".metadata").write_bytes(honest[:size])
        has_an_end = honest[:size].endswith(pickle.STOP)  # also a full stop in a name
        why = r"index" if has_an_end else r"\.metadata is not the index.*its end is missing"
        with pytest.raises(DataError, match=why):
            read_pickled_index(folder / ".metadata")


def test_index_of_terabytes_is_refused_unread(folder):
    os.truncate(folder / ".metadata", 2**42)  # sparse
    with pytest.raises(DataError, match=f"it has {2**42} bytes"):
        list(floating_parts(folder))


def test_tensor_that_repeats_one_number_is_no_tensor_of_its_shape(folder):
    tiny = io.BytesIO()
    torch.save(torch.zeros(1).expand(2**40), tiny)
    (folder / "__0_0.distcp").write_bytes(tiny.getvalue())
    index = index_of(folder)
    index.state_dict_metadata["model.w"].chunks[0].sizes = torch.Size([2**40])
    index.state_dict_metadata["model.w"].chunks[0].offsets = torch.Size([0])
    where = {
        dcp_metadata.MetadataIndex("model.w", [0]): _StorageInfo(
            "__0_0.distcp", 0, len(tiny.getvalue())
        )
    }
    index.storage_data = where
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DataError, match=r"model\.w in __0_0\.distcp has fewer numbers"):
        list(floating_parts(folder))


@pytest.mark.parametrize(
    "name", ["../saved/__0_0.distcp", "/etc/passwd", "", ".", "a\0b", "\x1b[2J"]
)
def test_place_out_of_the_directory_is_bad_data(folder, name):
    index = index_of(folder)
    for info in index.storage_data.values():
        info.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DataError, match="is not the index of a checkpoint: file"):
        list(floating_parts(folder))


def test_link_out_of_the_directory_is_not_followed(folder, tmp_path):
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="is missing or a link out of"):
        list(floating_parts(folder))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_index_of_every_protocol_is_read(folder, protocol):
    index = index_of(folder)
    before = read_pickled_index(folder / ".metadata")
    index.storage_meta = dcp_metadata.StorageMeta(checkpoint_id=Path("/some/where"))
    (folder / ".metadata").write_bytes(pickle.dumps(index, protocol))
    assert read_pickled_index(folder / ".metadata") == before
    assert sorted(part.name for part in before) == [
        *("ids", "model.b", "model.w", "optimizer.w.step", "small"),
    ]


def test_random_edits_of_an_index_are_read_or_bad_data_and_nothing_else(folder):
    honest, path = (folder / ".metadata").read_bytes(), folder / ".metadata"
    codes = [
        value for name, value in vars(pickle).items() if name.isupper() and type(value) is bytes
    ]
    chance, refused = random.Random(20), 0
    for _ in range(300):
        data = bytearray(honest)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data))
            new = chance.choice(
                [chance.choice(codes), chance.randbytes(1), data[: chance.randint(1, 80)]]
            )
            data[at : at + chance.randint(0, 2)] = new
        path.write_bytes(data)
        try:
            read_pickled_index(path)
        except DataError:
            refused += 1
    assert refused > 100
    assert str(Path("/x/y")) == "/x/y"


def test_fuzzed_checkpoint_of_another_program_is_read_or_refused(folder, tmp_path):
    """tests/support/mutations.py: no traceback, no hang, no memory beyond 2 GiB."""

    def read(saved):
        for part in floating_parts(saved):
            part.is_finite()

    ends = mutations.try_all(folder, tmp_path / "work", read, ForgeError)
    assert min(ends["taken"], ends["refused"]) > mutations.COUNT / 20, ends
