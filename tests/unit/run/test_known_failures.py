"""Which runs the workflow starts no more: those that `forge train` would refuse at once."""

import pytest
from support import happenings

from forge.core import events
from forge.core.config import Config, checked
from forge.core.paths import RunPaths
from forge.data.content_ids import resolve
from forge.flow import runs
from forge.launch.rank_records import RankRecord
from forge.run import train

DIVERGED = RankRecord("failed", code=70, cause="TrainingError", message="loss nan at step 3")


@pytest.fixture
def run(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text")
    values = {"run": "base", "results": str(tmp_path), "tokenize": {"inputs": [str(text)]}}
    # What is validated and reported is no part of what training reads.
    return resolve(checked(Config, values | {"report": {"sample_tokens": 3}}, "the test"))


def fails(run, why):
    """As the launcher writes it, with the config that config_run has written."""
    train._record_failure(run.of_training, RunPaths.of(run), why)


def test_run_that_diverged_is_known_by_its_message(run):
    assert runs.known_failures({"base": run}) == {}
    fails(run, DIVERGED)
    told = runs.known_failures({"base": run})["base"]
    assert "this config failed before: loss nan at step 3" in told
    assert str(RunPaths.of(run).events) in told  # how to try it once more


def test_another_config_is_tried(run):
    fails(run, DIVERGED)
    other = run.model_copy(update={"train": run.train.model_copy(update={"lr": 1e-5})})
    assert runs.known_failures({"base": other}) == {}


def test_removed_events_and_other_outcomes_since_are_tried(run):
    fails(run, DIVERGED)
    events.record(RunPaths.of(run).events, happenings.completed(5))
    assert runs.known_failures({"base": run}) == {}
    fails(run, DIVERGED)
    RunPaths.of(run).events.unlink()
    assert runs.known_failures({"base": run}) == {}


@pytest.mark.parametrize("code", [65, 69, 70, 78])
def test_failure_with_a_cause_outside_of_the_numbers_is_tried_again(run, code):
    fails(run, RankRecord("failed", code=code, cause="UnfitError", message="a disk was full"))
    assert runs.known_failures({"base": run}) == {}
