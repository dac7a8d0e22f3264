"""The private API of PyTorch changes without notice. One module has all of it, and the test below says
what to change when a release of torch lacks a name."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forge
from forge.launch import torch_private

ROOTS = ("torch", "dist", "dcp")  # names of torch and of its modules
# By private name: what Forge uses it for, and what to use instead.
INSTEAD = {
    "torch._inductor.codecache._HEADER_DIR": "keep_headers_in: the variable that has the directory of"
    " precompiled headers; without one, TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=0",
    "torch._inductor.codecache._HEADER_LOCK_DIR": "keep_headers_in: as _HEADER_DIR",
    "torch.cuda.memory._dump_snapshot": "dump_memory: remove it, and its call in forge/worker.py",
    "torch._foreach_norm": "is_finite of checkpoint/storage.py: one torch.linalg.vector_norm a tensor,"
    " with which the writer thread waits for the GIL more often",
    "torch._C._distributed_c10d": "flight_record: the extension module below torch.distributed, whose"
    " __init__.py shows where it is now",
    "torch._C._distributed_c10d._dump_fr_trace": "flight_record: the record under its new name; without"
    " one, remove flight_record and dump_collectives",
    "torch._C._distributed_c10d._dump_fr_trace_json": "collective_numbers: the record under its new name;"
    " without one, remove `collectives` of process_group.py, and _absent of lost_ranks.py",
    "torch.distributed._shard._utils.narrow_tensor_by_index": "SafeReader: torch.narrow",
    "torch.distributed.distributed_c10d._set_pg_timeout": "set_timeout: groups made by dist.new_group,"
    " which takes a timeout, and DeviceMesh.from_group",
    "torch.distributed.distributed_c10d._unpickler": "unpickle_objects_with: the class that"
    " _tensor_to_object calls; without one, collectives that DCP and test_plan_pickles.py can use without"
    " pickles",
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager": "Stager of checkpoint/storage.py:"
    " torch.distributed.checkpoint.staging.DefaultStager, once torch 2.11 is not supported any more",
    "torch.distributed.checkpoint.filesystem._split_by_size_and_type": "TensorWriter: give each tensor,"
    " the largest first, to the file that is the smallest so far",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "TensorWriter and SafeReader: the place of"
    " a tensor in its file. pickled_index.py: let it read the old name and the new one",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": "PlanUnpickler: the enum of"
    " memory formats in what DCP sends between ranks",
}


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_torch_has_every_private_name_or_this_says_what_to_change(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        found = hasattr(importlib.import_module(module), attribute)
    except ImportError:
        found = False
    assert found, (
        f"torch {torch.__version__} has no {name}. Change {torch_private.__name__}; it is used for"
        f" {INSTEAD[name]}"
    )


def test_every_private_name_is_in_the_module_for_them() -> None:
    folder = Path(forge.__file__).parent
    used = {path.stem: set(private(path.read_text())) for path in folder.rglob("*.py")}
    by_name = {f"torch._C._distributed_c10d._dump_fr_trace{end}" for end in ("", "_json")}
    headers = "torch._inductor.codecache"
    by_name |= {name for name in INSTEAD if name.startswith(headers)}
    assert used.pop("torch_private") == set(INSTEAD) - by_name | {headers}
    assert {module: names for module, names in used.items() if names} == {}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from torch import _foreach_norm", "torch._foreach_norm"),
        ("from torch._C import Generator as G", "torch._C.Generator"),
        ("import torch._inductor.config", "torch._inductor.config"),
        ("found = 1 + torch._C._get_default_device()", "torch._C._get_default_device"),
        ("dist.distributed_c10d._get_default_group", "dist.distributed_c10d._get_default_group"),
    ],
)
def test_the_check_sees_private_names(line: str, name: str) -> None:
    assert name in set(private(line))


def private(text: str) -> Iterator[str]:
    """Names of torch in imports and expressions that have an underscore before one of their parts."""
    if not re.search(rf"\b({'|'.join(ROOTS)})\b", text):
        return  # most modules: writing out each of their expressions takes seconds
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        for name in names:
            root, _, rest = name.partition(".")
            if root in ROOTS and "._" in f".{rest}" and rest != "__version__":
                yield name


def test_memory_of_a_gpu_is_written_and_without_one_nothing_is(tmp_path, monkeypatch):
    path = tmp_path / "rank.memory.pickle"
    assert not torch_private.dump_memory(path) or torch.cuda.is_available()
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"s")
    )
    assert torch_private.dump_memory(path) and path.read_bytes() == b"s"
    assert not torch_private.dump_memory(tmp_path / "nowhere" / "rank.memory.pickle")
