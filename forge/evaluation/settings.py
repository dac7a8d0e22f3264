"""What is evaluated: the section `evaluate` of a run, kept beside its results, and the records so far."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forge.core.errors import ConfigError
from forge.core.evaluation import Evaluate
from forge.core.files import canonical, digest_bytes, digest_file, disk_trouble
from forge.core.paths import RunPaths, checkpoint_name, checkpoint_step
from forge.core.records import Evaluation, EvaluationSettings

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


def keep_settings(paths: RunPaths, evaluate: Evaluate, sbatch: list[str] | None = None) -> None:
    """Write the settings for the processes that evaluate. Raises UnfitError where the disk is full."""
    path = _settings_file(paths)
    if evaluate.tasks or path.exists():
        EvaluationSettings(evaluate=evaluate, sbatch=sbatch).write(path)


def read_settings(paths: RunPaths) -> EvaluationSettings:
    """The settings that were kept. Raises DataError where the file is corrupt."""
    kept = EvaluationSettings.read_if_there(_settings_file(paths))
    return kept or EvaluationSettings(evaluate=Evaluate())


def kept_overrides(paths: RunPaths) -> dict[str, Any]:
    """The kept settings as overrides of config.json, which does not have them."""
    kept = read_settings(paths).evaluate
    return {f"evaluate.{key}": value for key, value in kept.model_dump(mode="json").items()}


def _settings_file(paths: RunPaths) -> Path:
    return paths.evaluations / "settings.json"


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
    return sorted(map(Evaluation.read, records), key=lambda found: found.step)
