"""What the Snakefile asks of Forge: the runs of the sample sheet, and the environment of rules."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge import store
from forge.artefacts import freeze
from forge.config import Config
from forge.paths import RunPaths
from forge.runs import resolve_runs, shared_folders

SHEET = "config/runs.tsv"


def prepare_environment() -> None:
    """Let rules call the `forge` that belongs to this Snakemake, and know that they are rules.

    Works where no environment is activated. A verb in a workflow stops when its Snakemake is killed.
    Snakemake sets OMP_NUM_THREADS in every rule, so the user's own is kept under another name.
    """
    environ = os.environ
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ["FORGE_IN_WORKFLOW"] = "1"
    environ.setdefault("FORGE_USER_OMP_NUM_THREADS", environ.get("OMP_NUM_THREADS", ""))


def read_runs(config: dict[str, Any]) -> dict[str, Config]:
    """Run name -> config with ids, for every row of the sheet (key `runs`, else config/runs.tsv).

    Raises ForgeError for a bad config or sheet, and for a run that cannot go on from its checkpoint:
    refused here, since Snakemake removes a rule's outputs before it starts the rule.
    """
    base = dict(config)
    sheet = base.pop("runs", SHEET)
    runs = {name: freeze(settings) for name, settings in resolve_runs(base, sheet).items()}
    shared_folders(runs)
    for settings in runs.values():
        store.check_resumable(settings, RunPaths.of(settings))
    return runs


def science(config: Config) -> str:
    """The config without the sections of what comes after training, as one line of JSON."""
    values = config.to_json()
    kept = {name: values[name] for name in values if name not in ("validate", "report")}
    return json.dumps(kept, sort_keys=True)


def overrides(config: Config, *names: str) -> list[str]:
    """Sections of a config as arguments of a verb."""
    values = config.to_json()
    return [f"--{name}={json.dumps(values[name], sort_keys=True)}" for name in names]


def resumable_steps(runs: dict[str, Config]) -> dict[str, int]:
    """Run name -> step of its checkpoint, for the runs that have one."""
    found = {name: store.check_resumable(c, RunPaths.of(c)) for name, c in runs.items()}
    return {name: checkpoint.step for name, checkpoint in found.items() if checkpoint}


def remove_stop_files(runs: dict[str, Config], say: Callable[[str], None]) -> None:
    """Let runs go on that a STOP file has stopped."""
    for config in runs.values():
        stop = RunPaths.of(config).stop
        if stop.exists():
            stop.unlink()
            say(f"removed {stop}")


def finished_folders(runs: dict[str, Config]) -> list[str]:
    """Folders of the runs that have a report."""
    paths = [RunPaths.of(config) for config in runs.values()]
    return [str(path.root) for path in paths if path.report.exists()]
