"""The raw file of one storm on one contender: what was seen, before any score. JSON, compressed: nobody
reads the times of 2,400 steps, and every clone has these files."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from bench.storm.trace import Trace, why
from forge.core.errors import DataError
from forge.core.files import atomic_open

FOLDER = Path(__file__).with_name("results")


class Seen(BaseModel):
    """All times are in seconds since the storm began, unless a field says otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Strike(Seen):
    """An event of the trace as it hit this contender. due: by the trace; at: when it was done. landed:
    when it was seen to have happened; None: it was not, and missed says why."""

    kind: str
    due: float
    at: float
    landed: float | None = None
    missed: str = ""


class Steps(Seen):
    """The steps of one launch of the program, one after the other.

    start: the step that it resumed from. times: of the steps start + 1, start + 2, … as rank 0 had
    completed them. wrong_from: the first step whose chain is not that of the undisturbed run. corrupt:
    whether it resumed from a corrupt checkpoint.
    """

    launch: str
    start: int
    begin: float
    times: list[float]
    wrong_from: int | None = None
    corrupt: bool = False


class Allocation(Seen):
    """A time during which Slurm gave nodes to a job, as `sacct -D` tells it. submit: when it entered the
    queue, by a person or requeued; start, end: None while it has not come."""

    job: str
    submit: float
    eligible: float | None
    start: float | None
    end: float | None
    state: str
    nodes: int


class Raw(Seen):
    """One storm. hands: when a person had to submit again. step_sec: of an undisturbed step. samples:
    (time, new distinct samples) of a contender whose steps may lose samples (torchft), else empty."""

    format: int = 1
    contender: str
    what: str
    is_ranked: bool
    seed: int
    minutes: float
    step_sec: float
    save_every_sec: float
    num_nodes: int
    trace: Trace
    strikes: list[Strike]
    launches: list[Steps]
    allocations: list[Allocation]
    hands: list[float]
    samples: list[tuple[float, int]] = []
    samples_per_step: int = 0
    versions: dict[str, str]
    cores: int
    loads: list[float]
    """Load of this machine over one minute, at the beginning and then each minute."""

    def write(self, path: Path) -> None:
        """An interrupted write leaves no file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_open(path) as file:
            file.write(lzma.compress(self.model_dump_json().encode()))

    @classmethod
    def read(cls, path: Path) -> Raw:
        """Raises DataError for a file that is no raw file."""
        try:
            return cls.model_validate_json(lzma.decompress(path.read_bytes()))
        except (OSError, lzma.LZMAError, ValidationError) as err:
            raise DataError(
                f"{path} is no raw file of a storm: {why(err)}",
                fix=f"remove {os.fspath(path)} and measure again: python -m bench.storm",
            ) from None


def file_of(folder: Path, contender: str, seed: int) -> Path:
    return folder / f"{contender}-seed{seed}.json.xz"


def read_all(folder: Path) -> list[Raw]:
    """All raw files of a folder, by contender and seed."""
    return [Raw.read(path) for path in sorted(folder.glob("*-seed*.json.xz"))]
