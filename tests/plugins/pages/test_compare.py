"""Comparison and scores. Threats: a difference that is not shown, scores of other questions side by side,
and GPU hours that leave out what a restart has cost."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support import happenings
from support.recorded_run import RecordedRun, interrupted_run, loss_at, score_words

from forge.core.config import ResolvedConfig
from forge.core.errors import ConfigError, DataError
from forge.core.files import digest_file, read_json, write_json
from forge.plugins.pages.compare import compare
from forge.plugins.pages.comparison import ComparedRow, comparison, to_json
from forge.plugins.pages.curves import device_hours
from forge.plugins.pages.report import render
from forge.reporting.history import read_history
from forge.reporting.show import show


@pytest.fixture
def first(tmp_path: Path) -> RecordedRun:
    return interrupted_run(tmp_path / "first")


@pytest.fixture
def second(tmp_path: Path) -> RecordedRun:
    """Ten steps with another seed, one key more, and other directories."""
    run = RecordedRun(tmp_path / "second")
    run.launch(0)
    run.steps(1, 10)
    run.evaluate(10)
    values = read_json(tmp_path / "first/config.json") | {"run": "second", "data": "/elsewhere"}
    values["train"] |= {"seed": 7}
    values["later"] = {"key": [1, 2]}
    write_json(run.paths.config, values)
    return run


def rows(lines: list[ComparedRow]) -> dict[str, list[str]]:
    return {row.label: row.texts for row in lines}


def test_only_keys_that_differ_are_shown_and_missing_ones_differ(first, second):
    compared = comparison([first.paths, second.paths])
    assert rows(compared.keys) == {"train.seed": ["0", "7"], "later.key": ["–", "[1, 2]"]}
    assert comparison([first.paths, first.paths]).keys == []


def test_results_are_those_of_status_report_and_checkpoint(first, second):
    found = rows(comparison([first.paths, second.paths]).results)
    assert found["state"] == ["validated", "cut off"]
    assert found["step"] == ["200", "10"]
    assert found["validation loss"] == [f"{loss_at(step) + 0.1:.4f}" for step in (200, 10)]
    assert found["launches"] == ["2", "1"]
    manifest = first.paths.latest / "checkpoint.json"
    assert found["checkpoint digest"] == [digest_file(manifest)[:12], "–"]
    assert "GPU hours" not in found and "core hours" in found


def test_a_run_of_another_version_is_named_and_hides_no_other(first, second, capsys):
    """Its state is unknown, as `forge status` says; pages of other runs are as without it."""
    second.paths.events.write_text('{"format": 2, "event": "launch"}\n')
    found = rows(comparison([first.paths, second.paths]).results)
    assert found["state"] == ["validated", "unknown"]
    assert found["validation loss"] == [f"{loss_at(200) + 0.1:.4f}", "–"]
    assert "note: second: " in (said := capsys.readouterr().err) and "format 2" in said
    render(first.paths)
    with pytest.raises(DataError, match="format 2"):
        render(second.paths)


def test_gpu_hours_count_every_rank_of_every_launch(tmp_path):
    run = RecordedRun(tmp_path / "gpu")
    gpu = {"device": "cuda", "precision": "bf16"}
    for name, seconds in (("launch-1", 1800.0), ("launch-2", 3600.0)):
        run.event(happenings.launch(0, launch=name, world_size=8), after=500.0)
        run.event(happenings.init(0, launch=name, seconds=10.0, numerics=gpu))
        run.event(happenings.stop(), after=seconds - 10.0)
    assert device_hours(read_history(run.paths).launches) == {"gpu_hours": pytest.approx(8 * 1.5)}


def test_gpu_hours_count_a_launch_that_ended_before_its_ranks_were_ready(tmp_path):
    run = RecordedRun(tmp_path / "early")
    run.event(happenings.launch(0, launch="launch-1", world_size=8))
    run.event(happenings.lost(), after=1800.0)
    run.event(happenings.launch(0, launch="launch-2", world_size=8), after=500.0)
    run.event(happenings.init(0, launch="launch-2", seconds=10.0, numerics={"device": "cuda"}))
    run.event(happenings.stop(), after=3590.0)
    assert device_hours(read_history(run.paths).launches) == {"gpu_hours": pytest.approx(8 * 1.5)}


def test_cores_of_cpus_count_by_their_threads_and_programs_by_ranks(tmp_path):
    run = RecordedRun(tmp_path / "cpu")
    run.event(happenings.launch(0, launch="launch-1", world_size=2))
    run.event(happenings.init(0, seconds=1800.0, numerics={"device": "cpu", "threads": 4}))
    run.event(happenings.stop(), after=1800.0)
    assert device_hours(read_history(run.paths).launches) == {
        "core_hours": pytest.approx(2 * 4 * 1.0)
    }
    program = RecordedRun(tmp_path / "program")
    program.event(happenings.launch(0, launch="launch-1", world_size=3))
    program.event(happenings.stop(), after=7200.0)
    assert device_hours(read_history(program.paths).launches) == {"rank_hours": pytest.approx(6.0)}


def test_scores_are_in_report_show_and_comparison(first, second, capsys):
    score_words(first, 100, 0.5)
    score_words(first, 200, 0.625)
    page = render(first.paths)
    assert "<h2>Evaluation</h2>" in page and "step 100" in page and "0.6250 ± 0.0100" in page
    assert "<h2>Evaluation</h2>" not in render(second.paths)
    show([first.paths])
    assert "0.6250 ± 0.0100 words acc (1,000 documents) at step 200" in capsys.readouterr().out
    found = rows(comparison([first.paths, second.paths]).scores)
    assert found == {"words acc (1,000 documents)": ["0.6250 ± 0.0100", "–"]}


def test_scores_of_other_questions_in_one_row_are_told(first, second, tmp_path, capsys):
    score_words(first, 200, 0.625, data_digest="a")
    score_words(second, 10, 0.5, data_digest="b")
    pair, page = [first.paths, second.paths], tmp_path / "compare.html"
    compare(pair)
    compare(pair, page=page)
    note = (
        "ote: words acc (1,000 documents): these runs were scored on other questions or another version"
        " of the task than the others: second\n"
    )
    assert f"n{note}" in capsys.readouterr().out
    assert f"N{note.strip()}<" in page.read_text()
    score_words(second, 10, 0.5, data_digest="a")
    compare(pair)
    assert "note: " not in capsys.readouterr().out


def test_json_is_for_scripts(first, second, capsys):
    score_words(first, 200, 0.5)
    compare([first.paths, second.paths], as_json=True)
    mine, theirs = json.loads(capsys.readouterr().out)
    assert mine["scores"]["words acc"]["value"] == 0.5 and mine["step"] == 200
    assert (mine["config"], theirs["config"]["train.seed"]) == ({"train.seed": 0}, 7)
    assert theirs["checkpoint_digest"] is None


def test_page_opens_offline_with_all_runs(first, second, tmp_path, capsys):
    page = tmp_path / "sub/compare.html"
    compare([first.paths, second.paths], page=page)
    assert capsys.readouterr().out == ""
    text = page.read_text()
    for word in ("first: validated at step 200", "second: ", "train.seed", "core hours"):
        assert word in text
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert "table" in tags and not set(tags) & {"script", "link", "iframe", "img"}
    assert "http" not in text and not re.search(r"url\((?!#)", text)


def test_table_has_a_column_for_each_run(first, second, capsys):
    compare([first.paths, second.paths])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["first", "second"]
    assert ["train.seed", "0", "7"] in [line.split() for line in lines]


def test_program_appears_with_what_it_has(tmp_path):
    run = RecordedRun(tmp_path / "program")
    program = {"command": ["python", "train.py"]}
    values = ResolvedConfig(run="program", program=program, ids={}).training_json()
    write_json(run.paths.config, values)
    run.event(happenings.launch(0, launch="launch-1", world_size=3))
    run.event(happenings.stop(), after=7200.0)
    (found,) = to_json(comparison([run.paths]))
    assert found["rank_hours"] == pytest.approx(6.0) and found["train_loss"] is None


def test_no_runs_are_refused():
    with pytest.raises(ConfigError, match="there are no runs to compare"):
        compare([])
