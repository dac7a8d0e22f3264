"""Against a step that depends on more than its number, and an update that is not finite."""

import pytest
import torch
from support import shards

from forge.core.machine import Machine
from forge.core.models.llama import Llama
from forge.core.optimizers import OPTIMIZERS
from forge.core.train_settings import Train
from forge.launch.process_group import joined
from forge.launch.rank import Rank
from forge.trainer.initialize import initialize
from forge.trainer.models.decoder import make_decoder
from forge.trainer.optim import learning_rate, make_optimizers
from forge.trainer.parallel import ParallelModel
from forge.trainer.step import TrainStep, train_loader

MODEL = Llama(dim=32, layers=1, heads=2, ffn_dim=64, dropout=0.1)
SIZES = {"seq_len": 16, "batch_size": 4, "warmup_steps": 2}
DECAY_STEPS = 10


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(**settings): the training step of a new model on one rank."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    data = shards.make(tmp_path)
    with joined(Rank(0, 0, 1, 1), Machine(device="cpu")) as world:

        def make(**settings):
            train = Train(**SIZES, **settings)
            model = make_decoder(MODEL, data.vocab_size)
            parallel = ParallelModel(model, train, world, "fp32")
            initialize(model, seed=0)
            loader = train_loader(data, train, world)
            return TrainStep(parallel, make_optimizers(model, train), loader, DECAY_STEPS)

        yield make


def poisoned(train_step, step):
    """The result of a step in which one gradient is NaN."""
    parameter = next(train_step.parallel.decoder.parameters())
    hook = parameter.register_hook(lambda gradient: gradient * torch.nan)
    try:
        return train_step(step).read()
    finally:
        hook.remove()


def state(train_step):
    """Copies of all weights and of all of the optimizer's state."""
    parameters = list(train_step.parallel.decoder.parameters())
    moments = [value for p in parameters for value in state_of(train_step, p)]
    return [tensor.detach().clone() for tensor in (*parameters, *moments)]


def state_of(train_step, parameter):
    """The optimizer state of a parameter."""
    return [v for one in train_step.optimizers for v in one.state.get(parameter, {}).values()]


def weights(train_step):
    """Copies of all weights."""
    return [weight.detach().clone() for weight in train_step.parallel.decoder.parameters()]


def equal(one, other):
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_dropout_of_a_step_does_not_depend_on_what_was_drawn_before(make):
    one, other = make(), make()
    for step in range(3):
        torch.rand(step + 1)
        expected = one(step).read()
        assert other(step).read() == expected
    assert equal(state(one), state(other))


def test_result_has_the_rate_of_the_step_and_the_norm_before_clipping(make):
    train_step = make(grad_clip=1e-3)
    for step in range(4):
        result = train_step(step, flags=lambda: [3, 0]).read()
        lr = learning_rate(step, train_step.parallel.settings, DECAY_STEPS)
        assert result.lr == lr
        assert {group["lr"] for one in train_step.optimizers for group in one.param_groups} == {lr}
        assert result.grad_norm > 0.01
        assert (result.trouble, result.flags) == ("", [[3, 0]])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", [0, 1])
def test_update_that_is_not_finite_leaves_weights_and_optimizer_state(make, step, optimizer):
    train_step = make(optimizer=optimizer)
    for earlier in range(step):
        train_step(earlier)
    before = weights(train_step) if step == 0 else state(train_step)
    result = poisoned(train_step, step)
    assert "gradient norm nan on rank 0 are not finite" in result.trouble
    found = state(train_step)
    assert equal(found[: len(before)], before)
    assert not any(moments.any() for moments in found[len(before) :])  # of a first update

    assert not train_step(step + 1).read().trouble  # no gradient of the step before is left
    assert not equal(state(train_step), found)


def test_results_may_be_read_steps_later(make):
    late, soon = make(), make()
    launched = [late(step) for step in range(3)]
    expected = [soon(step).read() for step in range(3)]
    assert [step.read() for step in launched] == expected
