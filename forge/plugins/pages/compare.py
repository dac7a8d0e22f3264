"""`forge compare`: runs side by side; more than a few as rows, sorted by validation loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from forge.core.errors import ConfigError
from forge.core.files import atomic_open
from forge.core.paths import RunPaths
from forge.core.terminal import Table, print_plain, say
from forge.plugins.pages.comparison import (
    FACTS,
    Comparison,
    comparison,
    to_json,
)
from forge.plugins.pages.run_tree import TreeRun, families
from forge.plugins.pages.sweep import SweepSetting, notes_on, print_sweep, sweep_of
from forge.reporting.run_state import COLORS

# Runs that can be read side by side at 80 columns.
MOST_COLUMNS = 4


def compare(runs: Sequence[RunPaths], *, as_json: bool = False, page: Path | None = None) -> None:
    """Print a comparison of runs to standard output, or write it as a page that opens offline.

    Raises ConfigError without runs, or where one does not exist, and UnfitError on a full disk.
    """
    if not runs:
        raise ConfigError(
            "there are no runs to compare", fix="train some, or name their directories"
        )
    compared = comparison(runs)
    if page:
        _write_page(page, compared, families(runs))
        say(f"comparison of {len(runs)} runs: {page}")
    if as_json:
        print(json.dumps(to_json(compared), indent=2))
    elif not page and len(runs) > MOST_COLUMNS:
        print_sweep(sweep_of(compared))
    elif not page:
        _table(compared).print()
        for note in notes_on(compared.runs, compared.keys):
            print_plain(f"note: {note}")


def _table(compared: Comparison) -> Table:
    names = [run.name for run in compared.runs]
    table = Table(("", *names), wrapped=names)
    for row in (*compared.results, *compared.scores, *compared.keys):
        is_state = row.label == FACTS["state"].label
        tones = {run.name: COLORS[run.state.tone] for run in compared.runs} if is_state else {}
        table.add((row.label, *row.texts), tones)
    return table


def _write_page(path: Path, compared: Comparison, family: list[TreeRun]) -> None:
    from forge.plugins.pages.report import environment, family_context
    from forge.plugins.pages.sweep_charts import curves_of, sweep_charts

    sweep = sweep_of(compared)
    if len(compared.runs) > MOST_COLUMNS:
        name, context = "sweep.html.j2", {"sweep": sweep, "charts": sweep_charts(sweep)}
    else:
        alone = [SweepSetting(run.name, [run]) for run in sweep.runs]
        notes, charts = notes_on(compared.runs, compared.keys), curves_of(alone)
        name = "compare.html.j2"
        context = {"compared": compared, "charts": charts, "notes": notes}
    template = environment().get_template(name)
    page = template.render(**context, phases=[], **family_context(family))
    with atomic_open(path, "w") as file:
        file.write(page)
