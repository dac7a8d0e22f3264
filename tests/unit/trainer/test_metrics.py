"""Utilization is compared between machines, so a wrong peak or formula must not pass."""

import json

import pytest

from forge.core import json_lines
from forge.trainer import metrics


def test_flop_utilization_of_a_worked_example():
    # 8 ranks of 312 TFLOP/s, 6 * 7e9 FLOPs a token, 30,000 tokens/s in all:
    # 1.26e15 / 2.496e15 = 0.50481
    found = metrics.flop_utilization(30_000, 6 * 7e9, 8, 312e12)
    assert found == pytest.approx(0.504808, abs=1e-6)


def test_utilization_without_a_known_peak_is_unknown():
    assert metrics.flop_utilization(30_000, 6 * 7e9, 8, None) is None


def test_throughput_is_of_the_steps_since_the_last_line():
    throughput = metrics.Throughput(
        tokens_per_step=1000, flops_per_token=6e9, world_size=2, peak_flops=1e12
    )
    throughput.add_step(0.5)
    throughput.add_step(1.5)
    assert throughput.measure() == (1000.0, pytest.approx(3.0))  # 6e12 of 2e12 FLOP/s
    throughput.add_step(4.0)
    assert throughput.measure() == (250.0, pytest.approx(0.75))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8e12),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("cpu", None),
    ],
)
def test_peak_is_found_by_the_full_name(name, peak):
    assert metrics.peak_flops(name) == peak


def train_line(**values):
    usual = {"launch": "launch-1", "step": 5, "loss": 3.5, "grad_norm": 1.0, "lr": 0.5}
    speed = {"tokens_per_sec": 20_000.5, "mfu": None, "tokens": 20_480}
    return metrics.TrainLine(**{**usual, **speed, **values})


def test_numbers_that_are_not_finite_become_null(tmp_path):
    file = tmp_path / "metrics.jsonl"
    metrics.write(file, train_line(loss=float("nan"), grad_norm=float("inf")))
    line = json.loads(file.read_text())
    assert line["time"] > 0
    assert (line["loss"], line["grad_norm"], line["lr"]) == (None, None, 0.5)


def test_lines_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "metrics.jsonl"
    written = [train_line(), metrics.EvalLine(launch="launch-1", step=5, loss=3.5)]
    for line in written:
        metrics.write(file, line)
    assert metrics.read(file) == metrics.read_last(file, 2**10) == written
    assert metrics.read_last(file, 150) == written[1:]


@pytest.mark.parametrize(
    "edit",
    [
        {"kind": "gpu"},
        {"kind": 7},
        {"step": "5"},
        {"step": 5.5},
        {"time": None},
        {"loss": "low"},
        {"launch": 3},
        {"tokens": None},
    ],
)
def test_a_line_that_was_edited_is_passed_over(tmp_path, edit):
    file = tmp_path / "metrics.jsonl"
    metrics.write(file, train_line(step=4))
    json_lines.append(file, {**vars(train_line()), **edit})
    file.write_text(file.read_text() + '{"kind": "train", "st')
    assert [line.step for line in metrics.read(file)] == [4]
