"""Names of all files and directories of tokenizers, tokens and runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forge.core.config import Config

CONFIG, SHEET = "config/config.yaml", "config/runs.tsv"  # of a project
WORKFLOW = Path(
    ".snakemake/forge"
)  # what Forge writes down of workflow commands, also for their jobs
WORKFLOW_RUNS = WORKFLOW / "runs.json"  # of the last one


def tokenizer_folder(data: str | Path, tokenizer_id: str) -> Path:
    """Where the tokenizer with this id lies: its files, manifest.json, and the workflow's config.json."""
    return Path(data) / "tokenizers" / tokenizer_id


def tokens_folder(data: str | Path, tokens_id: str) -> Path:
    """Where the token shards with this id lie: *.bin, manifest.json, the workflow's config.json."""
    return Path(data) / "tokens" / tokens_id


@dataclass(frozen=True)
class RunPaths:
    """Everything in `results/{run}/`. Snakemake outputs: config, trained, validated, report."""

    root: Path

    @classmethod
    def of(cls, config: Config) -> RunPaths:
        return cls(Path(config.results) / config.run)

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def allocation(self) -> Path:
        """Facts true of one allocation only (declared temp() in the workflow)."""
        return self.root / ".allocation"

    @property
    def stage(self) -> Path:
        return self.allocation / "stage.json"

    @property
    def preflight_pass(self) -> Path:
        return self.allocation / "preflight.json"

    @property
    def preflight(self) -> Path:
        return self.root / "preflight.json"

    @property
    def preflight_table(self) -> Path:
        return self.root / "preflight.tsv"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def latest(self) -> Path:
        return self.checkpoints / "latest"

    @property
    def quarantine(self) -> Path:
        """Damaged checkpoints, each with its reasons in damage.json."""
        return self.checkpoints / "quarantine"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def trained(self) -> Path:
        return self.root / "trained.json"

    @property
    def validation(self) -> Path:
        return self.root / "validation.json"

    @property
    def validated(self) -> Path:
        return self.root / "validated.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def bad_nodes(self) -> Path:
        """Nodes to leave out when this run is submitted, one a line. Remove a line to use it again."""
        return self.root / "bad_nodes.txt"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def launches(self) -> Path:
        """What ranks leave for their launcher: one folder a launch."""
        return self.root / ".launch"

    @property
    def stop(self) -> Path:
        """A file by this name asks training to stop."""
        return self.root / "STOP"


CHECKPOINT_PREFIX = "step-"


def checkpoint_name(step: int) -> str:
    """`step-00000100`: at least eight digits, so that a listing shows most runs in order."""
    return f"{CHECKPOINT_PREFIX}{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """The step of `step-00000100`; None for any other name, such as that of a copy that a person has
    put beside the checkpoints."""
    digits = name.removeprefix(CHECKPOINT_PREFIX)
    if not re.fullmatch("[0-9]{8,}", digits) or checkpoint_name(int(digits)) != name:
        return None
    return int(digits)


def by_step(folder: Path) -> tuple[int, str]:
    """Sort key: by step, then by name (quarantine has `step-00000020.2`); other names come first."""
    step = checkpoint_step(folder.name.partition(".")[0])
    return -1 if step is None else step, folder.name
