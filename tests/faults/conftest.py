"""A tiny run, uninterrupted and in the middle of its way, that the tests of faults begin with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from injection import Fault
from runs import GOAL, INTERVAL, FaultyRun, Story
from support.live_run import TINY, write_corpus


@pytest.fixture(scope="session")
def tiny_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of config.yaml, a corpus, its tokenizer and its shards."""
    root = tmp_path_factory.mktemp("tiny_project")
    corpus = write_corpus(root)
    train = {
        **TINY["train"],
        **{"max_steps": GOAL, "decay_steps": GOAL, "checkpoint_every": INTERVAL, "keep_last": 2},
    }
    values = {
        **TINY,
        "model": {**TINY["model"], "dropout": 0.1},
        "train": train,
        "data": str(root / "data"),
        "tokenize": {"inputs": [str(corpus)], "val_fraction": 0.3},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(values))
    maker = FaultyRun(root / "config.yaml", root / "none")
    for command in ("tokenizer", "tokenize"):
        ended = maker.command(command)
        assert ended.code == 0, ended.text
    return root


@pytest.fixture(scope="session")
def session_runs(
    tiny_project: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., FaultyRun]:
    """Makes runs that several tests look at: `session_runs(name, ranks, *overrides)`."""
    results = tmp_path_factory.mktemp("results")
    return lambda name, ranks, *more: FaultyRun.make(tiny_project, results, name, ranks, more)


@pytest.fixture
def runs(tiny_project: Path, tmp_path: Path) -> Callable[..., FaultyRun]:
    """Makes runs of one test: `runs(name, ranks, *overrides)`."""
    return lambda name, ranks, *more: FaultyRun.make(
        tiny_project, tmp_path / "results", name, ranks, more
    )


@pytest.fixture(scope="session")
def uninterrupted(session_runs: Callable[..., FaultyRun]) -> Callable[[int], Story]:
    """What a run of so many ranks is, when nothing happens to it."""
    told: dict[int, Story] = {}

    def tell(ranks: int) -> Story:
        if ranks not in told:
            run = session_runs(f"uninterrupted-{ranks}", ranks)
            ended = run.train()
            assert ended.code == 0, ended.text
            told[ranks] = run.story()
        return told[ranks]

    return tell


@pytest.fixture(scope="session")
def halfway(session_runs: Callable[..., FaultyRun]) -> Callable[[int], FaultyRun]:
    """A run that was stopped at step 10: it has checkpoints at 8 and 10."""
    made: dict[int, FaultyRun] = {}

    def make(ranks: int) -> FaultyRun:
        if ranks not in made:
            run = session_runs(f"halfway-{ranks}", ranks)
            ended = run.train(Fault("term", "data.read", at=10))
            assert ended.code == 75, ended.text
            made[ranks] = run
        return made[ranks]

    return make


@pytest.fixture
def resumable(halfway: Callable[[int], FaultyRun], tmp_path: Path) -> Callable[..., FaultyRun]:
    """Copies of it, of one test: `resumable(name, ranks)`."""

    def copy(name: str, ranks: int) -> FaultyRun:
        (tmp_path / "results").mkdir(exist_ok=True)
        return halfway(ranks).copy(tmp_path / "results" / name)

    return copy
