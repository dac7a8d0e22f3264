"""Against a bad checkpoint that passes: torch loads flipped bytes and mixed steps without a word."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.live_run import TWO_RANKS, forge
from support.manifests import MADE_BY
from support.saved import make_digests_right

from forge.checkpoint import directory, resume, storage
from forge.checkpoint.sealed import ProgramCheckpoints
from forge.core.config import load_config
from forge.core.files import read_json, write_json
from forge.core.paths import RunPaths


def validate(run):
    outcome = run.forge("validate")
    return outcome, read_json(run.paths.validation)


def show(run):
    command = [sys.executable, "-m", "forge", "show", str(run.folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def checks(verdict):
    return {check["name"]: (check["status"], check["message"]) for check in verdict["checks"]}


def tensors_file(checkpoint):
    return next(checkpoint.folder.glob("*.distcp"))


def test_good_run_is_valid_and_its_probe_equal_to_the_last_bit(uninterrupted, tmp_path):
    run = uninterrupted.copy(tmp_path / "good")
    command = run.fork("validate").end()
    assert command.code == 0, command.text
    verdict = read_json(run.paths.validation)
    assert verdict["status"] == "valid"
    assert verdict["weights_digest"] == run.weights_digest()
    found = checks(verdict)
    assert found["probe"] == ("ok", "2 of 2 recorded losses recomputed, bitwise equal")
    assert found["world size"] == ("ok", "written by 2 ranks, loaded by 1")
    assert read_json(run.paths.validated)["checkpoint_digest"] == verdict["checkpoint_digest"]


def test_bf16_run_of_one_rank_is_loaded_on_two_and_its_probe_is_right(bf16):
    outcome, verdict = validate(bf16)
    assert outcome.code == 0, outcome.text
    assert checks(verdict)["world size"] == ("ok", "written by 1 rank, loaded by 2")
    assert checks(verdict)["probe"][0] == "ok"


def flip_a_byte(run):
    path = tensors_file(resume.latest(run.paths))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return "digests", f"{path.name} has digest"


def lose_a_file(run):
    path = tensors_file(resume.latest(run.paths))
    path.unlink()
    return "digests", f"{path.name} is missing"


def write_a_nan(run):
    folder = resume.latest(run.paths).folder
    index = storage.SafeReader(folder).read_metadata()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
    }
    storage.read_tensors(state, folder, no_dist=True)
    name = next(name for name in state if name.startswith("model.") and state[name].dim() == 2)
    state[name][0, 0] = torch.nan
    for path in folder.glob("*.distcp"):
        path.unlink()
    dcp.save(state, storage_writer=storage.TensorWriter(folder, 1), no_dist=True)
    make_digests_right(folder)
    return "finite", f"not finite: {name.removeprefix('model.')}"


def mix_in_another_step(run):
    older, newest = directory.committed(run.paths.checkpoints)[-2:]
    for path in older.glob("*.distcp"):
        shutil.copy(path, newest)
    make_digests_right(newest)
    return "weights", "trained.json has"


def point_latest_to_an_older_step(run):
    older = directory.committed(run.paths.checkpoints)[-2]
    run.paths.latest.unlink()
    run.paths.latest.symlink_to(older.name)
    return "goal", "trained.json says step"


# DCP warns that it overwrites, and that it runs in one process.
@pytest.mark.default
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, lose_a_file, write_a_nan, mix_in_another_step, point_latest_to_an_older_step],
)
def test_corrupt_checkpoint_is_invalid_with_its_reason(uninterrupted, tmp_path, damage):
    run = uninterrupted.copy(tmp_path / "damaged")
    check, message = damage(run)
    outcome, verdict = validate(run)
    assert outcome.code == 65, outcome.text
    assert verdict["status"] == "invalid"
    assert checks(verdict)[check][0] == "fail"
    assert message in checks(verdict)[check][1]
    assert message in outcome.text
    assert not run.paths.validated.exists()


def test_a_checkpoint_on_the_way_to_a_later_goal_is_valid_beside_the_record_of_the_earlier_one(
    solo, tmp_path
):
    run = solo.copy(tmp_path / "further")
    earlier = run.paths.trained.read_bytes()
    assert run.forge("train", "--train.max_steps=13").code == 0
    run.paths.trained.write_bytes(earlier)  # as where training stops before its goal
    outcome = run.forge("validate", "--train.max_steps=20")
    assert outcome.code == 0, outcome.text
    assert read_json(run.paths.validated)["step"] == 13


def test_weights_of_another_step_are_found_without_the_goal(uninterrupted, tmp_path):
    """A lone checkpoint has no trained.json beside it: the recorded losses tell."""
    run = uninterrupted.copy(tmp_path / "mixed")
    mix_in_another_step(run)
    outcome = forge("validate", str(resume.latest(run.paths).folder), run.data)
    assert outcome.code == 65
    assert "probe: losses" in outcome.text


def test_checkpoint_folder_copied_elsewhere_is_validated_there(uninterrupted, tmp_path):
    folder = tmp_path / "elsewhere"
    shutil.copytree(resume.latest(uninterrupted.paths).folder, folder)
    before = sorted(folder.iterdir())
    outcome = forge("validate", str(folder), uninterrupted.data)
    assert outcome.code == 0, outcome.text
    assert f"{folder}: valid, step 200" in outcome.text
    assert sorted(folder.iterdir()) == before


def test_every_command_refuses_a_checkpoint_under_another_steps_name_and_training_takes_the_previous(
    solo, tmp_path
):
    run = solo.copy(tmp_path / "renamed")
    newest = resume.latest(run.paths).folder
    wrong = newest.rename(newest.with_name("step-00000020"))
    run.paths.latest.unlink()
    run.paths.latest.symlink_to(wrong.name)
    said = "step-00000020 is named for step 20, its manifest is of step 12"

    elsewhere = f"--to={tmp_path / 'export'}"
    for command in (
        ("validate", str(wrong)),
        ("validate", str(run.folder)),
        ("export", str(wrong), elsewhere),
        ("export", str(run.folder), elsewhere),
    ):
        refused = forge(*command)
        assert (refused.code, said in refused.text) == (65, True), (command, refused.text)
    shown = show(run)
    assert shown.returncode == 0
    assert said in shown.stdout
    assert wrong.is_dir()

    trained = run.forge("train")
    assert trained.code == 0, trained.text
    assert f"checkpoint {wrong} is corrupt" in trained.text and said in trained.text
    assert f"resume from {wrong.with_name('step-00000006')}" in trained.text
    assert run.weights_digest() == solo.weights_digest()


def test_older_checkpoint_that_is_damaged_too_does_not_end_the_launch(solo, tmp_path):
    run = solo.copy(tmp_path / "damaged")
    older, newest = directory.committed(run.paths.checkpoints)
    (older / "checkpoint.json").write_text("{")
    flip_a_byte(run)
    trained = run.forge("train", "--train.max_steps=13")
    assert trained.code == 0, trained.text
    assert {older.name, newest.name} <= {path.name for path in run.paths.quarantine.iterdir()}
    assert read_json(run.paths.trained)["step"] == 13


def test_checkpoint_of_sharded_bf16_is_valid_where_the_config_shards_no_more(session_runs):
    run = session_runs(
        "sharded", "--train.precision=bf16", "--train.shard=all", "--train.max_steps=6"
    )
    outcome = run.fork("train", *TWO_RANKS).end()
    assert outcome.code == 0, outcome.text
    outcome = run.forge("validate", "--train.shard=none")
    assert outcome.code == 0, outcome.text
    assert checks(read_json(run.paths.validation))["probe"][1].endswith("within 0.02")


def test_a_copy_of_a_checkpoint_under_a_name_of_no_step_is_validated_and_exported(solo, tmp_path):
    run = solo.copy(tmp_path / "copied")
    newest = resume.latest(run.paths).folder
    for name in ("step-00000100.bak", "best"):
        copy = shutil.copytree(newest, newest.with_name(name))
        outcome = forge("validate", str(copy), "--validate.depth=digests")
        assert outcome.code == 0, outcome.text
        outcome = forge("export", str(copy), f"--to={tmp_path / 'export' / name}", run.data)
        assert outcome.code == 0, outcome.text


# --- a run from elsewhere -------------------------------------------------------------------------


def planted(victim):
    """A pickle that sets PosixPath._str: every path of the process is then that directory."""
    name = os.fsencode(victim)
    text = b"\x8c" + bytes([len(name)]) + name
    path = b"\x8c\x07pathlib\x8c\x09PosixPath\x93"
    return b"\x80\x04" + path + b"N}\x8c\x04_str" + text + b"s\x86b0"


@pytest.fixture
def victim(tmp_path):
    """A directory of the user, with a path that a pickle can hold as a short text."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    return folder


