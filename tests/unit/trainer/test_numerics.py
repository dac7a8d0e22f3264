"""Arithmetic is the same in each process from its first step on."""

import re
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge.trainer.numerics import MKL_FUNCTIONS, call_each_mkl_function

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


def test_each_function_that_this_torch_computes_by_mkl_is_called_by_one_thread_first():
    """A first call by several threads at once gave wrong values in every second process."""
    by_mkl = set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", HEADER.read_text(), re.MULTILINE))
    assert "cos" in by_mkl
    assert by_mkl == set(MKL_FUNCTIONS)
    with Calls() as calls:
        call_each_mkl_function()
    types = torch.float32, torch.float64
    assert {(name, dtype, 1) for name in by_mkl for dtype in types} <= calls.seen
