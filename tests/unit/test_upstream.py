"""Threat: the patch of docs/measured/upstream.md does not fit the plugin, or does not mend its fault."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.pages import ROOT, blocks_of

pytestmark = pytest.mark.tools

PAGE = "docs/measured/upstream.md"
PLUGIN = "snakemake_executor_plugin_slurm"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A copy of the plugin as it is installed."""
    [folder] = importlib.util.find_spec(PLUGIN).submodule_search_locations
    return Path(shutil.copytree(folder, tmp_path / PLUGIN))


def patched(plugin: Path) -> Path:
    """The plugin, after the only patch of the page."""
    [patch] = [b.text for b in blocks_of(PAGE, (ROOT / PAGE).read_text()) if b.kind == "diff"]
    subprocess.run(
        ["git", "apply", "--verbose", "-"], input=patch, cwd=plugin.parent, check=True, text=True
    )
    return plugin


def still_active(plugin: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[Any]) -> list[Any]:
    """The jobs that are asked for again after a check in which no query was answered."""
    spec = importlib.util.spec_from_file_location(
        "tried_plugin", plugin / "__init__.py", submodule_search_locations=[str(plugin)]
    )
    module: ModuleType = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tried_plugin", module)
    spec.loader.exec_module(module)

    async def unanswered(*_: Any) -> tuple[None, None]:
        return None, None

    monkeypatch.setattr(module, "query_job_status", unanswered)
    executor = object.__new__(module.Executor)
    executor.workflow = SimpleNamespace(executor_settings=module.ExecutorSettings())
    executor.logger, executor.run_uuid = logging.getLogger("plugin"), "uuid"
    executor.status_rate_limiter = contextlib.nullcontext()
    executor._status_query_calls = executor._status_query_failures = 0

    async def check() -> list[Any]:
        return [job async for job in executor.check_active_jobs(jobs)]

    return asyncio.run(check())


def test_patch_keeps_the_jobs_that_the_plugin_forgets_when_no_query_is_answered(
    plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [SimpleNamespace(external_jobid=name) for name in ("17", "18")]
    assert still_active(plugin, monkeypatch, jobs) == [], "the page is out of date"
    for name in [name for name in sys.modules if name.startswith("tried_plugin")]:
        monkeypatch.delitem(sys.modules, name)
    assert still_active(patched(plugin), monkeypatch, jobs) == jobs
