"""What each operation of torch does on the simulated GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support.simulated_gpu.clocks import HOST, Actor
from support.simulated_gpu.device import SimulatedGpu
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "c10d._allgather_base_.default": "all-gather",
    "c10d._reduce_scatter_base_.default": "reduce-scatter",
    "c10d.allreduce_.default": "all-reduce",
    "c10d.alltoall_base_.default": "all-to-all",
    "_c10d_functional.all_reduce.default": "all-reduce",
    "_c10d_functional.all_gather_into_tensor.default": "all-gather",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce-scatter",
}


# Neither compute nor access memory, or give the tensor itself.
WITHOUT_ACCESS = ("prim.", "profiler.", "aten.detach", "aten.alias", "aten.lift_fresh")
NEW_COPY = "aten._to_copy.default"
COPIES = (NEW_COPY, "aten.copy_.default")


@dataclass(frozen=True)
class Operation:
    """One that is done. written: Python's ids of the inputs that it has changed."""

    name: str
    args: Any
    kwargs: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    written: set[int]

    @property
    def devices(self) -> set[str]:
        return {tensor.device.type for tensor in (*self.inputs, *self.outputs)}


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """On top of a FakeTensorMode: notes every operation, those inside of DTensor and torchao too."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if any(is_traceable_wrapper_subclass(tensor) for tensor in inputs):
            return NotImplemented  # the operations on the tensors inside come here again
        name = str(operator)
        if name == "aten._local_scalar_dense.default":
            return self._number(args[0])
        if name.startswith("aten.is_pinned"):
            return self._gpu.storage(args[0]) in self._gpu.pinned
        try:
            result = operator(*args, **kwargs)
        except FakeTensorDeviceMismatchError as err:
            self._gpu.wrong_device(f"{name}: {str(err).splitlines()[0]}")
            raise
        written = _written(operator, args, kwargs)
        if not name.startswith(WITHOUT_ACCESS) and (written or not _is_view(operator)):
            self._note(Operation(name, args, kwargs, inputs, _tensors(result), written))
        return result

    def _number(self, tensor: torch.Tensor) -> bool | float:
        """What `item` gives; not simulated: finite, and no flag is set."""
        if tensor.device.type == "cuda":
            self._gpu.wait("a number of the GPU is read (item, bool, float)")
        else:
            self._gpu.host_reads(tensor, "item")
        return False if tensor.dtype is torch.bool else 1.0

    def _note(self, done: Operation) -> None:
        gpu, name = self._gpu, done.name
        actor: Actor = gpu.stream if "cuda" in done.devices else HOST
        gpu.begin(actor)
        for tensor in done.inputs:
            access = gpu.accesses.write if id(tensor) in done.written else gpu.accesses.read
            access(actor, gpu.storage(tensor), name)
        known = {id(tensor) for tensor in done.inputs}
        for tensor in done.outputs:
            if id(tensor) not in known:
                gpu.accesses.write(actor, gpu.storage(tensor), name)
        if "cuda" not in done.devices:
            return
        gpu.findings.operations[COLLECTIVES.get(name, name)] += 1
        if name in COLLECTIVES:
            sent = [t for t in done.inputs if id(t) not in done.written] or done.inputs
            gpu.findings.moved[COLLECTIVES[name]] += sum(tensor.nbytes for tensor in sent)
        if "cpu" in done.devices and name in COPIES:
            self._copy(done)
        elif any(tensor.device.type == "cpu" and tensor.dim() for tensor in done.inputs):
            shapes = [f"{tuple(tensor.shape)} on {tensor.device.type}" for tensor in done.inputs]
            gpu.wrong_device(f"{name} takes tensors of both devices: {', '.join(shapes)}")

    def _copy(self, done: Operation) -> None:
        """A copy between host and GPU."""
        gpu, is_new, target = self._gpu, done.name == NEW_COPY, done.outputs[0]
        source = done.args[0] if is_new else done.args[1]
        on_host = source if target.device.type == "cuda" else target
        asynchronous = done.kwargs.get("non_blocking") or (
            not is_new and len(done.args) > 2 and done.args[2]
        )
        if is_new and asynchronous and on_host is target:
            gpu.pinned.add(gpu.storage(target))  # at::native::_to_copy allocates pinned memory
        is_pinned = gpu.storage(on_host) in gpu.pinned
        if asynchronous and is_pinned:
            gpu.findings.pinned_copies += 1
            return
        direction = "to" if target.device.type == "cuda" else "from"
        why = "memory that is not pinned" if asynchronous else "not asynchronous"
        gpu.wait(f"a copy {direction} the GPU of {tuple(on_host.shape)}: {why}", gpu.stream)


def _written(operator: Any, args: Any, kwargs: Any) -> set[int]:
    """Python's ids of the tensors that an operation changes."""
    if str(operator).startswith("c10d."):  # which declare nothing: the first argument is the output
        return {id(tensor) for tensor in _tensors(args[0])}
    declared = {argument.name: argument.alias_info for argument in operator._schema.arguments}
    given = [*zip(declared, args, strict=False), *kwargs.items()]
    return {
        id(tensor)
        for name, value in given
        if declared.get(name) and declared[name].is_write
        for tensor in _tensors(value)
    }


def _is_view(operator: Any) -> bool:
    returns = operator._schema.returns
    return any(value.alias_info and not value.alias_info.is_write for value in returns)
