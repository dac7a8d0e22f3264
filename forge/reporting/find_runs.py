"""Find the runs that a command line names: those of the project in the current directory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from forge.checkpoint.export_folder import MANIFEST as EXPORT_MANIFEST
from forge.checkpoint.resume import is_checkpoint
from forge.core.config import CONFIG, Config, checked, read_values
from forge.core.errors import ConfigError, DataError
from forge.core.files import read_object_or_empty
from forge.core.paths import WORKFLOW_RUNS, RunPaths
from forge.core.records import WorkflowRuns
from forge.core.terminal import say


def find_runs(names: list[str], *, with_config: bool = False) -> list[RunPaths]:
    """Folders of runs, each given by its path or by its name; all of the project where none is given. A
    name without a slash is that of a run, where there is one, unless such a directory is itself one.

    with_config: refuse a directory without the config of a run; where no name is given, runs that may not
    be read are left out with a note. Raises ConfigError with the names that there are.
    """
    results = results_folder()
    there = _folders(results)
    runs = []
    for name in names:
        named = [folder for folder in there if folder.name == name]
        # A directory of the project, such as one of weights, may have the name of a run.
        is_path = "/" in name or _is_own(Path(name))
        places = [Path(name), *named] if is_path else [*named, Path(name)]
        folder = next((place for place in (*places, results / name) if place.is_dir()), None)
        if folder is None:
            raise ConfigError(
                f"there is no run {name}",
                fix=f"there are: {', '.join(path.name for path in there)}"
                if there
                else "go to the project's folder, or give the path of a run's folder",
            )
        run = RunPaths(folder)
        if with_config and not run.config.exists():
            raise ConfigError(
                f"{folder} is not a run's directory: it has no {run.config.name}",
                fix="name directories such as results/base",
            )
        runs.append(run)
    if runs:
        return runs
    closed = [folder for folder in there if not os.access(folder, os.X_OK)] if with_config else []
    for folder in closed:
        say(f"note: {folder} may not be read, and is left out")
    return [RunPaths(folder) for folder in there if folder not in closed]


def _is_own(folder: Path) -> bool:
    """Return whether the directory is that of a run, a checkpoint or an export. That of a model has a
    config.json, too."""
    with suppress(PermissionError):
        is_run = "run" in read_object_or_empty(RunPaths(folder).config)
        return is_run or is_checkpoint(folder) or (folder / EXPORT_MANIFEST).is_file()
    return False


def _folders(results: Path) -> list[Path]:
    """Directories of the runs in `results`, and before them those of the last workflow command, whose
    `results` may have come from its --configfile or --config."""
    try:
        last = WorkflowRuns.read_if_there(WORKFLOW_RUNS)
    except DataError as err:
        say(f"note: {err.what}")
        last = None
    recorded = [Path(folder) for folder in last.folders.values()] if last else []
    there = sorted(results.iterdir()) if results.is_dir() else []
    there = [
        folder for folder in there if folder.name != "lost+found"
    ]  # closed, of a disk's file system
    folders = [folder for folder in (*recorded, *there) if _may_be_run(folder)]
    return list({folder.resolve(): folder for folder in folders}.values())


def _may_be_run(folder: Path) -> bool:
    """Return whether the directory has a config, or may not be read: its reader then says so."""
    try:
        return RunPaths(folder).config.exists()
    except PermissionError:
        return True


def results_folder() -> Path:
    """Directory of the runs by config/config.yaml; results/ without that file, or where it is being
    edited, which hides no run."""
    return Path(project_folder("results"))


def project_folder(key: str) -> str:
    """Directory that config/config.yaml gives for its runs (`results`), or its tokenizers and tokens
    (`data`); the default without that file, and where it is being edited, which is said."""
    default = str(Config.model_fields[key].default)
    if not Path(CONFIG).exists():
        return default
    try:
        values = {key: read_values(CONFIG).get(key, default)}
        return str(getattr(checked(Config, values, CONFIG), key))
    except ConfigError as err:
        what = "runs" if key == "results" else key
        say(f"note: {err.what}; looking for {what} in {default}/")
        return default
