"""The one place that knows how files and folders of artefacts and runs are named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forge.config import Config


def tokenizer_folder(data: str | Path, tokenizer_id: str) -> Path:
    """Where the tokenizer with this id lies: tokenizer.json, manifest.json."""
    return Path(data) / "tokenizers" / tokenizer_id


def tokens_folder(data: str | Path, tokens_id: str) -> Path:
    """Where the token shards with this id lie: *.bin, manifest.json."""
    return Path(data) / "tokens" / tokens_id


@dataclass(frozen=True)
class RunPaths:
    """Everything in `results/{run}/`. Only config, fit, validated and report are Snakemake outputs."""

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
    def fit(self) -> Path:
        return self.root / "fit.json"

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


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder is one of Forge's, not a copy that a person has put beside them."""
    return re.fullmatch(rf"{CHECKPOINT_PREFIX}\d{{8,}}", name) is not None


def checkpoint_name(step: int) -> str:
    """`step-00000100`: eight digits, so that names sort as numbers."""
    return f"{CHECKPOINT_PREFIX}{step:08d}"
