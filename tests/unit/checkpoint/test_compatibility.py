"""A config that no longer fits its checkpoint is refused by key, before anything is removed."""

import json
import re

import pytest
from support.manifests import IDS, save

from forge.checkpoint.compatibility import (
    check_compatible,
    frozen_decay_steps,
    schedule_warnings,
)
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import MANIFEST, Manifest
from forge.core.config import Config, ResolvedConfig, load_config
from forge.core.errors import ConfigError
from forge.core.paths import RunPaths
from forge.core.provenance import config_digest
from forge.core.section import later
from forge.core.train_settings import Train
from forge.data.content_ids import resolve


def config_of(**overrides):
    return resolve(load_config("/dev/null", {**overrides, "ids": IDS}))


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results" / "run")


def test_changed_hyperparameter_is_refused_by_key_and_value(paths):
    saved = save(paths, 10)
    with pytest.raises(ConfigError) as caught:
        check_compatible(config_of(**{"train.lr": 0.5, "model.layers": 9}), saved)
    assert "train.lr is 0.5, the checkpoint has 0.003" in str(caught.value)
    assert "model.layers is 9, the checkpoint has 4" in str(caught.value)


def test_another_architecture_is_refused_and_a_checkpoint_from_before_the_key_is_a_llama(paths):
    saved = save(paths, 10)
    with pytest.raises(ConfigError) as caught:
        check_compatible(config_of(**{"model.architecture": "gpt2"}), saved)
    assert "model.architecture is 'gpt2', the checkpoint has 'llama'" in str(caught.value)
    assert "model.positions is 1024, the checkpoint has None" in str(caught.value)
    values = json.loads((saved.folder / MANIFEST).read_text()) | {"digest": ""}
    assert values["lineage"]["config"]["model"].pop("architecture") == "llama"
    Manifest.model_validate(values).write(saved.folder)
    assert '"architecture"' not in (saved.folder / MANIFEST).read_text()
    older = Checkpoint.open(saved.folder)
    check_compatible(config_of(), older)
    with pytest.raises(ConfigError, match=r"architecture is 'gpt2', the checkpoint has 'llama'"):
        check_compatible(config_of(**{"model.architecture": "gpt2"}), older)


class Grown(Train):
    """Settings of a later version, with a key that the checkpoint does not have."""

    swirl: float = later(0.5, ge=0)
    """A key."""


class GrownConfig(ResolvedConfig):
    train: Grown = Grown()


def grown(**train):
    values = config_of().to_json()
    return GrownConfig.model_validate({**values, "train": {**values["train"], **train}})


def test_key_of_a_later_version_is_in_no_file_until_it_is_set_and_then_binds(paths, monkeypatch):
    monkeypatch.setitem(Config.model_fields, "train", GrownConfig.model_fields["train"])
    saved = save(paths, 10)
    assert grown().training_json() == config_of().training_json()
    assert config_digest(grown()) == config_digest(config_of()) != config_digest(grown(swirl=0.7))
    check_compatible(grown(), saved)
    with pytest.raises(ConfigError, match=r"train.swirl is 0.7, the checkpoint has 0.5"):
        check_compatible(grown(swirl=0.7), saved)
    values = json.loads((saved.folder / MANIFEST).read_text()) | {"digest": ""}
    values["lineage"]["config"]["train"]["swirl"] = 0.7
    Manifest.model_validate(values).write(saved.folder)
    with pytest.raises(ConfigError, match=r"train.swirl is 0.5, the checkpoint has 0.7"):
        check_compatible(grown(), Checkpoint.open(saved.folder))


