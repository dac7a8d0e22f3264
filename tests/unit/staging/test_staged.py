"""The stage record tells the ranks of each node where to read, and what must be removed."""

import os
import sys

import pytest

from forge.core.config import Config, checked
from forge.core.errors import DataError
from forge.core.files import read_json, write_json
from forge.core.paths import RunPaths, stage_proof_file
from forge.core.records import StageRecord
from forge.data.content_ids import resolve
from forge.hosts.nodes import NodePool
from forge.hosts.placement import Placement
from forge.slurm import slurm
from forge.staging import stage
from forge.staging.stage import keep, program_folders, stage_record

RECORD = StageRecord(
    **{"digest": "d" * 64, "bytes": 7200, "folders": {"n1": "/tmp/x"}, "sent": ["n1"]},
    **{"job": "7", "roots": {"n1": "/tmp"}, "python": "/tmp/python", "phase_sec": {"send": 1.5}},
)


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """`forge stage` was called here, in job 7."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "north")
    monkeypatch.setattr(slurm, "is_here", lambda: False)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results/base")


def test_record_is_read_as_it_was_written(paths):
    keep(RECORD, paths)
    assert StageRecord.read(paths.stage) == RECORD
    assert stage_record(paths) == RECORD
    assert (RECORD.folders, RECORD.interpreter) == ({"n1": "/tmp/x"}, "/tmp/python")


@pytest.mark.parametrize(
    ("why", "now"),
    [
        ("did not write it", {}),  # the directory of somebody else was copied into results/
        ("it is of job 7, this is 8", {"SLURM_JOB_ID": "8"}),
        ("of start 0 of job 7, this is start 1", {"SLURM_RESTART_COUNT": "1"}),
        ("of cluster north, this is south", {"SLURM_CLUSTER_NAME": "south"}),
        ("did not write it", {"changed": "python"}),
    ],
)
def test_record_that_is_not_of_this_project_and_job_decides_nothing(
    monkeypatch, capsys, paths, why, now
):
    keep(RECORD, paths)
    if not now:
        stage_proof_file(paths.root).unlink()
    if key := now.pop("changed", ""):
        write_json(paths.stage, {**read_json(paths.stage), key: "/tmp/evil"})
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    record = stage_record(paths)
    assert (record.folders, record.interpreter) == ({}, sys.executable)
    assert why in capsys.readouterr().err
    monkeypatch.setattr(stage, "NodePool", None)
    stage.remove_staged(record, "base", Placement.here())  # nothing


def test_staged_files_that_stay_since_slurm_is_silent_are_told_and_end_nothing(monkeypatch, capsys):
    away = "srun: error: Unable to create step for job 7: Unable to contact slurm controller"
    command = ["sh", "-c", f"echo '{away}' >&2; exit 1"]
    monkeypatch.setattr(NodePool, "_command", lambda *_: command)
    monkeypatch.setattr(slurm, "PATIENCE_SEC", -1)
    stage.remove_staged(RECORD, "base", Placement(("n1",)))
    said = "stage: could not remove the staged files: Slurm does not answer: srun: error: Unable to"
    assert said in capsys.readouterr().err


def test_record_that_is_a_pipe_does_not_stop_training(paths):
    paths.allocation.mkdir(parents=True)
    os.mkfifo(paths.stage)
    assert stage_record(paths) == StageRecord()


def test_without_a_record_ranks_read_the_shared_folder_with_this_python(paths):
    assert StageRecord.read_if_there(paths.stage) is None
    assert stage_record(paths) == StageRecord()
    assert (StageRecord().folders, StageRecord().interpreter) == ({}, sys.executable)


def test_record_of_another_format_is_refused_by_name(paths):
    RECORD.write(paths.stage)
    write_json(paths.stage, {**read_json(paths.stage), "format": 2, "new": "key"})
    with pytest.raises(DataError, match=r"stage\.json has format 2, this .* reads 1") as caught:
        StageRecord.read(paths.stage)
    assert caught.value.fix == "run forge stage again"


def test_program_runs_in_the_copy_of_its_source_on_every_node(tmp_path):
    (tmp_path / "src").mkdir()
    program = {"command": ["x"], "source": str(tmp_path / "src")}
    values = {"results": str(tmp_path), "program": program}
    config = resolve(checked(Config, values, "config.yaml"))
    paths = RunPaths.of(config)
    for job_files in (RECORD, StageRecord(job="7", roots={"n1": "/tmp"})):
        keep(job_files, paths)
        before = stage_record(paths)
        assert program_folders(config, config.program, before)[1].cwd == str(tmp_path / "src")
        assert before.source_digest == ""
        copied = {"python": "/tmp/python", "source": "/tmp/source", "source_digest": "e" * 64}
        keep(job_files.model_copy(update=copied), paths)
        after = stage_record(paths)
        by_host, shared = program_folders(config, config.program, after)
        assert (by_host, shared.cwd) == ({}, "/tmp/source")
        assert after.source_digest == "e" * 64
