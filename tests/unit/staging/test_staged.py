"""The stage record tells the ranks of each node where to read, and what must be removed."""

import sys

import pytest

from forge.core.config import Config, checked
from forge.core.errors import DataError
from forge.core.files import read_json, write_json
from forge.core.paths import RunPaths
from forge.data.content_ids import resolve
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


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def test_record_is_read_as_it_was_written(paths):
    RECORD.write(paths.stage)
    assert StageRecord.read(paths.stage) == RECORD
    assert (staged_folders(paths), staged_python(paths)) == ({"n1": "/tmp/x"}, "/tmp/python")


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
        job_files.write(paths.stage)
        assert program_folders(config)[1].cwd == str(tmp_path / "src")
        assert staged_source_digest(paths) == ""
        staged = job_files.with_project(StagedProject("/tmp/python", "/tmp/source", "e" * 64))
        staged.write(paths.stage)
        by_host, shared = program_folders(config)
        assert (by_host, shared.cwd) == ({}, "/tmp/source")
        assert staged_source_digest(paths) == "e" * 64
