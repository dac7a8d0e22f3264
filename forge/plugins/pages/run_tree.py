"""Runs that start from each other, as a tree: the step of each branch, and its losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forge.checkpoint.family import started_from
from forge.core.errors import DataError
from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths
from forge.plugins.pages.curves import facts, read_curves_or_empty

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TreeRun:
    """A run in its tree."""

    run: str
    parent: str
    """`base@5000`; of a run without a parent its pretrained weights, or ""."""
    start: int
    """The step at which the run starts, 0 without a parent."""
    branch: str
    """Lines of the tree before the name, such as `│  └─ `."""
    step: int | None
    loss: float | None
    """The last validation loss."""
    evals: pd.DataFrame
    """step, loss: the validation losses of this run alone."""

    @property
    def parent_run(self) -> str:
        return self.parent.rpartition("@")[0] if self.start else ""


def families(runs: Sequence[RunPaths]) -> list[TreeRun]:
    """The runs that are children or parents of others among them, each below its parent; [] for none."""
    members = {paths.root.name: _member(paths) for paths in runs}
    parents = {member.parent_run for member in members.values()}
    related = {
        name: member for name, member in members.items() if member.start or member.run in parents
    }
    roots = [member for member in related.values() if member.parent_run not in related]
    return [placed for root in roots for placed in _below(root, related, "", "")]


def family_of(paths: RunPaths) -> list[TreeRun]:
    """The tree that a run belongs to, of all runs in its `results`; [] for a run without relatives."""
    beside = [RunPaths(path.parent) for path in sorted(paths.root.parent.glob("*/config.json"))]
    members = families(beside)
    root = 0
    for number, member in enumerate(members):
        root = number if not member.branch else root
        if member.run == paths.root.name:
            after = (n for n, m in enumerate(members) if n > root and not m.branch)
            return members[root : next(after, len(members))]
    return []


def _below(member: TreeRun, among: dict[str, TreeRun], own: str, below: str) -> Iterator[TreeRun]:
    """The member and its descendants. own, below: what stands before its name, and before theirs."""
    yield replace(member, branch=own)
    children = [
        other for other in among.values() if other.parent_run == member.run and other != member
    ]
    children.sort(key=lambda other: other.start)
    for child in children:
        is_last = child is children[-1]
        head, rest = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield from _below(child, among, below + head, below + rest)


def _member(paths: RunPaths) -> TreeRun:
    parent, start = _parent(paths)
    history = read_curves_or_empty(paths)
    measured = facts(history)
    evals = history.evals.dropna(subset=["loss"])
    loss = measured["loss_to"]
    return TreeRun(
        run=paths.root.name,
        parent=parent,
        start=start,
        branch="",
        step=measured["step"],
        loss=None if loss is None else float(loss),
        evals=evals[["step", "loss"]],
    )


def _parent(paths: RunPaths) -> tuple[str, int]:
    """The parent from which the run started, and its step; before the first checkpoint from the
    config."""
    config = read_object_or_empty(paths.config)
    try:
        made_from = started_from(paths)
    except DataError:
        made_from = None
    if made_from:
        return f"{made_from.run}@{made_from.step}", made_from.step
    named = config.get("parent")
    if isinstance(named, str) and (step := named.rpartition("@")[2]).isdecimal():
        return named, int(step)
    return _pretrained(config), 0


def _pretrained(config: dict[str, Any]) -> str:
    model = config.get("model")
    init = model.get("init") if isinstance(model, dict) else None
    if not isinstance(init, dict):
        return ""
    return f"hub:{init['hub']}" if init.get("hub") else str(init.get("path") or "")
