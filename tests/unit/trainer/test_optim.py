import math

import pytest
import torch

from forge.checkpoint.storage import training_state
from forge.core.memory import Shape
from forge.core.models.llama import Llama
from forge.core.optimizers import OPTIMIZERS
from forge.core.train_settings import Train
from forge.trainer.initialize import initialized
from forge.trainer.optim import (
    learning_rate,
    make_optimizers,
    set_learning_rate,
    state_shapes,
    update,
)

COSINE = Train(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
WSD = Train(lr=1.0, warmup_steps=10, min_lr_ratio=0.1, schedule="wsd", wsd_decay_fraction=0.2)


@pytest.mark.parametrize("train", [COSINE, WSD])
def test_warm_up_rises_in_equal_steps_to_the_peak(train: Train) -> None:
    rates = [learning_rate(step, train, 100) for step in range(10)]
    assert rates == pytest.approx([0.1 * n for n in range(1, 11)])


def test_cosine_is_halfway_in_the_middle_of_its_decay() -> None:
    assert learning_rate(10, COSINE, 110) == pytest.approx(1.0)
    assert learning_rate(60, COSINE, 110) == pytest.approx(0.55)
    assert learning_rate(35, COSINE, 110) == pytest.approx(
        0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    )


def test_wsd_is_flat_and_then_falls_in_a_straight_line() -> None:
    assert {learning_rate(step, WSD, 100) for step in range(10, 81)} == {1.0}
    assert learning_rate(90, WSD, 100) == pytest.approx(0.55)


@pytest.mark.parametrize("train", [COSINE, WSD])
@pytest.mark.parametrize("decay_steps", [1, 5, 10, 11, 100])
def test_rate_stays_at_the_minimum_after_decay_steps(train: Train, decay_steps: int) -> None:
    # 1, 5 and 10 end inside or at the end of the warm-up
    assert {learning_rate(decay_steps + n, train, decay_steps) for n in (0, 1, 500)} == {0.1}


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(0, Train(lr=2.0, warmup_steps=0), 50) == 2.0


def test_weight_decay_moves_matrices_and_not_norms() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.RMSNorm(4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (optimizer,) = make_optimizers(model, Train(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    matrix, norm = model.parameters()
    torch.testing.assert_close(matrix, before[0] * (1 - 0.1 * 0.5))
    torch.testing.assert_close(norm, before[1])


def test_fused_adamw_moves_weights_like_the_plain_one() -> None:
    train = Train(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95)
    fused = torch.nn.Linear(8, 8, bias=False)
    plain = torch.nn.Linear(8, 8, bias=False)
    plain.load_state_dict(fused.state_dict())
    optimizers = [
        *make_optimizers(fused, train),
        torch.optim.AdamW(
            plain.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
        ),
    ]
    for _ in range(5):
        grad = torch.randn(8, 8)
        for model, optimizer in zip((fused, plain), optimizers, strict=True):
            model.weight.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(fused.weight, plain.weight)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_takes_the_memory_that_a_plan_counts(optimizer: str) -> None:
    train, settings = Train(optimizer=optimizer), Llama(dim=128, layers=2, heads=2)
    model = initialized(settings, 32)
    state = training_state(model, make_optimizers(model, train))["optimizer"]
    tensors = [t for of_weight in state.values() for t in of_weight.values() if t.dim()]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    planned = Shape(settings, 32, train, world_size=1, ranks_per_node=1).optimizer_bytes
    assert num_bytes == pytest.approx(planned, rel=0.01)  # norms count as matrices of their block


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_has_the_names_and_shapes_that_validation_expects(optimizer: str) -> None:
    train = Train(optimizer=optimizer)
    model = initialized(Llama(dim=16, layers=2, heads=2, tie_embeddings=False), 32)
    state = training_state(model, make_optimizers(model, train))["optimizer"]
    found = {
        name: {key: tuple(tensor.shape) for key, tensor in of_weight.items()}
        for name, of_weight in state.items()
    }
    assert found == {
        name: state_shapes(model, name, weight, train)
        for name, weight in model.state_dict().items()
    }
    kept = {*OPTIMIZERS[optimizer].state, *OPTIMIZERS[optimizer].scalars}
    own = {name for name, keys in found.items() if keys.keys() == kept}
    if OPTIMIZERS[optimizer].of_blocks:
        assert len(own) == 2 * 7
        assert all(name.endswith("_proj.weight") for name in own)
    else:
        assert own == found.keys()
    dtypes = {tensor.dtype for of_weight in state.values() for tensor in of_weight.values()}
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_made_for_a_checkpoint_without_moving_a_weight(optimizer: str) -> None:
    """By a step with gradients of 0 and a learning rate of 0: else a resumed run would lose bits."""
    model = initialized(Llama(dim=16, layers=2, heads=2), 32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    training_state(model, make_optimizers(model, Train(optimizer=optimizer)))
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_move_by_the_learning_rate_of_the_step(optimizer: str) -> None:
    """That of the settings is the peak: an optimizer that kept it would have no schedule."""
    model = initialized(Llama(dim=16, layers=2, heads=2), 32)
    optimizers = make_optimizers(model, Train(optimizer=optimizer, lr=0.01))
    for rate in (0.0, 1e-4):
        set_learning_rate(optimizers, rate)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        update(optimizers, torch.tensor(0.5), largest=1.0, unless=torch.tensor(False))
        moved = {
            name: (weight - before[name]).abs().max().item()
            for name, weight in model.state_dict().items()
        }
        assert all(0 < size < 1e-3 if rate else size == 0 for size in moved.values()), moved


def test_muon_moves_a_matrix_about_as_far_as_adamw() -> None:
    """Liu et al. 2025 (arXiv:2502.16982), section 2.2: 0.2 lr, the usual size of AdamW's updates."""
    train = Train(optimizer="muon", lr=0.1, weight_decay=0.0)
    model = initialized(Llama(dim=64, layers=1, heads=2, ffn_dim=192), 32)
    name, matrix = "model.layers.0.mlp.up_proj.weight", model.model.layers[0].mlp.up_proj.weight
    assert dict(model.named_parameters())[name] is matrix
    before = matrix.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    still = {"largest": 1.0, "unless": torch.tensor(False)}
    update(make_optimizers(model, train), torch.tensor(0.5), **still)
    moved = (matrix.detach() - before).square().mean().sqrt() / train.lr
    assert 0.1 < moved < 0.3


@pytest.mark.parametrize("largest", [0.1, 1e6])
def test_update_is_that_of_clipped_gradients(largest: float) -> None:
    train = Train(lr=0.01)
    ours, plain = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    optimizers = [make_optimizers(model, train) for model in (ours, plain)]
    for _ in range(3):
        ours.weight.grad, plain.weight.grad = (grad := torch.randn(8, 8)).clone(), grad
        update(optimizers[0], grad.norm(), largest=largest, unless=torch.tensor(False))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), largest)
        optimizers[1][0].step()
    moments = [
        one[0].state[model.weight] for one, model in zip(optimizers, (ours, plain), strict=True)
    ]
    torch.testing.assert_close(moments[0]["exp_avg"], moments[1]["exp_avg"])
    torch.testing.assert_close(ours.weight, plain.weight)
