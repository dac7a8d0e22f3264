"""Pretrained weights must be the model that transformers has: a norm in another place, another rotary
base or an epsilon trains without a word, from worse weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import mutations
from support.pretrained import MODELS, config_of, loaded, random_model, save
from transformers import AutoModelForCausalLM

from forge.core.config import ResolvedConfig
from forge.core.errors import ConfigError, DataError, ForgeError
from forge.core.models.llama import Llama
from forge.data import model
from forge.data.content_ids import resolve
from forge.data.model import ModelManifest, with_pretrained
from forge.trainer import pretrained, transforms
from forge.trainer.initialize import initialized

# Equal formulas in another order of sums, fp32; logits are of size 1.
LOGITS = 1e-5
HOW = [("float32", 1), ("bfloat16", 3)]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize(("dtype", "files"), HOW)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, dtype, files, tmp_path):
    made = save(random_model(name), tmp_path, dtype=dtype, files=files)
    theirs = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    assert (len(files_of(tmp_path)) > 1) == (files > 1)
    model = with_pretrained(config_of(tmp_path)).model
    ours = loaded(model, files_of(tmp_path))
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    tokens = torch.randint(300, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = theirs(tokens).logits, ours(tokens)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= LOGITS
    assert sum(p.numel() for p in ours.parameters()) == model.num_parameters(300)
    assert theirs.num_parameters() == model.num_parameters(300)


@pytest.fixture
def folder(tmp_path) -> Path:
    return save(random_model("qwen3"), tmp_path / "weights", files=2)


def resolved(folder: Path) -> ResolvedConfig:
    return resolve(config_of(folder))


def test_manifest_is_made_once_and_a_changed_file_is_refused(folder, capsys):
    config = resolved(folder)
    path = pretrained.make_model(config)
    manifest = ModelManifest.read(path)
    assert manifest.paths == files_of(folder)
    manifest.verify()
    pretrained.make_model(config)
    assert "nothing to do" in capsys.readouterr().err
    changed = manifest.paths[1]
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    manifest.verify((0, 2))  # the share of another rank
    with pytest.raises(DataError, match=f"{changed.name} has digest"):
        manifest.verify((1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.norm.bias": torch.ones(32)}, "model.norm.bias is not in the model"),
        (
            {"model.norm.weight": torch.ones(31)},
            r"model.norm.weight has shape \[31\], the model \[32\]",
        ),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "has type I8"),
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, None),
        (
            {"lm_head.weight": torch.ones(300, 32)},
            r"lm_head.weight in .* differs from model.embed_tokens.weight by up to 1\.\d",
        ),
        (
            {"lm_head.weight": torch.ones(299, 32)},
            r"lm_head.weight has shape \[299, 32\], the model \[300, 32\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    config = resolved(folder)
    file = files_of(folder)[0]
    tensors = load_file(file)
    for other in files_of(folder)[1:]:
        tensors |= load_file(other)
        other.unlink()
    (folder / "model.safetensors.index.json").unlink()
    file.unlink()
    tensors = {name: value for name, value in {**tensors, **change}.items() if value is not None}
    save_file(tensors, folder / "model.safetensors")
    config = resolve(config_of(folder))
    if message is None:
        pretrained.make_model(config)
        return
    with pytest.raises(DataError, match=message):
        pretrained.make_model(config)


def test_ranks_too_refuse_an_output_layer_that_differs_from_the_embedding_tied_to_it(tmp_path):
    """Manifests that earlier versions made have not compared the two."""
    save(random_model("llama-tied"), tmp_path)
    (file,) = files_of(tmp_path)
    tensors, settings = load_file(file), with_pretrained(config_of(tmp_path)).model
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.double()}, file)
    loaded(settings, [file])
    embedding[-1, -1] = torch.nan
    save_file({**tensors, "lm_head.weight": embedding.nan_to_num(1)}, file)
    with pytest.raises(DataError, match=r"lm_head.weight in .* by up to nan.* tie_word_embeddings"):
        loaded(settings, [file])


def test_one_tensor_by_two_names_is_refused(tmp_path):
    save(random_model("gpt2"), tmp_path)
    (file,) = files_of(tmp_path)
    tensors = load_file(file)
    save_file({**tensors, "ln_f.bias": tensors["transformer.ln_f.bias"] + 1}, file)
    with pytest.raises(DataError, match=r"transformer.ln_f.bias twice: .*ln_f.bias and "):
        pretrained.make_model(resolved(tmp_path))


def test_a_truncated_file_is_bad_data(folder):
    file = files_of(folder)[0]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        pretrained.make_model(resolved(folder))


def test_id_is_of_shape_and_place_since_tuned_models_have_files_of_equal_sizes(folder, tmp_path):
    before = resolved(folder).ids.model
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert resolved(link).ids.model == before
    other = shutil.copytree(folder, tmp_path / "other")
    assert resolved(other).ids.model != before
    values = json.loads((folder / "config.json").read_text())
    model._cached_config.cache_clear()
    (folder / "config.json").write_text(json.dumps({**values, "rms_norm_eps": 1e-5}))
    assert resolved(folder).ids.model != before


@pytest.mark.parametrize(
    "keys", [{"qk_norm": "head"}, {"norm": "post", "qk_norm": "full"}], ids=["qwen3", "olmo2"]
)
@pytest.mark.filterwarnings("error")  # of mixed types, on every rank
def test_norms_of_outputs_train_under_autocast(keys):
    model = Llama(dim=32, layers=2, heads=4, kv_heads=2, **keys)
    decoder = initialized(model, 100)
    tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = decoder(tokens, tokens)
    loss.backward()
    with torch.no_grad():
        assert abs(loss.item() - decoder(tokens, tokens).item()) < 0.02
    assert all(parameter.grad is not None for parameter in decoder.parameters())


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputation_gives_the_same_gradients_with_wide_heads_and_norms(how):
    model = Llama(dim=32, layers=1, heads=4, head_dim=16, qk_norm="head", vocab_size=110)
    tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(1))
    gradients = []
    for setting in ("none", how):
        decoder = initialized(model, 100)
        transforms.recompute_activations(decoder, setting)
        decoder(tokens, tokens).backward()
        gradients.append([parameter.grad for parameter in decoder.parameters()])
    assert len(gradients[0][0]) == 110  # rows of the embedding
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_files_of_openais_weights_have_masks_and_names_of_the_model_inside(tmp_path):
    made = random_model("gpt2")
    save(made, tmp_path)
    (file,) = files_of(tmp_path)
    inside = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 128, 128) for layer in (0, 1)}
    save_file(inside | masks, file)
    ours = loaded(with_pretrained(config_of(tmp_path)).model, files_of(tmp_path))
    tokens = torch.randint(300, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(tokens) - made(tokens).logits).abs().max() <= LOGITS


def test_each_rank_reads_its_rows_of_a_matrix_that_files_have_transposed(tmp_path):
    """A rank that read columns in place of rows would train on another model."""
    save(random_model("gpt2"), tmp_path)
    model = with_pretrained(config_of(tmp_path)).model
    name = "transformer.h.1.mlp.c_fc.weight"
    whole = loaded(model, files_of(tmp_path)).get_parameter(name)
    with pretrained._Tensors(files_of(tmp_path), model) as tensors:
        parts = [tensors.rows(name, first, first + 43) for first in range(0, len(whole), 43)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kv_heads": 2}, r"model.kv_heads is 2, the weights have None"),
        ({"architecture": "llama"}, r"model.architecture is 'llama', the weights have 'gpt2'"),
        ({"architecture": "gpt2", "layers": 9}, r"model.layers is 9, the weights have 2"),
    ],
)
def test_keys_of_another_shape_than_that_of_the_weights_are_named(tmp_path, keys, message):
    save(random_model("gpt2"), tmp_path)
    with pytest.raises(ConfigError, match=message):
        with_pretrained(config_of(tmp_path, model={"init": {"path": str(tmp_path)}, **keys}))
    mine = {"init": {"path": str(tmp_path)}, "dropout": 0.1}
    assert with_pretrained(config_of(tmp_path, model=mine)).model.dropout == 0.1


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_fuzzed_weights_are_read_or_refused(name, tmp_path):
    """tests/support/mutations.py: no traceback, no hang, no memory beyond 2 GiB."""

    def read(folder):
        config = resolved(folder)
        pretrained.make_model(config)
        loaded(config.model, pretrained.manifest_of(config).paths)

    weights = save(random_model(name), tmp_path / "weights", files=2)
    ends = mutations.try_all(weights, tmp_path / "work", read, ForgeError)
    assert min(ends["taken"], ends["refused"]) > mutations.COUNT / 20, ends
