"""The plugins of examples/. Threats: a Pythia that is not that of transformers, a Lion that is not that
of the paper, or that moves in a step which is left out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.pretrained import loaded
from support.project_plugin import fresh_process
from support.repository import REPOSITORY
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from forge.checkpoint.storage import training_state
from forge.core.config import Config, load_config
from forge.core.memory import Shape
from forge.core.models.base import Model
from forge.core.train_settings import Train
from forge.data.content_ids import resolve
from forge.data.model import ModelManifest, with_pretrained
from forge.trainer import pretrained
from forge.trainer.initialize import initialized
from forge.trainer.models.decoder import Decoder
from forge.trainer.optim import make_optimizers, state_shapes, update

LOGITS = 1e-5  # equal formulas in another order of sums, fp32; logits are of size 1
TOKENS = torch.randint(300, (2, 100), generator=torch.Generator().manual_seed(1))
SHAPE = {"architecture": "pythia", "dim": 32, "layers": 2, "heads": 4}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with both plugins."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "examples/plugins", tmp_path / "plugins")
    with fresh_process():
        yield tmp_path


def config_of(project: Path, **sections: Any) -> Config:
    values = {"plugins": ["plugins/pythia", "plugins/lion"], **sections}
    (project / "config.yaml").write_text(yaml.safe_dump(values))
    return load_config(project / "config.yaml")


def model_of(project: Path, **keys: Any) -> Model:
    return config_of(project, model={**SHAPE, **keys}).model


# --- Pythia ---------------------------------------------------------------------------------------


def random_weights(folder: Path, **keys: Any) -> GPTNeoXForCausalLM:
    """Save a model of transformers, with weights by which any mistake shows, those of its norms and
    biases included."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 128}
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **keys)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def from_weights(project: Path, folder: Path) -> tuple[Model, Decoder]:
    """Keys and decoder by the files that `forge model` records."""
    (project / "corpus.txt").write_text("text")
    config = config_of(
        project,
        model={"init": {"path": str(folder)}},
        train={"seq_len": 128},
        tokenize={"inputs": ["corpus.txt"]},
    )
    resolved = resolve(config)
    files = ModelManifest.read(pretrained.make_model(resolved)).paths
    model = with_pretrained(config).model
    return model, loaded(model, files)


@pytest.mark.parametrize(
    "keys",
    [
        {"use_parallel_residual": True},
        {"use_parallel_residual": False},
        {"tie_word_embeddings": True, "layer_norm_eps": 1e-2},
        {
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 77.0},
                "partial_rotary_factor": 1.0,
            }
        },
    ],
)
@torch.no_grad()
def test_logits_of_pythia_are_those_of_transformers(project: Path, keys: dict[str, Any]) -> None:
    theirs = random_weights(project / "weights", **keys)
    model, ours = from_weights(project, project / "weights")
    wanted, found = theirs(TOKENS).logits, ours(TOKENS)
    assert wanted.std() > 0.1
    assert float((found - wanted).abs().max()) <= LOGITS
    assert sum(p.numel() for p in ours.parameters()) == model.num_parameters(300)
    assert theirs.num_parameters() == model.num_parameters(300)


@torch.no_grad()
def test_config_that_pythia_gives_transformers_has_the_same_logits(project: Path) -> None:
    keys = {"use_parallel_residual": False, "layer_norm_eps": 1e-2, "tie_word_embeddings": True}
    theirs = random_weights(project / "weights", **keys)
    model, _ = from_weights(project, project / "weights")
    again = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            **{**model.to_hf(128), "vocab_size": 300},
            tie_word_embeddings=model.tie_embeddings,
        )
    ).eval()
    again.load_state_dict(theirs.state_dict())
    assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)


