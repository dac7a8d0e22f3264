"""Attestation: statements of exports, signatures, and steps of a run retrained.
docs/plugins/attestation.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.core.hooks import Finding, hook

if TYPE_CHECKING:
    from forge.core.paths import RunPaths


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.attestation.command import add_attestation

    add_attestation(subcommands)


@hook
def add_options(subcommand: str, parser: Any) -> None:
    from forge.plugins.attestation.command import export_options

    if subcommand == "export":
        export_options(parser)


@hook
def export_step(options: Any) -> Callable[[Path, Any, str | None], None]:
    from forge.plugins.attestation.command import attest

    return attest(options)


@hook
def run_files() -> Sequence[str]:
    from forge.plugins.attestation.places import CERTIFICATES, REPRODUCED

    return [CERTIFICATES, REPRODUCED]


@hook
def findings(paths: RunPaths) -> Sequence[Finding]:
    from forge.plugins.attestation import certified

    return certified.findings(paths)


@hook
def run_lines(paths: RunPaths) -> Mapping[str, Sequence[str]]:
    from forge.plugins.attestation import certified

    return {"certified": certified.summary(certified.results(paths))}


@hook
def rule_file() -> Path:
    return Path(__file__).with_name("rules.smk")


@hook
def rules_on_nodes() -> Sequence[str]:
    return ["reproduce_run"]
