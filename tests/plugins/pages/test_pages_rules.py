"""Threat: a target that asks for no page, or a comparison that is not made again with other runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge import cli
from forge.core.config import Config, ResolvedConfig, checked
from forge.core.files import write_json
from forge.data.content_ids import resolve
from forge.flow import rule_inputs
from forge.plugins.pages.hooks import wanted_files


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResolvedConfig:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text")
    return resolve(checked(Config, {"tokenize": {"inputs": ["text.txt"]}}, "the test"))


def test_train_and_resume_ask_for_the_report_and_no_other_target_does(
    config: ResolvedConfig,
) -> None:
    asked = {target: wanted_files(config, target) for target in ("train", "resume", "compare")}
    assert asked == {"train": ["report.html"], "resume": ["report.html"], "compare": []}


def test_comparison_is_newer_than_its_settings_until_there_are_other_runs(
    config: ResolvedConfig,
) -> None:
    page = Path("results/compare.html")

    def settings(*names: str) -> Path:
        found = rule_inputs.rule_settings(dict.fromkeys(names, config), main=True)
        return Path(found["compare_runs"][str(page)])

    both = settings("a", "b")
    assert both.read_text() and both == settings("b", "a") and both != settings("a")
    page.parent.mkdir()
    page.touch()
    assert settings("a", "b").stat().st_mtime_ns <= page.stat().st_mtime_ns
    assert settings("a", "c").stat().st_mtime_ns >= page.stat().st_mtime_ns


def test_report_is_written_where_the_user_has_named_and_not_where_the_config_says(
    tmp_path: Path,
) -> None:
    values = {"run": "victim", "results": str(tmp_path / "home")}
    write_json(tmp_path / "theirs/config.json", {**ResolvedConfig(ids={}).to_json(), **values})
    assert cli.main(["report", str(tmp_path / "theirs/config.json")]) == 0
    assert (tmp_path / "theirs/report.html").exists() and not (tmp_path / "home").exists()
