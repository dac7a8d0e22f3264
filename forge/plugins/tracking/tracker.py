"""The interface of a tracker, and the description of a run that a tracker gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, Self

from forge.core.errors import ConfigError
from forge.core.files import read_object
from forge.core.paths import RunPaths
from forge.core.provenance import recorded_digest
from forge.plugins.tracking.records import Sent
from forge.plugins.tracking.rows import StepRow
from forge.plugins.tracking.settings import Tracking


@dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked. config: with the digest of the config, and the ids of tokens and tokenizer
    in `ids`."""

    paths: RunPaths
    name: str
    config: dict[str, Any]

    @classmethod
    def read(cls, paths: RunPaths) -> Self:
        """Read the description from the run's config.json, which needs no plugin. Raises DataError where
        it cannot be read."""
        values = read_object(paths.config, "run", "ids")
        return cls(paths, str(values["run"]), {**values, "config_digest": recorded_digest(values)})


class Tracker(Protocol):
    """A tracker of one run. Made of the settings; its package is imported by `open`. Any exception is
    said once, and tried again later; a ForgeError is final."""

    def open(self, run: TrackedRun, sent: Sent) -> Sent:
        """Begin or continue the tracked run. The result says which rows it has, on the evidence."""

    def log(self, rows: Sequence[StepRow]) -> None:
        """Take these rows, which are later than all before."""

    def finish(self, state: str) -> None:
        """End for now, when all that was taken is safe. state: how the run has ended, from its events."""


def missing_packages(tracking: Tracking) -> list[str]:
    """Forge's trackers that are on, whose package is not installed here."""
    # Without an origin it is a folder of this name, such as the wandb/ of earlier runs.
    return [name for name in tracking.packages if not getattr(find_spec(name), "origin", None)]


def refuse_missing_packages(tracking: Tracking, where: str) -> None:
    """ConfigError for a tracker whose package is not installed here. where: of the setting."""
    if missing := missing_packages(tracking):
        raise ConfigError(
            f"{where}: tracking.{missing[0]} is set, but Python has no package {missing[0]} here",
            fix="make setup EXTRAS=tracking, or remove the key",
        )
