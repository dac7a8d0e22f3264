"""Packages are really imported on a node, in a process of their own."""

import sys

import pytest

from forge.preflight.packages import import_packages, import_torch


def imports(*names, command="", cwd=".", sec=60.0):
    answer = import_packages(names=names, command=command, cwd=str(cwd), sec=sec)
    return answer.check, answer.versions


def test_versions_of_imported_packages_are_reported():
    check, versions = imports("yaml", "json")
    assert check.status == "ok"
    assert f"Python {sys.version.split()[0]}, yaml {versions['yaml']}, json" in check.message


def test_missing_package_and_one_that_breaks_at_import_are_named(tmp_path):
    (tmp_path / "broken.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    check, _ = imports("json", "broken", "no_such_package", cwd=tmp_path)
    assert check.status == "fail"
    assert "broken (OSError: libcudart.so.12: cannot open), no_such_package" in check.message
    assert "json" not in check.message


def test_import_that_ends_the_process_is_reported(tmp_path):
    (tmp_path / "crash.py").write_text(
        "import os; os.write(2, b'illegal instruction'); os._exit(1)"
    )
    check, _ = imports("crash", cwd=tmp_path)
    assert (check.status, "imports nothing: illegal instruction" in check.message) == ("fail", True)


def test_import_that_takes_too_long_is_reported(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    check, _ = imports("slow", cwd=tmp_path, sec=0.5)
    assert "importing slow takes longer than" in check.message


@pytest.mark.parametrize(("command", "asked"), [("python3.99", True), ("train.sh", False)])
def test_python_of_the_programs_command_is_asked(tmp_path, monkeypatch, command, asked):
    program = tmp_path / command
    program.write_text("#!/bin/sh\necho '[\"3.99.0\", {}]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert ("3.99.0" in imports(command=command)[0].message) is asked


@pytest.fixture
def torch_of_the_node(tmp_path, monkeypatch):
    """torch_of_the_node(text): what the import of torch runs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/distributed.py").write_text("")
    return (tmp_path / "torch/__init__.py").write_text


def test_import_of_torch_is_timed(torch_of_the_node):
    torch_of_the_node("import time; time.sleep(0.2)")
    check = import_torch(sec=60)
    assert (check.name, check.status) == ("torch", "ok")
    assert 0.2 <= float(check.message.split()[2]) < 60


def test_torch_that_cannot_be_imported_is_named_with_its_error(torch_of_the_node):
    torch_of_the_node("raise OSError('libcudart.so.12: cannot open')")
    check = import_torch(sec=60)
    assert (check.status, check.message) == (
        "fail",
        "cannot import torch: OSError: libcudart.so.12: cannot open",
    )


def test_disk_that_is_too_slow_for_torch_is_named_with_what_to_do(torch_of_the_node):
    torch_of_the_node("import time; time.sleep(600)")
    check = import_torch(sec=0.5)
    assert check.message == "importing torch takes longer than 0.5 s"
    assert sys.prefix in check.cause and "stage.project: true" in check.fix
