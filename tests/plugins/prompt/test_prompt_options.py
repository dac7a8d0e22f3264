"""Threat: a mistake on the command line that is found after a minute, or shown as a bug."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge import cli
from forge.plugins.prompt import prompt as prompting


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls that the command would make a text for."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        prompting, "prompt", lambda run, text, **options: calls.append({"text": text, **options})
    )
    return calls


@pytest.mark.parametrize(
    "words",
    [
        ["base", "The ", "--seed=3", "--max-tokens", "5"],
        ["base", "--seed=3", "The ", "--max-tokens", "5"],
        ["base", "--seed=3", "--max-tokens", "5", "The "],
        ["--seed=3", "--max-tokens=5", "base", "The "],
    ],
)
def test_text_may_stand_before_and_behind_options(asked, words):
    assert cli.main(["prompt", *words]) == 0
    [call] = asked
    assert (call["text"], call["seed"], call["max_tokens"]) == ("The ", 3, 5)


@pytest.mark.parametrize(
    ("given", "text"), [("The ", "The "), ("a\nb\n", "a\nb"), ("a\n\n", "a\n")]
)
def test_without_text_standard_input_is_read_but_for_its_last_line_break(
    asked, monkeypatch, given, text
):
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    assert cli.main(["prompt", "base"]) == 0
    assert [call["text"] for call in asked] == [text]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens=0"], "--max-tokens is 0, but must be a number, 1 or more"),
        (["--temperature=-0.1"], "--temperature is -0.1, but must be a number, 0 or more"),
        (["--temperature=nan"], "--temperature is nan, but must be a number"),
        (["--temperature=inf"], "--temperature is inf, but must be at most"),
        (["--seed=-1"], "--seed is -1, but must be a number, 0 or more"),
        ([f"--seed={2**63}"], f"--seed is {2**63}, but must be at most {2**63 - 1}"),
    ],
)
def test_number_that_makes_no_text_is_refused_with_its_bound(asked, capsys, options, message):
    assert cli.main(["prompt", "base", "The ", *options]) == 78
    assert message in capsys.readouterr().err
    assert asked == []


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "the prompt is empty"), ("ab\udcff", "is not UTF-8, from its character 3 on")],
)
def test_prompt_that_no_tokenizer_encodes_is_refused(asked, capsys, monkeypatch, text, message):
    assert cli.main(["prompt", "base", text]) == 78
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert cli.main(["prompt", "base"]) == 78
    assert capsys.readouterr().err.count(message) == 2
    assert asked == []


@pytest.mark.parametrize("words", [["base", "a", "b"], ["base", "a", "--sed=1"]])
def test_what_is_not_known_is_refused(asked, capsys, words):
    with pytest.raises(SystemExit) as caught:
        cli.main(["prompt", *words])
    assert caught.value.code == 78 and asked == []
    assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err


def test_unknown_run_is_refused_without_waiting_for_torch(project):
    code = (
        "import sys\nfrom forge import cli\ncode = cli.main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\nraise SystemExit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "prompt", "nobody", "The "],
        check=False,
        capture_output=True,
        text=True,
        cwd=project,
    )
    assert done.returncode == 78, done.stderr
    assert "there is no run nobody" in done.stderr and "Traceback" not in done.stderr
