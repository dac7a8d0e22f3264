"""Models and training steps on the device of a check. Nothing else in tests/gpu constructs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from forge.core.machine import Machine
from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.data.loader import Prefetcher
from forge.launch.process_group import World, joined
from forge.launch.rank import Rank
from forge.trainer.divergence import SpikeRule
from forge.trainer.initialize import initialize, initialized
from forge.trainer.models.decoder import Decoder, make_decoder
from forge.trainer.optim import make_optimizers
from forge.trainer.parallel import ParallelModel
from forge.trainer.step import TrainStep


def one_rank(*, on_gpu: bool) -> AbstractContextManager[World]:
    """This process as the only rank, with the backend that a run has on such a device."""
    return joined(Rank(0, 0, 1, 1), Machine(device="cuda" if on_gpu else "cpu"))


def make_model(settings: Llama, vocab_size: int, device: torch.device) -> Decoder:
    """A decoder with the initial weights of seed 0."""
    return initialized(settings, vocab_size).to(device)


@dataclass(frozen=True)
class RandomBatches:
    """Random tokens in the place of a Loader: the same batch for the same step."""

    train: Train
    vocab_size: int

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets on the CPU, int64 [batch_size, seq_len]."""
        generator = torch.Generator().manual_seed(step)
        size = (self.train.batch_size, self.train.seq_len + 1)
        tokens = torch.randint(self.vocab_size, size, generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


def make_step(
    world: World, model: Llama, train: Train, vocab_size: int, precision: str
) -> TrainStep:
    """The training step of a new model, compiled where `train` says so."""
    decoder = make_decoder(model, vocab_size)
    parallel = ParallelModel(decoder, train, world, precision, eos_id=0)
    initialize(decoder, seed=0)
    optimizers = make_optimizers(decoder, train)
    parallel.wrap("" if train.compile else "not compiled here")
    loader: Any = RandomBatches(train, vocab_size)
    if world.device.type == "cuda":
        loader = Prefetcher(loader, world.device)
    spikes = SpikeRule.of(train, world.device, None)
    return TrainStep(parallel, optimizers, loader, train.max_steps, spikes)


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Wall time of an action and of all its work on the device."""
    synchronize(device)
    started = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that FSDP2 keeps, which is a DTensor even where one rank has all of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in fp64."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())
