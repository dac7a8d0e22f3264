"""`forge status`: the current state of each run, from its files and squeue."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forge.core import hooks
from forge.core.errors import ConfigError, UnfitError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths
from forge.core.terminal import Table, duration, is_terminal, print_plain, say, visible
from forge.reporting.find_runs import results_folder
from forge.reporting.run_files import RunFiles
from forge.reporting.run_state import COLORS, TRAINING, Queue, RunState, ask_slurm, clipped, judge

WATCH_SEC = 5.0


@dataclass(frozen=True)
class StatusRow:
    """One run in the table. loss and tokens_per_sec of the last step that was logged; nodes, ranks and
    steps_per_sec of the last launch, 0 before the first one."""

    state: RunState
    nodes: int
    ranks: int
    loss: float | None
    tokens_per_sec: float | None
    steps_per_sec: float | None
    restarts: int
    eta_sec: float | None  # None when it does not train, or just began

    def to_json(self) -> dict[str, Any]:
        """The row as JSON for scripts: state and speed in one object."""
        values = asdict(self)
        state = values.pop("state")
        state["not_reproduced"] = state.pop("finding")  # as scripts know it
        return {**state, "log": state["log"] and str(state["log"]), **values}


def status(runs: Sequence[RunPaths], *, watch: bool = False, as_json: bool = False) -> None:
    """Print one line a run to standard output, below those of plugins; or as JSON an object with the list
    `runs`, and what plugins add.

    watch: draw it again every few seconds until Ctrl-C. Raises ConfigError without a terminal then.
    """
    if watch:
        if not is_terminal(sys.stdout):
            raise ConfigError("--watch needs a terminal", fix="leave it out, or use --json")
        _watch(runs)
        return
    rows, note = look(runs)
    if as_json:
        values = {**hooks.status_json(), "runs": [one.to_json() for one in rows]}
        print(json.dumps(values, indent=2))
        if note:
            say(note)
        return
    for line in hooks.status_lines():
        print_plain(line)
    if not rows:
        folder = results_folder().absolute()
        say(f"no runs in {folder} yet: train one with make train, or name their directories")
    else:
        _table(rows).print()
    if note:
        say(note)


def look(runs: Sequence[RunPaths]) -> tuple[list[StatusRow], str]:
    """A row for each run, and a note when Slurm's side of it is missing."""
    queue, note = ask_slurm(runs)
    return [row(paths, queue) for paths in runs], note


def row(paths: RunPaths, queue: Queue) -> StatusRow:
    """The row of a run. queue: Slurm's, None where it cannot be asked.

    A run that this user may not read is `unknown`, and hides no other run.
    """
    try:
        with disk_trouble(paths.root, "read"):
            return _row(RunFiles(paths), queue)
    except UnfitError as err:
        state = RunState(
            run=paths.root.name,
            state="unknown",
            reason=err.what,
            details=(err.cause,) if err.cause else (),
            next=err.fix,
            log=None,
            step=None,
            goal=None,
            job="",
        )
        return StatusRow(state, 0, 0, None, None, None, 0, None)


def _row(files: RunFiles, queue: Queue) -> StatusRow:
    state, last = judge(files, queue), files.steps[-1] if files.steps else None
    is_training = (
        state.state == "running"
        and state.reason.startswith(TRAINING)
        and files.rate
        and files.goal
        and files.step is not None
    )
    launch = files.launches[-1] if files.launches else None
    return StatusRow(
        state=state,
        nodes=len(launch.nodes) if launch else 0,
        ranks=launch.world_size if launch else 0,
        loss=last.loss if last else None,
        tokens_per_sec=last.tokens_per_sec if last else None,
        steps_per_sec=files.rate,
        restarts=max(0, len(files.launches) - 1),
        eta_sec=(files.goal - files.step) / files.rate if is_training else None,  # type: ignore[operator]
    )


# --- for people ------------------------------------------------------------------------------------

_HEADS = (
    *(
        "run",
        "state",
        "job",
        "ranks",
        "step",
        "loss",
        "steps/s",
        "tokens/s",
        "restarts",
        "ETA",
        "now",
    ),
)
_NUMBERS = ("ranks", "step", "loss", "steps/s", "tokens/s", "restarts", "ETA")


def _cells(run: StatusRow) -> list[str]:
    state = run.state
    step = "" if state.step is None else str(state.step)
    return [
        state.run,
        state.state,
        state.job,
        f"{run.nodes}x{run.ranks // run.nodes}" if run.nodes else "",
        f"{state.step or 0}/{state.goal}" if state.goal else step,
        "" if run.loss is None else f"{run.loss:.3f}",
        "" if run.steps_per_sec is None else f"{run.steps_per_sec:.3g}",
        "" if run.tokens_per_sec is None else f"{run.tokens_per_sec:,.0f}",
        str(run.restarts),
        "" if run.eta_sec is None else duration(run.eta_sec),
        ": ".join(filter(None, (clipped(state.reason), state.next))),
    ]


def _table(rows: Sequence[StatusRow]) -> Table:
    table = Table(_HEADS, numbers=_NUMBERS, wrapped=("job", "now"))
    for run in rows:
        table.add(_cells(run), {"run": "bold", "state": COLORS[run.state.tone]})
    return table


def _watch(runs: Sequence[RunPaths]) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    try:
        with Live(auto_refresh=False) as live:
            while True:
                rows, note = look(runs)
                foot = f"{time.strftime('%H:%M:%S')}  Ctrl-C ends this, not the runs  {note}"
                head = "\n".join(hooks.status_lines())
                shown = Group(
                    *([Text(visible(head))] if head else []),
                    _table(rows).drawn(),
                    "",
                    Text(visible(foot.rstrip())),
                )
                live.update(shown, refresh=True)
                time.sleep(WATCH_SEC)
    except KeyboardInterrupt:
        pass
