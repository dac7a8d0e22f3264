"""The stage record tells the ranks of each node where to read, and what must be removed."""

import os
import sys

import pytest

from forge.cluster.placement import Placement
from forge.core.config import Config, checked
from forge.core.errors import DataError
from forge.core.files import read_json, write_json
from forge.core.paths import RunPaths
from forge.data.content_ids import resolve
from forge.staging import staged
from forge.staging.environment import StagedProject
from forge.staging.staged import (
    StageRecord,
    program_folders,
    staged_folders,
    staged_python,
    staged_source_digest,
)

RECORD = StageRecord(
    **{"digest": "d" * 64, "bytes": 7200, "folders": {"n1": "/tmp/x"}, "sent": ["n1"]},
    **{"job": "7", "roots": {"n1": "/tmp"}, "python": "/tmp/python", "phase_sec": {"send": 1.5}},
)


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """`forge stage` was called here, in job 7."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "results/base")


def test_record_is_read_as_it_was_written(paths):
    RECORD.keep(paths)
    assert StageRecord.read(paths.stage) == RECORD
    assert (staged_folders(paths), staged_python(paths)) == ({"n1": "/tmp/x"}, "/tmp/python")


@pytest.mark.parametrize(
    ("why", "now"),
    [
        ("did not write it", {}),  # the directory of somebody else was copied into results/
        ("it is of job 7, this is 8", {"SLURM_JOB_ID": "8"}),
        ("did not write it", {"changed": "python"}),
    ],
)
def test_record_that_is_not_of_this_project_and_job_decides_nothing(
    monkeypatch, capsys, paths, why, now
):
    (RECORD.keep if now else lambda paths: RECORD.write(paths.stage))(paths)
    if key := now.pop("changed", ""):
        write_json(paths.stage, {**read_json(paths.stage), key: "/tmp/evil"})
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    assert (staged_folders(paths), staged_python(paths)) == ({}, sys.executable)
    assert capsys.readouterr().err.count(why) == 1  # said once
    monkeypatch.setattr(staged, "NodePool", None)
    staged.remove_staged(paths, Placement.here())  # nothing


def test_record_that_is_a_pipe_does_not_stop_training(paths):
    paths.allocation.mkdir(parents=True)
    os.mkfifo(paths.stage)
    assert staged_python(paths) == sys.executable


def test_without_a_record_ranks_read_the_shared_folder_with_this_python(paths):
    assert StageRecord.read_if_there(paths.stage) is None
    assert (staged_folders(paths), staged_python(paths)) == ({}, sys.executable)


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
    for job_files in (RECORD, StageRecord.of_no_files("7", {"n1": "/tmp"})):
        job_files.keep(paths)
        assert program_folders(config, config.program)[1].cwd == str(tmp_path / "src")
        assert staged_source_digest(paths) == ""
        whole = job_files.with_project(StagedProject("/tmp/python", "/tmp/source", "e" * 64))
        whole.keep(paths)
        by_host, shared = program_folders(config, config.program)
        assert (by_host, shared.cwd) == ({}, "/tmp/source")
        assert staged_source_digest(paths) == "e" * 64
