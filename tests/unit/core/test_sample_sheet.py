"""The sample sheet is typed by tired people: each mistake is told with row, column and value."""

import pytest

from forge.core.errors import ConfigError
from forge.core.sample_sheet import read_rows, run_configs, shared_folders


@pytest.fixture
def sheet(tmp_path):
    def write(text):
        path = tmp_path / "runs.tsv"
        path.write_text(text)
        return path

    return write


def test_columns_override_keys_and_empty_cells_do_not(sheet):
    path = sheet("run\ttrain.seed\tmodel.dim\na\t1\t128\nb\t\t64\n")
    runs = run_configs({"train": {"seed": 9}}, path)
    assert runs["a"].train.seed == 1
    assert runs["b"].train.seed == 9
    assert runs["b"].model.dim == 64


def test_bad_cell_names_row_column_and_value(sheet):
    path = sheet("run\ttrain.lr\na\t0.1\nb\tfast\n")
    with pytest.raises(ConfigError) as caught:
        run_configs({}, path)
    assert "line 3 (run b), column train.lr: value 'fast'" in str(caught.value)


def test_cells_of_forges_trainer_are_refused_for_a_program_with_what_to_write(
    sheet, tmp_path, monkeypatch
):
    """A config of three lines was refused for a column of the default sheet that nobody named."""
    program = {"program": {"command": ["true"]}}
    path = sheet("run\ttrain.seed\ttrain.lr\tparent\na\t\t\t\nb\t0\t\ta@5\n")
    with pytest.raises(ConfigError) as caught:
        run_configs(program, path)
    told = (
        "line 3 (run b), column train.seed: value 0, column parent: value 'a@5': the config has a"
    )
    assert told in caught.value.what and "train.lr" not in caught.value.what
    assert "`runs: config/program.tsv`" in caught.value.fix
    (tmp_path / "config").mkdir()
    path.rename(tmp_path / "config/runs.tsv")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as of_default:
        run_configs(program, "config/runs.tsv")
    assert caught.value.cause == ""
    assert of_default.value.cause == "a config without the key `runs` reads config/runs.tsv"
    runs = run_configs(program, sheet("run\ttrain.seed\tprogram.keep_last\na\t\t\nb\t\t3\n"))
    assert (runs["a"].program.keep_last, runs["b"].program.keep_last) == (None, 3)


def test_cells_that_do_not_fit_together_are_named(sheet):
    path = sheet("run\tmodel.dim\tmodel.heads\ttrain.seed\na\t100\t8\t1\n")
    with pytest.raises(ConfigError) as caught:
        run_configs({}, path)
    assert "column model.dim: value 100, column model.heads: value 8:" in str(caught.value)
    assert "train.seed" not in str(caught.value)


def test_unknown_column_is_refused(sheet):
    with pytest.raises(ConfigError, match=r"train\.learning_rate"):
        run_configs({}, sheet("run\ttrain.learning_rate\na\t1\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run\na\na\n", r"line 3, column run: duplicate run name 'a', already used on line 2"),
        ("run\na\n../b\n", r"line 3, column run: '\.\./b' cannot name a run"),
        ("run\n", "no rows"),
        ("name\na\n", "no column run"),
        ("run train.lr\na 1\n", "commas or blanks instead of tabs"),
        ("", "is empty"),
        ("# only\n\n", "is empty"),
        ("run\ttrain.seed\t\na\t1\t\n", "line 1: column 3 has no name"),
        ("run\ttrain.seed\ttrain.seed\na\t1\t2\n", "columns 2 and 3 are both train.seed"),
        ("run\ttrain.seed train.lr\na\t1\n", "column 2 is 'train.seed train.lr'.*\n.*blanks"),
        ("run\tid\trun\na\t1\tb\n", "columns 1 and 3 are both run"),
    ],
)
def test_bad_sheet_is_refused(sheet, text, message):
    with pytest.raises(ConfigError, match=message):
        read_rows(sheet(text))