def test_other_text_under_the_name_of_a_trained_run_is_refused_by_its_key(paths):
    """Only two digests were named, from which nobody sees what to restore."""
    saved = save(paths, 10)
    ids = IDS.model_copy(update={"tokens": "f" * 12, "tokenizer": "e" * 12})
    other = {"ids": ids, "tokenize.inputs": ["mine.txt"]}
    with pytest.raises(ConfigError) as caught:
        check_compatible(resolve(load_config("/dev/null", other)), saved)
    was = config_of().tokenize.inputs
    assert f"tokenize.inputs is ['mine.txt'], the checkpoint has {was}" in caught.value.what
    assert "f" * 12 not in caught.value.what and "new name" in caught.value.fix
    same_settings = resolve(load_config("/dev/null", {"ids": ids, "tokenize.fast": False}))
    with pytest.raises(ConfigError, match=r"(?s)ids\.tokens is 'f+', .*names or sizes"):
        check_compatible(same_settings, saved)


def test_free_keys_may_change(paths):
    saved = save(paths, 10)
    changed = {
        "train.max_steps": 900,
        "train.log_every": 1,
        "train.shard": "all",
        "train.recompute": "full",
    }
    check_compatible(config_of(**changed), saved)


def test_key_that_is_newer_than_the_checkpoint_must_have_its_default(paths):
    """Else an update of Forge ends every run that was under way."""
    written = json.loads((save(paths, 10).folder / MANIFEST).read_text())
    del written["lineage"]["config"]["train"]["reduce_dtype"]
    folder = save(paths, 20).folder
    Manifest.model_validate({**written, "step": 20}).sealed().write(folder)
    saved = Checkpoint.open(folder)
    check_compatible(config_of(), saved)
    with pytest.raises(ConfigError, match=r"reduce_dtype is 'bf16', the checkpoint has 'fp32'"):
        check_compatible(config_of(**{"train.reduce_dtype": "bf16"}), saved)


def test_decay_stays_as_at_the_first_start_when_the_goal_is_raised(paths):
    saved = save(paths, 10, config=config_of(**{"train.max_steps": 100}))
    raised = config_of(**{"train.max_steps": 300})
    assert frozen_decay_steps(raised, saved) == 100
    with pytest.raises(ConfigError, match=r"train\.decay_steps is 300, the checkpoint has 100"):
        check_compatible(config_of(**{"train.max_steps": 300, "train.decay_steps": 300}), saved)


@pytest.mark.parametrize(
    ("keys", "step", "said"),
    [
        (
            {"warmup_steps": 20, "max_steps": 10, "lr": 0.1},
            None,
            "max_steps 10: .* 0.05, never 0.1",
        ),
        ({"warmup_steps": 20, "max_steps": 10, "decay_steps": 99}, None, "beyond max_steps 10"),
        ({"warmup_steps": 20, "max_steps": 10}, 5, "beyond max_steps 10"),
        ({"warmup_steps": 20, "max_steps": 10}, 10, None),
        ({"warmup_steps": 10, "max_steps": 10}, None, None),
        ({"warmup_steps": 0, "max_steps": 1}, None, None),
    ],
)
def test_warmup_that_never_ends_is_reported_until_the_goal_is_reached(paths, keys, step, said):
    """max_steps only stops, so it may be small; but nobody should wonder why the loss is high."""
    config = config_of(**{f"train.{key}": value for key, value in keys.items()})
    saved = save(paths, step, config=config) if step else None
    warnings = schedule_warnings(config, saved)
    assert len(warnings) == (said is not None)
    assert said is None or re.search(said, warnings[0])


def test_schedule_that_is_left_open_never_ends_in_the_warmup():
    """It did, and validation then refused the finished checkpoint: warmup_steps beyond decay_steps."""
    short = config_of(**{"train.max_steps": 10, "train.warmup_steps": 20})
    assert frozen_decay_steps(short, None) == 20
    assert frozen_decay_steps(config_of(**{"train.max_steps": 30}), None) == 30


def test_goal_below_latest_is_refused_and_nothing_is_deleted(paths):
    saved = save(paths, 50)
    with pytest.raises(ConfigError, match=r"max_steps is 20, but .* is at step 50"):
        check_compatible(config_of(**{"train.max_steps": 20, "train.decay_steps": 200}), saved)
    assert saved.folder.is_dir()
