"""`forge export` of another program's run copies what it names, by digest, and only once."""

import os
import shutil
from pathlib import Path

import pytest
from test_sealed import MADE_BY, write

from forge.checkpoint.directory import remove
from forge.checkpoint.export_folder import export_sealed, record_export
from forge.checkpoint.manifest import Artifact
from forge.checkpoint.sealed import ProgramCheckpoints
from forge.core.config import Config, checked
from forge.core.errors import ConfigError, DataError
from forge.core.files import read_json
from forge.core.paths import RunPaths
from forge.core.records import ContainerImage, LaunchEnvironment


def config_of(tmp_path, patterns):
    program = {"command": ["x"], "goal": 9, "checkpoints": {}, "export": patterns}
    values = {"run": "one", "results": str(tmp_path / "results"), "program": program}
    return checked(Config, values, "config.yaml")


def export(config):
    checkpoints = ProgramCheckpoints(RunPaths.of(config), config.program.checkpoints)
    return export_sealed(checkpoints, config.program.export, None)


@pytest.fixture
def paths(tmp_path):
    """A run with a sealed checkpoint of step 9."""
    paths = RunPaths.of(config_of(tmp_path, ["*"]))
    settings = config_of(tmp_path, ["*"]).program.checkpoints
    checkpoints = ProgramCheckpoints(paths, settings, 1)
    folder = write(checkpoints, 9)
    (folder / "optimizer.pt").write_text("large")
    checkpoints.seal(folder, 9, MADE_BY)
    return paths


def test_named_files_are_copied_once_with_lineage_and_record(paths, tmp_path, capsys):
    config = config_of(tmp_path, ["deep/*"])
    folder = export(config)
    assert folder == paths.root / "export/checkpoint-9"
    assert sorted(p.name for p in folder.rglob("*")) == ["deep", "forge.json", "weights.bin"]
    facts = read_json(folder / "forge.json")
    assert (facts["step"], list(facts["files"])) == (9, ["deep/weights.bin"])
    assert facts["run"] == MADE_BY.run and facts["config_digest"] == MADE_BY.config_digest
    record_export(folder)
    assert read_json(paths.exported)["folder"] == "export/checkpoint-9"
    assert export(config) == folder
    assert "nothing to do" in capsys.readouterr().err


def test_export_has_no_command_path_or_variable_of_the_program(tmp_path):
    config = config_of(tmp_path, ["*"])
    checkpoints = ProgramCheckpoints(RunPaths.of(config), config.program.checkpoints, 1)
    image = ContainerImage(engine="podman", version="4", image="/home/alice/x.sif", digest="")
    environment = LaunchEnvironment(variables=["TOKEN_FILE"], container=image)
    private = {
        "command": ["/home/alice/python", "/home/alice/train.py"],
        "source": Artifact(id="/home/alice", digest="d" * 64),
        "environment": environment,
    }
    folder = write(checkpoints, 9)
    checkpoints.seal(folder, 9, MADE_BY.model_copy(update=private))
    facts = (export(config) / "forge.json").read_text()
    assert "/home" not in facts and "TOKEN_FILE" not in facts
    assert "/home/alice/train.py" in checkpoints.seal_of(folder).read_text()


def test_pattern_without_files_is_named_with_what_there_is(paths, tmp_path):
    with pytest.raises(ConfigError, match=r"no file of checkpoint-9 matches 'vocab\*'") as caught:
        export(config_of(tmp_path, ["vocab*"]))
    assert "optimizer.pt" in caught.value.cause
    assert not paths.exports.exists()


def test_corrupt_file_is_refused_and_leaves_nothing(paths, tmp_path):
    (paths.checkpoints / "checkpoint-9/optimizer.pt").write_text("lurge")
    with pytest.raises(DataError, match=r"checkpoint-9 is corrupt: optimizer\.pt has digest"):
        export(config_of(tmp_path, ["*"]))
    assert list(paths.exports.glob("checkpoint*")) == []


def test_export_has_its_name_only_when_each_file_and_folder_of_it_is_on_disk(
    paths, tmp_path, monkeypatch
):
    synced, fsync = set(), os.fsync

    def noted(fd):
        synced.add(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    folder = export(config_of(tmp_path, ["*"]))
    assert {path.name for path in folder.rglob("*")} <= synced


def remove_first_files(folder):
    """As far as rmtree of a program has come after a moment."""
    shutil.rmtree(folder / "deep")
    (folder / "optimizer.pt").unlink()


@pytest.mark.parametrize("removed", [remove, remove_first_files])
def test_checkpoint_that_is_pruned_while_it_is_copied_is_an_error_that_says_so(
    paths, tmp_path, monkeypatch, removed
):
    copyfile = shutil.copyfile

    def pruned(source, target):
        removed(paths.checkpoints / "checkpoint-9")
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", pruned)
    with pytest.raises(DataError, match="checkpoint-9 was removed while it was read"):
        export(config_of(tmp_path, ["*"]))
    assert list(paths.exports.glob("checkpoint*")) == []


def test_directory_of_the_copy_that_is_gone_is_no_checkpoint_that_was_pruned(
    paths, tmp_path, monkeypatch
):
    def gone(_source, target):
        shutil.rmtree(target.parent)
        target.write_bytes(b"")

    monkeypatch.setattr(shutil, "copyfile", gone)
    with pytest.raises(FileNotFoundError):
        export(config_of(tmp_path, ["*"]))


def test_other_files_than_before_are_not_written_over_an_export(paths, tmp_path):
    export(config_of(tmp_path, ["deep/*"]))
    with pytest.raises(ConfigError, match="holds the export of step 9"):
        export(config_of(tmp_path, ["*"]))


def test_run_without_a_sealed_checkpoint_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no sealed checkpoint"):
        export(config_of(tmp_path, ["*"]))
