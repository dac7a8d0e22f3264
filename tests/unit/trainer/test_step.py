"""Against a step that depends on more than its number, and an update that is not finite."""

import pytest
import torch
from support import shards

from forge.core.config import Model, Train
from forge.core.machine import Machine
from forge.launch.process_group import joined
from forge.launch.rank import Rank
from forge.trainer.initialize import initialize
from forge.trainer.llama import Decoder
from forge.trainer.nonfinite import Skipped
from forge.trainer.optim import learning_rate, make_optimizer
from forge.trainer.parallel import ParallelModel
from forge.trainer.step import TrainStep, train_loader

MODEL = Model(dim=32, layers=1, heads=2, ffn_dim=64, dropout=0.1)
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
            model = Decoder(MODEL, data.vocab_size)
            parallel = ParallelModel(model, train, world, "fp32")
            initialize(model, seed=0)
            loader = train_loader(data, train, world.rank)
            optimizer = make_optimizer(model, train)
            return TrainStep(parallel, optimizer, loader, DECAY_STEPS, Skipped())

        yield make


def poisoned(train_step, step):
    """The result of a step in which one gradient is NaN."""
    parameter = next(train_step.parallel.decoder.parameters())
    hook = parameter.register_hook(lambda gradient: gradient * torch.nan)
    try:
        return train_step(step)
    finally:
        hook.remove()


def state(train_step):
    """Copies of all weights and of all of the optimizer's state."""
    parameters = list(train_step.parallel.decoder.parameters())
    moments = [value for p in parameters for value in train_step.optimizer.state[p].values()]
    return [tensor.detach().clone() for tensor in (*parameters, *moments)]


def equal(one, other):
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_dropout_of_a_step_does_not_depend_on_what_was_drawn_before(make):
    one, other = make(), make()
    for step in range(3):
        torch.rand(step + 1)
        expected = one(step)
        assert other(step) == expected
    assert equal(state(one), state(other))


def test_result_has_the_rate_of_the_step_and_the_norm_before_clipping(make):
    train_step = make(grad_clip=1e-3)
    for step in range(4):
        result = train_step(step)
        lr = learning_rate(step, train_step.parallel.settings, DECAY_STEPS)
        assert result.lr == lr
        assert {group["lr"] for group in train_step.optimizer.param_groups} == {lr}
        assert result.grad_norm > 0.01
        assert (result.skipped, result.fatal) == ("", "")


def test_skipped_update_leaves_weights_and_optimizer_state_and_is_counted(make):
    train_step = make(on_nonfinite="skip")
    train_step(0)
    before = state(train_step)
    result = poisoned(train_step, 1)
    assert "gradient norm nan on rank 0 are not finite" in result.skipped and not result.fatal
    assert equal(state(train_step), before)
    assert train_step.skipped == Skipped(steps=1, in_a_row=1)

    assert not train_step(2).skipped  # no gradient of the step before is left
    assert not equal(state(train_step), before)
    assert train_step.skipped == Skipped(steps=1, in_a_row=0)


def test_update_that_may_not_be_skipped_is_fatal_and_says_why(make):
    stop, skip = make(on_nonfinite="stop"), make(on_nonfinite="skip", max_skipped_steps=1)
    for train_step in (stop, skip):
        train_step(0)
    assert poisoned(stop, 1).fatal.endswith("are not finite; the weights were not updated")
    assert not poisoned(skip, 1).fatal
    assert "the 1 steps before it were skipped already" in poisoned(skip, 2).fatal
    assert stop.skipped == Skipped() and skip.skipped == Skipped(steps=1, in_a_row=1)


def test_first_update_of_a_run_is_never_skipped(make):
    result = poisoned(make(on_nonfinite="skip"), 0)
    assert result.fatal.endswith("the first update of a run cannot be skipped")
    assert not result.skipped
