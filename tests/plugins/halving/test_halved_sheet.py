"""The sample sheet of a halved sweep. Threat: other cells, comments or runs than meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.core.errors import ConfigError
from forge.core.sample_sheet import read_rows
from forge.plugins.halving.sheet import with_steps_of


def rewritten(folder: Path, text: str, runs: list[str], steps: int = 20) -> str:
    sheet = folder / "runs.tsv"
    sheet.write_text(text)
    return with_steps_of(text, read_rows(sheet), runs, steps)


def test_cells_of_kept_runs_change_and_nothing_else(tmp_path: Path) -> None:
    text = (
        "# a sweep\trates\n\nrun\ttrain.lr\ttrain.max_steps\ttrain.seed\n"
        "a\t1e-3\t 10 \t1\n# b is odd\nb\t2e-3\t10\t\nc\t\t10\t10\n"
    )
    expected = text.replace("1e-3\t 10 ", "1e-3\t 20 ").replace("c\t\t10", "c\t\t20")
    assert rewritten(tmp_path, text, ["a", "c"]) == expected


def test_runs_of_a_grid_get_lines_of_their_own_with_the_names_that_they_had(tmp_path: Path) -> None:
    text = (
        "run\tgrid:train.lr\tgrid:train.seed\ttrain.max_steps\n"
        "s\t1e-3, 3e-4\t0,1\t10\nt\t5e-4\t\t10\n"
    )
    sheet = tmp_path / "runs.tsv"
    sheet.write_text(text)
    before = {row.run: row.overrides for row in read_rows(sheet)}
    sheet.write_text(rewritten(tmp_path, text, ["s-lr3e-4-seed1", "t-lr5e-4"]))
    after = {row.run: row.overrides for row in read_rows(sheet)}
    assert len(before) == 5
    for run in ("s-lr3e-4-seed1", "t-lr5e-4"):
        before[run]["train.max_steps"] = 20
    assert after == before


def test_grid_cells_keep_null_text_with_commas_and_the_layout(tmp_path: Path) -> None:
    text = (
        "run\tgrid:train.fp8\tgrid:run_note\tgrid:nodes\tgrid:tasks_per_node\ttrain.max_steps\n"
        's\tnull, tensorwise\t"a, b", \'c: d\', "[e"\t1, 2\t4, 8\t10\n'
    )
    sheet = tmp_path / "runs.tsv"
    sheet.write_text(text)
    before = {row.run: (row.overrides, row.layout) for row in read_rows(sheet)}
    assert len(before) == 24
    sheet.write_text(rewritten(tmp_path, text, list(before)))
    after = {row.run: (row.overrides, row.layout) for row in read_rows(sheet)}
    for overrides, _ in before.values():
        overrides["train.max_steps"] = 20
    assert after == before


@pytest.mark.parametrize(
    ("head", "message"), [("train.seed", "is missing"), ("grid:train.max_steps", "is a grid")]
)
def test_sheet_without_a_cell_for_the_steps_of_each_run_is_refused(
    tmp_path: Path, head: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rewritten(tmp_path, f"run\t{head}\na\t1\n", ["a"])
