"""`forge show`: status, paths, loss, sampled text and lineage of runs on the screen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from forge.core.errors import DataError
from forge.core.paths import RunPaths
from forge.core.records import BitsPerByte
from forge.core.terminal import duration, is_terminal, print_plain, visible
from forge.reporting.history import read_history
from forge.reporting.run_rows import read_scores
from forge.reporting.run_state import COLORS
from forge.reporting.summary import Summary, summarize
from forge.trainer import metrics

SAMPLES = 3
SAMPLE_WIDTH = 100


def show(runs: Sequence[RunPaths]) -> None:
    """Print each run to standard output: a panel on a terminal, plain lines elsewhere.

    Raises ConfigError where a run does not exist; all runs are looked up before the first line.
    """
    summaries = [(paths, summarize(paths)) for paths in runs]
    for paths, summary in summaries:
        rows = _rows(paths, summary)
        if is_terminal(sys.stdout):
            _print_panel(summary, rows)
        else:
            _print_plain(summary, rows)


def _rows(paths: RunPaths, summary: Summary) -> list[tuple[str, str]]:
    """(label, value) lines below the status; repeated labels are left blank."""
    checkpoint = (
        f"{paths.latest} -> {summary.checkpoint.folder.name}" if summary.checkpoint else "none yet"
    )
    report = (
        str(paths.report) if paths.report.exists() else f"none yet: forge report {paths.config}"
    )
    rows = [("reason" if i == 0 else "", note) for i, note in enumerate(summary.notes)]
    rows += [("next", summary.state.next)] if summary.state.next else []
    rows += [("checkpoint", checkpoint), ("report", report), ("validation loss", _losses(paths))]
    rows += _goodput(paths, summary)
    for label, lines in summary.of_plugins.items():
        rows += [("" if number else label, line) for number, line in enumerate(lines)]
    rows += [("" if number else "sources", str(row)) for number, row in enumerate(summary.sources)]
    rows += [("" if number else "text", line) for number, line in enumerate(summary.text)]
    for number, row in enumerate(read_scores(paths)):
        at = f"{row.label} at step {max(row.by_step)}"
        rows.append(("evaluation" if number == 0 else "", f"{row.text()} {at}"))
    for number, sample in enumerate(summary.samples[:SAMPLES]):
        clipped = sample if len(sample) <= SAMPLE_WIDTH else sample[: SAMPLE_WIDTH - 1] + "…"
        rows.append(("samples" if number == 0 else "", clipped))
    return rows + summary.lineage


def _goodput(paths: RunPaths, summary: Summary) -> list[tuple[str, str]]:
    """Goodput that came out, beside the expected one."""
    with suppress(DataError):  # of another version of Forge: the state says so
        history = read_history(paths)
        rows = []
        if history.goodput is not None:
            share, of = f"{history.goodput:.1%}", duration(history.wall_sec, precise=True)
            rows += [("goodput", f"{share} of {of} in steps kept")]
        rows += [("expected", str(summary.expected))] if summary.expected else []
        return rows + ([("end", summary.end)] if summary.end else [])
    return []


def _losses(paths: RunPaths) -> str:
    lines = [line for line in metrics.read(paths.metrics) if isinstance(line, metrics.EvalLine)]
    evals = [(line.step, line.loss) for line in lines if line.loss is not None]
    bpb = BitsPerByte.of(lines[-1]) if lines else None
    in_bits = f", {bpb}" if bpb else ""
    if not evals:
        return "not measured yet"
    # The newest line is on the surviving line of history whatever was done again.
    (first_step, first), (last_step, last) = min(evals), evals[-1]
    steps = f"steps {first_step} -> {last_step}"
    return f"{first:.3f} -> {last:.3f} nats per token{in_bits} ({steps})"


def _print_plain(summary: Summary, rows: list[tuple[str, str]]) -> None:
    lines = [f"{summary.state.run}: {summary.state.headline}"]
    lines += [f"  {label:<15} {value}".rstrip() for label, value in rows]
    print_plain("\n".join(lines))


def _print_panel(summary: Summary, rows: list[tuple[str, str]]) -> None:
    """rich honors NO_COLOR by itself. Text objects: brackets in sampled text are not markup."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, Text(visible(value)))
    color = COLORS[summary.state.tone]
    headline = visible(f"{summary.state.run}: {summary.state.headline}")
    title = Text(headline, style=f"bold {color}")
    Console().print(Panel(grid, title=title, title_align="left", border_style=color))
