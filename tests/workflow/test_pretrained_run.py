"""From a directory of Hugging Face weights to a validated checkpoint by the usual command, kill -9 in the
middle included."""

import json

import pytest
import yaml
from conftest import TINY, kill_tree
from support.pretrained import random_model, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Enough steps that some are left when it is killed.
LONG = {"max_steps": 60, "checkpoint_every": 5, "eval_every": 30}


@pytest.fixture
def weights(project):
    """Qwen3 with a byte-level tokenizer of 257 ids and 300 rows for them, in the project."""
    folder = save(random_model("qwen3"), project.root / "weights", dtype="bfloat16", files=2)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_config(project, **model):
    """The tiny config without its tokenizer and its shape."""
    values = {name: section for name, section in TINY.items() if name != "tokenizer"}
    values |= {"train": TINY["train"] | LONG, "model": {"init": {"path": "weights"}, **model}}
    (project.root / "config/config.yaml").write_text(yaml.safe_dump(values))


def test_killed_in_the_middle_and_resumed_it_is_validated(project, weights):
    project.one_rank()
    write_config(project, heads=2, layers=2)
    code, output = project.snakemake("train", "-n")
    assert code != 0
    assert "model.heads is 2, the weights have 4" in output
    assert "model.layers" not in output  # which is the same

    write_config(project, dropout=0.1)
    process = project.start("train")
    project.wait_for_step(7, process)
    kill_tree(process.pid)
    process.communicate()
    assert not project.path("trained.json").exists()

    code, output = project.snakemake("train")
    assert code == 0, output
    assert "resume from" in output
    log = project.path("logs/train.log").read_text()
    assert log.count("start from weights") == 1
    (manifest,) = (project.root / "data/models").glob("*/manifest.json")
    facts = json.loads(manifest.read_text())
    checkpoint = json.loads((project.path("checkpoints/latest") / "checkpoint.json").read_text())
    assert checkpoint["lineage"]["model"] == {"id": facts["id"], "digest": facts["digest"]}
    assert facts["id"] in project.path("report.html").read_text()
