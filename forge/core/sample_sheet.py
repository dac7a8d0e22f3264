"""The sample sheet: one row per run, or per grid of runs; columns override config keys by dotted name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from forge.core import hooks
from forge.core.config import OF_FORGES_TRAINER, RUN_NAME, Config, apply_overrides, checked
from forge.core.errors import ConfigError
from forge.core.paths import SHEET
from forge.core.values import as_cell, read_cell, read_text, shown

# Columns that are not config keys, since they change nothing of what is trained: as in the profile.
LAYOUT = ("nodes", "tasks_per_node")
COLUMN = r"[A-Za-z_][\w.]*"  # as the dotted names on the command line
GRID = "grid:"  # before the name of a column whose cells have several values


@dataclass(frozen=True)
class SheetRow:
    """One run of the sheet."""

    line: int  # number in the file, from 1
    run: str
    overrides: dict[str, Any]  # config key by dotted name -> value, without empty cells
    layout: dict[str, int]  # those of LAYOUT that have a cell


def read_rows(path: str | Path) -> list[SheetRow]:
    """The rows of the sheet, in order; for a row with cells in columns of a grid, one for each of their
    combinations, the last column changing first.

    Raises ConfigError that names line, column and value. Nothing is guessed: a cell in the wrong column
    would train another model.
    """
    lines = _lines(path)
    if not lines:
        raise ConfigError(f"sample sheet {path} is empty", fix="copy config/runs.tsv from Forge")
    header, *rows = lines
    columns = _columns(path, *header)
    seen: dict[str, int] = {}
    read = []
    for line, cells in rows:
        for row in _rows(f"{path}, line {line}", line, columns, cells):
            if row.run in seen:
                raise ConfigError(
                    f"{path}, line {line}, column run: duplicate run name {row.run!r}, already used on"
                    f" line {seen[row.run]}",
                    fix="give each run a name of its own, and each value of a grid once",
                )
            seen[row.run] = line
            read.append(row)
    if not read:
        raise ConfigError(f"sample sheet {path} has no rows", fix="add one row for each run")
    return read


def _lines(path: str | Path) -> list[tuple[int, list[str]]]:
    """Line number and cells of each line that is neither a comment nor blank. Quotes are part of a
    cell."""
    text = read_text(path, "sample sheet")
    return [
        (number, line.split("\t"))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip() and not line.startswith("#")
    ]


def _columns(path: str | Path, line: int, cells: list[str]) -> dict[str, bool]:
    """The names in the header, and whether each is marked as a grid."""
    heads = [cell.strip() for cell in cells]
    columns = [head.removeprefix(GRID).strip() for head in heads]
    where = f"{path}, line {line}"
    if "run" not in columns:
        raise ConfigError(
            f"sample sheet {path} has the columns {', '.join(columns)}, but no column run",
            cause="commas or blanks instead of tabs between columns" if len(columns) == 1 else "",
            fix="the first line names the columns, separated by tabs: run, train.max_steps, …",
        )
    for number, column in enumerate(columns, start=1):
        if not column:
            raise ConfigError(
                f"{where}: column {number} has no name",
                cause="two tabs in a row, or a tab at the end of the line",
                fix="remove the column, or name it",
            )
        if not re.fullmatch(COLUMN, column):
            raise ConfigError(
                f"{where}: column {number} is {column!r}, which cannot be a config key",
                cause="blanks instead of a tab between two columns" if " " in column else "",
                fix="name columns by dotted config keys, such as train.max_steps",
            )
        if columns.index(column) != number - 1:
            raise ConfigError(
                f"{where}: columns {columns.index(column) + 1} and {number} are both {column}",
                fix="remove one of them",
            )
    marked = {column: head.startswith(GRID) for column, head in zip(columns, heads, strict=True)}
    if marked["run"]:
        raise ConfigError(
            f"{where}: the column run cannot be a grid",
            fix=f"write {GRID} before the keys that have several values; each run's name is made of them",
        )
    return marked


def _rows(where: str, line: int, columns: dict[str, bool], cells: list[str]) -> Iterator[SheetRow]:
    """The runs of one line of the sheet."""
    cells = [cell.strip() for cell in cells]
    if len(cells) != len(columns):
        raise ConfigError(
            f"{where}: {len(cells)} cells, but the header names {len(columns)} columns"
            f" ({', '.join(columns)})",
            cause="a tab at the end of the line"
            if len(cells) > len(columns) and not cells[-1]
            else "",
            fix="separate the cells by single tabs, one cell for each column; a cell may be empty",
        )
    named = dict(zip(columns, cells, strict=True))
    grid = {
        column: _grid_values(f"{where}, column {column}", named[column])
        for column, several in columns.items()
        if several and named[column]
    }
    for chosen in itertools.product(*grid.values()):
        values = dict(zip(grid, chosen, strict=True))
        run = "-".join([named["run"], *(_in_name(c, v, grid) for c, v in values.items())])
        # As text: the cells of a grid are read as those of other columns.
        texts = {column: as_cell(value) for column, value in values.items()}
        yield _row(where, line, {**named, "run": run, **texts})


def _grid_values(where: str, cell: str) -> list[Any]:
    """The values in a cell of a grid, separated by commas."""
    values = read_cell(f"[{cell}]")
    if not isinstance(values, list):
        raise ConfigError(
            f"{where}: {shown(cell)} is not a list of values",
            fix="separate the values by commas: 1e-3, 3e-4",
        )
    return values


def _in_name(column: str, value: Any, grid: Iterable[str]) -> str:
    """The part of a run's name that says its value in this column: `lr3e-4`. A name has no dots, so that
    0.00015 is `15e-5`."""
    short = column.rpartition(".")[2]
    if [other.rpartition(".")[2] for other in grid].count(short) > 1:
        short = column.replace(".", "_")
    if isinstance(value, float):
        _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
        text = "-" * (value < 0) + "".join(map(str, digits)) + (f"e{exponent}" if exponent else "")
    else:
        text = re.sub("[^A-Za-z0-9_-]+", "_", as_cell(value)).strip("_")
    return short + text


def _row(where: str, line: int, values: dict[str, str]) -> SheetRow:
    name = values.pop("run")
    if not re.fullmatch(RUN_NAME, name):
        raise ConfigError(
            f"{where}, column run: {name!r} cannot name a run",
            cause=f"it has {len(name)} characters" if len(name) > 64 else "",
            fix="use letters, digits, - and _, at most 64, beginning with a letter or digit",
        )
    layout = {
        column: _count(where, column, cell) for column in LAYOUT if (cell := values.pop(column, ""))
    }
    overrides = {column: read_cell(cell) for column, cell in values.items() if cell}
    return SheetRow(line, name, overrides, layout)


def _count(where: str, column: str, cell: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,5}", cell):
        raise ConfigError(
            f"{where}, column {column}: value {shown(cell)} is not a number of 1 or more",
            fix="give the number of nodes, or of ranks on each node, or leave the cell empty",
        )
    return int(cell)


def run_configs(base: dict[str, Any], path: str | Path) -> dict[str, Config]:
    """The config of every run in the sheet: `base` with the overrides of its row. Raises ConfigError."""
    configs = {}
    for row in read_rows(path):
        where = f"{path}, line {row.line} (run {row.run})"
        if base.get("program"):
            _refuse_columns_of_trainer(row, path)
        try:
            values = apply_overrides(base, {"run": row.run, **row.overrides})
            configs[row.run] = checked(Config, values, where)
        except ConfigError as err:
            raise _with_columns(err, row.overrides, where) from None
    return configs


def _refuse_columns_of_trainer(row: SheetRow, path: str | Path) -> None:
    """ConfigError where a cell is about Forge's own trainer: a program would not see it, and rows that
    differ in nothing else would be one training under several names."""
    of_plugins = [key for key, section in hooks.sections().items() if section.IS_OF_TRAINER]
    sections = (*OF_FORGES_TRAINER, "parent", *of_plugins)
    cells = [
        f"column {key}: value {shown(value)}"
        for key, value in row.overrides.items()
        if key.partition(".")[0] in sections
    ]
    if cells:
        raise ConfigError(
            f"{path}, line {row.line} (run {row.run}), {', '.join(cells)}: the config has a program,"
            " which takes the place of Forge's own trainer, and reads no such key",
            cause=f"a config without the key `runs` reads {SHEET}" if str(path) == SHEET else "",
            fix="name a sheet for the program in its config, such as `runs: config/program.tsv`: its"
            " first line is `run`, and each other line the name of a run. Or leave these cells empty",
        )


def _with_columns(err: ConfigError, overrides: dict[str, Any], where: str) -> ConfigError:
    """The error, with the columns and values of the cells in this row that cause it; of the config that
    the rows share, where no cell does."""
    detail = err.what.removeprefix(f"{where}: ")
    blamed = [
        f"column {key}: value {shown(value)}"
        for key, value in overrides.items()
        # A rule about several keys of a section names only the section.
        if key in detail or detail.startswith(f"{key.partition('.')[0]}: ")
    ]
    if not blamed:
        where = "the config (config/config.yaml, or what --configfile and --config give)"
    return ConfigError(f"{', '.join([where, *blamed])}: {detail}", fix=err.fix)


def shared_folders(runs: Mapping[str, Config]) -> tuple[str, str]:
    """The directories `results` and `data`, which all runs of a sheet must share. Raises ConfigError."""
    folders = {(config.results, config.data) for config in runs.values()}
    if len(folders) > 1:
        raise ConfigError(
            f"the runs have different directories: {sorted(folders)}",
            fix="set results and data in config.yaml, not in the sample sheet",
        )
    return folders.pop()
