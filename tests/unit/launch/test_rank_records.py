"""Exit codes come from what ranks recorded: launcher and ranks must read what the other has written."""

import errno
import os
from pathlib import Path

import pytest

from forge.core import files
from forge.core.errors import DataError, UnfitError
from forge.core.files import open_regular, read_json, write_json
from forge.core.machine import Fabric, Machine
from forge.core.process import Process
from forge.launch import lost_ranks, rank_records
from forge.launch.heartbeat import Activity
from forge.launch.rank_records import (
    LaunchSpec,
    LossesResult,
    LossesTask,
    PreflightTask,
    RankRecord,
    RecordsSoFar,
    ReplayTask,
    TrainTask,
)

TASKS = [
    TrainTask(step=40, started=1.5, staged={"node01": "/local"}, shared="/shared", deadline=9.0),
    PreflightTask(patience_sec=5, nccl_file="/tmp/%h.log"),
    ReplayTask(checkpoint="/run/step-00000040", shards="/shared"),
    LossesTask(checkpoint="/c", shards="/s", precision="bf16", ranks=[0, 9], prompts=[[1, 2], [3]]),
]


def spec_of(folder, task=TASKS[0], **facts):
    usual = {"machine": Machine(), "nodes": 1, "ranks_per_node": 3, "launcher": Process.current()}
    return LaunchSpec(**{"task": task, "run": str(folder), "launch": "now", **usual, **facts})


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_spec_survives_the_file(tmp_path, task):
    machine = Machine(launcher="torchrun", fabric=Fabric(timeout_sec=7))
    spec = spec_of(tmp_path, task, machine=machine, master=("node01", 1234), job="17", restart=2)
    spec.write(spec.path)
    assert LaunchSpec.read(spec.path) == spec


LOSSES = LossesResult([3.5, None], {"device": "cpu"}, {"": (3.25, 80)}, [[1, 2]])


def written(spec):
    """The records that the launcher finds in its first look."""
    records = RecordsSoFar(spec)
    records.look()
    return records.written


def test_rank_without_a_record_is_lost_and_records_survive_the_file(tmp_path):
    spec = spec_of(tmp_path)
    first = RankRecord("stopped", 0, 75, step=40, cause="SIGTERM", lost=(1, 2))
    last = RankRecord("completed", 2, weights_digest="0" * 64, result=LOSSES)
    spec.write(spec.path)
    for record in (first, last):
        record.write(spec)
    lost = RankRecord("lost", 1, message="it exited without a record")
    assert [RankRecord.read(spec, rank) for rank in range(3)] == [first, lost, last]
    assert sorted(written(spec), key=lambda record: record.rank) == [first, last]


def test_provisional_record_counts_until_the_rank_writes_another_one(tmp_path):
    spec = spec_of(tmp_path)
    spec.write(spec.path)
    rank_records.reserve(spec)
    activity = Activity(18, "data read of step 18", waits=False, sec=35.0, stalled=True)
    stalled = RankRecord("lost", 1, 69, message="no progress", activity=activity)
    stalled.write_provisional(spec)
    assert RankRecord.read(spec, 1) == stalled
    assert written(spec) == []  # the rank has not ended: the launcher must not kill others
    ended = RankRecord("completed", 1)
    ended.write(spec)
    assert RankRecord.read(spec, 1) == ended


def test_rank_that_is_ended_while_it_drains_a_save_has_said_that_its_gpu_failed(tmp_path):
    """As NCCL's watchdog may end it."""
    spec = spec_of(tmp_path)
    spec.write(spec.path)
    rank_records.reserve(spec)
    lost_ranks.note_gpu_error(
        RuntimeError("CUDA error: uncorrectable ECC error encountered"), 1, spec
    )
    assert written(spec) == []  # the rank has not ended
    found = RankRecord.read(spec, 1)
    assert (found.status, found.cause, found.code) == ("failed", lost_ranks.GPU_FAULT, 69)
    assert "uncorrectable ECC error" in found.message


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("Connection closed by peer")])
def test_other_errors_leave_no_record_before_the_rank_ends(tmp_path, error):
    spec = spec_of(tmp_path)
    spec.write(spec.path)
    rank_records.reserve(spec)
    lost_ranks.note_gpu_error(error, 1, spec)
    assert RankRecord.read(spec, 1).status == "lost"


