"""Threat: pages that fit recorded runs alone. Real ranks, a real monitor, a real branch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.live_run import forge

pytestmark = pytest.mark.all
OFTEN = "--machine.monitor.every_sec=0.05"


@pytest.fixture(autouse=True)
def launches():
    """Ranks that the launcher starts itself, beside a monitor."""


def test_the_report_draws_nodes_and_the_branch_of_a_run_that_has_trained(runs):
    run = runs("watched", OFTEN, "--train.checkpoint_every=6", "--train.keep_every=6")
    assert run.forge("train").code == 0
    branch = (*run.overrides, "--run=branch", "--parent=watched@6", "--train.lr=1e-3")
    child = replace(run, folder=run.folder.with_name("branch"), overrides=branch)
    assert child.forge("train").code == 0
    assert forge("report", str(child.folder)).code == 0
    page = child.paths.report.read_text()
    assert "Nodes while they trained" in page and "Memory in use on a node: median" in page
    assert "Throughput: tokens per second: median" in page and "watched@6" in page