def test_pythia_gives_each_weight_a_gradient_and_starts_at_the_loss_of_a_uniform_guess(
    project: Path,
) -> None:
    decoder = initialized(model_of(project), 300)
    loss = decoder(TOKENS[:, :-1], TOKENS[:, 1:])
    assert loss.item() == pytest.approx(torch.tensor(300.0).log().item(), abs=0.1)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())


# --- Lion -----------------------------------------------------------------------------------------


def lion(project: Path, **keys: Any) -> Train:
    return config_of(project, train={"optimizer": "lion", **keys}).train


@pytest.mark.parametrize("largest", [0.1, 1e6])
def test_update_of_lion_is_that_of_the_paper_with_clipped_gradients(
    project: Path, largest: float
) -> None:
    """Chen et al. 2023 (arXiv:2302.06675), program 1, number by number; the third step is left out."""
    train = lion(project, lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.99)
    layer = torch.nn.Linear(8, 8, bias=False)
    optimizers = make_optimizers(layer, train)
    weight, moment = layer.weight.detach().double().flatten().tolist(), [0.0] * 64
    for step in range(5):
        torch.manual_seed(step)
        grad = torch.randn(8, 8)
        before = layer.weight.detach().clone(), [*moment]
        layer.weight.grad = grad.clone()
        is_bad = torch.tensor(step == 2)
        update(optimizers, grad.norm(), largest=largest, unless=is_bad)
        clipped = grad.double() * min(1.0, largest / (float(grad.norm()) + 1e-6))
        if not is_bad:
            for i, g in enumerate(clipped.flatten().tolist()):
                direction = 0.9 * moment[i] + 0.1 * g
                sign = (direction > 0) - (direction < 0)
                weight[i] -= 0.01 * (sign + 0.1 * weight[i])
                moment[i] = 0.99 * moment[i] + 0.01 * g
        else:
            assert torch.equal(layer.weight, before[0])
        [state] = [optimizers[0].state[layer.weight]]
        found = layer.weight.detach().double().flatten(), state["exp_avg"].double().flatten()
        for one, other in zip(found, (weight, moment), strict=True):
            torch.testing.assert_close(one, torch.tensor(other).double(), rtol=1e-5, atol=1e-7)
        assert state.keys() == {"exp_avg"}


def test_step_that_lion_leaves_out_keeps_every_bit_though_gradients_are_no_numbers(
    project: Path,
) -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    optimizers = make_optimizers(layer, lion(project, lr=0.1))
    still = torch.tensor(False)
    layer.weight.grad = torch.randn(4, 4)
    update(optimizers, torch.tensor(1.0), largest=1.0, unless=still)
    moment = optimizers[0].state[layer.weight]["exp_avg"]
    before = layer.weight.detach().clone(), moment.clone()
    layer.weight.grad = torch.full((4, 4), torch.nan)
    update(optimizers, torch.tensor(torch.nan), largest=1.0, unless=torch.tensor(True))
    assert torch.equal(layer.weight, before[0]) and torch.equal(moment, before[1])
    assert bool(moment.any())


def test_state_of_lion_is_what_checks_and_plans_expect(project: Path) -> None:
    """As a checkpoint has it, which is made without moving a weight."""
    config = config_of(
        project, model={**SHAPE, "dim": 128}, train={"optimizer": "lion", "weight_decay": 0.5}
    )
    model = initialized(config.model, 32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = training_state(model, make_optimizers(model, config.train))["optimizer"]
    shapes = {name: {key: tuple(t.shape) for key, t in of.items()} for name, of in state.items()}
    assert shapes == {
        name: state_shapes(model, name, weight, config.train) for name, weight in before.items()
    }
    assert {key for of_weight in shapes.values() for key in of_weight} == {"exp_avg"}
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    num_bytes = sum(t.nbytes for of_weight in state.values() for t in of_weight.values())
    planned = Shape(config.model, 32, config.train, world_size=1, ranks_per_node=1)
    assert num_bytes == pytest.approx(planned.optimizer_bytes, rel=0.01)
