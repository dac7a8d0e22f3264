"""Pickles that torch.distributed.checkpoint (DCP) sends between ranks: only plans, results and errors
are read, nothing that runs.

Whoever can connect to a port of Gloo can take the place of a rank, and send what it likes.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType

from forge.core import errors
from forge.core.errors import UnfitError
from forge.launch.rank_records import SAME_VERSION
from forge.launch.torch_private import MemoryFormat, unpickle_objects_with

_DCP = "torch.distributed.checkpoint"
# All classes that torch 2.11 and 2.13 send in a save or a load of tensors.
ALLOWED = frozenset(
    (module, name)
    for module, names in {
        "torch": ("Size", "float32", "float64", "bfloat16", "float16", "int64"),
        "torch.serialization": ("_get_layout",),
        f"{_DCP}.metadata": (
            *("MetadataIndex", "TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
            *("Metadata", "TensorStorageMetadata", "StorageMeta"),
        ),
        f"{_DCP}.planner": (
            *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
            *("LoadPlan", "ReadItem", "LoadItemType"),
        ),
        f"{_DCP}.filesystem": ("_StoragePrefix", "_StorageInfo"),
        f"{_DCP}.storage": ("WriteResult",),
        f"{_DCP}.api": ("CheckpointException",),
        "traceback": ("StackSummary", "FrameSummary"),
    }.items()
    for name in names
)
ENUMS = (MemoryFormat, WriteItemType, LoadItemType)


def read_only_plans() -> None:
    """Have the object collectives of this process, those of DCP, refuse everything else. Every rank."""
    unpickle_objects_with(PlanUnpickler)


class PlanUnpickler(pickle.Unpickler):
    """Reads what DCP sends between ranks; UnfitError for a class that no save and no load needs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # early releases of Python 3.11 pickle a member of an enum so
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if module in ("builtins", "torch", errors.__name__) and "." not in name:
            member = getattr(sys.modules[module], name, None)
            if member is errors.Exit or (
                isinstance(member, type) and issubclass(member, BaseException)
            ):
                return member
        raise _foreign(f"{module}.{name}")


def _member(owner: Any, name: str = "") -> Any:
    """getattr as these pickles need it: a member of an enum. UnfitError for anything else."""
    if owner not in ENUMS or name not in owner.__members__:
        raise _foreign(f"attribute {name!r} of {owner!r}")
    return owner[name]


def _foreign(what: str) -> UnfitError:
    return UnfitError(
        f"a rank sent a pickle with {what}, which no save and no load needs",
        cause="its node has another version of torch or Forge, or another program, not a rank,"
        " connected to the ports of this launch",
        fix=f"{SAME_VERSION}; docs/environment.md says who can connect",
    )
