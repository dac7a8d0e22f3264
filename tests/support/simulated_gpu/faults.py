"""Faults of a training step and of an asynchronous save, each of which the simulated GPU must find."""

from __future__ import annotations

from typing import Any


def unpinned_batches() -> None:
    """The loader's thread gives memory that is not pinned."""
    from forge.data.loader import Prefetcher

    def batch(self: Any, step: int) -> Any:
        return [tokens.contiguous() for tokens in self._loader.batch(step)]

    Prefetcher.batch = batch  # type: ignore[method-assign]


def unpinned_flags() -> None:
    """The flags of a rank are copied from memory that is not pinned."""
    import torch

    from forge.launch.process_group import World

    def on_device(self: World, values: Any) -> Any:
        return torch.tensor(values, dtype=torch.float32).to(self.device, non_blocking=True)

    World.on_device = on_device  # type: ignore[method-assign]


def unpinned_positions() -> None:
    """What find_documents makes is copied from memory that is not pinned."""
    from forge.trainer import documents

    documents._copied = lambda tensor, device: tensor.to(device, non_blocking=True)


def loss_is_read() -> None:
    """A number of the step is read before the next one is launched."""
    from forge.trainer.parallel import ParallelModel

    backward = ParallelModel.backward

    def reading(self: Any, inputs: Any, targets: Any) -> Any:
        loss = backward(self, inputs, targets)
        assert float(loss) > 0
        return loss

    ParallelModel.backward = reading  # type: ignore[method-assign]


def device_is_synchronized() -> None:
    """The host waits for all that it has launched."""
    import torch

    from forge.trainer.parallel import ParallelModel

    norm = ParallelModel.gradient_norm

    def synchronizing(self: Any) -> Any:
        torch.cuda.synchronize()
        return norm(self)

    ParallelModel.gradient_norm = synchronizing  # type: ignore[method-assign]


def results_without_event() -> None:
    """The results of a step are read from the host's memory before the copy is known to be complete."""
    from forge.trainer.step import LaunchedStep

    make = LaunchedStep.__init__

    def without_event(self: Any, *args: Any) -> None:
        make(self, *args)
        self._copied = None

    LaunchedStep.__init__ = without_event  # type: ignore[method-assign]


def rotary_on_the_cpu() -> None:
    """The tables of RoPE are made on the CPU."""
    import torch

    from forge.trainer.models import llama_decoder

    rotary = llama_decoder.rotary

    def on_cpu(*args: Any) -> Any:
        given = [torch.device("cpu") if isinstance(arg, torch.device) else arg for arg in args]
        return rotary(*given)

    llama_decoder.rotary = on_cpu


def updates_not_held() -> None:
    """The optimizer does not wait for the copy of its state."""
    from forge.checkpoint.storage import Stager

    Stager.hold_device = lambda self: None  # type: ignore[method-assign]


def writer_does_not_wait() -> None:
    """The writer thread reads the copy before it is known to be complete."""
    from forge.checkpoint.storage import Stager

    Stager.wait = lambda self: None  # type: ignore[method-assign]


def copy_does_not_wait() -> None:
    """The stream of the copy does not wait for the update that is under way."""
    import torch

    torch.cuda.Stream.wait_stream = lambda self, other: None  # type: ignore[method-assign]


def unpinned_copy() -> None:
    """The state is copied into memory that is not pinned."""
    from forge.checkpoint import storage

    make = storage.StateDictStager
    storage.StateDictStager = lambda **_: make(pin_memory=False, share_memory=False)


def scalars_one_by_one() -> None:
    """Each scalar of the state is copied by itself, into memory that torch does not pin."""
    from forge.checkpoint import storage

    storage.with_joined_scalars = lambda state: (state, [])
