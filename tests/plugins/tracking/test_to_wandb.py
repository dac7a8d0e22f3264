"""Threat: the record of what W&B was sent comes from somebody else, and names what is then removed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.core.paths import RunPaths
from forge.plugins.tracking.records import Sent
from forge.plugins.tracking.settings import Wandb
from forge.plugins.tracking.to_wandb import WeightsAndBiases
from forge.plugins.tracking.tracker import TrackedRun

OFFLINE, NEW = "offline-run-20250101_000000-abcd1234", "offline-run-20250102_000000-abcd1234"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run whose last sending process was killed; W&B's client begins the directory NEW."""
    paths = RunPaths(tmp_path / "run")
    for name in (OFFLINE, NEW):
        (paths.root / "wandb" / name).mkdir(parents=True)
    begun = SimpleNamespace(dir=str(paths.root / "wandb" / NEW / "files"), summary={})
    begun.finish = lambda **_: None
    fake = SimpleNamespace(run=None, init=lambda **_: begun, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return paths


def opened(paths: RunPaths, folder: str) -> tuple[WeightsAndBiases, Sent]:
    sent = Sent(id="abcd1234", step=9, before=4, folder=folder)
    tracker = WeightsAndBiases(Wandb(mode="offline"), print)
    return tracker, tracker.open(TrackedRun(paths, "run", {}), sent)


def test_directory_of_the_killed_process_is_removed_and_its_rows_are_recorded_again(
    run: RunPaths,
) -> None:
    _, sent = opened(run, OFFLINE)
    assert not (run.root / "wandb" / OFFLINE).exists()
    assert (sent.step, sent.folder) == (4, NEW)


@pytest.mark.parametrize("kind", ["absolute", "dots", "other", "link", "linked parent"])
def test_nothing_else_that_the_record_names_is_removed(run: RunPaths, kind: str) -> None:
    thesis = run.root.parent / "home" / OFFLINE
    thesis.mkdir(parents=True)
    name = {"absolute": str(thesis), "dots": f"../../home/{OFFLINE}", "other": "files"}.get(kind)
    if kind == "other":
        thesis = run.root / "wandb/files"
        thesis.mkdir()
    if kind == "link":
        (run.root / "wandb" / OFFLINE).rmdir()
        (run.root / "wandb" / OFFLINE).symlink_to(thesis)
    if kind == "linked parent":
        (run.root / "wandb").rename(run.root / "moved")
        (run.root / "wandb").symlink_to(thesis.parent)
    (thesis / "main.tex").write_text("years")
    tracker, sent = opened(run, name or OFFLINE)
    tracker._offline = False  # as in `forge sync`, which removes what the server has
    tracker.finish("completed")
    assert (thesis / "main.tex").read_text() == "years"
    assert sent.step == 9


def test_id_that_would_name_other_directories_is_refused() -> None:
    with pytest.raises(ValueError, match="id"):
        Sent(id="*")