def test_missing_sheet_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nope\.tsv does not exist"):
        read_rows(tmp_path / "nope.tsv")


def test_runs_with_different_result_folders_are_refused(sheet):
    runs = run_configs({}, sheet("run\tresults\na\tx\nb\ty\n"))
    with pytest.raises(ConfigError, match="different directories"):
        shared_folders(runs)


# --- cells and columns ------------------------------------------------------------------------------


def test_tab_at_the_end_of_every_row_is_refused_and_shifts_nothing(sheet):
    """pandas takes the first column for an index then, and trains a run called 7 with seed 0."""
    with pytest.raises(ConfigError) as caught:
        read_rows(sheet("run\ttrain.seed\nbase\t7\t\n"))
    assert "line 2: 3 cells, but the header names 2 columns (run, train.seed)" in str(caught.value)
    assert "a tab at the end of the line" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "cells"),
    [
        ("run\ttrain.seed\na\t1\nb\t2\t3\n", 3, 3),
        ("run\ttrain.seed\na\t1\nb\n", 3, 1),
        ("# c\n\nrun\ttrain.seed\n# c\na\t1\n\n#\nb\n", 8, 1),
    ],
)
def test_row_of_another_width_is_refused_by_its_line_in_the_file(sheet, text, line, cells):
    with pytest.raises(ConfigError, match=rf"line {line}: {cells} cells, but the header names 2"):
        read_rows(sheet(text))


def test_bad_cell_below_comments_and_blank_lines_is_reported_with_its_line_in_the_file(sheet):
    path = sheet("# c\nrun\ttrain.lr\n\n# c\nb\tfast\n")
    with pytest.raises(ConfigError, match=r"line 5 \(run b\), column train\.lr: value 'fast'"):
        run_configs({}, path)


def test_value_of_the_shared_config_is_not_blamed_on_a_row(sheet):
    path = sheet("run\ttrain.lr\na\t0.1\n")
    with pytest.raises(ConfigError, match=r"^the config .*: train\.max_steps is 'many'") as caught:
        run_configs({"train": {"max_steps": "many"}}, path)
    assert str(path) not in str(caught.value)


def test_column_below_a_value_is_reported_with_its_line(sheet):
    with pytest.raises(ConfigError, match=r"line 2 \(run a\), column run\.x: value 1: cannot set"):
        run_configs({}, sheet("run\trun.x\na\t1\n"))


def test_lines_of_tabs_only_and_comments_are_no_rows(sheet):
    (row,) = read_rows(sheet("run\ttrain.seed\n\t\n#a\t1\t2\nb\t3\n"))
    assert (row.line, row.run, row.overrides) == (4, "b", {"train.seed": 3})


def test_hash_inside_a_cell_does_not_cut_it(sheet):
    (row,) = read_rows(sheet("run\ttokenizer.eos_token\na\t<#eos#>\n"))
    assert row.overrides == {"tokenizer.eos_token": "<#eos#>"}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_sheet_saved_by_a_spreadsheet_is_read(tmp_path, end):
    path = tmp_path / "runs.tsv"
    lines = ["run \t train.seed", "a\t1", "b\t"]
    path.write_bytes(b"\xef\xbb\xbf" + end.join(lines).encode())
    assert [(row.run, row.overrides) for row in read_rows(path)] == [
        ("a", {"train.seed": 1}),
        ("b", {}),
    ]


