"""Float8 products. Against layers that are left in bf16 unnoticed, rounding that reaches evaluation, and
a GPU or a size that cannot multiply in float8."""

import sys

import pytest
import torch
from support import architectures
from support.architectures import each_architecture

from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.machine import Machine
from forge.core.train_settings import Train
from forge.hosts.placement import WorldLayout, check_layout
from forge.trainer import transforms
from forge.trainer.initialize import initialized

pytestmark = pytest.mark.all

SMALL = architectures.SMALL["llama"]
VOCAB = 97
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
CPU = torch.device("cpu")
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def made(recipe, how="none", settings=SMALL):
    model = initialized(settings, VOCAB)
    transforms.use_float8(model, Train(fp8=recipe), CPU)
    transforms.recompute_activations(model, how)
    return model


def trained(model):
    """Loss and gradients of a batch."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCAB, (2, 33), generator=generator)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def rounded(x, dim):
    """Through float8: the largest value, of all (None) or along a dimension, becomes float8's largest."""
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = LARGEST / largest.double()
    if dim is not None:  # torchao rounds the scales of rows down to powers of two
        scale = 2 ** scale.log2().floor()
    scale = scale.float()
    return (x * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_product_is_that_of_rounded_activations_and_weights(recipe):
    linear = made(recipe).blocks[0].mlp.gate_proj
    x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(1))
    dim = None if recipe == "tensorwise" else -1
    expected = rounded(x, dim) @ rounded(linear.weight, dim).T
    torch.testing.assert_close(linear(x), expected)
    assert not torch.allclose(linear(x), x @ linear.weight.T, rtol=1e-3, atol=1e-3)


@each_architecture
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_gradients_are_near_those_without_it(recipe, small):
    loss, expected = trained(made(None, settings=small))
    found_loss, found = trained(made(recipe, settings=small))
    assert 0 < abs(found_loss - loss) < 2e-2
    assert found.keys() == expected.keys()  # weights keep their names
    for name, grad in expected.items():
        assert (found[name] - grad).norm() < 0.15 * grad.norm(), name


def test_all_layers_of_the_blocks_and_no_others_round():
    model = made("rowwise")
    seen = [name for name, module in model.named_modules() if "Float8" in type(module).__name__]
    of_block = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    of_block += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert seen == [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in of_block]


@each_architecture
def test_evaluation_has_the_bits_of_a_model_without_it(small):
    plain, scaled = (made(recipe, settings=small).eval() for recipe in (None, "tensorwise"))
    tokens = torch.arange(64).view(2, 32)
    assert torch.equal(scaled(tokens), plain(tokens))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scaled(tokens), plain(tokens))


def test_autocast_on_a_cpu_gives_bf16():
    linear = made("tensorwise").blocks[0].mlp.gate_proj
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(16, 32)).dtype == torch.bfloat16


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_gradients_are_bitwise_the_same(how):
    expected, found = trained(made("tensorwise")), trained(made("tensorwise", how))
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())


@pytest.mark.parametrize(
    ("recipe", "capability", "needed"),
    [("tensorwise", (8, 0), "8.9"), ("rowwise", (8, 9), "9.0")],
)
def test_an_older_gpu_is_refused_by_name(monkeypatch, recipe, capability, needed):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=f"compute capability {needed}, and NVIDIA A100 has"):
        transforms.use_float8(initialized(SMALL, VOCAB), Train(fp8=recipe), torch.device("cuda", 0))


def test_a_host_without_torchao_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match="cannot import torchao on"):
        made("rowwise")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"dim": 40, "heads": 5}}, "model.dim is 40"),
        ({"model": {"dim": 64, "heads": 8, "kv_heads": 1}}, "all key heads is 8"),
        ({"model": {"dim": 64, "heads": 4, "ffn_dim": 100}}, "the feed-forward is 100"),
        ({"train": {"seq_len": 100}}, "train.seq_len is 100"),
        ({"train": {"precision": "fp32"}}, "train.precision is fp32"),
    ],
)
def test_what_cannot_be_multiplied_in_float8_is_refused_before_ranks_start(changes, message):
    train = {"fp8": "rowwise", "batch_size": 4, **changes.get("train", {})}
    config = Config.model_validate({**changes, "train": train})
    with pytest.raises(ConfigError, match=message):
        check_layout(Machine(), WorldLayout(), config)


def test_a_missing_package_is_named_before_ranks_start(monkeypatch):
    monkeypatch.setattr("forge.core.train_settings.find_spec", lambda name: None)
    config = Config.model_validate({"train": {"fp8": "rowwise"}})
    with pytest.raises(ConfigError) as raised:
        check_layout(Machine(), WorldLayout(), config)
    assert "make setup EXTRAS=fp8" in str(raised.value)
