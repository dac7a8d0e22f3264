"""What was measured with the programs of config/labs, and the table that docs/labs.md shows of it.

python tests/slurm/labs_table.py RESULTS     writes the table
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

RESULTS = "FORGE_LABS_RESULTS"  # the file that takes the lines
PAGE = Path(__file__).parents[2] / "docs/labs.md"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"


def note(lab: str, event: str, launcher: str, outcome: str) -> None:
    """Keep the outcome of a case where `make labs` asks for it."""
    if path := os.environ.get(RESULTS):
        with open(path, "a") as file:
            file.write(json.dumps([lab, event.replace("_", " "), launcher, outcome]) + "\n")


def table(rows: list[list[str]]) -> Iterator[str]:
    """One row an event, one column a program and launcher."""
    outcomes = {(event, lab, launcher): outcome for lab, event, launcher, outcome in rows}
    columns = sorted({(lab, launcher) for lab, _, launcher, _ in rows}, reverse=True)
    yield "| event | " + " | ".join(f"{lab}, {launcher}" for lab, launcher in columns) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for event in dict.fromkeys(event for _, event, _, _ in rows):
        cells = [outcomes.get((event, *column), "failed") for column in columns]
        yield f"| {event} | {' | '.join(cells)} |"


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n".join(table(rows)) + "\n" + END + after)


if __name__ == "__main__":
    main()
