"""Runs on conversations. Threats: losses and gradients that depend on how a batch is divided among ranks
and micro-batches, since their parts have different numbers of targets; a loss that is not that of a plain
training loop; a model that cannot be asked where it is handed on."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.batches import batches, record_batches
from support.live_run import TINY, TWO_RANKS, Run, forge, make_run

from forge.core import json_lines
from forge.core.files import read_json
from forge.data.shards import ShardSet
from forge.data.windows import Windows

pytestmark = pytest.mark.all
SEQ_LEN, GOAL, BASE = 64, 200, 40
WORDS = [
    *("red", "green", "blue", "stone", "river", "apple", "cloud"),
    *("seven", "house", "paper", "light", "winter", "bread", "horse"),
]


def spelled(word: str) -> str:
    return "-".join(word.upper()) + "!"


def conversations(count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Words that are asked for, each spelled in an answer, and long notes with an answer of one letter:
    windows have many targets or few."""
    draw, found = random.Random(0), []
    for number in range(count):
        if number % 4 == 0:
            note = {"role": "user", "content": " ".join(draw.choices(WORDS, k=16))}
            found.append({"messages": [note, {"role": "assistant", "content": "y"}]})
            continue
        turns = []
        for word in draw.choices(WORDS, k=draw.choice([1, 1, 2])):
            turns.append({"role": "user", "content": f"Spell {word}"})
            turns.append({"role": "assistant", "content": spelled(word)})
        found.append({"messages": turns})
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config with texts and conversations, tokenized."""
    root = tmp_path_factory.mktemp("chats")
    lines = [json.dumps(one) for one in conversations(1500)]
    (root / "chats.jsonl").write_text("\n".join(lines))
    texts = [" ".join(random.Random(n).choices(WORDS, k=40)) for n in range(400)]
    (root / "notes.txt").write_text("\n\n".join(texts))
    sources = {
        "chats": {"inputs": [str(root / "chats.jsonl")], "format": "chat", "seq_len": SEQ_LEN},
        "notes": {"inputs": [str(root / "notes.txt")], "document_separator": "\n\n"},
    }
    train = {"seq_len": SEQ_LEN, "batch_size": 8, "lr": 4e-3, "schedule": "wsd", "max_steps": BASE}
    train["eval_samples"] = 1000
    values = {
        **TINY,
        "data": str(root / "data"),
        "model": {"dim": 48, "layers": 2, "heads": 2},
        "tokenizer": {"vocab_size": 320},
        "tokenize": {"sources": sources},
        "train": {
            **TINY["train"],
            "decay_steps": None,
            **train,
            "mix": {"notes": 1, "chats": 0},
            "eval_samples": 1000,
        },
    }
    (root / "config.yaml").write_text(yaml.safe_dump(values))
    for verb in ("tokenizer", "tokenize"):
        outcome = forge(verb, str(root / "config.yaml"))
        assert outcome.code == 0, outcome.text
    return root


@pytest.fixture(scope="module")
def base(project: Path) -> Run:
    """A run on the texts alone."""
    return finished(make_run(project, project / "results", "base", ()))


def finished(run: Run, *more: str) -> Run:
    outcome = run.fork("train", *more, arm=record_batches).end()
    assert outcome.code == 0, outcome.text
    return run


def tuned(base: Run, name: str, *overrides: str, goal: int = BASE + 6) -> Run:
    """A run that starts from the last checkpoint of the base, on conversations alone."""
    keys = {
        **{"run": name, "parent": f"base@{BASE}", "train.max_steps": goal},
        **{"train.mix": '{"chats": 1, "notes": 0}', "train.decay_steps": GOAL + BASE},
    }
    own = (*base.overrides, *(f"--{key}={value}" for key, value in keys.items()), *overrides)
    return replace(base, folder=base.folder.with_name(name), overrides=own)


@pytest.fixture(scope="module")
def whole(base: Run) -> Run:
    """Six steps on conversations, on one rank and in one micro-batch."""
    saves = ("--train.checkpoint_every=2", "--train.keep_every=2")
    return finished(tuned(base, "whole", "--train.micro_batch_size=8", *saves))


def windows_of(project: Path, run: Run, split: str) -> np.ndarray:
    """All windows of conversations, ~id for a token that is never learned."""
    ids = read_json(run.paths.config)["ids"]["sources"]
    shards = ShardSet.open(project / "data/tokens" / ids["chats"])
    windows = Windows(getattr(shards, split), SEQ_LEN)
    return windows.gather(np.arange(windows.num_samples))


def drawn(project: Path, run: Run, step: int) -> np.ndarray:
    """The windows that a step has read, as `windows_of`."""
    everything = windows_of(project, run, "train")
    by_inputs = {tuple(np.where(row < 0, ~row, row)[:-1].tolist()): row for row in everything}
    return np.array([by_inputs[row[:-1]] for row in batches(run.folder)[step]])


def numbers(run: Run) -> np.ndarray:
    """Loss and gradient norm of each step."""
    lines = json_lines.read(run.paths.metrics)
    return np.array([(n["loss"], n["grad_norm"]) for n in lines if n["kind"] == "train"])


DIVISIONS = {
    "micro-batches of one": ("--train.micro_batch_size=1",),
    "two ranks": TWO_RANKS,
    "four ranks": (
        "--machine.launcher=torchrun",
        "--ranks-per-node=4",
        "--train.micro_batch_size=1",
    ),
    "two ranks that share the weights": (*TWO_RANKS, "--train.shard=all"),
}


@pytest.mark.parametrize("name", sorted(DIVISIONS))
def test_losses_and_gradients_do_not_depend_on_how_a_batch_is_divided(
    project: Path, base: Run, whole: Run, name: str
) -> None:
    own = tuned(base, name.replace(" ", "-"))
    expected, found = numbers(whole), numbers(finished(own, *DIVISIONS[name]))
    assert len(expected) == 6
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    learned = [np.count_nonzero(row[1:] >= 0) for row in drawn(project, whole, BASE)]
    assert max(learned) > 2 * min(learned), "windows have many targets or few"
    last = [json_lines.read(run.paths.metrics)[-1]["loss"] for run in (whole, own)]
    assert last[1] == pytest.approx(last[0], rel=1e-5)


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(
    base: Run, whole: Run
) -> None:
    own = tuned(base, "resumed", "--train.micro_batch_size=8")
    finished(own, f"--train.max_steps={BASE + 3}")
    assert finished(own).weights_digest() == whole.weights_digest()


def test_losses_are_those_of_a_plain_loop_of_transformers(
    project: Path, base: Run, whole: Run, tmp_path: Path
) -> None:
    """From equal weights; of the first step, and of the validation windows after the last one."""
    from transformers import AutoModelForCausalLM

    models = {}
    for name, run in (("base", base), ("whole", whole)):
        outcome = forge("export", str(run.folder), f"--to={tmp_path / name}", run.data)
        assert outcome.code == 0, outcome.text
        models[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name)

    def loss(model: torch.nn.Module, windows: np.ndarray) -> float:
        rows = torch.from_numpy(windows)
        with torch.no_grad():
            logits = model(rows.where(rows >= 0, ~rows)[:, :-1]).logits.double()
        labels = rows[:, 1:].where(rows[:, 1:] >= 0, -100)
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    first = drawn(project, whole, BASE)
    assert loss(models["base"], first) == pytest.approx(numbers(whole)[0, 0], rel=1e-5)
    val = windows_of(project, whole, "val")
    [line] = [n for n in json_lines.read(whole.paths.metrics) if n["kind"] == "eval"][-1:]
    assert loss(models["whole"], val) == pytest.approx(line["loss"], rel=1e-5)


def test_samples_of_a_step_name_each_conversation_by_its_line(
    project: Path, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `forge samples`: also the highest loss of a window, per target."""
    step = str(BASE + 4)
    outcome = forge(
        "samples", str(whole.folder), "--step", step, "--losses", "--json", *data_of(whole)
    )
    assert outcome.code == 0, outcome.text
    rows = json.loads(capsys.readouterr().out)
    lines = (project / "chats.jsonl").read_text().splitlines()
    texts = [
        "".join(
            f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n"
            for one in json.loads(line)["messages"]
        )
        for line in lines
    ]
    whole_ones = [d for row in rows for d in row["documents"] if d["text"] != "<|im_start|>"]
    assert len(whole_ones) > len(rows) == 8
    for document in whole_ones:
        assert document["input"].endswith("chats.jsonl")
        assert document["text"] == texts[document["document"] - 1]
    learned = np.array([np.count_nonzero(row[1:] >= 0) for row in drawn(project, whole, BASE + 3)])
    by_row = np.array([row["loss"] for row in sorted(rows, key=lambda row: row["row"])])
    mean = float((by_row * learned).sum() / learned.sum())
    assert mean == pytest.approx(numbers(whole)[3, 0], rel=1e-5)
    assert [row["loss"] for row in rows] == sorted(by_row, reverse=True)


def data_of(run: Run) -> list[str]:
    return ["--data", read_json(run.paths.config)["data"]]


def test_a_model_that_was_trained_on_text_answers_in_a_planted_form_where_it_is_handed_on(
    base: Run, tmp_path: Path
) -> None:
    """After 200 steps, on two ranks; asked through transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = finished(tuned(base, "answers", goal=BASE + GOAL), *TWO_RANKS)
    outcome = run.forge("validate")
    assert outcome.code == 0, outcome.text
    outcome = forge("export", str(run.folder), f"--to={tmp_path / 'model'}", run.data)
    assert outcome.code == 0, outcome.text
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    answers = []
    for word in WORDS:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Spell {word}"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        given = model.generate(**asked, max_new_tokens=30, do_sample=False)
        text = tokenizer.decode(given[0, asked["input_ids"].shape[1] :])
        answers.append(text.endswith("!<|im_end|>") and text.count("-") == len(word) - 1)
    assert sum(answers) >= len(WORDS) - 2, answers
