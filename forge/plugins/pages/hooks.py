"""Pages: a report of each run, and a comparison of runs, for people. docs/plugins/pages.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.core.hooks import hook

if TYPE_CHECKING:
    from forge.core.config import ResolvedConfig


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.pages.command import add_compare, add_report

    add_report(subcommands)
    add_compare(subcommands)


@hook
def rule_file() -> Path:
    return Path(__file__).with_name("rules.smk")


@hook
def rule_settings(runs: Mapping[str, ResolvedConfig]) -> Mapping[str, dict[str, Any]]:
    from forge.plugins.pages import flow

    return {"compare_runs": flow.rule_settings(runs)}


@hook
def wanted_files(config: ResolvedConfig, target: str) -> Sequence[str]:
    return ["report.html"] if target in ("train", "resume") else []
