"""Threat: a task that is misspelled waits for days in a queue, or another one is scored."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import lm_eval.tasks.manager
import pytest

from forge.core.errors import ConfigError, UnfitError
from forge.core.paths import RunPaths
from forge.plugins.evaluation import tasks
from forge.plugins.evaluation.settings import Evaluate

pytestmark = pytest.mark.all


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with the tasks `colors` and a broken one, beside a harness that has `hellaswag`."""
    for folder, name in (("harness", "hellaswag"), ("own", "colors")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.yaml").write_text(f"task: {name}\ndataset_path: json\n")
    (tmp_path / "own/broken.yaml").write_text("task: [")
    manager = str(tmp_path / "harness/manager.py")
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", manager)
    tasks._index.cache_clear()
    yield str(tmp_path / "own")
    tasks._index.cache_clear()


def test_tasks_of_the_harness_and_own_ones_are_found(own: str) -> None:
    index = tasks.find_tasks(Evaluate(tasks=["hellaswag", "colors"], include_path=own))
    assert index.all_subtasks == ["colors", "hellaswag"]
    only_own = tasks.find_tasks(Evaluate(tasks=["colors"], include_path=own))
    assert only_own.all_subtasks == ["colors"]


def test_unknown_task_is_refused_with_close_names_and_those_of_the_directory(own: str) -> None:
    with pytest.raises(ConfigError) as err:
        tasks.find_tasks(Evaluate(tasks=["colors", "helaswag"], include_path=own))
    assert "'helaswag'" in err.value.what and "did you mean hellaswag?" in err.value.what
    assert "include_path has colors;" in err.value.cause


def test_directory_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nowhere', and there is no such directory"):
        tasks.find_tasks(Evaluate(tasks=["colors"], include_path="nowhere"))


class Raises:
    """An index whose tasks cannot be loaded."""

    def __init__(self, err: Exception) -> None:
        self.err = err

    def load(self, names: list[str]) -> None:
        raise self.err


@pytest.mark.parametrize(
    "err",
    [
        ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub (OfflineModeIsEnabled)"),
        ValueError("Couldn't find cache for Rowan/hellaswag for config 'default'"),
    ],
)
def test_data_that_is_not_cached_names_the_command_that_downloads_it(err: Exception) -> None:
    wanted = Evaluate(tasks=["hellaswag", "mmlu"], include_path="my tasks")
    with pytest.raises(UnfitError, match="data of task hellaswag is not in the cache") as told:
        tasks.load(Raises(err), wanted, RunPaths(Path("results/base")))
    assert told.value.fix.endswith(
        "forge evaluate --download results/base '--evaluate.tasks=[hellaswag,mmlu]'"
        " '--evaluate.include_path=my tasks'"
    )
    with pytest.raises(UnfitError, match="data of task hellaswag cannot be downloaded"):
        tasks.load(Raises(err), wanted)


@pytest.mark.parametrize(
    ("err", "said"),
    [
        (ModuleNotFoundError("No module named 'langdetect'"), "needs a package: No module named"),
        (FileNotFoundError("Unable to find '/x/words.jsonl'"), "Unable to find '/x/words.jsonl'"),
        (KeyError("test_split"), "cannot be loaded: KeyError: 'test_split'"),
    ],
)
def test_task_that_cannot_be_used_is_refused_with_the_reason(err: Exception, said: str) -> None:
    with pytest.raises(ConfigError) as told:
        tasks.load(Raises(err), Evaluate(tasks=["x"]), RunPaths(Path("results/base")))
    assert "task x" in told.value.what and said in told.value.what


def test_task_that_runs_code_of_the_model_is_refused() -> None:
    task = SimpleNamespace(get_config=lambda key: key == "unsafe_code")
    index = SimpleNamespace(load=lambda names: {"tasks": {"humaneval": task}})
    with pytest.raises(ConfigError, match="task humaneval runs code that the model writes"):
        tasks.load(index, Evaluate(tasks=["humaneval"]))


def test_harness_that_is_not_installed_is_refused_only_where_tasks_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "PACKAGE", "no_such_package")
    tasks.refuse_missing_package(Evaluate(), "run base")
    with pytest.raises(ConfigError, match=r"run base: .*, but Python has no package") as err:
        tasks.refuse_missing_package(Evaluate(tasks=["x"]), "run base")
    assert "make setup EXTRAS=evaluate" in err.value.fix
