"""What was measured, one line a case, and the table that docs/faults.md shows of it.

python tests/faults/outcomes.py RESULTS     writes the table
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases import CASES, FAULTS, KILLED, Case

from forge.core.errors import Exit
from forge.core.failpoints import FAILPOINTS

RESULTS = "FORGE_FAULTS_RESULTS"  # the file that takes the lines
PAGE = Path(__file__).parents[2] / "docs/faults.md"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
COLUMNS = (*FAULTS, "empty")
HEADS = {
    **{"kill": "kill -9", "power": "all killed", "term": "SIGTERM", "stop": "SIGSTOP"},
    **{"enospc": "ENOSPC", "eio": "EIO", "truncate": "cut", "flip": "flipped bit"},
    **{"mix": "other step's file", "empty": "emptied"},
}
NONE = "·"


def note(case: Case, *, starts: int, quarantined: int, lost: int) -> None:
    """Keep the outcome of a case where `make faults` asks for it.

    starts: of ranks, by the command that the fault struck. lost: steps that were retrained.
    """
    if path := os.environ.get(RESULTS):
        facts = {"case": case.name, "starts": starts, "quarantined": quarantined, "lost": lost}
        with open(path, "a") as file:
            file.write(json.dumps(facts) + "\n")


def cell(case: Case, facts: dict[str, Any]) -> str:
    """`again 4`: what the command did, then the steps that were retrained."""
    if case.code == Exit.DONE:
        word = "again" if facts["starts"] > 1 else "on"
    else:
        word = "killed" if case.code == KILLED else str(int(case.code))
    return f"{word}{'*' if facts['quarantined'] else ''} {facts['lost']}"


def table(ranks: int, outcomes: dict[str, dict[str, Any]]) -> Iterator[str]:
    """One row a point, one column a fault."""
    cases = {(case.point, case.kind): case for case in CASES if case.ranks == ranks}
    yield f"| {ranks} rank{'s' if ranks > 1 else ''} | {' | '.join(HEADS[k] for k in COLUMNS)} |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for point in FAILPOINTS:
        cells = []
        for kind in COLUMNS:
            case = cases.get((point, kind))
            cells.append(cell(case, outcomes[case.name]) if case else NONE)
        yield f"| `{point}` | {' | '.join(cells)} |"


def main(results: str) -> None:
    """Put the measured tables into the page. KeyError for a case that was not measured."""
    lines = map(json.loads, Path(results).read_text().splitlines())
    outcomes = {line["case"]: line for line in lines}
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    tables = "\n\n".join("\n".join(table(ranks, outcomes)) for ranks in (1, 2))
    PAGE.write_text(f"{before}{BEGIN}\n{tables}\n\n{END}{after}")
    print(f"{len(outcomes)} cases in {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1])
