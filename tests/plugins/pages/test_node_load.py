"""Curves and energy against numbers worked out by hand; files of strangers must not break a report."""

import json
import os
import re
from dataclasses import asdict

import pytest
from support.recorded_run import START, RecordedRun

from forge.launch.monitor import LoadLine
from forge.plugins.pages import node_load
from forge.plugins.pages.node_load import BINS, read_loads
from forge.plugins.pages.report import render
from forge.reporting.history import read_history

GIB = 2**30


def line(sec, launch="launch-1", watts=(500.0, 700.0), **values):
    usual = {"load": 4.0, "memory_gib": 100.0, "received": 0, "sent": 1e6 * sec}
    gpus = {"gpu_percent": [90, 100], "gpu_celsius": [50, 60], "gpu_memory_gib": [70, None]}
    rdma = {"rdma_received": 0, "rdma_sent": 0}
    line = LoadLine(time=START + sec, launch=launch, gpu_watts=list(watts), **usual, **gpus, **rdma)
    return json.dumps(asdict(line) | values)


@pytest.fixture
def run(tmp_path):
    run = RecordedRun(tmp_path / "base")
    run.launch(0, job="7")
    run.steps(1, 200)
    run.paths.monitor.mkdir()
    return run


def write(run, lines, node="n1"):
    (run.paths.monitor / f"{node}.jsonl").write_text("".join(f"{each}\n" for each in lines))


def loads(run):
    return read_loads(run.paths, read_history(run.paths).launches)


def curves(run):
    return {curve.title: curve for curve in loads(run).curves}


def test_a_run_without_files_has_no_curves_and_no_energy(run):
    assert loads(run) == node_load.NodeLoads([], None)
    assert "Nodes while they trained" not in render(run.paths)


def test_energy_is_power_over_time_and_not_between_launches(run):
    run.launch(200, job="7")
    later = [line(1000, "launch-2"), line(1010, "launch-2")]
    write(run, [line(0), line(10), line(20), *later])
    assert loads(run).energy_kwh == pytest.approx(1200 * 30 / 3.6e6)


def test_a_gpu_without_power_adds_none(run):
    write(run, [line(sec, watts=(None, 360.0)) for sec in (0, 10)])
    assert loads(run).energy_kwh == pytest.approx(3600 / 3.6e6)


def test_curves_are_median_least_and_most_of_all_nodes(run):
    for number, node in enumerate(("n1", "n2", "n3")):
        write(run, [line(sec, load=float(number)) for sec in range(0, 100, 10)], node)
    found = curves(run)
    points = found["Load of a node"].points
    assert points[["median", "min", "max"]].to_numpy().tolist() == [[1.0, 0.0, 2.0]] * len(points)
    assert found["GPU utilization"].points["min"].iloc[0] == 90
    network = found["Network of a node"]
    assert (network.median, network.unit) == (pytest.approx(1.0), "MB/s")
    assert "InfiniBand and RoCE of a node" not in found


def test_a_counter_that_begins_again_is_no_rate(run):
    write(run, [line(0, sent=5e9), line(10, sent=1e6), line(20, sent=3e6)])
    assert curves(run)["Network of a node"].most == pytest.approx(0.2)


def test_a_pause_between_launches_is_a_gap(run):
    run.launch(200, job="7")
    lines = [line(sec) for sec in range(0, 100, 10)]
    write(run, [*lines, *(line(1500 + sec, "launch-2") for sec in range(0, 100, 10))])
    medians = curves(run)["GPU power"].points["median"]
    assert medians.isna().any() and not medians.isna().iloc[[0, -1]].any()


def test_a_long_run_is_thinned(run, monkeypatch):
    monkeypatch.setattr(node_load, "PARSED_BYTES", 20_000)
    write(run, [line(sec) for sec in range(2000)])
    found = loads(run)
    assert all(len(curve.points) <= BINS + 1 for curve in found.curves)
    assert found.energy_kwh == pytest.approx(1200 * 2000 / 3.6e6, rel=0.05)


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        line(5, load=float("nan")),
        line(5, memory_gib=1e300),
        line(5, memory_gib="1e999"),
        line(5, gpu_watts=[1.0] * 100_000),
        line(5, gpu_watts=-1),
        line(5, launch="\x1b[2J"),
        line(1e12),
    ],
)
def test_lines_that_no_monitor_writes_are_passed_over(run, bad):
    write(run, [line(0), bad, line(10)])
    found = curves(run)
    assert found["GPU power"].most == 700 and found["Load of a node"].most == 4
    assert loads(run).energy_kwh == pytest.approx(1200 * 10 / 3.6e6)


def test_pipes_links_and_folders_in_place_of_files_are_passed_over(run):
    write(run, [line(0), line(10)])
    os.mkfifo(run.paths.monitor / "a.jsonl")
    (run.paths.monitor / "b.jsonl").symlink_to("/dev/zero")
    (run.paths.monitor / "c.jsonl").symlink_to("c.jsonl")
    (run.paths.monitor / "d.jsonl").mkdir()
    assert loads(run).energy_kwh == pytest.approx(1200 * 10 / 3.6e6)


def test_the_page_has_curves_energy_and_gpu_hours(run):
    write(run, [line(sec) for sec in range(0, 100, 10)])
    page = render(run.paths)
    assert page == render(run.paths)
    for text in ("Nodes while they trained", "GPU utilization: median 95 %", "kWh", "GPU power"):
        assert text in page
    assert len(set(re.findall(r'\bid="([^"]*)"', page))) == len(re.findall(r'\bid="', page))
