"""`model.init` when a config is resolved: the shape is that of the weights, and so is the tokenizer. The
hub is a loopback server, in a process of its own, whose client reads HF_ENDPOINT when it is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hub import COMMIT, served
from tokenizers import Tokenizer, models

from forge.core.config import Config, ResolvedConfig
from forge.core.errors import ConfigError, DataError, UnfitError
from forge.core.files import read_json, write_json
from forge.data import model
from forge.data.content_ids import resolve

VALUES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
}
BUILD = """
import sys
from forge.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(VALUES))
    (folder / "model.safetensors").write_bytes(b"some weights")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, "a"))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (tmp_path / "corpus.txt").write_text("a")
    return folder


def config_of(folder: Path, sections: dict | None = None) -> Config:
    given = {"model": {}, **(sections or {})}
    given["model"] = {"init": {"path": str(folder)}, **given["model"]}
    inputs = [str(folder.parent / "corpus.txt")]
    data = str(folder.parent / "data")
    return Config.model_validate({"data": data, "tokenize": {"inputs": inputs}, **given})


def test_shape_and_tokenizer_are_those_of_the_weights(folder, capsys):
    found = resolve(config_of(folder))
    shape = found.model
    assert (shape.dim, shape.kv_heads, shape.vocab_size, shape.tie_embeddings) == (
        32,
        4,
        300,
        False,
    )
    tokenizer = found.tokenizer
    assert (tokenizer.source, tokenizer.path) == ("path", str(folder / "tokenizer.json"))
    assert found.ids.model
    assert capsys.readouterr().err == ""
    # A resolved config needs the weights no more.
    (folder / "config.json").unlink()
    assert resolve(ResolvedConfig.model_validate(found.to_json())) == found


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"dim": 64}}, "model.dim is 64, the weights have 32"),
        (
            {"model": {"tie_embeddings": True}},
            "model.tie_embeddings is True, the weights have False",
        ),
        ({"model": {"vocab_size": 320}}, "model.vocab_size is 320, the weights have 300"),
        (
            {"tokenizer": {"source": "train", "vocab_size": 301}},
            "the tokenizer has 301 ids, the embedding 300 rows",
        ),
    ],
)
def test_what_differs_from_the_weights_is_named_with_both_values(folder, sections, message):
    with pytest.raises(ConfigError, match=message):
        resolve(config_of(folder, sections))


def test_the_same_values_and_free_keys_may_be_given(folder):
    found = resolve(config_of(folder, {"model": {"dim": 32, "kv_heads": None, "dropout": 0.1}}))
    assert (found.model.dim, found.model.dropout) == (32, 0.1)


def test_another_tokenizer_is_a_warning(folder, capsys):
    resolve(config_of(folder, {"tokenizer": {"source": "train", "vocab_size": 290}}))
    assert "is not that of" in capsys.readouterr().err


def test_a_built_tokenizer_with_too_many_ids_is_refused(folder):
    found = resolve(config_of(folder))
    path = model.tokenizer_folder(found.data, found.ids.tokenizer) / "manifest.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"vocab_size": 300}')
    model.check_tokenizer(found)
    path.write_text('{"vocab_size": 301}')
    with pytest.raises(ConfigError, match="has 301 ids"):
        model.check_tokenizer(found)


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("config.json", None, ConfigError, "has no config.json"),
        ("config.json", "[]", DataError, "not a JSON object"),
        ("tokenizer.json", None, ConfigError, "which has no tokenizer.json"),
        ("model.safetensors", None, ConfigError, "which has no model.safetensors"),
        ("model.safetensors.index.json", "{}", DataError, "lists no files"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "../b.safetensors"}}',
            DataError,
            "lists no files",
        ),
    ],
)
def test_incomplete_directories_are_named(folder, file, content, error, message):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / "model.safetensors").unlink()
        (folder / file).write_text(content)
    with pytest.raises(error, match=message):
        resolve(config_of(folder))


def write_shards(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / model.INDEX).write_text(json.dumps(index))
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"other weights")


