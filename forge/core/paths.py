"""Names of all files and directories of tokenizers, tokens and runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from forge.core import hooks
from forge.core.config import Config
from forge.core.errors import UnfitError
from forge.core.files import disk_trouble, short_id

MANIFEST = "manifest.json"  # of each directory below data/: what it holds, written last
STATISTICS = "statistics.json"  # beside the manifest of a token set; outside of all digests
TOKENIZER = (
    "tokenizer.json"  # in the directory of a tokenizer, of an export and of a model on a hub
)
SNAKEFILE = "workflow/Snakefile"
SHARE = "share/forge"  # data-files of pyproject.toml
SHEET = "config/runs.tsv"  # of a project
# Files of workflow commands: for their jobs, and what the last command was about.
WORKFLOW = Path(".snakemake/forge")
WORKFLOW_RUNS = WORKFLOW / "runs.json"


def shipped() -> Path:
    """The directory with workflow/, profiles/ and config/ of this Forge: a clone or an unpacked source
    distribution that is installed in place, else where the wheel has put them."""
    around = Path(__file__).resolve().parents[2]
    for folder in (around, around / SHARE, *_recorded()):  # the second: pip install --target
        if (folder / SNAKEFILE).is_file():
            return folder
    raise UnfitError(
        f"the workflow of Forge is neither beside its package, in {around}, nor in {SHARE} of the wheel",
        cause="the package was copied, or installed by other means than pip",
        fix="install the wheel of Forge with pip",
    )


def _recorded() -> Iterator[Path]:
    """SHARE of this environment, as pip has recorded it."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files("forge") or ():
            if file.match(f"{SHARE}/{SNAKEFILE}"):
                yield Path(file.locate()).resolve().parents[1]


def settings_file(run: str) -> Path:
    """Settings that the last workflow command has for this run beside its config.json."""
    return WORKFLOW / f"{run}.settings.json"


def modules_file(host: str) -> Path:
    """Modules of the site that a job which began on this host has loaded."""
    return WORKFLOW / f"modules-{host}.json"


def stage_proof_file(folder: Path) -> Path:
    """Proof that `forge stage`, called in this project, wrote the stage record of the run in this
    directory."""
    return WORKFLOW / f"{folder.name}-{short_id(os.path.realpath(folder))}.stage.json"


def kernels_folder(folder: Path) -> Path:
    """Kernels that torch compiles for the run in this directory. Kernels are code, which later launches
    execute: so they are in the project, and not beside the results, which may come from elsewhere."""
    return WORKFLOW / "kernels" / f"{folder.name}-{short_id(os.path.realpath(folder))}"


def tokenizer_folder(data: str | Path, tokenizer_id: str) -> Path:
    """The directory of the tokenizer with this id: tokenizer.json, manifest.json, config.json."""
    return Path(data) / "tokenizers" / tokenizer_id


def tokens_folder(data: str | Path, tokens_id: str) -> Path:
    """The directory of the token shards with this id: *.bin, manifest.json, config.json; statistics.json,
    but for sets of earlier versions."""
    return Path(data) / "tokens" / tokens_id


def inputs_folder(data: str | Path, inputs_id: str) -> Path:
    """The directory of the input files of a program with this id: manifest.json."""
    return Path(data) / "inputs" / inputs_id


def model_folder(data: str | Path, model_id: str) -> Path:
    """The directory of the pretrained weights with this id: manifest.json, config.json."""
    return Path(data) / "models" / model_id


class _Below:
    """An attribute that is a path below the directory of the run."""

    def __init__(self, name: str, *, extended: bool = False) -> None:
        """extended: commands about a run write into it, too, as its training does."""
        self.name, self.is_extended = name, extended

    def __get__(self, paths: RunPaths, owner: type[RunPaths]) -> Path:
        return paths.root / self.name


