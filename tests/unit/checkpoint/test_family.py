"""Families of runs. Threats: a child that starts before its parent's checkpoint is there, or waits for
one that is; results that came from a checkpoint which is another one now; a child in the queue that
cannot start."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support import manifests

from forge.checkpoint import family, parent
from forge.checkpoint.manifest import SkippedSteps
from forge.core.errors import ConfigError
from forge.core.paths import RunPaths
from forge.core.records import Trained
from forge.core.sample_sheet import run_configs

STEPS = "train.max_steps\ttrain.keep_every"
BASE = "base\t\t100\t50\n"


def save(config, step, **facts):
    return manifests.save(RunPaths.of(config), step, config=config, keep_last=9, **facts)


def save_child(config, step):
    """A checkpoint of a run that has started from its parent's."""
    start = parent.find(config)
    made_from = parent.recorded(config, None, start)
    return save(config, step, lineage=manifests.lineage_of(config, parent=made_from))


def end(config):
    """What a run leaves that is at its goal."""
    made_from = family.started_from(RunPaths.of(config))
    Trained(
        **{"run": config.run, "goal_step": config.goal, "step": config.goal},
        **{"checkpoint": "", "weights_digest": "", "config_digest": ""},
        parent=made_from.to_json() if made_from else None,
    ).write(RunPaths.of(config).trained)


@pytest.fixture
def rows(sheet):
    """rows(row, …): the runs of a sheet. Columns: run, parent, train.max_steps, train.keep_every."""
    return lambda *lines: sheet(f"run\tparent\t{STEPS}\n" + "".join(lines))


def remake(config, step):
    """Another checkpoint in the place of the one at this step."""
    shutil.rmtree(RunPaths.of(config).checkpoints / f"step-{step:08d}")
    save(config, step, skipped=SkippedSteps(steps=1, in_a_row=0))


# --- order ----------------------------------------------------------------------------------------


def test_latest_of_a_run_on_the_sheet_is_its_last_step_also_along_a_line(rows):
    runs = rows(BASE, "child\tbase@latest\t120\t\n", "next\tchild@latest\t150\t\n")
    assert [run.parent for run in runs.values()] == [None, "base@100", "child@120"]


def test_latest_of_another_run_is_its_newest_checkpoint_and_then_stays(rows):
    base = rows(BASE)["base"]
    save(base, 50)
    child = rows("child\tbase@latest\t120\t\n")["child"]
    assert child.parent == "base@50"
    save_child(child, 60)
    save(base, 100)
    assert rows("child\tbase@latest\t120\t\n")["child"].parent == "base@50"


def test_latest_of_a_run_that_is_nowhere_is_refused(rows):
    with pytest.raises(ConfigError, match="child: its parent nobody@latest does not exist"):
        rows("child\tnobody@latest\t120\t\n")


def test_sheet_of_the_documentation_is_accepted(sheet):
    page = (Path(__file__).parents[3] / "docs/families.md").read_text()
    [table] = re.findall("```tsv\n(.*?)```", page, re.DOTALL)
    head, *lines = table.splitlines()
    more = [f"{line}\twsd\t10000" for line in lines]
    runs = sheet("\n".join([f"{head}\ttrain.schedule\ttrain.keep_every", *more]))
    assert [run.parent for run in runs.values()] == [None, "base@10000", "base@20000", "base@40000"]


def test_parents_in_a_circle_are_refused(rows):
    lines = ("a\tc@1\t9\t\n", "b\ta@1\t9\t\n")
    with pytest.raises(ConfigError, match="a from c from b from a"):
        rows(*lines, "c\tb@1\t9\t\n")


