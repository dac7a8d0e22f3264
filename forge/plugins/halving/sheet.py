"""The sample sheet with another train.max_steps for some of its runs: their cells, and nothing else."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from forge.core.errors import ConfigError
from forge.core.sample_sheet import GRID, SheetRow
from forge.core.values import as_cell, read_cell

STEPS = "train.max_steps"


def with_steps_of(text: str, rows: Sequence[SheetRow], runs: Collection[str], steps: int) -> str:
    """The text of a sheet in which these runs have `steps`. A line with cells of a grid becomes one line
    for each of its runs, whose names stay. rows: as the text has them.

    Raises ConfigError for a sheet without a column train.max_steps, or with a grid of it.
    """
    lines = text.split("\n")
    of_line: dict[int, list[SheetRow]] = defaultdict(list)
    for row in rows:
        of_line[row.line].append(row)
    header = next(line for line in lines if line.strip() and not line.startswith("#"))
    heads = [head.strip() for head in header.split("\t")]
    if STEPS not in heads:
        there = (
            f"is a grid ({GRID})" if any(head.endswith(STEPS) for head in heads) else "is missing"
        )
        raise ConfigError(
            f"the column {STEPS} of the sample sheet {there}: its cells say how far a run trains",
            fix=f"give the sheet a column {STEPS}, with a cell for each line",
        )
    for number, own in of_line.items():
        if any(row.run in runs for row in own):
            cells = lines[number - 1].split("\t")
            each = [_cells(cells, heads, row, steps if row.run in runs else None) for row in own]
            lines[number - 1] = "\n".join("\t".join(one) for one in each)
    return "\n".join(lines)


def _cells(cells: list[str], heads: list[str], row: SheetRow, steps: int | None) -> list[str]:
    """The cells of a run in a line of its own. steps: None for those that the line has."""
    own = []
    values: dict[str, Any] = {**row.overrides, **row.layout}
    for cell, head in zip(cells, heads, strict=True):
        old = new = cell.strip()
        if head.startswith(GRID) and old:
            new = _in_grid(values[head.removeprefix(GRID).strip()])
        elif head == STEPS and steps is not None:
            new = as_cell(steps)
        own.append(cell.replace(old, new) if old else new + cell)
    return own


def _in_grid(value: Any) -> str:
    """The cell of a grid that has this one value. There a plain word ends at a comma."""
    text = as_cell(value)
    return text if read_cell(f"[{text}]") == [value] else json.dumps(value)
