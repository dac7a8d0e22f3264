"""`make bench` said nothing of a part that measured nothing, and ended with 0."""

import subprocess
import sys
from pathlib import Path

import pytest

import bench
from bench.__main__ import PARTS, run

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs_when_it_is_started(part: str) -> None:
    """Its main was defined and never called."""
    text = Path(bench.__path__[0], f"{part}.py").read_text()
    assert '\nif __name__ == "__main__":\n' in text


def test_pipeline_measures_when_it_is_started() -> None:
    command = [sys.executable, "-m", "bench.pipeline", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert "--quick" in done.stdout


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
