"""Arithmetic is the same in each process from its first step on."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge.trainer import numerics

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"


class Calls(TorchDispatchMode):
    """Collects name, type and number of elements of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype, int]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            name = function.overloadpacket.__name__
            self.seen.add((name, args[0].dtype, args[0].numel()))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def prepared(monkeypatch):
    """What `prepare` calls; what it sets for the whole process is left out, or taken back."""
    for name in ("use_fast_fp32", "keep_freed_memory"):
        monkeypatch.setattr(numerics, name, lambda: True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    before = torch.backends.cuda.matmul.fp32_precision
    with Calls() as calls:
        numerics.prepare(torch.device("cpu"))
    torch.backends.cuda.matmul.fp32_precision = before
    return calls.seen


def test_each_function_that_this_torch_computes_by_mkl_is_called_by_one_thread_first(prepared):
    """A first call by several threads at once gave wrong values in every second process."""
    by_mkl = set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", HEADER.read_text(), re.MULTILINE))
    assert "cos" in by_mkl
    assert by_mkl == set(numerics.MKL_FUNCTIONS)
    types = torch.float32, torch.float64
    assert {(name, dtype, 1) for name in by_mkl for dtype in types} <= prepared