def test_a_single_file_is_read_in_place_of_shards_beside_it_and_that_is_said(folder, capsys):
    """save_pretrained into a directory of an older model, saved in parts, removes these only if it knows
    their names; transformers reads the single file."""
    write_shards(folder)
    _, files, _ = model.find_files(resolve(config_of(folder)))
    assert files == [folder / "model.safetensors"]
    assert "the former is read" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    _, files, _ = model.find_files(resolve(config_of(folder)))
    assert files == [folder / "model-00001-of-00001.safetensors"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "shard-00000-model-00001-of-00002.safetensors"]
)
def test_files_by_which_transformers_makes_another_model_are_named(folder, name):
    (folder / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"which has {name}"):
        resolve(config_of(folder))


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    "files", [["model.safetensors"], ["shards"], ["model.safetensors", "shards"]]
)
def test_a_single_file_of_the_hub_comes_before_shards(folder, monkeypatch, files, offline):
    """Offline, a cache that another program filled does not say which files the repository lacks."""
    from huggingface_hub import constants

    write_shards(folder)
    if "shards" not in files:
        (folder / model.INDEX).unlink()
    if "model.safetensors" not in files:
        (folder / model.WEIGHTS).unlink()

    def download(repo, name):
        path = folder / name
        if not path.exists() and offline:
            raise UnfitError(f"{name} is not in the cache")
        return path if path.exists() else None

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(model.hub, "download", download)
    hub = {"model": {"init": {"path": None, "hub": "team/weights@main"}}}
    _, found, _ = model.find_files(resolve(config_of(folder, hub)))
    single = "model.safetensors" in files
    assert [path.name for path in found] == [
        model.WEIGHTS if single else "model-00001-of-00001.safetensors"
    ]


def test_an_adapter_on_the_hub_is_named(folder, monkeypatch):
    (folder / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(model.hub, "download", lambda repo, name: folder / name)
    hub = {"model": {"init": {"path": None, "hub": "team/weights@main"}}}
    with pytest.raises(ConfigError, match=r"model.init.hub is .*, which has adapter_config.json"):
        model.find_files(resolve(config_of(folder, hub)))


def test_a_file_that_a_node_does_not_see_is_no_bad_data(folder):
    found = resolve(config_of(folder))
    place, files, commit = model.find_files(found)
    path = model.write_manifest(found, place, files, commit)
    assert model.is_made(found)
    (folder / "model.safetensors").unlink()
    assert not model.is_made(found)
    with pytest.raises(UnfitError, match=r"does not see .*model\.safetensors"):
        model.ModelManifest.read(path).verify()


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "a/b", ".."])
def test_manifest_that_names_a_file_outside_is_not_believed(folder, name):
    found = resolve(config_of(folder))
    path = model.write_manifest(found, *model.find_files(found))
    listed = read_json(path)
    listed["files"][0]["name"] = name
    write_json(path, listed)
    with pytest.raises(DataError, match=r"files\.0\.name: .* is not the plain name"):
        model.ModelManifest.read(path)


def command(tmp_path: Path, folder: Path, url: str, **env: str) -> tuple[int, str]:
    """Exit code and output of `forge model` for weights of the hub."""
    config = {
        "data": str(tmp_path / "data"),
        "tokenize": {"inputs": [str(tmp_path / "corpus.txt")]},
        "model": {"init": {"hub": "team/weights@main"}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, "model", str(tmp_path / "config.yaml")],
        env=inherited | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")} | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def test_weights_of_the_hub_are_linked_from_its_cache_and_then_need_no_network(folder, tmp_path):
    import torch
    from safetensors.torch import save

    from forge.core.models.llama import Llama
    from forge.trainer.initialize import initialized

    keys = model.model_keys(VALUES, 256, "")
    weights = {name: p.detach() for name, p in initialized(Llama(**keys), 300).named_parameters()}
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["model.safetensors"] = save({k: v.to(torch.bfloat16) for k, v in weights.items()})
    with served({"team/weights": {**files, "pytorch_model.bin": b"pickle"}}) as hub:
        code, output = command(tmp_path, folder, hub.url, HF_HUB_OFFLINE="1")
        assert code == 69
        assert "on a login node: forge model CONFIG" in output
        code, output = command(tmp_path, folder, hub.url)
        assert code == 0, output
        asked = {path.rsplit("/", 1)[1] for path in hub.asked if "/resolve/" in path}
        assert asked == {"config.json", "model.safetensors", "adapter_config.json"}
    (path,) = (tmp_path / "data" / "models").glob("*/manifest.json")
    manifest = model.ModelManifest.read(path)
    assert (manifest.commit, manifest.source) == (COMMIT, "hub:team/weights@main")
    (link,) = manifest.paths
    (blob,) = (tmp_path / "home").glob("hub/*/snapshots/*/model.safetensors")
    assert link.samefile(blob)
    path.unlink()
    code, output = command(tmp_path, folder, hub.url, HF_HUB_OFFLINE="1")
    assert code == 0, output
    assert model.ModelManifest.read(path) == manifest
