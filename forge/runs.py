"""The sample sheet: one row a run, columns override config keys by dotted name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

from forge.config import RUN_NAME, Config, apply_overrides, checked, read_cell
from forge.errors import ConfigError


def read_runs(path: str | Path) -> dict[str, dict[str, Any]]:
    """Overrides by run name, in the order of the rows; empty cells override nothing.

    Raises ConfigError that names row, column and value of a bad name or cell.
    """
    try:
        table = pd.read_csv(path, sep="\t", dtype=str, keep_default_na=False, comment="#")
    except FileNotFoundError:
        raise ConfigError(f"sample sheet {path} does not exist") from None
    except (ValueError, OSError) as err:
        raise ConfigError(
            f"cannot read sample sheet {path}: {err}",
            cause="not a table with tabs between its columns",
        ) from None
    if "run" not in table.columns:
        raise ConfigError(
            f"sample sheet {path} has the columns {', '.join(table.columns)}, but no column run",
            cause="blanks instead of tabs between columns" if len(table.columns) == 1 else "",
            fix="the first line names the columns, separated by tabs: run, train.max_steps, …",
        )
    runs: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(table.to_dict("records"), start=2):
        name = row["run"].strip()
        where = f"{path}, row {number}"
        if not re.fullmatch(RUN_NAME, name):
            raise ConfigError(
                f"{where}, column run: {name!r} cannot name a run",
                fix="use letters, digits, - and _, at most 64, beginning with a letter or digit",
            )
        if name in runs:
            raise ConfigError(f"{where}, column run: {name!r} is there twice")
        cells = {
            str(column): read_cell(cell.strip())
            for column, cell in row.items()
            if column != "run" and cell.strip()
        }
        runs[name] = {"run": name, **cells}
    if not runs:
        raise ConfigError(f"sample sheet {path} has no rows", fix="add one row a run")
    return runs


def resolve_runs(base: dict[str, Any], path: str | Path) -> dict[str, Config]:
    """The config of every run on the sheet: `base` with the row's cells. Raises ConfigError."""
    configs = {}
    for number, (name, overrides) in enumerate(read_runs(path).items(), start=2):
        where = f"{path}, row {number} (run {name})"
        try:
            configs[name] = checked(Config, apply_overrides(base, overrides), where)
        except ConfigError as err:
            raise _with_columns(err, overrides, where) from None
    return configs


def _with_columns(err: ConfigError, overrides: dict[str, Any], where: str) -> ConfigError:
    """The same error; where cells of this row are to blame, it names their columns and values."""
    detail = err.what.removeprefix(f"{where}: ")
    blamed = [
        f"column {key}: value {value!r}"
        for key, value in overrides.items()
        # A rule over several keys of a section names the section only.
        if key != "run" and (key in detail or detail.startswith(f"{key.partition('.')[0]}: "))
    ]
    return ConfigError(f"{', '.join([where, *blamed])}: {detail}", fix=err.fix)


def shared_folders(runs: dict[str, Config]) -> tuple[str, str]:
    """The folders `results` and `data`, which all runs of a sheet must share."""
    folders = {(config.results, config.data) for config in runs.values()}
    if len(folders) > 1:
        raise ConfigError(
            f"the runs have different folders: {sorted(folders)}",
            fix="set results and data in config.yaml, not in the sample sheet",
        )
    return folders.pop()
