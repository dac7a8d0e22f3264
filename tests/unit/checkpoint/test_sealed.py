"""Checkpoints of other programs: what is sealed, what is verified, what is moved away, what is kept."""

import os
import shutil

import pytest
from support.manifests import MADE_BY

from forge.checkpoint.sealed import ProgramCheckpoints, signature
from forge.core.errors import ConfigError, OtherFormat
from forge.core.files import read_json, write_json
from forge.core.paths import RunPaths
from forge.core.program_settings import Checkpoints


@pytest.fixture
def checkpoints(tmp_path):
    return ProgramCheckpoints(RunPaths(tmp_path), Checkpoints(), world_size=2)


def write(checkpoints, step, files=("state.json", "deep/weights.bin")):
    folder = checkpoints.paths.checkpoints / f"checkpoint-{step}"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} at {step}")
    return folder


def sealed(checkpoints, *steps):
    """The folders of sealed checkpoints at these steps."""
    folders = [write(checkpoints, step) for step in steps]
    for folder, step in zip(folders, steps, strict=True):
        assert checkpoints.seal(folder, step, MADE_BY)
    return folders


def test_a_seal_has_the_digest_of_every_file_and_stands_beside_the_checkpoint(checkpoints):
    (folder,) = sealed(checkpoints, 5)
    seal = read_json(folder.with_name("checkpoint-5.forge.json"))
    assert sorted(seal["files"]) == ["deep/weights.bin", "state.json"]
    assert sorted(path.name for path in folder.iterdir()) == ["deep", "state.json"]
    assert checkpoints.paths.latest.readlink().name == "checkpoint-5"
    assert checkpoints.repaired_latest().step == 5


def test_a_checkpoint_may_be_a_file(checkpoints, tmp_path):
    checkpoints = ProgramCheckpoints(RunPaths(tmp_path), Checkpoints(pattern="{step}.pt"), 1)
    checkpoints.paths.checkpoints.mkdir()
    path = checkpoints.paths.checkpoints / "12.pt"
    path.write_text("weights")
    assert checkpoints.seal(path, 12, MADE_BY)
    assert checkpoints.repaired_latest().folder == path
    path.write_text("Weights")
    assert checkpoints.repaired_latest() is None
    assert (checkpoints.paths.quarantine / "12.pt").read_text() == "Weights"


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
        (lambda folder: (folder / "state.json").write_text("x"), "has 1 bytes, its seal says"),
        (
            lambda folder: (folder / "state.json").write_text("STATE.json at 9"),
            "state.json has digest",
        ),
        (lambda folder: (folder / "more").write_text(""), "more is not in its seal"),
    ],
)
def test_corrupt_checkpoint_is_moved_away_and_the_older_one_is_used(
    checkpoints, harm, reason, capsys
):
    harm(sealed(checkpoints, 5, 9)[1])
    assert checkpoints.repaired_latest().step == 5
    assert reason in capsys.readouterr().err
    assert checkpoints.paths.latest.readlink().name == "checkpoint-5"
    assert (checkpoints.paths.quarantine / "checkpoint-9").is_dir()
    assert (checkpoints.paths.quarantine / "checkpoint-9.forge.json").exists()
    assert (
        reason in read_json(checkpoints.paths.quarantine / "checkpoint-9.damage.json")["reasons"][0]
    )


def test_what_was_never_sealed_is_moved_away(checkpoints, capsys):
    sealed(checkpoints, 5)
    write(checkpoints, 9)
    assert checkpoints.repaired_latest().step == 5
    assert "checkpoint-9 is not used: it was never sealed" in capsys.readouterr().err


