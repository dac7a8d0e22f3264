"""A simulated GPU: fake tensors on `cuda` in a build of torch for CPUs. Nothing is computed; of every
operation it is noted on which stream it is launched, and which storages it reads and writes.

Found are operations on the wrong device, waits of the host (a number that is read, a copy from or to
memory that is not pinned), and races between streams, or between a stream and the host. Not simulated:
values, NCCL's own streams, memory that the allocator uses again.

`install` replaces functions of torch.cuda for good, so that cases run in children of a process without
tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from support.simulated_gpu.clocks import HOST, Accesses, Actor, Clock, Order

import forge

FORGE = f"{Path(forge.__file__).parent}/"  # a checkout may have this name, too
GIB = 2**30
GPU_NAME, CAPABILITY, MEMORY = "NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB


@dataclass
class Findings:
    """What the simulated GPU has seen since the last `clear`.

    waits, races, wrong_devices: a sentence each, with the lines of Forge that led there. operations: how
    often each was launched on the GPU. moved: bytes of the tensors that collectives have sent, by name.
    """

    waits: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    wrong_devices: list[str] = field(default_factory=list)
    event_waits: int = 0  # of the host, for an event
    pinned_copies: int = 0  # between host and GPU, for which the host does not wait
    operations: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)


class SimulatedGpu:
    """One GPU of this process, with its streams."""

    def __init__(self, guard: Path) -> None:
        """guard: the library made of guard.cpp. Before torch is imported, which remembers that there is
        no GPU."""
        self._guard = ctypes.CDLL(str(guard), ctypes.RTLD_GLOBAL)
        self._guard.current_stream.restype = ctypes.c_int64
        self._guard.set_current_stream.argtypes = (ctypes.c_int64,)
        self.order, self.findings = Order(), Findings()
        self.accesses = Accesses(self.order, lambda text: self._note(self.findings.races, text))
        self.pinned: set[int] = set()  # storages
        self._kept: dict[int, Any] = {}  # storages by id: none is used twice
        self._num_streams = 0

    def clear(self) -> Findings:
        """What was found since the last call."""
        findings, self.findings = self.findings, Findings()
        return findings

    # --- streams and events ---------------------------------------------------------------------

    @property
    def stream(self) -> int:
        """The current stream of this thread; 0 is the default one."""
        return int(self._guard.current_stream())

    @stream.setter
    def stream(self, number: int) -> None:
        self._guard.set_current_stream(number)

    def new_stream(self) -> int:
        self._num_streams += 1
        return self._num_streams

    # --- what happens -----------------------------------------------------------------------------

    def wait(self, what: str, actor: Actor | None = None) -> None:
        """The host waits for the device, or for one stream."""
        self._note(self.findings.waits, what)
        if actor is None:
            self.order.wait_for_all()
        else:
            self.order.wait(HOST, self.order.clock(actor))

    def wrong_device(self, what: str) -> None:
        self._note(self.findings.wrong_devices, what)

    def _note(self, where: list[str], text: str) -> None:
        where.append(f"{text} ({_lines()})")

    def storage(self, tensor: Any) -> int:
        storage = tensor.untyped_storage()
        self._kept.setdefault(storage._cdata, storage)
        return int(storage._cdata)

    def begin(self, actor: Actor) -> None:
        self.order.begin(actor)

    def host_reads(self, tensor: Any, what: str) -> None:
        self.begin(HOST)
        self.accesses.read(HOST, self.storage(tensor), what)


def _lines() -> str:
    """The innermost lines of Forge and of FSDP2 that are being executed."""
    places = []
    for frame in reversed(traceback.extract_stack(limit=80)):
        path = frame.filename
        if path.startswith(FORGE) or "/fsdp/" in path or "/torch/optim/" in path:
            short = path.removeprefix(FORGE) if path.startswith(FORGE) else Path(path).name
            places.append(f"{short}:{frame.lineno}")
    return " < ".join(places[:3]) or "outside of Forge"


# --- torch.cuda -----------------------------------------------------------------------------------


def install(gpu: SimulatedGpu) -> None:
    """Have torch use this GPU in place of CUDA, in this process."""
    import torch
    from torch._subclasses import fake_tensor

    for name, value in {**_streams(gpu), **_facts()}.items():
        setattr(torch.cuda, name, value)
    for name in NOTHING_TO_DO:
        setattr(torch.cuda, name, _nothing())
    torch.accelerator.current_stream = torch.cuda.current_stream
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda _: True)
    fake_tensor.init_gpu_context = _nothing()
    _replace_methods_of_tensors(gpu)
    _replace_staging(gpu)


NOTHING_TO_DO = ("set_device", "init", "_lazy_init", "manual_seed", "manual_seed_all")


def _nothing() -> Any:
    """A new function for each name: torch._dynamo refuses one that has two."""
    return lambda *_, **__: None


class Event:
    """As torch.cuda.Event."""

    gpu: ClassVar[SimulatedGpu]

    def __init__(self, *_: Any, **__: Any) -> None:
        self._clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self._clock = self.gpu.order.clock(_number(self.gpu, stream))

    def wait(self, stream: Stream | None = None) -> None:
        self.gpu.order.wait(_number(self.gpu, stream), self._clock)

    def synchronize(self) -> None:
        self.gpu.findings.event_waits += 1
        self.gpu.order.wait(HOST, self._clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Stream:
    """As torch.cuda.Stream."""

    gpu: ClassVar[SimulatedGpu]

    def __init__(self, device: Any = None, priority: int = 0, **given: Any) -> None:
        import torch

        number = given.get("stream_id")
        self.stream_id = self.gpu.new_stream() if number is None else number
        self.cuda_stream, self.priority = self.stream_id, priority
        self.device, self.device_index = torch.device("cuda", 0), 0

    def wait_stream(self, other: Stream) -> None:
        self.gpu.order.wait(self.stream_id, self.gpu.order.clock(other.stream_id))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.wait("Stream.synchronize", self.stream_id)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id


def _number(gpu: SimulatedGpu, stream: Stream | None) -> int:
    return gpu.stream if stream is None else stream.stream_id


def _streams(gpu: SimulatedGpu) -> dict[str, Any]:
    """What torch.cuda has for streams and events."""
    Event.gpu = Stream.gpu = gpu

    @contextlib.contextmanager
    def on_stream(stream: Stream | None) -> Iterator[None]:
        before, gpu.stream = gpu.stream, _number(gpu, stream)
        try:
            yield
        finally:
            gpu.stream = before

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda _=None: Stream(stream_id=gpu.stream),
        "default_stream": lambda _=None: Stream(stream_id=0),
        "stream": on_stream,
        "synchronize": lambda _=None: gpu.wait("torch.cuda.synchronize"),
    }


class Properties:
    """As torch.cuda.get_device_properties."""

    name, total_memory, uuid = GPU_NAME, MEMORY, "GPU-0"
    (major, minor), multi_processor_count = CAPABILITY, 132


def _facts() -> dict[str, Any]:
    """What torch.cuda says of its devices."""
    return {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda *_: Properties,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_name": lambda *_: GPU_NAME,
        "mem_get_info": lambda *_: (MEMORY - GIB, MEMORY),
        "_is_in_bad_fork": lambda: False,
    }


def _replace_methods_of_tensors(gpu: SimulatedGpu) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    def pin_memory(self: Any, *_: Any) -> Any:
        copy = torch.empty_like(self)
        gpu.pinned.add(gpu.storage(copy))
        return copy.copy_(self)

    make_tensor = torch.tensor

    def tensor(*values: Any, pin_memory: bool = False, **options: Any) -> Any:
        made = make_tensor(*values, **options)
        if pin_memory:
            gpu.pinned.add(gpu.storage(made))
        return made

    to_list = torch.Tensor.tolist

    def tolist(self: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return to_list(self)
        if self.device.type == "cuda":
            gpu.wait("tolist of a tensor on the GPU")
        else:
            gpu.host_reads(self, "tolist")
        return _ones(list(self.shape))

    torch.Tensor.pin_memory, torch.tensor, torch.Tensor.tolist = pin_memory, tensor, tolist


def _ones(shape: list[int]) -> Any:
    """A nested list of the shape: values are not simulated."""
    return [_ones(shape[1:]) for _ in range(shape[0])] if shape else 1.0


def _replace_staging(gpu: SimulatedGpu) -> None:
    """torch's stager copies storages by their addresses, which fake ones do not have."""
    import torch
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    copies: dict[int, Any] = {}

    def offload(stager: Any, tensor: Any, memo: Any, non_blocking: bool = False) -> Any:
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        number, size = gpu.storage(tensor), tensor.untyped_storage().nbytes()
        if number not in copies:
            copies[number] = torch.empty(size, dtype=torch.uint8, device="cpu")
            if stager.pin_memory and size >= stager.pin_memory_min_bytes:
                gpu.pinned.add(gpu.storage(copies[number]))
        copy = copies[number]
        if memo.setdefault(("copied", number), tensor) is not tensor:
            return copy  # of a storage that several tensors share
        if tensor.device.type != "cuda":
            gpu.host_reads(tensor, "the copy of the state")
            return copy
        stream, is_pinned = gpu.stream, gpu.storage(copy) in gpu.pinned
        gpu.begin(stream)
        gpu.accesses.read(stream, number, "the copy of the state")
        gpu.accesses.write(stream, gpu.storage(copy), "the copy of the state")
        if non_blocking and is_pinned:
            gpu.findings.pinned_copies += 1
        else:
            what = f"a copy of the state of shape {tuple(tensor.shape)}"
            gpu.wait(f"{what} into memory that is not pinned", stream)
        return copy

    StateDictStager._offload_tensor = offload
