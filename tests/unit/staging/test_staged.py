"""The stage record: another version's is refused by name, and no key of it is taken on trust."""

import sys

import pytest

from forge.core.errors import DataError
from forge.core.files import read_json, write_json
from forge.core.paths import RunPaths
from forge.staging.staged import StageRecord, staged_folders, staged_python

RECORD = StageRecord(
    **{"digest": "d" * 64, "bytes": 7200, "folders": {"n1": "/tmp/x"}, "sent": ["n1"]},
    **{"job": "7", "roots": {"n1": "/tmp"}, "python": "/tmp/python", "parts_sec": {"send": 1.5}},
)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def test_record_is_read_as_it_was_written(paths):
    RECORD.write(paths)
    assert StageRecord.read(paths) == RECORD
    assert (staged_folders(paths), staged_python(paths)) == ({"n1": "/tmp/x"}, "/tmp/python")


def test_without_a_record_ranks_read_the_shared_folder_with_this_python(paths):
    assert StageRecord.read(paths) is None
    assert (staged_folders(paths), staged_python(paths)) == ({}, sys.executable)


def test_record_of_another_format_is_refused_by_name(paths):
    write_json(paths.stage, {**RECORD.model_dump(mode="json"), "format": 2, "new": "key"})
    with pytest.raises(DataError, match=r"stage\.json has format 2, this .* reads 1") as caught:
        StageRecord.read(paths)
    assert caught.value.fix == "run forge stage again"


@pytest.mark.parametrize(
    ("change", "told"),
    [({"folders": 3}, "folders: Input should be"), ({"older": 1}, "older: Extra inputs")],
)
def test_record_with_another_content_is_refused_by_key(paths, change, told):
    RECORD.write(paths)
    write_json(paths.stage, read_json(paths.stage) | change)
    with pytest.raises(DataError, match=rf"stage\.json is no stage record: {told}"):
        StageRecord.read(paths)


def test_record_without_a_format_is_refused(paths):
    write_json(paths.stage, {"folders": {}})
    with pytest.raises(DataError, match=r"stage\.json has no format"):
        StageRecord.read(paths)
