"""`make bench` said nothing of a part that measured nothing, and ended with 0."""

import sys
from pathlib import Path

import pytest

from bench import recovery, reproducibility
from bench.__main__ import PARTS, main, run

pytestmark = pytest.mark.tools


def test_a_part_that_measures_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, code, status in (
        ("silent", "", 1),
        ("broken", "raise SystemExit(3)", 3),
        ("good", "print('1.0')", 0),
    ):
        (tmp_path / f"{name}.py").write_text(code)
        assert run([name]) == status
    said = capsys.readouterr().out
    assert said == "silent has measured nothing\n1.0\n"


def test_a_part_that_fails_is_named_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = {"loader": 70}
    started = []

    def fake(arguments: list[str]) -> int:
        name = arguments[0].removeprefix("bench.")
        started.append(name)
        return status.get(name, 0)

    monkeypatch.setattr("bench.__main__.run", fake)
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert main() == 1
    assert started == list(PARTS)
    assert capsys.readouterr().out.endswith("failed: loader (exit status 70)\n")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--event", "kiled-rank"], "invalid choice: 'kiled-rank' (choose from 'killed-rank'"),
        (["--rounds", "0"], "--rounds: '0' is not an integer of 1 or more"),
        (["--rounds", "many"], "--rounds: 'many' is not an integer of 1 or more"),
        (["--ranks-per-node", "-1"], "--ranks-per-node: '-1' is not an integer of 1 or more"),
    ],
)
def test_recovery_refuses_an_event_or_a_number_that_is_none(
    wrong: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.recovery", *wrong])
    with pytest.raises(SystemExit):
        recovery.main()
    assert said in capsys.readouterr().err


def test_python_that_is_asked_for_is_compared_in_a_quick_run_too() -> None:
    chosen = reproducibility.quick(reproducibility.ways("/other/bin/python"))
    assert [way.python for way in chosen[1:]].count("/other/bin/python") == 1
    assert chosen[0] == reproducibility.ways(None)[0]


def test_python_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["reproducibility", "--python", "/nowhere/python"])
    with pytest.raises(SystemExit):
        reproducibility.main()
    assert "/nowhere/python is not a program" in capsys.readouterr().err
