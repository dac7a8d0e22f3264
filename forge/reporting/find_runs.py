"""Find the runs that a command line names: those of the project in the current directory."""

from __future__ import annotations

from pathlib import Path

from forge.core.config import Config, checked, read_values
from forge.core.errors import ConfigError
from forge.core.paths import CONFIG, RunPaths
from forge.core.terminal import say


def find_runs(names: list[str]) -> list[RunPaths]:
    """Folders of runs, each given by its path or by its name; all of the project where none is given.

    Raises ConfigError with the names that there are.
    """
    results = results_folder()
    there = sorted(path.parent for path in results.glob("*/config.json"))
    runs = []
    for name in names:
        folder = next((f for f in (Path(name), results / name) if f.is_dir()), None)
        if folder is None:
            raise ConfigError(
                f"there is no run {name}",
                fix=f"runs in {results}: {', '.join(path.name for path in there)}"
                if there
                else "go to the project's folder, or give the path of a run's folder",
            )
        runs.append(RunPaths(folder))
    return runs or [RunPaths(folder) for folder in there]


def results_folder() -> Path:
    """Where config/config.yaml has the runs (`results:`); results/ without that file.

    A config that is being edited hides no run: what is wrong with it is said, and results/ is taken.
    """
    default = Config.model_fields["results"].default
    if not Path(CONFIG).exists():
        return Path(default)
    try:
        results = read_values(CONFIG).get("results", default)
        return Path(checked(Config, {"results": results}, CONFIG).results)
    except ConfigError as err:
        say(f"note: {err.what}; looking for runs in {default}/")
        return Path(default)