def test_launcher_reads_a_record_once_and_again_when_it_is_replaced(tmp_path, monkeypatch):
    spec = spec_of(tmp_path)
    spec.write(spec.path)
    rank_records.reserve(spec)
    read, read_file = [], RankRecord.read_file
    monkeypatch.setattr(
        RankRecord, "read_file", lambda path: read.append(path.name) or read_file(path)
    )
    records = RecordsSoFar(spec)
    ended, activity = RankRecord("completed", 1), Activity(3, "save", False, 35.0, True)
    first = RankRecord("lost", 2, 69, activity=activity)
    ended.write(spec)
    first.write_provisional(spec)
    for _ in range(3):
        records.look()
        assert (records.written, records.stalled) == ([ended], [first])
    assert sorted(read) == ["rank-1.json", "rank-2.provisional"]
    then = RankRecord("failed", 2, 69, activity=activity)
    then.write_provisional(spec)
    records.look()
    assert (records.stalled, len(read)) == ([then], 3)
    rank_records.withdraw(spec, 2)
    records.look()
    assert (records.written, records.stalled, len(read)) == ([ended], [], 3)


def test_launcher_looks_again_where_the_directory_or_a_record_is_gone(tmp_path, monkeypatch):
    spec = spec_of(tmp_path)
    records = RecordsSoFar(spec)
    records.look()
    assert records.written == []
    spec.write(spec.path)
    RankRecord("lost", 1).write_provisional(spec)
    read_file = RankRecord.read_file

    def gone(path):
        path.unlink()
        return read_file(path)

    monkeypatch.setattr(RankRecord, "read_file", gone)
    records.look()
    assert records.stalled == []


@pytest.fixture
def refuses(monkeypatch):
    """refuses(number, times): the disk answers the next reads of a file with this error."""

    def refuse(number, times):
        left = [times]

        def fail(path):
            if left[0] and path.name.startswith("rank-1."):
                left[0] -= 1
                raise OSError(number, os.strerror(number), str(path))

        def opened(path, most=None):
            fail(path)
            return open_regular(path, most)

        read_text = Path.read_text
        monkeypatch.setattr(files, "open_regular", opened)
        monkeypatch.setattr(
            Path, "read_text", lambda path, *given: fail(path) or read_text(path, *given)
        )

    return refuse


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN])
@pytest.mark.parametrize("write", [RankRecord.write, RankRecord.write_provisional])
def test_record_that_the_disk_does_not_give_ends_no_launch_and_the_next_look_reads_it(
    tmp_path, refuses, number, write
):
    spec = spec_of(tmp_path)
    spec.write(spec.path)
    write(record := RankRecord("failed", 1, 69), spec)
    refuses(number, 1)
    records = RecordsSoFar(spec)
    records.look()
    assert records.written + records.stalled == []
    records.look()
    assert records.written + records.stalled == [record]


def test_record_is_read_again_after_the_launch_until_the_disk_gives_it_or_for_too_long(
    tmp_path, refuses, monkeypatch
):
    spec = spec_of(tmp_path)
    spec.write(spec.path)
    RankRecord("completed", 1).write(spec)
    monkeypatch.setattr(rank_records, "AGAIN_EVERY_SEC", 0.0)
    refuses(errno.ESTALE, 3)
    assert RankRecord.read(spec, 1).status == "completed"
    monkeypatch.setattr(rank_records, "AGAIN_SEC", 0.0)
    refuses(errno.EIO, 1000)
    with pytest.raises(UnfitError, match=r"cannot read .*rank-1\.json: Input/output error"):
        RankRecord.read(spec, 1)


def test_record_fits_into_the_reserved_space_of_a_full_disk(tmp_path, monkeypatch):
    spec = spec_of(tmp_path)
    spec.write(spec.path)
    rank_records.reserve(spec)
    monkeypatch.setattr(rank_records, "write_json", full_disk)
    RankRecord("failed", 1, 69, message="no space left " * 1000).write(spec)
    found = RankRecord.read(spec, 1)
    assert (found.status, found.code) == ("failed", 69)
    assert found.message.startswith("no space left no space")
    assert written(spec) == []


def full_disk(path, _value):
    with rank_records.disk_trouble(path):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("other", [None, 2])
def test_spec_of_another_version_is_refused_by_its_format(tmp_path, other):
    spec = spec_of(tmp_path)
    spec.write(path := spec.path)
    write_json(path, {**read_json(path), "format": other})
    with pytest.raises(
        DataError, match=f"has format {other}, this version of Forge reads 1"
    ) as caught:
        LaunchSpec.read(path)
    assert "same version on all nodes" in str(caught.value)
