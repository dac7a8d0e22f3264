"""What the harness reads of a storm, while it lasts and after it: steps, allocations, load."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import islice
from pathlib import Path

from bench.storm import chain
from bench.storm.raw import Allocation, Steps
from forge.core import json_lines
from tools.slurm_cluster.cluster import Cluster


def last_step_time(step_log: Path) -> float | None:
    """When the program completed its last step, in seconds since the epoch; None before the first."""
    if not step_log.exists():
        return None
    lines, _ = json_lines.last_lines(step_log, 4096)
    for line in reversed(lines):
        value = json_lines.parse(line)
        if value and "step" in value:
            return float(value["time"])
    return None


def launches(step_log: Path, num_ranks: int, begin: float) -> list[Steps]:
    """The launches of the paced program, their steps compared with the undisturbed run.

    begin: of the storm, in seconds since the epoch.
    """
    found: dict[str, list[dict[str, object]]] = {}
    for line in json_lines.read(step_log):
        found.setdefault(str(line["launch"]), []).append(line)
    last = max((_number(line) for lines in found.values() for line in lines), default=0)
    right = list(islice(chain.undisturbed(num_ranks), last))
    return [_launch(name, lines, right, begin) for name, lines in found.items()]


def _launch(name: str, lines: list[dict[str, object]], right: list[str], begin: float) -> Steps:
    head, *rest = lines
    start = int(str(head["start"]))
    steps = [(_number(line), line) for line in rest]
    wrong = [step for step, line in steps if line["chain"] != right[step - 1]]
    # A launch that leaves out a number, or counts one twice, is wrong from there on.
    gaps = [step for n, (step, _) in enumerate(steps, start + 1) if step != n]
    return Steps(
        launch=name,
        start=start,
        begin=_since(head, begin),
        times=[_since(line, begin) for _, line in steps],
        wrong_from=min([*wrong, *gaps], default=None),
        corrupt=bool(head["corrupt"]),
    )


def distinct_samples(step_log: Path, begin: float) -> list[tuple[float, int]]:
    """(time, samples not trained on before) of each line of a program whose steps may lose samples. One
    that a restart took back and nobody repeated still counts: in favor of the contender."""
    seen: set[int] = set()
    found = []
    for line in json_lines.read(step_log):
        samples = line.get("samples")
        new = set(samples if isinstance(samples, list) else ()) - seen
        seen |= new
        if new:
            found.append((_since(line, begin), len(new)))
    return found


def _number(line: dict[str, object]) -> int:
    return int(str(line.get("step", 0)))


def _since(line: dict[str, object], begin: float) -> float:
    return round(float(str(line["time"])) - begin, 2)


FIELDS = "JobIDRaw,Submit,Eligible,Start,End,State,NNodes"


def allocations(cluster: Cluster, jobs: Iterable[str], begin: float) -> list[Allocation]:
    """What Slurm's accounting has of the jobs, each of their starts for itself."""
    names = ",".join(jobs)
    command = ("sacct", "-D", "-X", "-n", "-P", "-o", FIELDS, "-j", names)
    lines = cluster.run(*command).stdout.splitlines() if names else []
    found = []
    for line in lines:
        job, submit, eligible, start, end, state, nodes = line.split("|")
        times = {"submit": submit, "eligible": eligible, "start": start, "end": end}
        found.append(
            Allocation(
                job=job,
                state=state.split(" ")[0],
                nodes=int(nodes),
                **{name: _moment(text, begin) for name, text in times.items()},
            )
        )
    return found


def _moment(text: str, begin: float) -> float | None:
    """Seconds since the storm began; None for a time that has not come."""
    if text in ("Unknown", "None"):
        return None
    return round(datetime.fromisoformat(text).timestamp() - begin, 1)