def test_parent_on_a_hub_is_that_of_model_init(tmp_path):
    path = tmp_path / "runs.tsv"
    path.write_text("run\tparent\ntuned\thub:org/name@main\n")
    [run] = run_configs({"model": {"layers": 2}}, path).values()
    assert (run.parent, run.model.init.hub, run.model.layers) == (None, "org/name@main", 2)
    with pytest.raises(ConfigError, match=r"model\.init is set, too: leave one of them out"):
        run_configs({"model": {"init": {"path": "weights"}}}, path)


# --- what can be refused before the parent is trained ------------------------------------------------


@pytest.mark.parametrize("step", [50, 100])
def test_child_of_a_checkpoint_that_will_be_kept_is_accepted(rows, step):
    assert rows(BASE, f"child\tbase@{step}\t120\t\n")["child"].parent == f"base@{step}"


@pytest.mark.parametrize("step", [60, 75, 150])
def test_child_of_a_checkpoint_that_will_not_be_kept_is_refused_with_those_that_will(rows, step):
    with pytest.raises(ConfigError) as caught:
        rows(BASE, f"child\tbase@{step}\t220\t\n")
    assert f"its parent base@{step} will not be there" in caught.value.what
    assert "its last step 100, and those at steps that are multiples of" in caught.value.what
    assert f"divisors of {step}" in caught.value.fix


def test_child_that_cannot_have_its_parents_weights_is_refused_before_those_are_trained(sheet):
    head = "run\tparent\ttrain.max_steps\tmodel.layers\ttrain.batch_size\n"
    with pytest.raises(
        ConfigError, match=r"cannot start from base@9: model.layers is 9.*batch_size"
    ):
        sheet(f"{head}base\t\t9\t\t\nchild\tbase@9\t20\t9\t4\n")
    with pytest.raises(ConfigError, match="max_steps is 9, but its parent base@9 is at step 9"):
        sheet(f"{head}base\t\t9\t\t\nchild\tbase@9\t9\t\t\n")


def test_checkpoint_that_the_parent_has_passed_and_removed_is_not_waited_for(rows):
    base = rows(BASE)["base"]
    save(base, 100)
    with pytest.raises(ConfigError, match=r"base@50 does not exist: .* has the steps 100"):
        rows(BASE, "child\tbase@50\t120\t\n")


# --- waiting --------------------------------------------------------------------------------------


def test_child_waits_for_a_parent_on_the_sheet_until_its_checkpoint_is_there(rows):
    lines = (BASE, "child\tbase@50\t120\t\n")
    runs = rows(*lines)
    assert family.waiting(runs, ()) == {"child": "base"}
    save(runs["base"], 50)
    assert family.waiting(runs, ()) == {}, "the parent trains on, the child too"
    save(runs["base"], 100)
    end(runs["base"])
    assert family.waiting(runs, ()) == {"child": "base"}, "for the plan: it has ended"
    alone = {"child": runs["child"]}
    assert family.waiting(alone, ()) == {}


def test_child_that_has_begun_waits_for_nothing_even_where_the_checkpoint_is_gone(rows):
    runs = rows(BASE, "child\tbase@50\t120\t\n")
    save(runs["base"], 50)
    save_child(runs["child"], 60)
    shutil.rmtree(RunPaths.of(runs["base"]).checkpoints)
    assert family.waiting(runs, ()) == {}


# --- a changed parent -----------------------------------------------------------------------------


@pytest.fixture
def line(rows):
    """line(): a run with two children, the child of one, and a run alone, which have all ended."""
    lines = (BASE, "a\tbase@50\t120\t\n", "b\tbase@100\t120\t\n", "aa\ta@latest\t150\t\n")

    def read():
        return rows(*lines, "alone\t\t10\t\n")

    for name, step in {"base": 50, "a": 120, "b": 120, "aa": 150, "alone": 10}.items():
        config = read()[name]
        save_child(config, step)
        if name == "base":
            save(config, 100)
        end(config)
    return read


def test_nothing_starts_anew_while_the_parents_checkpoint_is_the_same(line):
    assert family.starting_anew(line()) == {}