def test_sheet_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "runs.tsv"
    path.write_bytes("run\na\n".encode("utf-16"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_rows(path)


def test_nodes_and_ranks_are_no_config_keys(sheet):
    path = sheet("run\tnodes\ttasks_per_node\ttrain.seed\na\t3\t\t1\nb\t\t2\t1\n")
    assert [row.layout for row in read_rows(path)] == [{"nodes": 3}, {"tasks_per_node": 2}]
    assert [config.train.seed for config in run_configs({}, path).values()] == [1, 1]


@pytest.mark.parametrize("cell", ["0", "-1", "two", "1.5"])
def test_number_of_nodes_that_is_none_is_named(sheet, cell):
    with pytest.raises(ConfigError, match=rf"line 2, column nodes: value '{cell}' is not a number"):
        read_rows(sheet(f"run\tnodes\na\t{cell}\n"))


# --- grids ------------------------------------------------------------------------------------------


def test_row_of_a_grid_is_every_combination_named_by_its_values(sheet):
    path = sheet(
        "run\tgrid:train.lr\tgrid:train.seed\tmodel.dim\nbase\t1e-3, 0.00015\t0,1\t64\nalone\t\t7\t\n"
    )
    assert {row.run: row.overrides for row in read_rows(path)} == {
        "base-lr1e-3-seed0": {"train.lr": 1e-3, "train.seed": 0, "model.dim": 64},
        "base-lr1e-3-seed1": {"train.lr": 1e-3, "train.seed": 1, "model.dim": 64},
        "base-lr15e-5-seed0": {"train.lr": 1.5e-4, "train.seed": 0, "model.dim": 64},
        "base-lr15e-5-seed1": {"train.lr": 1.5e-4, "train.seed": 1, "model.dim": 64},
        "alone-seed7": {"train.seed": 7},
    }
    assert [config.train.lr for config in run_configs({}, path).values()][::2] == [
        1e-3,
        1.5e-4,
        3e-3,
    ]


def test_further_value_of_a_grid_renames_no_run(sheet):
    before = [row.run for row in read_rows(sheet("run\tgrid:train.seed\na\t0\n"))]
    after = [row.run for row in read_rows(sheet("run\tgrid:train.seed\na\t0,1\n"))]
    assert before == ["a-seed0"] == after[:1]


def test_layout_lists_and_words_may_be_a_grid(sheet):
    path = sheet(
        "run\tgrid:nodes\tgrid:train.betas\tgrid:train.schedule\na\t1,2\t[0.9, 0.95]\twsd\n"
    )
    rows = [(row.run, row.layout, row.overrides) for row in read_rows(path)]
    values = {"train.betas": [0.9, 0.95], "train.schedule": "wsd"}
    assert rows == [
        ("a-nodes1-betas0_9_0_95-schedulewsd", {"nodes": 1}, values),
        ("a-nodes2-betas0_9_0_95-schedulewsd", {"nodes": 2}, values),
    ]


def test_columns_of_equal_last_words_are_told_apart_in_names(sheet):
    path = sheet("run\tgrid:train.seed\tgrid:data.seed\na\t1\t2\n")
    assert [row.run for row in read_rows(path)] == ["a-train_seed1-data_seed2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "run\tgrid:train.seed\na\t0,,1\n",
            r"line 2, column train\.seed: '0,,1' is not a list of values",
        ),
        ("run\tgrid:train.seed\na\t1],[2\n", r"'1\],\[2' is not a list of values"),
        ("run\tgrid:train.seed\na\t0,1,0\n", "duplicate run name 'a-seed0'"),
        ("grid:run\na,b\n", "the column run cannot be a grid"),
        ("run\tgrid:train.seed\ttrain.seed\na\t0\t1\n", "columns 2 and 3 are both train.seed"),
        ("run\tgrid:nodes\na\t1,many\n", "column nodes: value 'many' is not a number"),
        (f"run\tgrid:train.seed\n{'a' * 60}\t0\n", "cannot name a run\n.*it has 66 characters"),
    ],
)
def test_bad_grid_is_refused(sheet, text, message):
    with pytest.raises(ConfigError, match=message):
        read_rows(sheet(text))


def test_bad_value_of_a_grid_names_its_run_and_column(sheet):
    path = sheet("run\tgrid:train.lr\na\t1e-3,fast\n")
    with pytest.raises(
        ConfigError, match=r"line 2 \(run a-lrfast\), column train\.lr: value 'fast'"
    ):
        run_configs({}, path)