def forge_outside(*arguments):
    """The command in a process of its own, which a planted index may spoil."""
    command = [sys.executable, "-m", "forge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["validate", "export"])
def test_index_that_sets_attributes_of_classes_removes_nothing(solo, tmp_path, victim, command):
    """All digests are right: whoever hands out a checkpoint has made them."""
    run = solo.copy(tmp_path / "stranger")
    folder = resume.latest(run.paths).folder
    (index,) = {*folder.iterdir()} - {*folder.glob("*.distcp"), folder / "checkpoint.json"}
    index.write_bytes(planted(victim) + index.read_bytes())
    make_digests_right(folder)
    to = [f"--to={tmp_path / 'out'}"] if command == "export" else []
    done = forge_outside(command, run.folder, run.data, *to)
    assert (victim / "thesis.tex").read_text() == "years of work"
    assert done.returncode == 65, done.stderr
    assert f"{index.name} is not JSON" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
def test_index_of_a_program_that_sets_attributes_of_classes_changes_nothing(tmp_path, victim):
    values = {"run": "p", "results": str(tmp_path), "data": str(tmp_path / "data")}
    program = {"command": ["true"], "goal": 1, "checkpoints": {}}
    write_json(tmp_path / "p/config.json", {**values, "program": program})
    folder = tmp_path / "p/checkpoints/checkpoint-1"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(planted(victim) + (folder / ".metadata").read_bytes()[2:])
    config = load_config(tmp_path / "p/config.json", {})
    ProgramCheckpoints(RunPaths.of(config), config.program.checkpoints, 1).seal(folder, 1, MADE_BY)
    done = forge_outside("validate", tmp_path / "p/config.json")
    assert done.returncode == 65, done.stderr
    assert "sets attributes of what it has not just made, which no index needs" in done.stderr
    verdict = read_json(tmp_path / "p/validation.json")
    assert checks(verdict)["tensors"][0] == "fail"
    exported = forge_outside("export", tmp_path / "p", f"--to={tmp_path / 'out'}")
    assert exported.returncode == 0, exported.stderr  # copies files, and reads no index
    assert (victim / "thesis.tex").read_text() == "years of work"
    assert list(victim.iterdir()) == [victim / "thesis.tex"]


@pytest.mark.parametrize("kind", ["thesis", "other run"])
def test_training_moves_nothing_that_latest_leads_to_outside_of_the_run(
    solo, tmp_path, victim, kind
):
    run = solo.copy(tmp_path / "stranger")
    other = resume.latest(solo.paths).folder
    target = victim if kind == "thesis" else other
    run.paths.latest.unlink()
    run.paths.latest.symlink_to(target)
    for command in ("train", "validate"):
        refused = run.forge(command)
        assert refused.code == 65, refused.text
        assert f"points to {str(target)!r}" in refused.text
        assert f"ln -sfn step-00000012 {run.paths.latest}" in refused.text
    for command in (("validate",), ("export", f"--to={tmp_path / 'out'}")):
        assert forge(command[0], str(run.folder), *command[1:]).code == 65
    assert (victim / "thesis.tex").read_text() == "years of work" and other.is_dir()
    assert not run.paths.quarantine.exists()


@pytest.mark.default
def test_file_of_a_checkpoint_that_is_a_link_is_not_read(solo, tmp_path):
    run = solo.copy(tmp_path / "stranger")
    folder = resume.latest(run.paths).folder
    file = next(folder.glob("*.distcp"))
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    for command in (("validate",), ("export", f"--to={tmp_path / 'out'}")):
        refused = forge(command[0], str(run.folder), *command[1:])
        assert refused.code == 65, refused.text
        assert f"{file.name} is a link out of its directory" in refused.text
