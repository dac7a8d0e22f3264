"""Against a table in docs/faults.md that tells of cases which are no more, or leaves some out."""

from __future__ import annotations

import re

import pytest
from cases import CASES
from outcomes import BEGIN, COLUMNS, END, HEADS, NONE, PAGE

from forge.core.failpoints import FAILPOINTS

pytestmark = pytest.mark.tools


def measured() -> dict[tuple[str, str, int], str]:
    """(point, fault, ranks) -> cell, of every cell that is not empty."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    found = {}
    for part in text.strip().split("\n\n"):
        head, _, *rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()
        ]
        assert head[1:] == [HEADS[kind] for kind in COLUMNS]
        assert [row[0].strip("`") for row in rows] == list(FAILPOINTS)
        for point, *cells in rows:
            for kind, cell in zip(COLUMNS, cells, strict=True):
                if cell != NONE:
                    found[point.strip("`"), kind, int(head[0].split()[0])] = cell
    return found


def test_table_has_the_cases_that_exist_and_no_other():
    assert set(measured()) == {(case.point, case.kind, case.ranks) for case in CASES}


def test_table_has_the_outcomes_that_the_cases_demand():
    for case in CASES:
        cell = measured()[case.point, case.kind, case.ranks]
        found = re.fullmatch(r"(on|again|killed|65|69|75)(\*?) (\d+)", cell)
        assert found, cell
        word = {"on": 0, "again": 0, "killed": -9}.get(found[1])
        assert case.code == (int(found[1]) if word is None else word), (case, cell)
        assert case.is_quarantined == bool(found[2]), (case, cell)
