"""Fixtures: a tiny corpus, its shards, runs that several tests look at; no process outlives its test. For
the conftest.py of a folder, which imports all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from support.forked import LEFT_OVER, forked_launches
from support.live_run import (
    LONG,
    MARK,
    MARK_VALUE,
    TINY,
    TWO_RANKS,
    Run,
    forge,
    kill_all,
    make_run,
    write_corpus,
)

__all__ = [
    "bf16",
    "launches",
    "marked",
    "nothing_outlives_its_test",
    "one_rank_runs",
    "runs",
    "session_runs",
    "solo",
    "tiny_project",
    "uninterrupted",
]


@pytest.fixture(scope="session", autouse=True)
def marked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in LEFT_OVER:
            patch.delenv(name, raising=False)
        patch.setenv(MARK, MARK_VALUE)
        # Several ranks with a thread per core each would wait for each other spinning.
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
        kill_all()


@pytest.fixture(autouse=True)
def nothing_outlives_its_test() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture(autouse=True)
def launches() -> Iterator[None]:
    """`Run.forge` forks its ranks; a file about launchers overrides this, or takes `Run.start`."""
    with forked_launches():
        yield


@pytest.fixture(scope="session")
def tiny_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of config.yaml, a corpus, its tokenizer and its shards."""
    root = tmp_path_factory.mktemp("tiny_project")
    corpus = write_corpus(root)
    values = {
        **TINY,
        "data": str(root / "data"),
        "tokenize": {"inputs": [str(corpus)], "val_fraction": 0.3},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(values))
    assert forge("tokenizer", str(root / "config.yaml")).code == 0
    assert forge("tokenize", str(root / "config.yaml"), "--workers=1").code == 0
    return root


@pytest.fixture(scope="session")
def session_runs(
    tiny_project: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Run]:
    """Makes runs that several tests look at: `session_runs(name, *overrides)`."""
    results = tmp_path_factory.mktemp("results")
    return lambda name, *overrides: make_run(tiny_project, results, name, overrides)


@pytest.fixture
def runs(tiny_project: Path, tmp_path: Path) -> Callable[..., Run]:
    """Makes runs of one test: `runs(name, *overrides)`."""
    return lambda name, *overrides: make_run(tiny_project, tmp_path / "results", name, overrides)


@pytest.fixture(scope="session")
def one_rank_runs(session_runs: Callable[..., Run]) -> dict[str, Run]:
    """Uninterrupted runs on one rank, made at the same time."""
    made = {
        "solo": session_runs("solo", "--train.checkpoint_every=6"),
        "bf16": session_runs("bf16", "--train.precision=bf16", "--train.max_steps=6"),
    }
    for started in [run.fork("train") for run in made.values()]:
        outcome = started.end()
        assert outcome.code == 0, outcome.text
    return made


@pytest.fixture(scope="session")
def solo(one_rank_runs: dict[str, Run]) -> Run:
    """12 steps, with checkpoints at 6 and 12."""
    return one_rank_runs["solo"]


@pytest.fixture(scope="session")
def bf16(one_rank_runs: dict[str, Run]) -> Run:
    """6 steps in bf16."""
    return one_rank_runs["bf16"]


@pytest.fixture(scope="session")
def uninterrupted(session_runs: Callable[..., Run]) -> Run:
    """A run of GOAL steps on two ranks, with dropout."""
    run = session_runs("uninterrupted", *LONG)
    outcome = run.fork("train", *TWO_RANKS).end()
    assert outcome.code == 0, outcome.text
    return run
