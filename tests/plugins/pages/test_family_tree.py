"""The tree of runs that start from each other. Threats: a run below another parent than the one whose
weights it has, and a curve that begins elsewhere than at its parent's checkpoint."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from support import manifests
from support.recorded_run import RecordedRun

from forge.checkpoint.manifest import ParentCheckpoint
from forge.core.files import read_json, write_json
from forge.core.paths import RunPaths
from forge.plugins.pages import charts
from forge.plugins.pages.compare import compare
from forge.plugins.pages.report import render
from forge.plugins.pages.run_tree import families, family_of


@pytest.fixture
def results(tmp_path):
    """base, trained to 20; early and late from its steps 10 and 20, last from late; alone."""

    def train(name, first, last, parent=None):
        run = RecordedRun(tmp_path / name)
        run.freeze_config()
        config = read_json(run.paths.config) | {"run": name}
        write_json(run.paths.config, config | {"parent": parent and f"{parent}@{first}"})
        run.launch(first)
        for step in range(first + 5, last + 1, 5):
            run.evaluate(step)
        if parent:
            made_from = ParentCheckpoint(run=parent, step=first, digest="d" * 64)
            lineage = manifests.lineage_of(
                manifests.ResolvedConfig(ids=manifests.IDS), parent=made_from
            )
            manifests.save(run.paths, last, lineage=lineage)

    train("base", 0, 20)
    train("late", 20, 30, "base")
    train("early", 10, 15, "base")
    train("last", 30, 40, "late")
    train("alone", 0, 10)
    return tmp_path


def runs(results):
    return [RunPaths(results / name) for name in ("alone", "base", "early", "last", "late")]


def drawn(members):
    return [f"{member.branch}{member.run} {member.parent}".rstrip() for member in members]


TREE = ["base", "├─ early base@10", "└─ late base@20", "   └─ last late@30"]


def test_children_stand_below_their_parent_by_step_and_others_not_at_all(results):
    assert drawn(families(runs(results))) == TREE


@pytest.mark.parametrize("name", ["base", "early", "last"])
def test_every_run_of_a_family_sees_all_of_it(results, name):
    assert drawn(family_of(RunPaths(results / name))) == TREE


def test_run_without_relatives_has_no_tree(results):
    assert family_of(RunPaths(results / "alone")) == []
    assert "Runs that start from each other" not in render(RunPaths(results / "alone"))


def test_run_that_has_not_started_stands_below_the_parent_that_its_config_names(results):
    paths = RunPaths(results / "next")
    paths.root.mkdir()
    write_json(paths.config, {"run": "next", "parent": "early@15"})
    assert "│  └─ next early@15" in drawn(family_of(paths))


def test_parent_that_a_run_has_started_from_counts_and_not_its_edited_config(results):
    paths = RunPaths(results / "early")
    write_json(paths.config, read_json(paths.config) | {"parent": "late@30"})
    assert drawn(families(runs(results))) == TREE


def test_child_of_a_run_that_is_not_there_is_a_root(results):
    [late, last] = families([RunPaths(results / "late"), RunPaths(results / "last")])
    assert (late.branch, late.parent, last.branch) == ("", "base@20", "└─ ")


def test_curve_of_a_child_begins_at_its_parents_point(results):
    members = {member.run: member for member in families(runs(results))}
    line = charts._from_parent(members["late"], list(members.values()))
    base = members["base"].evals.set_index("step")["loss"]
    assert list(line["step"]) == [20, 25, 30]
    assert line["loss"].iloc[0] == base[20]


class Text(HTMLParser):
    def __init__(self):
        super().__init__()
        self.words = []

    def handle_data(self, data):
        self.words.append(data)


def test_report_and_comparison_show_the_tree_with_steps_and_losses(results, tmp_path):
    compare(runs(results), page=tmp_path / "compare.html")
    for page in (render(RunPaths(results / "late")), (tmp_path / "compare.html").read_text()):
        text = Text()
        text.feed(page)
        assert "Runs that start from each other" in text.words
        assert "20–30" in text.words and "late@30" in text.words
        assert "<svg" in page and 'id="family-' in page
