"""Rules of pages: the page that compares all runs, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forge.core.config import ResolvedConfig
from forge.core.sample_sheet import shared_folders
from forge.flow.rule_inputs import RuleSettings


def comparison(results: str) -> str:
    """The page that compares the runs in this directory."""
    return f"{results}/compare.html"


def rule_settings(runs: Mapping[str, ResolvedConfig]) -> dict[str, RuleSettings]:
    """The page -> settings of compare_runs: which runs there are, by which it is made again."""
    results, _ = shared_folders(runs)
    page = comparison(results)
    return {page: RuleSettings.of("compare", sorted(runs), Path(page), None)}