@dataclass(frozen=True)
class RunPaths:
    """Everything in `results/{run}/` but the locks and what plugins make. Snakemake outputs: config,
    trained, validated, report, exported, evaluation."""

    root: Path

    @classmethod
    def of(cls, config: Config) -> RunPaths:
        return cls(Path(config.results) / config.run)

    @classmethod
    def of_checkpoint(cls, folder: Path) -> RunPaths | None:
        """The run that has this checkpoint; None for a checkpoint outside of a run's directory."""
        run = cls(folder.parent.parent)
        return run if run.checkpoints == folder.parent else None

    @classmethod
    def of_merged(cls, folder: Path) -> RunPaths | None:
        """The run that has this merge of its checkpoints; None for any other directory."""
        run = cls(folder.parent.parent)
        return run if run.merged == folder.parent else None

    config = _Below("config.json")

    # What is true of one allocation only; temp() in the workflow.
    allocation = _Below(".allocation")
    stage = _Below(".allocation/stage.json")
    preflight_pass = _Below(".allocation/preflight.json")

    preflight = _Below("preflight.json")
    preflight_table = _Below("preflight.tsv")
    checkpoints = _Below("checkpoints")
    latest = _Below("checkpoints/latest")
    quarantine = _Below("checkpoints/quarantine")  # with the reasons in damage.json
    merged = _Below("merged", extended=True)  # means of checkpoints, which nothing resumes from
    metrics = _Below("metrics.jsonl")
    events = _Below("events.jsonl", extended=True)
    trained = _Below("trained.json")
    validation = _Below("validation.json")
    validated = _Below("validated.json")
    report = _Below("report.html")
    exports = _Below("export", extended=True)  # a directory for each exported checkpoint
    exported = _Below("exported.json")
    evaluation = _Below("evaluation.json")
    evaluations = _Below("evaluations", extended=True)  # a record for each evaluated checkpoint
    evaluation_data = _Below("evaluations/data.json")  # which data of tasks is in the cache
    bad_nodes = _Below("bad_nodes.txt")  # nodes that the next submission excludes, one per line
    monitor = _Below("monitor")  # the load of each node, in a file of its name
    logs = _Below("logs")
    launches = _Below(".launch")  # files between launcher and ranks, in a directory per launch
    heartbeats = _Below(".launch/heartbeats")  # of the ranks of another program
    stop = _Below("STOP")  # a file of this name stops training
    parent_trained = _Below(".parent_trained")  # of the workflow, where the parent is on the sheet

    @property
    def extended(self) -> list[Path]:
        """Files and directories that commands about a run write into; others are replaced by new ones."""
        entries = [entry for entry in vars(RunPaths).values() if isinstance(entry, _Below)]
        names = [entry.name for entry in entries if entry.is_extended]
        return [self.root / name for name in (*names, *hooks.run_files())]

    def name_of(self, folder: Path) -> str:
        """Name of what is made of a checkpoint; of a merge it is not that of the step's checkpoint."""
        return f"merged-{folder.name}" if folder.parent.name == self.merged.name else folder.name

    def evaluation_of(self, folder: Path) -> Path:
        """The scores of this checkpoint."""
        return self.evaluations / f"{self.name_of(folder)}.json"


def place_logs(paths: RunPaths) -> None:
    """Put the logs of a run into a new directory in `$FORGE_LOG_DIR`, with a link to it in the run's
    directory. An id of the run's directory is in its name, as two projects may have runs of one name.

    Does nothing without the variable, and for a run that has logs. Raises UnfitError where a directory
    cannot be made.
    """
    place = os.environ.get("FORGE_LOG_DIR")
    if not place or os.path.lexists(paths.logs):
        return
    name = f"{paths.root.name}-{short_id(os.path.realpath(paths.root))}"
    with disk_trouble(folder := Path(place).absolute() / name):
        target = _new_folder(folder)
    with disk_trouble(paths.logs):
        paths.root.mkdir(parents=True, exist_ok=True)
        paths.logs.symlink_to(target)


def _new_folder(folder: Path) -> Path:
    """Make this directory; with a number behind its name where it has files of a removed run."""
    made, number = folder, 1
    made.mkdir(parents=True, exist_ok=True)
    while any(made.iterdir()):
        number += 1
        made = folder.with_name(f"{folder.name}.{number}")
        made.mkdir(exist_ok=True)
    return made


CHECKPOINT_PREFIX = "step-"


def checkpoint_name(step: int) -> str:
    """`step-00000100`: at least eight digits, so that `ls` sorts the checkpoints of most runs."""
    return f"{CHECKPOINT_PREFIX}{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """The step of `step-00000100`; None for any other name, such as that of a copy made by the user."""
    digits = name.removeprefix(CHECKPOINT_PREFIX)
    if not re.fullmatch("[0-9]{8,}", digits) or checkpoint_name(int(digits)) != name:
        return None
    return int(digits)


def by_step(folder: Path) -> tuple[int, str]:
    """Sort key: by step, then by name (quarantine has `step-00000020.2`); other names come first."""
    step = checkpoint_step(folder.name.partition(".")[0])
    return -1 if step is None else step, folder.name
