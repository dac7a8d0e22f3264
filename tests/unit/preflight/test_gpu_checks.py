"""A GPU that would fail or slow down all ranks must be found before training, and a healthy one, or one
that does not answer a question, must not be refused."""

import os

import pynvml
import pytest
from support import nvml
from support.nvml import UNSUPPORTED, FakeGpu

from forge.hosts import gpus
from forge.preflight import compare_nodes
from forge.preflight.compare_nodes import CheckedNode, bad_nodes
from forge.preflight.gpu_checks import gpu_checks

NAMES = ["gpu memory", "gpu clocks", "gpu links", "gpu in use"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("forge.preflight.gpu_checks.PAUSE_SEC", 0)


def problems(monkeypatch, *fakes):
    nvml.install(monkeypatch, *fakes)
    found = list(gpu_checks())
    return {check.name: check for check in found if check.status != "ok"}


def test_healthy_gpus_pass(monkeypatch):
    nvml.install(monkeypatch, FakeGpu(), FakeGpu(uuid="GPU-1"))
    found = list(gpu_checks())
    assert [(check.name, check.status) for check in found] == [(name, "ok") for name in NAMES]
    assert "on 2 GPUs (NVIDIA H100 80GB HBM3)" in found[0].message


def test_a_node_without_a_driver_has_nothing_to_say():
    assert list(gpu_checks()) == []


def test_a_node_without_the_package_has_nothing_to_say(monkeypatch):
    monkeypatch.setattr(gpus, "pynvml", None)
    assert list(gpu_checks()) == []


def test_a_driver_that_does_not_answer_is_said(monkeypatch):
    def fails():
        nvml.raises(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    [check] = gpu_checks()
    assert (check.status, check.name) == ("warn", "gpu memory")
    assert "does not answer" in check.message


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (FakeGpu(ecc=[2, 5]), "GPU 1 has 5 uncorrected ECC errors, 3 of them now"),
        (FakeGpu(remapped=(0, 1, 1, 0)), "GPU 1 has rows to remap"),
        (FakeGpu(remapped=(0, 9, 0, 1)), "GPU 1 could not remap a row"),
    ],
)
def test_failing_memory_fails(monkeypatch, fake, message):
    check = problems(monkeypatch, FakeGpu(), fake)["gpu memory"]
    assert (check.status, check.message) == ("fail", message)


def test_errors_that_do_not_grow_warn(monkeypatch):
    check = problems(monkeypatch, FakeGpu(), FakeGpu(ecc=[2]))["gpu memory"]
    assert (check.status, check.message) == ("warn", "GPU 1 has 2 uncorrected ECC errors")


def test_rows_that_were_remapped_are_no_trouble(monkeypatch):
    assert problems(monkeypatch, FakeGpu(remapped=(3, 2, 0, 0))) == {}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_a_gpu_that_fell_off_the_bus_fails(monkeypatch, code):
    nvml.install(monkeypatch, FakeGpu(), FakeGpu())
    handle = pynvml.nvmlDeviceGetHandleByIndex
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetHandleByIndex", lambda n: nvml.raises(code) if n else handle(n)
    )
    [check] = gpu_checks()
    assert check.status == "fail" and check.message.startswith("GPU 1: ")


@pytest.mark.parametrize(
    ("bits", "status", "message"),
    [
        (0x48, "fail", "GPU 0: hardware slowdown: too hot"),
        (0x88, "fail", "GPU 0: hardware slowdown: power brake of the power supply"),
        (0x08, "fail", "GPU 0: hardware slowdown"),
        (0x20, "warn", "GPU 0: software slowdown: hot"),
    ],
)
def test_slowdowns_are_told_with_their_reason(monkeypatch, bits, status, message):
    check = problems(monkeypatch, FakeGpu(reasons=[bits]))["gpu clocks"]
    assert (check.status, check.message) == (status, message)


@pytest.mark.parametrize("reasons", [[0x01], [0x04], [0x02], [0x10], [0x08, 0x08, 0x01]])
def test_idle_power_limit_and_a_change_of_clocks_are_no_trouble(monkeypatch, reasons):
    assert problems(monkeypatch, FakeGpu(reasons=reasons)) == {}


def test_a_narrow_link_warns(monkeypatch):
    check = problems(monkeypatch, FakeGpu(lanes=(8, 16)))["gpu links"]
    assert (check.status, check.message) == ("warn", "GPU 0: 8 of 16 lanes")


def test_a_gpu_in_use_fails_in_a_job_and_names_the_process(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    check = problems(monkeypatch, FakeGpu(used_mib=9000, pids=(os.getpid(), 2**22 + 1)))[
        "gpu in use"
    ]
    assert check.status == "fail"
    assert check.message.startswith(f"GPU 0: 9,000 MiB in use by pid {os.getpid()} (")
    assert check.message.endswith(f", pid {2**22 + 1}")


def test_a_gpu_in_use_on_ones_own_machine_warns(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert problems(monkeypatch, FakeGpu(used_mib=9000))["gpu in use"].status == "warn"


@pytest.mark.parametrize("code", [UNSUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_what_a_gpu_does_not_answer_is_no_trouble(monkeypatch, code):
    errors = dict.fromkeys(FakeGpu().answers(), code)
    assert problems(monkeypatch, FakeGpu(errors=errors)) == {}


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [("1", ["bad"]), ("GPU-1", ["bad"]), ("0", []), ("", []), ("0,1", ["bad"]), ("7", [])],
)
def test_only_gpus_that_were_given_to_us_are_checked(monkeypatch, visible, numbers):
    nvml.install(monkeypatch, FakeGpu(), FakeGpu(uuid="GPU-1", remapped=(0, 0, 0, 1)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ["bad" for check in gpu_checks() if check.status == "fail"] == numbers


def test_sick_gpus_exclude_a_node_even_where_all_have_some(monkeypatch):
    checks = list(problems(monkeypatch, FakeGpu(remapped=(0, 0, 0, 1))).values())
    assert set(bad_nodes([CheckedNode("n1", checks), CheckedNode("n2", checks)])) == {"n1", "n2"}
    assert set(NAMES) - {"gpu links"} <= set(compare_nodes.OWN)
