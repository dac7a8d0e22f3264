"""Against a start that hangs: what is unhealthy is named before any step is paid for."""

from __future__ import annotations

import time

import pandas as pd
import pytest
from support.live_run import TWO_RANKS, living

from forge.core.files import read_json
from forge.core.process import hostname
from forge.core.records import PreflightPass


@pytest.fixture
def launches():
    """Here ranks are really launched."""


def test_two_healthy_ranks_pass_and_json_and_table_say_the_same(runs):
    run = runs("healthy")
    outcome = run.forge("preflight", *TWO_RANKS)
    assert outcome.code == 0, outcome.text
    assert "NODE " in outcome.text
    assert "RANKS world of 2" in outcome.text
    assert PreflightPass.read(run.paths.preflight_pass).nodes == [hostname()]

    summary = read_json(run.paths.preflight)
    assert summary["status"] == "ok"
    assert summary["ranks"]["world_size"] == 2
    found = {check["name"]: check["status"] for check in summary["ranks"]["checks"]}
    assert found == dict.fromkeys(("mapping", "rendezvous", "versions", "all-reduce"), "ok")
    table = pd.read_csv(run.paths.preflight_table, sep="\t", keep_default_na=False)
    everything = summary["nodes"][0]["checks"] + summary["ranks"]["checks"]
    assert table.drop(columns="where").to_dict("records") == everything


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("fabric.interface=none0", "none0 (fabric.interface) is not there"),
        (
            "environment.variables={GLOO_SOCKET_IFNAME: none0}",
            "none0 (GLOO_SOCKET_IFNAME of machine.yaml) is not there",
        ),
    ],
)
def test_interface_that_is_not_there_is_named_and_no_rank_started(runs, setting, said):
    run = runs("unhealthy")
    outcome = run.forge("preflight", *TWO_RANKS, f"--machine.{setting}")
    assert outcome.code == 69
    assert said in outcome.text
    assert "run forge preflight" not in outcome.text
    assert read_json(run.paths.preflight)["status"] == "failed"
    assert "none0" in run.paths.preflight_table.read_text()
    assert not run.paths.preflight_pass.exists()
    assert not list(run.paths.logs.glob("torchrun.*"))


def test_world_size_that_does_not_divide_the_batch_is_a_config_error(runs):
    outcome = runs("odd").forge("preflight", "--machine.launcher=torchrun", "--ranks-per-node=3")
    assert outcome.code == 78
    assert "train.batch_size 8 cannot be shared by a world of 3 ranks" in outcome.text


def test_deadline_ends_ranks_that_do_not_meet(runs):
    run = runs("late")
    started = time.monotonic()
    outcome = run.forge("preflight", *TWO_RANKS, "--machine.preflight.deadline_sec=0.5")
    assert outcome.code == 69
    assert "not done within 0.5 s" in outcome.text
    assert time.monotonic() - started < 10
    assert living() == []
    assert read_json(run.paths.preflight)["status"] == "failed"
