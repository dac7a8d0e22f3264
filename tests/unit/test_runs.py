"""The sample sheet is typed by tired people: each mistake is told with row, column and value."""

import pytest

from forge.errors import ConfigError
from forge.runs import read_runs, resolve_runs, shared_folders


@pytest.fixture
def sheet(tmp_path):
    def write(text):
        path = tmp_path / "runs.tsv"
        path.write_text(text)
        return path

    return write


def test_columns_override_keys_and_empty_cells_do_not(sheet):
    path = sheet("run\ttrain.seed\tmodel.dim\na\t1\t128\nb\t\t64\n")
    runs = resolve_runs({"train": {"seed": 9}}, path)
    assert runs["a"].train.seed == 1
    assert runs["b"].train.seed == 9
    assert runs["b"].model.dim == 64


def test_bad_cell_names_row_column_and_value(sheet):
    path = sheet("run\ttrain.lr\na\t0.1\nb\tfast\n")
    with pytest.raises(ConfigError) as caught:
        resolve_runs({}, path)
    assert "row 3 (run b), column train.lr: value 'fast'" in str(caught.value)


def test_cells_that_do_not_fit_together_are_named(sheet):
    path = sheet("run\tmodel.dim\tmodel.heads\ttrain.seed\na\t100\t8\t1\n")
    with pytest.raises(ConfigError) as caught:
        resolve_runs({}, path)
    assert "column model.dim: value 100, column model.heads: value 8:" in str(caught.value)
    assert "train.seed" not in str(caught.value)


def test_unknown_column_is_refused(sheet):
    with pytest.raises(ConfigError, match=r"train\.learning_rate"):
        resolve_runs({}, sheet("run\ttrain.learning_rate\na\t1\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run\na\na\n", r"row 3, column run: 'a' is there twice"),
        ("run\na\n../b\n", r"row 3, column run: '\.\./b' cannot name a run"),
        ("run\n", "no rows"),
        ("name\na\n", "no column run"),
        ("run train.lr\na 1\n", "blanks instead of tabs"),
        ("", "cannot read"),
    ],
)
def test_bad_sheet_is_refused(sheet, text, message):
    with pytest.raises(ConfigError, match=message):
        read_runs(sheet(text))


def test_missing_sheet_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nope\.tsv does not exist"):
        read_runs(tmp_path / "nope.tsv")


def test_runs_with_different_result_folders_are_refused(sheet):
    runs = resolve_runs({}, sheet("run\tresults\na\tx\nb\ty\n"))
    with pytest.raises(ConfigError, match="different folders"):
        shared_folders(runs)