def test_another_checkpoint_of_the_parent_restarts_the_children_of_that_step_and_theirs(
    line, capsys
):
    remake(line()["base"], 50)
    runs = line()
    found = family.starting_anew(runs)
    assert set(found) == {"a", "aa"}
    assert "it started from base@50 with digest" in found["a"]
    assert found["aa"] == "a@120, from which it started, is made anew"
    assert family.waiting(runs, found) == {"a": "base", "aa": "a"}
    assert "a starts anew: it started from base@50" in capsys.readouterr().err


def test_parent_that_will_be_trained_again_restarts_all_its_descendants(line):
    shutil.rmtree(RunPaths.of(line()["base"]).root)
    assert set(family.starting_anew(line())) == {"a", "b", "aa"}


def test_parent_that_has_ended_and_whose_checkpoints_were_removed_restarts_nothing(line):
    shutil.rmtree(RunPaths.of(line()["base"]).checkpoints)
    assert family.starting_anew(line()) == {}


def test_unreadable_records_restart_nothing(line):
    runs = line()
    (RunPaths.of(runs["base"]).checkpoints / "step-00000050/checkpoint.json").write_text("{")
    shutil.rmtree(RunPaths.of(runs["b"]).checkpoints)
    RunPaths.of(runs["b"]).trained.write_text(json.dumps({}))
    assert family.starting_anew(runs) == {}


def files(paths):
    return {str(path.relative_to(paths.root)) for path in paths.root.rglob("*") if path.is_file()}


def test_what_a_run_has_made_is_set_aside_and_nothing_else(line):
    runs = line()
    paths = RunPaths.of(runs["a"])
    kept = {"config.json", "logs/train.log", "evaluations/data.json"}
    kept |= {".allocation/stage.json", "preflight.json"}
    made = {
        "metrics.jsonl",
        "events.jsonl",
        "evaluations/step-00000120.json",
        "tracking/wandb.json",
    }
    for name in (*kept, *made):
        (paths.root / name).parent.mkdir(exist_ok=True)
        (paths.root / name).touch()
    before = files(paths)
    digest = family.started_from(paths).digest
    family.set_aside_if_parent_changed(runs["a"])
    assert files(paths) == before, "the parent is the same"

    remake(runs["base"], 50)
    family.set_aside_if_parent_changed(runs["a"])
    aside = f"superseded/base-50-{digest[:12]}"
    assert files(paths) == kept | {f"{aside}/{name}" for name in before - kept}
    assert family.times_started_anew(paths) == 1
    assert family.started_from(paths) is None


def test_interrupted_move_is_finished_by_the_next_start(line, monkeypatch):
    runs = line()
    paths = RunPaths.of(runs["a"])
    paths.metrics.touch()
    remake(runs["base"], 50)
    monkeypatch.setattr(family, "MADE", family.MADE[:1])  # killed after the first
    family.set_aside_if_parent_changed(runs["a"])
    monkeypatch.undo()
    assert not paths.metrics.exists() and paths.checkpoints.exists()
    assert set(family.starting_anew(runs)) == {"a", "aa"}
    family.set_aside_if_parent_changed(runs["a"])
    [aside] = paths.superseded.iterdir()
    assert {path.name for path in aside.iterdir()} == {
        "metrics.jsonl",
        "trained.json",
        "checkpoints",
    }


def test_second_time_from_the_same_checkpoint_has_a_folder_of_its_own(line):
    runs = line()
    for times in (1, 2):
        before = RunPaths.of(runs["base"]).checkpoints / "step-00000050"
        saved = before.with_name("saved")
        before.rename(saved)
        save(runs["base"], 50, skipped=SkippedSteps(steps=1, in_a_row=0))
        family.set_aside_if_parent_changed(runs["a"])
        assert family.times_started_anew(RunPaths.of(runs["a"])) == times
        shutil.rmtree(before)
        saved.rename(before)
        save_child(runs["a"], 60)
