"""Names that others chose must not end a report, and a figure shows where a run branches off."""

import re

import pandas as pd
import pytest

from forge.plugins.pages import charts
from forge.plugins.pages.run_tree import TreeRun


def member(run, losses, parent="", start=0):
    """losses: by step."""
    evals = pd.DataFrame({"step": list(losses), "loss": list(losses.values())})
    return TreeRun(run, parent, start, "", max(losses), min(losses.values()), evals)


@pytest.mark.parametrize("name", ["$\\frac$", "a$b$c", "100 % & <b>"])
def test_name_is_drawn_as_it_is_and_is_no_formula(name):
    svg = charts.family_chart([member(name, {10: 4.0, 20: 3.0})])
    shown = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert f">{shown}</text>" in svg


def test_branch_between_two_evaluations_of_the_parent_lies_in_the_figure(monkeypatch):
    """The child starts at step 150. Its line begins at the parent's loss at step 100."""
    limits = []
    monkeypatch.setattr(charts, "svg", lambda figure, _: limits.append(figure.axes[0].get_ylim()))
    base = member("base", {50: 9.0, 100: 6.0, 200: 3.0})
    charts.family_chart([base, member("child", {200: 2.5}, "base@150", 150)])
    low, high = limits[0]
    assert low < 2.5 and 6.0 < high < 9.0


def test_family_whose_child_has_no_losses_yet_is_drawn():
    child = member("child", {200: 2.5}, "gone@150", 150)
    empty = TreeRun("new", "gone@150", 150, "", None, None, child.evals.iloc[:0])
    assert re.search("<svg", charts.family_chart([child, empty]))
