"""A wrong parent is refused before anything starts; Forge never takes another checkpoint instead."""

from __future__ import annotations

import json
import shutil

import pytest
from support import manifests
from support.manifests import IDS, lineage_of

from forge.checkpoint import compatibility, parent, resume
from forge.checkpoint.manifest import MANIFEST, ParentCheckpoint
from forge.core.config import Ids, load_config
from forge.core.errors import ConfigError, DataError
from forge.core.paths import RunPaths
from forge.core.sample_sheet import run_configs
from forge.data.content_ids import resolve
from tools.config_docs import keys_text


@pytest.fixture
def config_of(results):
    def make(run="child", ids=IDS, **overrides):
        overrides = {key.replace("__", "."): value for key, value in overrides.items()}
        named = {"run": run, "results": str(results), "ids": ids}
        return resolve(load_config("/dev/null", {**named, **overrides}))

    return make


def save(config, step, **facts):
    return manifests.save(RunPaths.of(config), step, config=config, keep_last=9, **facts)


@pytest.fixture
def base(config_of):
    """A run with checkpoints of the steps 50 and 100."""
    config = config_of("base")
    save(config, 50)
    save(config, 100)
    return config


def test_a_run_without_a_parent_starts_from_nothing(config_of):
    assert parent.find(config_of()) is None
    assert parent.first_step(config_of()) == 0


def test_the_named_checkpoint_is_found_and_not_the_newest(base, config_of):
    child = config_of(parent="base@50")
    assert parent.find(child).folder == RunPaths.of(base).checkpoints / "step-00000050"
    assert parent.first_step(child) == 50


@pytest.mark.parametrize(
    "value", ["base", "base@", "base@0", "base@07", "@5", "../x@5", "a@5@5", "a@x"]
)
def test_parent_that_names_no_step_of_a_run_is_refused_with_an_example(config_of, value):
    with pytest.raises(ConfigError, match=r"parent is .*must be RUN@STEP, such as base@5000"):
        config_of(parent=value)


def test_a_run_is_not_its_own_parent(config_of):
    with pytest.raises(ConfigError, match="a checkpoint of this run itself"):
        config_of("base", parent="base@50")


def test_unknown_run_is_refused(config_of, results):
    with pytest.raises(ConfigError, match=f"there is no run base in {results}") as caught:
        parent.find(config_of(parent="base@50"))
    assert "train base first" in str(caught.value)


def test_run_that_is_not_trained_so_far_is_refused_with_the_steps_that_are_there(base, config_of):
    with pytest.raises(ConfigError, match="base@75 does not exist") as caught:
        parent.find(config_of(parent="base@75"))
    assert "has the steps 50, 100" in str(caught.value)
    assert "train.keep_every" in str(caught.value)
    shutil.rmtree(RunPaths.of(base).checkpoints)
    with pytest.raises(ConfigError, match="has no checkpoint"):
        parent.find(config_of(parent="base@75"))


@pytest.mark.parametrize("damage", ["manifest", "size", "missing", "renamed"])
def test_corrupt_checkpoint_is_refused_by_name_and_stays_where_it_is(base, config_of, damage):
    paths = RunPaths.of(base)
    folder = paths.checkpoints / "step-00000100"
    {
        "manifest": lambda: (folder / MANIFEST).write_text("{"),
        "size": lambda: (folder / "__0_0.distcp").write_bytes(b"cut"),
        "missing": (folder / "__0_0.distcp").unlink,
        "renamed": lambda: shutil.copytree(
            paths.checkpoints / "step-00000050", folder, dirs_exist_ok=True
        ),
    }[damage]()
    before = sorted(paths.root.rglob("*"))
    with pytest.raises(DataError, match="run child: its parent base@100 is corrupt") as caught:
        parent.find(config_of(parent="base@100"))
    assert "the steps 50, 100" in str(caught.value)
    assert sorted(paths.root.rglob("*")) == before


@pytest.mark.parametrize(
    ("key", "value", "then"),
    [
        ("model__dim", 128, 256),
        ("model__layers", 2, 4),
        ("model__tie_embeddings", False, True),
        ("model__rope_theta", 5e5, 10000.0),
        ("train__seq_len", 128, 256),
        ("train__batch_size", 32, 16),
    ],
)
def test_key_that_a_run_shares_with_its_parent_is_refused_by_name(
    base, config_of, key, value, then
):
    with pytest.raises(ConfigError) as caught:
        parent.find(config_of(parent="base@50", **{key: value}))
    assert f"{key.replace('__', '.')} is {value!r}, the checkpoint has {then!r}" in str(
        caught.value
    )


