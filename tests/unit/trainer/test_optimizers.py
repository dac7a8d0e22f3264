"""Against an optimizer that ignores that an update is clipped or left out, or resumes with another state:
those of train.optimizer, and torch's, any of which a change of make_optimizers may bring in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forge.checkpoint.save_plan import KeptPlans
from forge.checkpoint.storage import load_state, training_state, write_state
from forge.core.machine import Machine
from forge.core.models.llama import Llama
from forge.core.optimizers import OPTIMIZERS
from forge.core.train_settings import Train
from forge.launch.process_group import World, joined
from forge.launch.rank import Rank
from forge.launch.torch_private import scales_gradients
from forge.trainer.initialize import initialized
from forge.trainer.models.decoder import Decoder, make_decoder
from forge.trainer.optim import Optimizers, make_optimizers, update

Maker = Callable[[Decoder], Optimizers]
LR, LARGEST = 0.01, 1.0
MODEL = Llama(dim=16, layers=1, heads=2, ffn_dim=32)
SHAPES = [weight.shape for weight in make_decoder(MODEL, 32).parameters()]


def of_settings(name: str) -> Maker:
    return lambda model: make_optimizers(model, Train(optimizer=name, lr=LR))


def of_torch(kind: type[torch.optim.Optimizer], **options: float | bool) -> Maker:
    """One of torch's for the matrices, AdamW for the norms."""

    def make(model: Decoder) -> Optimizers:
        weights = list(model.parameters())
        matrices = kind([w for w in weights if w.dim() == 2], lr=LR, **options)  # type: ignore[call-arg]
        return matrices, torch.optim.AdamW([w for w in weights if w.dim() < 2], lr=LR)

    return make


# Not LBFGS, which calls the model itself, nor SparseAdam.
MAKERS: dict[str, Maker] = {name: of_settings(name) for name in OPTIMIZERS} | {
    **{
        f"torch-{kind.__name__}": of_torch(kind)
        for kind in (
            *(torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad),
            *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.Muon),
            *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
        )
    },
    "torch-SGD": of_torch(torch.optim.SGD, momentum=0.9),
    "torch-SGD-fused": of_torch(torch.optim.SGD, momentum=0.9, fused=True),
    "torch-Adam-fused": of_torch(torch.optim.Adam, fused=True),
    "torch-Adagrad-fused": of_torch(torch.optim.Adagrad, fused=True),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


class Training:
    """A small model and its optimizers."""

    def __init__(self, make: Maker) -> None:
        self.model = initialized(MODEL, 32)
        self.optimizers = make(self.model)

    def take(self, gradients: Sequence[torch.Tensor], *, unless: bool = False) -> None:
        for weight, gradient in zip(self.model.parameters(), gradients, strict=True):
            weight.grad = gradient.clone()
        norm = torch.nn.utils.get_total_norm(gradients)
        update(self.optimizers, norm, largest=LARGEST, unless=torch.tensor(unless))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of weights and optimizer state."""
        state = training_state(self.model, self.optimizers)
        moments = {
            f"{name}.{key}": value
            for name, of_weight in state["optimizer"].items()
            for key, value in of_weight.items()
        }
        return {name: value.clone() for name, value in (state["model"] | moments).items()}


def gradients(step: int) -> list[torch.Tensor]:
    """Gradients of a step, in odd steps with a norm far above LARGEST, in even ones below."""
    generator = torch.Generator().manual_seed(step)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    factor = (50.0 if step % 2 else 0.5) / torch.nn.utils.get_total_norm(values)
    return [value * factor for value in values]


def clipped(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same gradients by torch.nn.utils.clip_grad_norm_."""
    weights = [torch.nn.Parameter(torch.empty_like(value)) for value in values]
    for weight, value in zip(weights, values, strict=True):
        weight.grad = value
    torch.nn.utils.clip_grad_norm_(weights, LARGEST)
    return [weight.grad for weight in weights if weight.grad is not None]


def same(one: Training, other: Training) -> bool:
    ours, theirs = one.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)


@every_optimizer
def test_update_is_that_of_clipped_gradients(make: Maker) -> None:
    ours, plain = Training(make), Training(make)
    for step in range(3):
        ours.take(gradients(step))
        plain.take(clipped(gradients(step)))
    torch.testing.assert_close(ours.tensors(), plain.tensors())


@every_optimizer
def test_update_that_is_left_out_leaves_no_trace(make: Maker) -> None:
    ours, plain = Training(make), Training(make)
    for step in range(3):
        ours.take([torch.full_like(g, torch.nan) for g in gradients(step)], unless=True)
        for training in (ours, plain):
            training.take(gradients(step))
    assert same(ours, plain)


@every_optimizer
@pytest.mark.parametrize("skipped", [None, 0])
def test_resumed_optimizer_continues_bitwise(
    make: Maker, skipped: int | None, world: World, tmp_path: Path
) -> None:
    whole = Training(make)
    for step in range(2):
        whole.take(gradients(step), unless=step == skipped)
    write_state(training_state(whole.model, whole.optimizers), tmp_path, world, KeptPlans())
    resumed = Training(make)
    resumed.take(gradients(9))  # state of its own, which the load replaces
    load_state(resumed.model, resumed.optimizers, tmp_path, world)
    for step in range(2, 5):
        for training in (whole, resumed):
            training.take(gradients(step), unless=step == 3)
    assert same(whole, resumed)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_host_does_not_wait_for_an_optimizer_of_the_settings(name: str) -> None:
    assert all(map(scales_gradients, Training(of_settings(name)).optimizers))


def test_gradients_that_are_sharded_are_clipped(world: World) -> None:
    make = of_torch(torch.optim.NAdam)
    whole, sharded = Training(make), Training(make)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    fully_shard(sharded.model, mesh=mesh)
    sharded.optimizers = make(sharded.model)
    for step in range(3):
        whole.take(gradients(step))
        pairs = zip(sharded.model.parameters(), gradients(step), strict=True)
        for weight, gradient in pairs:
            weight.grad = torch.distributed.tensor.distribute_tensor(
                gradient, mesh, weight.placements
            )
        norm = torch.nn.utils.get_total_norm(gradients(step))
        update(sharded.optimizers, norm, largest=LARGEST, unless=torch.tensor(False))
    pairs = zip(whole.model.parameters(), sharded.model.parameters(), strict=True)
    assert all(one.equal(other.full_tensor()) for one, other in pairs)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with joined(Rank(0, 0, 1, 1), Machine(device="cpu")) as joined_world:
        yield joined_world
