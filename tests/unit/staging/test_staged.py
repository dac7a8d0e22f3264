"""The stage record tells the ranks of each node where to read, and what must be removed."""

import sys

import pytest

from forge.core.errors import DataError
from forge.core.files import read_json, write_json
from forge.core.paths import RunPaths
from forge.staging.staged import StageRecord, staged_folders, staged_python

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
