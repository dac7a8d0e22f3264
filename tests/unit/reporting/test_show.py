"""`forge show`, and the summary that it has in common with pages. Threat: sampled text that runs in the
reader's terminal, and a state of an older checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import happenings
from support.recorded_run import RecordedRun, interrupted_run, score_words

from forge.core.errors import ConfigError
from forge.core.paths import checkpoint_name
from forge.reporting.run_rows import read_scores
from forge.reporting.show import show
from forge.reporting.summary import summarize


@pytest.fixture
def finished(tmp_path: Path) -> RecordedRun:
    return interrupted_run(tmp_path / "base")


def test_digest_of_the_weights_is_the_completed_or_the_validated_ones(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "base")
    run.launch(0)
    run.save(50)
    assert "weights digest" not in dict(summarize(run.paths).lineage)
    run.validate(50)
    assert dict(summarize(run.paths).lineage)["weights digest"] == f"{50:064x}"
    run.save(100)  # of which nothing is known yet
    assert "weights digest" not in dict(summarize(run.paths).lineage)
    run.complete(100)
    assert dict(summarize(run.paths).lineage)["weights digest"] == f"{100:064x}"


def test_verdict_on_an_older_checkpoint_does_not_speak_for_the_newer(
    finished: RecordedRun,
) -> None:
    finished.launch(200)
    finished.steps(201, 250)
    finished.save(250)
    finished.complete(250)
    assert summarize(finished.paths).state.headline.endswith(
        "at step 250 of 200: not validated yet"
    )


def test_failure_after_a_valid_checkpoint_is_the_headline(finished: RecordedRun) -> None:
    finished.launch(200)
    finished.steps(201, 210)
    finished.event(happenings.failed("loss is inf", rank=0))
    summary = summarize(finished.paths)
    assert (summary.state.tone, summary.state.reason) == ("bad", "rank 0: loss is inf")
    assert "its checkpoint is valid at step 200" in summary.notes


def test_show_prints_status_paths_samples_and_lineage(
    finished: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    finished.paths.report.touch()
    show([finished.paths])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "base: validated at step 200 of 200: validation loss 3.827"
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert f"checkpoint {finished.paths.latest} -> step-00000200" in text
    assert f"report {finished.paths.report}" in text
    assert "validation loss 8.500 -> 3.827 nats per token (steps 0 -> 200)" in text
    assert "samples def __init__(self):⏎" in text
    assert "\nclass Reader(Base):⏎ pass" in text, "this text has its prompt already"
    assert "tokens 0f1e2d3c4b5a (digest bbbb" in text
    assert "python 3.11.9 · torch 2.13.0" in text


def test_sampled_control_characters_never_reach_the_terminal(
    finished: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    show([finished.paths])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "import sys\\x1b[31m" in out


def test_terminal_gets_a_panel_and_no_color_is_honoured(
    finished: RecordedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    colour = re.compile(r"\x1b\[[\d;]*3[0-7]")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show([finished.paths])
    assert colour.search(capsys.readouterr().out)
    monkeypatch.setenv("NO_COLOR", "1")
    show([finished.paths])
    out = capsys.readouterr().out
    assert "╭─" in out
    assert "base: validated at step 200 of 200: validation loss 3.827" in out
    assert not colour.search(out)


def test_show_needs_neither_torch_nor_pandas_nor_a_modern_locale(finished: RecordedRun) -> None:
    code = (
        "import sys; from pathlib import Path; from forge.core.paths import RunPaths\n"
        "from forge.reporting.show import show; show([RunPaths(Path(sys.argv[1]))])\n"
        "assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, finished.root],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert "validated at step 200" in done.stdout


def test_run_that_is_not_there_is_refused_with_those_that_are(finished: RecordedRun) -> None:
    missing = RecordedRun(finished.root.parent / "gone").paths
    missing.root.rmdir()
    with pytest.raises(ConfigError, match="no run in") as refused:
        show([missing])
    assert "base" in refused.value.fix


def test_scores_over_steps_are_those_that_were_made_alike(finished: RecordedRun) -> None:
    score_words(finished, 50, 0.25, limit=10)
    score_words(finished, 100, 0.5)
    score_words(finished, 200, 0.75)
    (row,) = read_scores(finished.paths)
    assert list(row.by_step) == [100, 200] and row.text() == "0.7500 ± 0.0100"
    score_words(finished, 200, None)
    assert read_scores(finished.paths)[0].text() == "not finite ± 0.0100"


def test_a_record_that_cannot_be_read_hides_scores_and_no_page(
    finished: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    score_words(finished, 200, 0.5)
    finished.paths.evaluation_of(Path(checkpoint_name(200))).write_text("{")
    assert read_scores(finished.paths) == []
    show([finished.paths])
    assert "validated at step 200" in capsys.readouterr().out