def test_other_tokens_or_another_tokenizer_are_refused_by_name(base, config_of):
    for key in ("tokens", "tokenizer"):
        ids = Ids(**{**IDS.model_dump(), key: "0" * 12})
        with pytest.raises(ConfigError, match=rf"ids\.{key} is '0+', the checkpoint has"):
            parent.find(config_of(parent="base@50", ids=ids))


def test_keys_that_are_changed_after_a_divergence_may_differ(base, config_of):
    changed = {
        **{
            "train__lr": 1e-4,
            "train__seed": 7,
            "train__schedule": "wsd",
            "train__warmup_steps": 70,
        },
        **{"train__weight_decay": 0.0, "train__beta2": 0.99, "train__grad_clip": 0.5},
        **{"train__decay_steps": 500, "train__max_steps": 400, "train__precision": "bf16"},
        **{"model__dropout": 0.1, "train__shard": "all"},
    }
    assert parent.find(config_of(parent="base@50", **changed)).step == 50


@pytest.mark.parametrize("max_steps", [49, 50])
def test_goal_that_the_parent_has_reached_already_is_refused(base, config_of, max_steps):
    with pytest.raises(ConfigError, match=f"max_steps is {max_steps}, but .* at step 50 already"):
        parent.find(config_of(parent="base@50", train__max_steps=max_steps))


# --- the sheet, and the second start --------------------------------------------------------------


def test_the_sheet_has_a_column_parent_and_an_empty_cell_is_none(tmp_path):
    sheet = tmp_path / "runs.tsv"
    sheet.write_text("run\tparent\ttrain.lr\nbase\t\t\ncooler\tbase@50\t1e-4\n")
    runs = run_configs({}, sheet)
    assert [(run.parent, run.train.lr) for run in runs.values()] == [
        (None, 3e-3),
        ("base@50", 1e-4),
    ]
    sheet.write_text("run\tparent\nbase\tbase\n")
    with pytest.raises(
        ConfigError, match=r"line 2 \(run base\), column parent: .*must be RUN@STEP"
    ):
        run_configs({}, sheet)


def test_workflow_refuses_a_missing_parent_until_it_is_trained(sheet):
    rows = "run\tparent\nchild\tbase@50\n"
    with pytest.raises(ConfigError, match="there is no run base"):
        sheet(rows)
    save(sheet("run\nbase\n")["base"], 50)
    assert sheet(rows)["child"].parent == "base@50"


def test_a_run_with_a_checkpoint_of_its_own_needs_its_parent_no_more(sheet):
    rows = "run\tparent\nchild\tbase@50\n"
    save(sheet("run\nbase\n")["base"], 50)
    child = sheet(rows)["child"]
    save(child, 60)
    shutil.rmtree(RunPaths.of(child).root.parent / "base")
    assert sheet(rows)["child"].parent == "base@50"
    RunPaths.of(child).trained.write_text(json.dumps({}))
    shutil.rmtree(RunPaths.of(child).checkpoints)
    assert sheet(rows), "it is trained: nothing of the parent is asked for"


def test_parent_changed_after_the_first_checkpoint_is_refused_by_key(base, config_of):
    save(config_of(parent="base@50"), 60)
    saved = resume.latest(RunPaths.of(config_of()))
    for changed, shown in (({"parent": "base@100"}, "'base@100'"), ({}, "None")):
        with pytest.raises(ConfigError, match=f"parent is {shown}, the checkpoint has 'base@50'"):
            compatibility.check_compatible(config_of(**changed), saved)


def test_lineage_names_run_step_and_digest_and_is_handed_on_by_the_runs_own_checkpoints(
    base, config_of
):
    child = config_of(parent="base@50")
    start = parent.find(child)
    then = ParentCheckpoint(run="base", step=50, digest=start.manifest.digest)
    assert parent.recorded(child, None, start) == then
    own = save(child, 60)
    assert parent.recorded(child, own, own) is None
    lineage = lineage_of(child, parent=then)
    assert parent.recorded(child, save(child, 70, lineage=lineage), None) == then


def test_fix_for_a_run_that_diverged_names_a_checkpoint(config_of):
    assert "parent: child@60, or a step" in parent.fix_for_divergence(config_of(), 60)
    child = config_of(parent="base@50")
    assert "parent: child@60, or a step" in parent.fix_for_divergence(child, 60)
    assert "parent: base@50, or a step" in parent.fix_for_divergence(child, 50)
    assert "lower train.lr" in parent.fix_for_divergence(config_of(), 0)
    for saved_step in (0, 60):
        assert "train.seed" in parent.fix_for_divergence(config_of(), saved_step)


def test_the_table_of_keys_says_that_parent_may_not_change():
    [line] = [text for text in keys_text(type(load_config("/dev/null")), with_resume=True).splitlines()
              if text.startswith("| `parent`")]  # fmt: skip
    assert line.endswith("| no |")
