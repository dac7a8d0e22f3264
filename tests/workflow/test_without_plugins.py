"""Threat: a kernel that needs a plugin, so that neither can be read, changed or left out alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clone import Project
from support.repository import REPOSITORY

from forge.core import hooks

TREES = (
    *("forge", "snakemake_executor_plugin_forge", "workflow", "config", "profiles"),
    *("tests", "tools", "bench", "docs"),
)
# Everything but what needs an accelerator, or a program of others that may not be installed.
IMPORT_ALL = """
import importlib, pkgutil, forge
for module in pkgutil.walk_packages(forge.__path__, "forge."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
# Beside transformers, pandas and matplotlib: a hooks.py is read by every start of `forge`.
LIGHT = """
import sys
for name in ("torch", "pandas", "matplotlib", "transformers", "snakemake", "numpy"):
    sys.modules[name] = None
from forge.core import hooks
hooks.sections()
print(*hooks.names())
"""
SCHEMA = """
import json
from forge.core.config import Config
from tools.config_docs import schema_text
print(json.dumps(sorted(json.loads(schema_text(Config))["properties"])))
"""

Without = Callable[..., Path]


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Without:
    """Copies Forge without these plugins; Python here finds the copy."""

    def copied(*plugins: str) -> Path:
        root = tmp_path / "without"
        for name in TREES:
            shutil.copytree(REPOSITORY / name, root / name)
        shutil.copy(REPOSITORY / "pyproject.toml", root)
        for plugin in plugins:
            shutil.rmtree(root / "forge/plugins" / plugin)
            shutil.rmtree(root / "tests/plugins" / plugin)
        monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{root / 'tests'}")
        return root

    return copied


def python(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_hooks_of_plugins_import_nothing_large() -> None:
    assert python(REPOSITORY, "-c", LIGHT).split() == [*hooks.names()]


@pytest.mark.parametrize("plugin", hooks.names())
def test_forge_works_without_a_plugin(plugin: str, without: Without, project: Project) -> None:
    root = without(plugin)
    kept = python(root, "-c", LIGHT).split()
    assert kept == [name for name in hooks.names() if name != plugin]
    assert "train up to the goal" in python(root, "-m", "forge", "--help")
    its = {key for key, one in hooks.sections().items() if f".{plugin}." in one.__module__}
    assert its.isdisjoint(json.loads(python(root, "-c", SCHEMA)))
    # set-resources of a profile may name rules that are not here.
    rules = hooks.rules_on_nodes()
    resources = [f"{rule}:mem_mb=900" for rule in rules]
    code, output = project.snakemake("-n", "train", "--set-resources", *resources)
    assert code == 0 and "train_run" in output, output
    for key in sorted(its):
        code, output = project.snakemake("-n", "train", "--config", f"{key}={{}}")
        assert code != 0 and f"unknown key {key}" in output, output


def test_all_modules_and_tests_of_the_kernel_are_imported_without_any_plugin(
    without: Without,
) -> None:
    """That no plugin imports another: tests/unit/test_imports.py."""
    root = without(*hooks.names())
    python(root, "-c", IMPORT_ALL)
    tests = [f"tests/{circle}" for circle in ("unit", "past", "workflow", "distributed")]
    options = ("-q", "--collect-only", "-p", "no:cacheprovider", "--no-header")
    python(root, "-m", "pytest", *options, *tests)


def test_run_without_any_plugin_ends_validated(without: Without, project: Project) -> None:
    without(*hooks.names())
    project.one_rank()
    code, output = project.snakemake("train")
    assert code == 0, output
    assert project.read("validated.json")["status"] == "valid"
    assert not project.path("report.html").exists()


def test_results_that_other_nodes_do_not_see_are_refused_without_a_plugin_for_them(
    without: Without, project: Project
) -> None:
    without(*hooks.names())
    project.machine(stage={"project": "auto", "results": "first_node"})
    code, output = project.snakemake("train")
    assert code != 0 and "stage.results is first_node, and no plugin is here" in output, output
    assert not project.path("config.json").exists()  # nothing was started


def test_rules_of_plugins_may_be_left_out_by_a_users_snakefile(project: Project) -> None:
    rules = " ".join(f"{name}," for name in hooks.rules_on_nodes()).rstrip(",")
    (project.root / "workflow/Snakefile").write_text(
        "from forge.as_module import snakefile_of\n"
        f'configfile: "config/config.yaml"\n'
        f'module forge:\n    snakefile: "{REPOSITORY}/workflow/Snakefile"\n    config: config\n'
        f"use rule * from forge exclude {rules}\n"
    )
    code, output = project.snakemake("-n", "train")
    assert code == 0 and "train_run" in output, output
