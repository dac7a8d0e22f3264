"""Threat: a page that says something else of a run than `forge status` does."""

from __future__ import annotations

from html import unescape

import pytest
from support.run_states import KINDS, QUEUE, new_run

from forge.plugins.pages.report import render
from forge.reporting import run_state
from forge.reporting.run_files import RunFiles
from forge.slurm import jobs, slurm


@pytest.fixture(autouse=True)
def queue(monkeypatch):
    """Slurm's queue has one job."""
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setattr(slurm, "cluster_name", lambda **_: "forge")
    monkeypatch.setattr(jobs, "read_queue", lambda *_, **__: QUEUE)


@pytest.mark.parametrize("kind", KINDS)
def test_page_of_a_run_has_its_state_and_reason(kind, tmp_path):
    run = new_run(tmp_path / kind)
    make, state, _ = KINDS[kind]
    make(run)
    found, page = run_state.judge(RunFiles(run.paths), QUEUE), unescape(render(run.paths))
    assert state in page and run_state.clipped(found.reason).rstrip("…") in page
