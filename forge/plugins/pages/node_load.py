"""Load of the nodes while they trained, from `monitor/*.jsonl`: curves over time, and energy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from forge.core import json_lines
from forge.core.errors import ForgeError
from forge.core.paths import RunPaths
from forge.launch.monitor import LoadLine
from forge.run.launches import LaunchHistory

if TYPE_CHECKING:
    import pandas as pd

# Files may come from elsewhere. Of a long file every k-th line is parsed: some 3,000 lines a node.
MOST_NODES, MOST_BYTES, PARSED_BYTES = 1024, 2**32, 2**20
BEFORE_SEC, AFTER_SEC = (
    60.0,
    3600.0,
)  # a launch whose end nobody recorded went on after its last event
BINS = 200  # in a curve
OF_GPUS = "gpu_"  # how the names of their columns begin
# Column -> title and unit. Rates are of both directions.
QUANTITIES = {
    "gpu_percent": ("GPU utilization", "%"),
    "gpu_watts": ("GPU power", "W"),
    "gpu_celsius": ("GPU temperature", "°C"),
    "gpu_memory_gib": ("GPU memory in use", "GiB"),
    "load": ("Load of a node", "processes"),
    "memory_gib": ("Memory in use on a node", "GiB"),
    "network": ("Network of a node", "MB/s"),
    "rdma": ("InfiniBand and RoCE of a node", "MB/s"),
}
RATES = {"network": ("received", "sent"), "rdma": ("rdma_received", "rdma_sent")}
_LINE = TypeAdapter(LoadLine)


@dataclass(frozen=True)
class LoadCurve:
    """A quantity of nodes or GPUs. points: in each bin of time median, min and max over them, at `hours`
    since the first line. median, least, most: over all lines."""

    title: str
    unit: str
    points: pd.DataFrame
    median: float
    least: float
    most: float


@dataclass(frozen=True)
class NodeLoads:
    """The curves that have data, and the energy of the GPUs; None without them."""

    curves: list[LoadCurve]
    energy_kwh: float | None


def read_loads(paths: RunPaths, launches: Sequence[LaunchHistory]) -> NodeLoads:
    """The load in these launches of a run; without curves where nothing was recorded."""
    import pandas as pd

    spans = {each.id: (each.start - BEFORE_SEC, each.end + AFTER_SEC) for each in launches}
    nodes: list[dict[str, object]] = []
    gpus: list[dict[str, object]] = []
    for number, file in enumerate(_files(paths.monitor)):
        for line in _lines(file):
            first, last = spans.get(line.launch, (1.0, 0.0))
            if first <= line.time <= last:
                where = {"time": line.time, "launch": line.launch}
                nodes.append({**where, "device": f"{number}", **_of_node(line)})
                gpus += [{**where, "device": f"{number}/{n}", **g} for n, g in _of_gpus(line)]
    of_nodes, of_gpus = (pd.DataFrame(rows) for rows in (nodes, gpus))
    if of_nodes.empty:
        return NodeLoads([], None)
    of_nodes = _with_rates(of_nodes.sort_values("time"))
    of_gpus = of_gpus.sort_values("time") if gpus else of_gpus
    return NodeLoads(list(_curves(of_nodes, of_gpus)), _energy_kwh(of_gpus) if gpus else None)


def _files(folder: Path) -> Iterator[Path]:
    left = MOST_BYTES
    for path in sorted(islice(folder.glob("*.jsonl"), MOST_NODES)):
        with suppress(OSError):
            left -= path.stat().st_size
            if left < 0:
                return
            yield path


def _lines(path: Path) -> Iterator[LoadLine]:
    with suppress(ForgeError, OSError):
        step = 1 + path.stat().st_size // PARSED_BYTES
        for line in islice(json_lines.lines(path), 0, None, step):
            with suppress(ValidationError):
                yield _LINE.validate_json(line, strict=True)


def _of_node(line: LoadLine) -> dict[str, float]:
    values = vars(line)
    return {"load": line.load, "memory_gib": line.memory_gib} | {
        name: sum(values[counter] for counter in counters) for name, counters in RATES.items()
    }


def _of_gpus(line: LoadLine) -> Iterator[tuple[int, dict[str, float | None]]]:
    names = [field.name for field in fields(line) if field.name.startswith(OF_GPUS)]
    columns = (getattr(line, name) for name in names)
    for number, values in enumerate(zip(*columns, strict=False)):
        yield number, dict(zip(names, values, strict=True))


def _with_rates(nodes: pd.DataFrame) -> pd.DataFrame:
    """The counters of bytes as MB/s since the line before, of the same node and launch."""
    groups = nodes.groupby(["device", "launch"])
    seconds = groups["time"].diff()
    for name in RATES:
        rate = groups[name].diff() / seconds / 1e6
        nodes[name] = rate.where(
            (rate >= 0) & (seconds > 0)
        )  # a node that has rebooted begins at 0
    return nodes


def _curves(nodes: pd.DataFrame, gpus: pd.DataFrame) -> Iterator[LoadCurve]:
    start, end = nodes["time"].min(), nodes["time"].max()
    interval = nodes.groupby(["device", "launch"])["time"].diff().median()
    # Each bin has two lines of a node or more: an empty one is a gap between launches.
    width = max((end - start) / BINS, 2 * interval if interval > 0 else 0.0, 1.0)
    for column, (title, unit) in QUANTITIES.items():
        frame = gpus if column.startswith(OF_GPUS) else nodes
        values = frame.dropna(subset=[column]) if column in frame else frame.iloc[:0]
        if len(values) and not (column in RATES and values[column].max() == 0):
            number = ((values["time"] - start) // width).astype(int)
            means = values.groupby([number, values["device"]])[column].mean()
            points = means.groupby(level=0).agg(["median", "min", "max"])
            points = points.reindex(range(int((end - start) // width) + 1))
            points["hours"] = (points.index + 0.5) * width / 3600
            each = values[column].astype(float)
            yield LoadCurve(title, unit, points, each.median(), each.min(), each.max())


def _energy_kwh(gpus: pd.DataFrame) -> float | None:
    """The power of the GPUs over time, by the trapezoidal rule within each launch."""
    known = gpus.dropna(subset=["gpu_watts"])
    groups = known.groupby(["device", "launch"])
    watts = (known["gpu_watts"] + groups["gpu_watts"].shift()).astype(float) / 2
    joules = (watts * groups["time"].diff()).sum()
    return float(joules) / 3.6e6 if len(known) else None
