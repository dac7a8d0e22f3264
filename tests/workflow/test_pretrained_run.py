"""From a directory of Hugging Face weights to a validated checkpoint by the usual command, kill -9 in the
middle included."""

import json

import pytest
import yaml
from support.clone import TINY, kill_tree, wait
from support.pretrained import random_model, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Enough steps that some are left when it is killed.
LONG = {"max_steps": 150, "checkpoint_every": 5, "eval_every": 75}


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


def write_config(project):
    """The tiny config without its tokenizer and its shape."""
    values = {name: section for name, section in TINY.items() if name != "tokenizer"}
    values |= {
        "train": TINY["train"] | LONG,
        "model": {"init": {"path": "weights"}, "dropout": 0.1},
    }
    (project.root / "config/config.yaml").write_text(yaml.safe_dump(values))


@pytest.mark.weekly
def test_killed_in_the_middle_and_resumed_it_is_validated(project, weights):
    project.one_rank()
    write_config(project)
    process = project.start("train")
    wait(lambda: project.path("checkpoints/latest").exists() or process.poll() is not None)
    kill_tree(process.pid)
    process.communicate()
    logs = project.path("logs").glob("*.0.log")  # of rank 0, which the command shows a second later
    assert any("start from weights" in log.read_text() for log in logs)
    assert not project.path("trained.json").exists()

    code, output = project.snakemake("train")
    assert code == 0, output
    assert "resume from" in output
    assert "start from weights" not in output
    (manifest,) = (project.root / "data/models").glob("*/manifest.json")
    facts = json.loads(manifest.read_text())
    checkpoint = json.loads((project.path("checkpoints/latest") / "checkpoint.json").read_text())
    assert checkpoint["lineage"]["model"] == {"id": facts["id"], "digest": facts["digest"]}
    assert facts["id"] in project.path("report.html").read_text()
