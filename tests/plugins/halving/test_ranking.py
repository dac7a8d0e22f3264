"""Ranking of runs. Threat: losses of other samples, or that weigh sources otherwise, in one order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.manifests import IDS
from support.recorded_run import RecordedRun

from forge.core.config import Config, ResolvedConfig
from forge.core.errors import ConfigError
from forge.core.files import write_json
from forge.plugins.halving.ranking import ranked

STEP = 20


def made(root: Path, loss: float, **train: Any) -> Config:
    """A run with a validation at STEP, whose config.json has these keys of `train`."""
    run = RecordedRun(root)
    config = ResolvedConfig(run=root.name, results=str(root.parent), ids=IDS)
    values = config.training_json()
    values["train"] |= train
    write_json(run.paths.config, values)
    run.launch(0)
    run.metric("eval", STEP, loss=loss)
    run.save(STEP)
    return config


def order(configs: list[Config]) -> list[str]:
    return [one.run for one in ranked({one.run: one for one in configs}, STEP)[0]]


MIX = {"web": 0.9, "code": 0.1}
OTHER = {
    "mix": {"mix": {"web": 0.5, "code": 0.5}},
    "seq_len": {"mix": MIX, "seq_len": 512},
    "eval_samples": {"mix": MIX, "eval_samples": 8},
}


@pytest.mark.parametrize("key", sorted(OTHER))
def test_runs_that_are_measured_otherwise_are_refused_by_the_key(key: str, tmp_path: Path) -> None:
    one, other = made(tmp_path / "a", 3.0, mix=MIX), made(tmp_path / "b", 2.2, **OTHER[key])
    with pytest.raises(
        ConfigError, match=rf"runs a and b do not compare: their train\.{key} at step"
    ):
        order([one, other])


def test_runs_with_the_same_shares_at_the_step_are_ranked(tmp_path: Path) -> None:
    """Other units, a stage that is over, and one that has not begun."""
    stages = [{"step": 0, "web": 1, "code": 1}, {"step": 10, **MIX}, {"step": STEP, "web": 1}]
    configs = [
        made(tmp_path / "a", 3.0, mix=MIX),
        made(tmp_path / "b", 2.2, mix={"web": 9, "code": 1, "books": 0}),
        made(tmp_path / "c", 2.5, mix=stages),
    ]
    assert order(configs) == ["b", "c", "a"]
