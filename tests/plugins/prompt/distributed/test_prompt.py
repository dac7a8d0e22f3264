"""Threat: text of another checkpoint or of another seed, an endless one, or a traceback for what a user
does. A real run and the real command."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys

import pytest
from support.live_run import MARK, MARK_VALUE, Run, make_run, wait_until

import forge as package
from forge.core.files import read_json

pytestmark = pytest.mark.all
GREEDY = ("--temperature=0", "--max-tokens=8")


def prompt(run: Run, *words: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forge", "prompt", str(run.folder), *words, run.data]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, **options
    )


def text_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    return done.stdout[:-1]


def made_here(run: Run, text: str, num_tokens: int, step: int | None = None, **options) -> str:
    """What `forge.load` and `generate` give for the same."""
    model, tokenizer = package.load(run.folder, step=step, data=run.data.removeprefix("--data="))
    ids = tokenizer.encode(text)
    new = model.generate(ids, num_tokens, end_id=tokenizer.eos_id, **options)
    return tokenizer.decode([*ids, *new])[len(text) :]


def test_text_is_that_of_forge_load_and_of_the_step_that_is_named(solo):
    assert text_of(prompt(solo, "the ", *GREEDY)) == made_here(solo, "the ", 8, temperature=0)
    older = text_of(prompt(solo, "the ", "--max-tokens=8", "--step=6"))
    assert older == made_here(solo, "the ", 8, step=6)
    assert "step 6 of" in prompt(solo, "the ", "--step=6", *GREEDY).stderr


def test_same_seed_gives_the_same_text_from_argument_and_input_and_another_seed_another(solo):
    first = text_of(prompt(solo, "the ", "--seed=5", "--max-tokens=20"))
    assert first == text_of(prompt(solo, "--seed=5", "--max-tokens=20", input="the \n"))
    assert first != text_of(prompt(solo, "the ", "--seed=6", "--max-tokens=20"))


def test_prompt_that_is_longer_than_the_context_is_continued_from_its_end_which_is_said(solo):
    text = "the word is 12 times the word " * 4
    done = prompt(solo, text, *GREEDY)
    assert "tokens; the model reads the last 16 of them (train.seq_len)" in done.stderr
    assert text_of(done) == made_here(solo, text, 8, temperature=0)
    assert "the model reads" not in prompt(solo, "the ", *GREEDY).stderr


def test_corrupt_weights_and_unknown_steps_and_devices_are_refused_without_a_traceback(
    solo, tmp_path
):
    own = solo.copy(tmp_path / "own")
    for words, code, message in (
        (("--step=7",), 78, "has no checkpoint of step 7"),
        (("--device=abacus",), 78, "device is 'abacus', which torch cannot use here"),
    ):
        done = prompt(own, "the ", *words)
        assert (done.returncode, done.stdout) == (code, "") and message in done.stderr
    index = read_json(own.paths.latest / "index.json")
    part = next(tensor for name, tensor in index["tensors"].items() if name.startswith("model."))
    weights = own.paths.latest / part["parts"][0]["file"]
    content = bytearray(weights.read_bytes())
    content[part["parts"][0]["start"]] ^= 1
    weights.write_bytes(content)
    done = prompt(own, "the ")
    assert (done.returncode, done.stdout) == (65, "")
    assert f"{weights.name} has digest" in done.stderr
    shutil.rmtree(own.paths.checkpoints)
    done = prompt(own, "the ")
    assert done.returncode == 65 and "has no checkpoint" in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_ends_the_text_with_a_line_break_and_no_traceback(solo):
    command = [sys.executable, "-m", "forge", "prompt", str(solo.folder), "the ", solo.data]
    # A terminal: the first character is there before the last.
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*command, "--max-tokens=1000000"], stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    assert os.read(ours, 1)
    process.send_signal(signal.SIGINT)
    text = b""
    try:
        while part := os.read(ours, 65536):
            text += part
    except OSError:  # Linux: the other side is closed
        pass
    os.close(ours)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75 and text.endswith(b"\n")
    assert "interrupted" in said and "Traceback" not in said


def test_run_that_is_training_is_prompted_by_its_last_checkpoint_so_far(tiny_project, tmp_path):
    overrides = ("--train.max_steps=1000000", "--train.checkpoint_every=20", "--train.keep_last=1")
    run = make_run(tiny_project, tmp_path / "results", "long", overrides)
    training = run.start("train", **{MARK: MARK_VALUE})
    wait_until(lambda: run.paths.latest.exists() or training.process.poll() is not None, "a save")
    done = prompt(run, "the ", *GREEDY)
    assert training.process.poll() is None, training.output.read_text()
    text_of(done)
    training.process.send_signal(signal.SIGINT)
    assert training.end().code == 75
