"""Families of runs. Threats: a child that starts before its parent's checkpoint is there, or waits for
one that is; results that came from a checkpoint which is another one now; a child in the queue that
cannot start."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from support import manifests
from support.repository import REPOSITORY

from forge.checkpoint import directory, family, parent
from forge.checkpoint.manifest import SkippedSteps
from forge.core.errors import ConfigError
from forge.core.paths import RunPaths
from forge.core.records import Trained
from forge.core.sample_sheet import run_configs
from forge.flow.flow import Flow

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


def merge(config, step):
    """A merge whose newest checkpoint is of this step."""
    paths = RunPaths.of(config)
    save(config, step)
    paths.merged.mkdir(exist_ok=True)
    (paths.checkpoints / f"step-{step:08d}").rename(paths.merged / f"step-{step:08d}")


def test_merged_is_the_newest_merge_of_a_run_also_on_the_sheet_and_then_stays(rows):
    base = rows(BASE)["base"]
    merge(base, 50)
    row = "child\tbase@merged\t120\t\n"
    child = rows(BASE, row)["child"]
    assert child.parent == "base@merged-50" and parent.first_step(child) == 50
    assert parent.find(child).folder == RunPaths.of(base).merged / "step-00000050"
    save_child(child, 60)
    merge(base, 100)
    assert rows(BASE, row)["child"].parent == "base@merged-50"
    assert rows(BASE, "other\tbase@merged\t120\t\n")["other"].parent == "base@merged-100"


@pytest.mark.parametrize("name", ["base@merged", "base@merged-50"])
def test_merge_that_is_not_there_is_refused_since_the_workflow_makes_none(rows, name):
    save(rows(BASE)["base"], 50)
    with pytest.raises(ConfigError, match="base has no such merge") as caught:
        runs = rows(BASE, f"child\t{name}\t120\t\n")
        family.check_start(runs["child"], runs)
    assert caught.value.fix == "forge merge base"


def test_latest_of_a_run_that_is_nowhere_is_refused(rows):
    with pytest.raises(ConfigError, match="child: its parent nobody@latest does not exist"):
        rows("child\tnobody@latest\t120\t\n")


def test_sheet_of_the_documentation_is_accepted(sheet):
    page = (REPOSITORY / "docs/families.md").read_text()
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
    assert family.waiting(runs) == {"child": "base"}
    save(runs["base"], 50)
    assert family.waiting(runs) == {}, "the parent trains on, the child too"
    save(runs["base"], 100)
    end(runs["base"])
    assert family.waiting(runs) == {"child": "base"}, "for the plan: it has ended"
    alone = {"child": runs["child"]}
    assert family.waiting(alone) == {}


def test_snakemake_in_the_job_of_a_child_wants_no_file_that_only_the_plan_makes(rows, tmp_path):
    """The parent has ended while the job was in the queue, where the child waited for nothing."""
    runs = rows(BASE, "child\tbase@50\t120\t\n")
    save(runs["base"], 100)
    end(runs["base"])
    wildcards = SimpleNamespace(run="child")
    made = tmp_path / "child/.parent_trained"

    def wanted(*, main):
        flow = SimpleNamespace(results=tmp_path, waiting=family.waiting(runs), _is_main=main)
        return Flow.parent_of(flow, wildcards)

    assert wanted(main=True) == [made] and wanted(main=False) == []
    made.parent.mkdir()
    made.touch()
    assert wanted(main=False) == [made]


def test_child_that_has_begun_waits_for_nothing_even_where_the_checkpoint_is_gone(rows):
    runs = rows(BASE, "child\tbase@50\t120\t\n")
    save(runs["base"], 50)
    save_child(runs["child"], 60)
    shutil.rmtree(RunPaths.of(runs["base"]).checkpoints)
    assert family.waiting(runs) == {}


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


def test_nothing_is_said_while_the_parents_checkpoint_is_the_same(line, capsys):
    line()
    assert "digest" not in capsys.readouterr().err


def test_complete_child_of_a_changed_checkpoint_stays_as_it_is_with_a_warning(line, capsys):
    base = RunPaths.of(line()["base"])
    then = family.started_from(RunPaths.of(line()["a"])).digest[:12]
    remake(line()["base"], 50)
    now = directory.Checkpoint.open(base.checkpoints / "step-00000050").manifest.digest[:12]
    capsys.readouterr()
    assert family.waiting(line()) == {}
    [warning] = [text for text in capsys.readouterr().err.splitlines() if "digest" in text]
    a = RunPaths.of(line()["a"]).root
    assert warning == (
        f"a: warning: started from base@50 with digest {then}, which has digest {now} now; it is complete"
        f" and stays as it is (to start a anew, rerun the command after mv {a} {a}.old)"
    )


def test_child_of_a_changed_checkpoint_with_steps_to_train_is_refused_with_both_digests(rows):
    lines = (BASE, "child\tbase@50\t120\t\n")
    runs = rows(*lines)
    save(runs["base"], 50)
    save_child(runs["child"], 60)
    root = RunPaths.of(runs["child"]).root
    then = family.started_from(RunPaths.of(runs["child"])).digest
    remake(runs["base"], 50)
    now = parent.find(runs["child"]).manifest.digest
    assert now != then
    root.with_name("child.old").mkdir()
    for start in (lambda: rows(*lines), lambda: family.check_parent(runs["child"], {})):
        with pytest.raises(ConfigError) as caught:
            start()
        assert caught.value.what == (
            f"run child started from base@50 with digest {then[:12]}, which has digest {now[:12]} now"
        )
        assert f"mv {root} {root}.old.2;" in caught.value.fix, "a name that is free"
    saved_again = root.rename(f"{root}.old.2")
    assert rows(*lines)["child"].parent == "base@50"
    assert saved_again.is_dir()


def test_child_with_steps_to_train_of_a_parent_that_this_command_would_make_again_is_refused(rows):
    lines = (BASE, "child\tbase@50\t120\t\n")
    runs = rows(*lines)
    save(runs["base"], 50)
    save_child(runs["child"], 60)
    shutil.rmtree(RunPaths.of(runs["base"]).root)
    with pytest.raises(ConfigError, match="which is gone and will be made again: base is on"):
        rows(*lines)
    assert rows(lines[1])["child"].parent == "base@50", "without the parent's row it trains on"


def test_warning_precedes_the_second_training_of_a_parent(line, capsys):
    shutil.rmtree(RunPaths.of(line()["base"]).root)
    capsys.readouterr()
    assert family.waiting(line()) == {}
    said = capsys.readouterr().err
    assert re.findall("^(.*): warning: .* which is gone and will be made again", said, re.M) == [
        *("a", "b")
    ]


def test_parent_that_has_ended_and_whose_checkpoints_were_removed_changes_nothing(line, capsys):
    shutil.rmtree(RunPaths.of(line()["base"]).checkpoints)
    line()
    assert "digest" not in capsys.readouterr().err


def test_unreadable_records_are_no_change(line):
    runs = line()
    (RunPaths.of(runs["base"]).checkpoints / "step-00000050/checkpoint.json").write_text("{")
    shutil.rmtree(RunPaths.of(runs["b"]).checkpoints)
    RunPaths.of(runs["b"]).trained.write_text(json.dumps({}))
    assert [family.check_parent(config, runs) for config in runs.values()] == [[]] * len(runs)
