"""Tasks of the lm-evaluation-harness: by name, the files of a user's own, and their data in the cache."""

from __future__ import annotations

import difflib
import os
import shlex
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.core.errors import ConfigError, ForgeError, UnfitError
from forge.core.files import canonical, digest_bytes, digest_file, disk_trouble
from forge.core.paths import RunPaths
from forge.core.terminal import say
from forge.plugins.evaluation.records import EvaluationData
from forge.plugins.evaluation.settings import Evaluate

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PACKAGE = "lm_eval"
# What a directory of tasks holds: the tasks, their code, their data.
TASK_FILES = {".yaml", ".py", ".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet"}
MOST_LISTED = 12


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


def go_offline() -> None:
    """Take data from the cache only: compute nodes have no internet, and a try waits for minutes. Before
    any library of Hugging Face is imported, which reads the variables then."""
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    os.environ |= dict.fromkeys(offline, "1")


def harness_version() -> str:
    return version(PACKAGE)


def find_tasks(evaluate: Evaluate) -> TaskManager:
    """The harness' index of tasks, which has all that are asked for. ConfigError for unknown ones.

    Reading its own 14,000 tasks takes up to 15 s; where include_path has all, only that is read.
    """
    task_files(evaluate)  # refuses a directory that is not there
    own = _index(evaluate.include_path, False) if evaluate.include_path else None
    if own and set(evaluate.tasks) <= set(own.all_subtasks):
        return own
    index = _index(evaluate.include_path, True)
    for task in evaluate.tasks:
        if task not in index.task_index:
            raise _unknown(task, index.all_tasks, own.all_tasks if own else [])
    return index


@cache
def _index(include_path: str | None, with_defaults: bool) -> TaskManager:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=with_defaults)


def _unknown(task: str, known: list[str], own: list[str]) -> ConfigError:
    close = difflib.get_close_matches(task, known, n=3)
    listed = ", ".join(own[:MOST_LISTED]) + ", …" * (len(own) > MOST_LISTED)
    return ConfigError(
        f"evaluate.tasks has {task!r}, which is not a task of lm-eval {harness_version()}"
        + (f" (did you mean {', '.join(close)}?)" if close else ""),
        cause=f"evaluate.include_path has {listed}; a file that is not valid YAML is left out"
        if own
        else "",
        fix="`lm-eval ls tasks` lists all; evaluate.include_path names a directory of your own",
    )


def load(index: TaskManager, evaluate: Evaluate, paths: RunPaths | None = None) -> dict[str, Any]:
    """Task name -> task of the harness, with its data, for all tasks behind the names.

    paths: of the run, where data must be in the cache; None: it is downloaded. Raises UnfitError where it
    is not, or cannot be, and ConfigError for a task that cannot be used.
    """
    loaded: dict[str, Any] = {}
    for name in evaluate.tasks:
        try:
            loaded |= index.load([name])["tasks"]
        except Exception as err:
            command = _download_command(paths, evaluate) if paths else None
            raise _trouble(name, err, command) from err
    for name, task in loaded.items():
        if task.get_config("unsafe_code"):
            raise ConfigError(
                f"task {name} runs code that the model writes, which Forge does not do",
                fix="remove it from evaluate.tasks, or run lm-eval on what `forge export` writes",
            )
    return loaded


def _download_command(paths: RunPaths, evaluate: Evaluate) -> str:
    keys = {"tasks": f"[{','.join(evaluate.tasks)}]", "include_path": evaluate.include_path}
    given = [f"--evaluate.{key}={value}" for key, value in keys.items() if value]
    return shlex.join(["forge", "evaluate", "--download", str(paths.root), *given])


def _trouble(name: str, err: Exception, download_command: str | None) -> ForgeError:
    """Message for an exception of the harness, or of `datasets`, while a task is loaded."""
    if isinstance(err, ConnectionError) or "Couldn't find cache" in str(err):
        if download_command is None:
            return UnfitError(
                f"the data of task {name} cannot be downloaded: {err}",
                cause="no internet here, HF_HUB_OFFLINE is set, or access needs HF_TOKEN",
                fix="run the command on a node with internet, such as a login node",
            )
        return UnfitError(
            f"the data of task {name} is not in the cache, and the network is not used: {err}",
            cause="it was not downloaded, or HF_HOME is another one here",
            fix=f"on a node with internet: {download_command}",
        )
    if isinstance(err, ImportError):
        return ConfigError(
            f"task {name} needs a package: {err}", fix="install it, or remove the task"
        )
    return ConfigError(
        f"task {name} cannot be loaded: {type(err).__name__}: {err}",
        cause="its file is wrong, names data that is not there, or is of another version of lm-eval",
    )


def download(paths: RunPaths, evaluate: Evaluate) -> None:
    """`forge evaluate --download`: put the data of all tasks into the cache, and write down which. Raises
    as `find_tasks` and `load`."""
    loaded = load(find_tasks(evaluate), evaluate)
    documents = {name: len(task.eval_docs) for name, task in sorted(loaded.items())}
    data = EvaluationData(
        harness=harness_version(),
        task_files=task_digest(evaluate),
        documents=documents,
        tasks=evaluate.tasks,
        include_path=evaluate.include_path,
    )
    data.write(paths.evaluation_data)
    say(
        f"data of {', '.join(f'{name} ({n:,} documents)' for name, n in documents.items())}: cached"
    )
