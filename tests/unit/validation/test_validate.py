"""The table of all checkpoints says why each one in quarantine is there."""

from support.recorded_run import RecordedRun

from forge.checkpoint import directory
from forge.checkpoint.resume import CommittedCheckpoints
from forge.core.files import read_json, write_json
from forge.validation.validate import _quarantined


def test_a_checkpoint_in_quarantine_is_listed_with_its_reasons(tmp_path, capfd):
    run = RecordedRun(tmp_path / "base")
    run.save(50)
    place = directory.quarantine(run.paths, run.paths.latest.resolve(), ["a bit has flipped"])
    (row,) = _quarantined(CommittedCheckpoints(run.paths))
    assert (row.verdict, row.reasons) == ("in quarantine", ["a bit has flipped"])

    record = place / directory.DAMAGE
    write_json(record, {**read_json(record), "format": 9})
    (row,) = _quarantined(CommittedCheckpoints(run.paths))
    assert row.reasons == [f"{record} has format 9, this version of Forge reads 1"]

    record.unlink()  # the disk was full
    (row,) = _quarantined(CommittedCheckpoints(run.paths))
    assert row.reasons == []
