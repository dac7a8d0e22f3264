"""Names of checkpoint directories: one function writes them, one reads them back."""

import shutil

import pytest

from forge.core.errors import UnfitError
from forge.core.paths import RunPaths, by_step, checkpoint_name, checkpoint_step, place_logs


@pytest.mark.parametrize("step", [0, 1, 99_999_999, 100_000_000, 10**12])
def test_a_step_is_read_back_from_the_name_of_its_checkpoint(step):
    assert checkpoint_step(checkpoint_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["best", "step-100", "step-00000100.bak", "step-000000100", "step-0000010\u0660", "step-"],
)
def test_other_names_are_of_no_step(name):
    assert checkpoint_step(name) is None


def test_names_sort_by_step_and_second_copies_after_the_first(tmp_path):
    names = ["step-100000000", "step-00000020.2", "step-99999999", "best", "step-00000020"]
    found = sorted((tmp_path / name for name in names), key=by_step)
    assert [folder.name for folder in found] == [names[i] for i in (3, 4, 1, 2, 0)]


def test_logs_of_a_new_run_go_where_the_variable_says(tmp_path, monkeypatch):
    paths, old = RunPaths(tmp_path / "results/base"), RunPaths(tmp_path / "results/old")
    old.logs.mkdir(parents=True)
    monkeypatch.setenv("FORGE_LOG_DIR", str(tmp_path / "logs"))
    for _ in range(2):
        place_logs(paths)
        place_logs(old)
    (paths.logs / "train.log").write_text("said")
    [file] = tmp_path.glob("logs/base-*/train.log")
    assert file.read_text() == "said"
    assert not old.logs.is_symlink()


def test_runs_of_one_name_and_a_new_run_in_the_place_of_a_removed_one_share_no_logs(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("FORGE_LOG_DIR", str(tmp_path / "logs"))
    mine, theirs = (RunPaths(tmp_path / name / "results/base") for name in ("mine", "theirs"))
    for paths in (mine, theirs):
        place_logs(paths)
        (paths.logs / "train.log").write_text(str(paths.root))
    assert (mine.logs / "train.log").read_text() == str(mine.root)
    for _ in range(2):
        shutil.rmtree(mine.root)
        place_logs(mine)
        assert not [*mine.logs.iterdir()]
        (mine.logs / "train.log").write_text("again")
    assert len([*tmp_path.glob("logs/*/train.log")]) == 4


def test_directory_for_logs_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "logs").write_text("a file")
    monkeypatch.setenv("FORGE_LOG_DIR", str(tmp_path / "logs"))
    with pytest.raises(UnfitError, match="logs/base"):
        place_logs(RunPaths(tmp_path / "results/base"))
