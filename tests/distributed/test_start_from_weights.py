"""A run starts from pretrained weights to the last bit, on any ranks, and gives them back by export.

Threats: a rank that reads the rows of another one; weights that are read again when a run resumes; a
file that has changed since its digest was made.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from support.live_run import Run, forge
from support.pretrained import MODELS, random_model, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.checkpoint import resume
from forge.core.files import read_json
from forge.data.model import ModelManifest

# That of TINY, which the runs are given, and three heads' worth of rows that no two ranks share evenly.
SIZES = {"num_attention_heads": 2, "intermediate_size": 64, "num_key_value_heads": 1}
SIZES |= {"n_inner": 64}  # GPT-2's name
# One for each class that an export can be: that of a Mistral is a Llama.
NAMES = {kind: name for name, (kind, _) in reversed(MODELS.items()) if name != "mistral"}.values()
# One step that changes no bit of a weight: AdamW's update is about lr.
IDLE = ("--train.lr=1e-30", "--train.weight_decay=0", "--train.max_steps=1")
LAYOUTS = {
    "one": (),
    "two": ("--machine.launcher=torchrun", "--ranks-per-node=2", "--train.shard=all"),
    "three": (
        *("--machine.launcher=torchrun", "--ranks-per-node=3", "--train.shard=all"),
        "--train.batch_size=9",
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tiny_project) -> Path:
    (folder,) = (path.parent for path in tiny_project.glob("data/tokenizers/*/tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def bases(session_runs, tokenizer, tmp_path_factory) -> dict[str, Run]:
    """Runs that start from weights of each architecture, with all that comes before training."""
    made = {}
    for name, dtype in zip(NAMES, cycle(["bfloat16", "float32"])):
        folder = tmp_path_factory.mktemp("weights") / name
        save(random_model(name, **SIZES), folder, dtype=dtype, files=3, tokenizer=tokenizer)
        run = session_runs(name, f"--model.init.path={folder}", *IDLE)
        for verb in ("tokenizer", "tokenize", "model"):
            outcome = run.forge(verb)
            assert outcome.code == 0, outcome.text
        made[name] = run
    return made


def weights_of(run: Run) -> Path:
    return Path(dict(option.split("=", 1) for option in run.overrides)["--model.init.path"])


def with_layout(run: Run, layout: str) -> Run:
    return replace(
        run,
        folder=run.folder.parent / f"{run.folder.name}-{layout}",
        overrides=(*run.overrides, f"--run={run.folder.name}-{layout}"),
    )


def trained(run: Run, *more: str) -> str:
    outcome = run.fork("train", *more).end()
    assert outcome.code == 0, outcome.text
    return outcome.text


@pytest.mark.parametrize(("name", "layout"), [*zip(NAMES, cycle(reversed(LAYOUTS)))])
def test_start_and_export_keep_every_bit(name, layout, bases, tmp_path):
    run = with_layout(bases[name], layout)
    text = trained(run, *LAYOUTS[layout])
    assert f"start from {weights_of(run)}" in text
    outcome = forge("export", str(run.folder), f"--to={tmp_path / 'out'}", run.data)
    assert outcome.code == 0, outcome.text
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (weights_of(run), tmp_path / "out")
    )
    assert type(theirs) is type(ours)
    wanted = dict(theirs.named_parameters())
    assert wanted.keys() == dict(ours.named_parameters()).keys()
    for key, parameter in ours.named_parameters():
        assert torch.equal(parameter, wanted[key]), key
    text = "the word is 12 times the word"
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")(text, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.fixture
def own(bases, tmp_path) -> Run:
    """A run in a directory of its own, from a copy of the Qwen3 weights."""
    base = bases["qwen3"]
    folder = shutil.copytree(weights_of(base), tmp_path / "weights")
    overrides = (
        *(*base.overrides, f"--model.init.path={folder}"),
        *(f"--data={tmp_path / 'data'}", f"--results={tmp_path / 'results'}"),
    )
    run = replace(base, folder=tmp_path / "results" / base.folder.name, overrides=overrides)
    for verb in ("tokenizer", "tokenize", "model"):
        outcome = run.forge(verb)
        assert outcome.code == 0, outcome.text
    return run


def test_only_the_first_launch_reads_the_weights_and_the_lineage_names_them(own):
    trained(own)
    (path,) = (weights_of(own).parent / "data/models").glob("*/manifest.json")
    made_from = resume.required(own.paths).manifest.lineage.model
    assert made_from
    assert made_from.digest == ModelManifest.read(path).digest
    shutil.rmtree(weights_of(own))
    shutil.rmtree(path.parent)
    outcome = forge("train", str(own.paths.config), "--train.max_steps=3")
    assert outcome.code == 0, outcome.text
    assert "resume from" in outcome.text
    assert resume.required(own.paths).manifest.lineage.model == made_from
    child = ("--run=child", f"--parent={own.folder.name}@3", "--train.max_steps=4")
    outcome = forge("train", str(own.paths.config), *child)
    assert outcome.code == 0, outcome.text
    lineage = resume.required(
        replace(own, folder=own.folder.parent / "child").paths
    ).manifest.lineage
    assert (lineage.model, lineage.parent.step) == (made_from, 3)
    outcome = forge("validate", str(own.paths.config), "--train.max_steps=3", own.data)
    assert outcome.code == 0, outcome.text
    assert read_json(own.paths.validation)["status"] == "valid"


def test_weights_that_changed_since_their_digest_was_made_are_bad_data(own):
    file = sorted(weights_of(own).glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    outcome = own.forge("train")
    assert outcome.code == 65, outcome.text
    assert f"{file.name} has digest" in outcome.text
    assert resume.latest(own.paths) is None