def test_link_that_the_program_moves_to_its_newest_checkpoint_counts_for_nothing(checkpoints):
    """KempnerForge points `latest` in the same directory to what it has just written."""
    sealed(checkpoints, 5)
    write(checkpoints, 9)
    checkpoints.paths.latest.unlink()
    checkpoints.paths.latest.symlink_to("checkpoint-9")
    assert checkpoints.latest().step == 5
    assert checkpoints.repaired_latest().step == 5
    assert checkpoints.paths.latest.readlink().name == "checkpoint-5"


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_latest_of_the_program_that_is_no_link_stays(checkpoints, kind):
    """DeepSpeed writes the name of its newest checkpoint into a file `latest` of the same directory."""
    latest = checkpoints.paths.latest
    latest.parent.mkdir(parents=True)
    latest.write_text("checkpoint-5") if kind == "file" else latest.mkdir()
    sealed(checkpoints, 5, 9)
    write(checkpoints, 12)
    assert checkpoints.repaired_latest().step == 9
    for step in (5, 9):
        shutil.rmtree(checkpoints.paths.checkpoints / f"checkpoint-{step}")
    assert checkpoints.repaired_latest() is None
    assert latest.read_text() == "checkpoint-5" if kind == "file" else latest.is_dir()


def test_seal_of_a_checkpoint_that_was_moved_away_is_not_that_of_the_next_of_its_name(checkpoints):
    older, newer = sealed(checkpoints, 5, 9)
    newer.rename(checkpoints.paths.root / "elsewhere")
    assert checkpoints.repaired_latest().folder == older
    write(checkpoints, 9, ["half.bin"])
    assert checkpoints.latest().step == 5


def test_edited_seal_is_noticed(checkpoints):
    folder = sealed(checkpoints, 5)[0]
    path = checkpoints.seal_of(folder)
    write_json(path, {**read_json(path), "step": 6})
    assert checkpoints.repaired_latest() is None


def test_seal_of_another_version_of_forge_stops_everything(checkpoints):
    folder = sealed(checkpoints, 5)[0]
    path = checkpoints.seal_of(folder)
    write_json(path, {**read_json(path), "format": 99})
    with pytest.raises(OtherFormat, match="format 99"):
        checkpoints.repaired_latest()
    assert folder.is_dir()


def test_marks_may_name_every_rank(tmp_path):
    settings = Checkpoints(complete=["state.json", "rng_{rank}.pt", "*-{step}.bin"])
    checkpoints = ProgramCheckpoints(RunPaths(tmp_path), settings, world_size=2)
    folder = write(checkpoints, 7, ("state.json", "rng_0.pt", "w-7.bin"))
    assert not checkpoints.is_complete(folder, 7)
    write(checkpoints, 7, ("rng_1.pt",))
    assert checkpoints.is_complete(folder, 7)


def test_checkpoint_that_the_program_removes_or_writes_meanwhile_is_not_sealed(
    checkpoints, monkeypatch
):
    folder = write(checkpoints, 5)
    assert signature(folder)
    fsync, removed = os.fsync, []

    def remove_on_the_way(fd):
        fsync(fd)
        if not removed:
            removed.append(shutil.rmtree(folder))

    monkeypatch.setattr(os, "fsync", remove_on_the_way)
    assert checkpoints.seal(folder, 5, MADE_BY) is None
    assert not checkpoints.seal_of(folder).exists()
    assert not checkpoints.paths.latest.is_symlink()


def test_only_the_newest_are_kept_and_seals_without_checkpoint_go(checkpoints):
    folders = sealed(checkpoints, 1, 2, 3, 4)
    shutil.rmtree(folders[0])  # by the program's own retention
    checkpoints.prune(2)
    left = sorted(path.name for path in checkpoints.paths.checkpoints.glob("checkpoint-*"))
    assert left == [
        *("checkpoint-3", "checkpoint-3.forge.json"),
        *("checkpoint-4", "checkpoint-4.forge.json"),
    ]


def test_other_pattern_is_refused_while_there_are_checkpoints(checkpoints):
    sealed(checkpoints, 5)
    other = ProgramCheckpoints(checkpoints.paths, Checkpoints(pattern="step_{step}"), 2)
    with pytest.raises(ConfigError, match=r"checkpoint-5, which is not named like step_\{step\}"):
        other.refuse_other_pattern()
    checkpoints.refuse_other_pattern()
