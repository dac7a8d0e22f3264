"""Ladder: small runs by which the loss of a larger one is forecast. docs/plugins/ladder.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.core.hooks import Finding, hook
from forge.plugins.ladder.settings import Ladder

if TYPE_CHECKING:
    from forge.core.config import Config, ResolvedConfig
    from forge.core.paths import RunPaths
    from forge.core.section import Section


@hook
def sections() -> dict[str, type[Section]]:
    return {"ladder": Ladder}


@hook
def check_config(config: Config) -> None:
    role = config.of(Ladder).role
    if role and config.model.init:
        raise ValueError(
            f"ladder.role is {role}, and model.init is set: rows of a ladder are new models"
        )
    if role and (role == "rung") != bool(config.parent):
        raise ValueError(
            f"ladder.role is {role}, and parent is {config.parent or 'null'}: a rung starts from a"
            " checkpoint of its trunk, trunks and forecast rows from none"
        )


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.ladder.command import add_forecast, add_ladder

    add_ladder(subcommands)
    add_forecast(subcommands)


@hook
def rule_file() -> Path:
    return Path(__file__).with_name("rules.smk")


@hook
def rule_settings(runs: Mapping[str, ResolvedConfig]) -> Mapping[str, dict[str, Any]]:
    from forge.plugins.ladder import flow

    return {"ladder_forecast": flow.rule_settings(runs)}


@hook
def check_targets(runs: Mapping[str, ResolvedConfig], targets: Sequence[str]) -> None:
    if "ladder" in targets:
        from forge.plugins.ladder.forecast import check_rows
        from forge.plugins.ladder.records import rows_of

        check_rows(rows_of(runs))


@hook
def check_plan(runs: Mapping[str, ResolvedConfig], rules: Mapping[str, Sequence[str]]) -> None:
    from forge.plugins.ladder import flow

    flow.check_plan(runs, rules)


@hook
def run_lines(paths: RunPaths) -> Mapping[str, Sequence[str]]:
    from forge.plugins.ladder.outcome import outcome_of

    outcome = outcome_of(paths)
    return {"ladder": [outcome.text]} if outcome else {}


@hook
def findings(paths: RunPaths) -> Sequence[Finding]:
    from forge.plugins.ladder.outcome import outcome_of

    outcome = outcome_of(paths)
    return [Finding("its forecast is late")] if outcome and outcome.is_late else []
