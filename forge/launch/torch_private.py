"""The private API of PyTorch that Forge uses, all of it.

tests/unit/launch/test_torch_private.py says what to change when a release of torch lacks one of these.
"""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from pathlib import Path

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.filesystem import (
    _split_by_size_and_type as split_by_size_and_type,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat

__all__ = [
    "MemoryFormat",
    "StateDictStager",
    "StorageInfo",
    "collective_numbers",
    "dump_memory",
    "flight_record",
    "foreach_norm",
    "keep_headers_in",
    "narrow_tensor_by_index",
    "scales_gradients",
    "set_timeout",
    "split_by_size_and_type",
    "unpickle_objects_with",
]

foreach_norm = torch._foreach_norm


def collective_numbers(backend: str) -> dict[str, dict[str, str]]:
    """By process group, the numbers of the last collectives of this rank, as its flight recorders have
    them: JSON, and without a question to the device. NCCL's groups are in a recorder of their own."""
    dumps = {"gloo": "_dump_fr_trace_json"}
    if backend == "nccl":
        dumps["nccl"] = "_dump_nccl_trace_json"
    return {
        f"{kind} {group}": numbers
        for kind, name in dumps.items()
        for group, numbers in json.loads(getattr(c10d, name)(False)).get("pg_status", {}).items()
    }


def flight_record(backend: str) -> bytes:
    """The last collectives of this rank, as torch's flight recorder pickles them. torch has no other way
    to ask for them; NCCL has a recorder of its own, apart from that of all other backends."""
    record: bytes = getattr(c10d, "_dump_nccl_trace" if backend == "nccl" else "_dump_fr_trace")()
    return record


def dump_memory(path: Path) -> bool:
    """Write what is in the memory of this process's GPU, which pytorch.org/memory_viz draws; whether
    there is a GPU, and it could be written."""
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception:  # this tells of another error, whatever happens
        return False
    return path.exists()


def scales_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's step divides gradients by its attribute `grad_scale`, and leaves
    weights and state as they are where `found_inf` is not 0; all others ignore both. torch.amp.GradScaler
    asks the same."""
    # Fused SGD of torch 2.13 reads memory that was never written where its first update was left out.
    reads_both = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return reads_both and not isinstance(optimizer, torch.optim.SGD)


def set_timeout(group: torch.distributed.ProcessGroup, timeout: timedelta) -> None:
    """Give a group that torch has made, such as one of a DeviceMesh, a timeout other than 30 minutes."""
    torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


def keep_headers_in(folder: Path) -> None:
    """Keep the C++ headers that torch precompiles in this directory of kernels. torch keeps them in its
    default one, in /tmp, whatever TORCHINDUCTOR_CACHE_DIR says."""
    from torch._inductor import codecache  # not at import: that takes a second

    headers = folder / "precompiled_headers"
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")


def unpickle_objects_with(unpickler: type[pickle.Unpickler]) -> None:
    """Have the object collectives of this process, such as those of DCP, read with this class."""
    torch.distributed.distributed_c10d._unpickler = unpickler
