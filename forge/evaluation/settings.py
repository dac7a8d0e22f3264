"""Settings of evaluation: the files of a user's own tasks, and the records so far."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from forge.core.errors import ConfigError
from forge.core.files import canonical, digest_bytes, digest_file, disk_trouble
from forge.core.paths import RunPaths, checkpoint_name, checkpoint_step
from forge.core.records import Evaluation
from forge.core.service_settings import Evaluate

PACKAGE = "lm_eval"
# What a directory of tasks holds: the tasks, their code, their data.
TASK_FILES = {".yaml", ".py", ".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet"}


def refuse_missing_package(evaluate: Evaluate, where: str) -> None:
    """ConfigError where tasks are set and the harness is not installed here. where: of the setting."""
    if evaluate.tasks and find_spec(PACKAGE) is None:
        raise ConfigError(
            f"{where}: evaluate.tasks is set, but Python has no package {PACKAGE} here",
            fix="make setup EXTRAS=evaluate, or remove the key",
        )


def task_files(evaluate: Evaluate) -> list[Path]:
    """Files of the user's own tasks, sorted; [] without evaluate.include_path. Raises ConfigError where
    there is no such directory."""
    if not evaluate.tasks or evaluate.include_path is None:
        return []
    folder = Path(evaluate.include_path)
    if not folder.is_dir():
        raise ConfigError(
            f"evaluate.include_path is {evaluate.include_path!r}, and there is no such directory",
            fix="name the directory of your task files, relative to the project's",
        )
    with disk_trouble(folder, "read"):
        return sorted(path for path in folder.rglob("*") if path.suffix in TASK_FILES)


def task_digest(evaluate: Evaluate) -> str:
    """Digest of the names and contents of these files; empty without any."""
    files = task_files(evaluate)
    if not files:
        return ""
    with disk_trouble(files[0], "read"):
        digests = {
            str(path.relative_to(str(evaluate.include_path))): digest_file(path) for path in files
        }
    return digest_bytes(canonical(digests))


def data_file(paths: RunPaths) -> Path:
    """The record of the data that was downloaded."""
    return paths.evaluations / "data.json"


def record_file(paths: RunPaths, step: int) -> Path:
    """The file with the scores of the checkpoint at this step."""
    return paths.evaluations / f"{checkpoint_name(step)}.json"


def read_evaluations(paths: RunPaths) -> list[Evaluation]:
    """The scores of all evaluated checkpoints, by step. Raises DataError where a file is corrupt."""
    files = paths.evaluations.glob("step-*.json") if paths.evaluations.is_dir() else ()
    records = [path for path in files if checkpoint_step(path.stem) is not None]
    return sorted(map(Evaluation.read, records), key=lambda evaluation: evaluation.step)
