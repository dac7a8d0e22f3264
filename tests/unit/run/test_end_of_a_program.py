"""How a launch of another program ended, by its checkpoints, and whether another one may follow."""

import pytest
from support.manifests import MADE_BY

from forge.core.config import Config, checked
from forge.core.errors import DataError
from forge.core.files import read_json, write_json
from forge.data.content_ids import resolve
from forge.launch.rank_records import RankRecord
from forge.run.programs import program_of


@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_only_the_end_of_a_program_without_checkpoints_tells_whether_it_is_complete(
    tmp_path, status
):
    """Its goal is 0, which a program that was asked to stop, and exits with 0, has always reached."""
    values = {"results": str(tmp_path), "run": "p", "program": {"command": ["python"]}}
    program = program_of(resolve(checked(Config, values, "the test")))
    record = RankRecord(status, exit_status=0)
    assert program._judged(record).status == status


@pytest.mark.parametrize("harm", ["link", "seal of another version"])
def test_program_whose_checkpoints_may_not_be_read_is_refused_before_a_job_waits(tmp_path, harm):
    """Its input functions read them while Snakemake plans: that ended with a traceback."""
    values = {"command": ["python"], "goal": 9, "checkpoints": {}}
    run = {"results": str(tmp_path), "run": "p", "program": values}
    program = program_of(resolve(checked(Config, run, "the test")))
    checkpoints = program.paths.checkpoints
    (checkpoints / "checkpoint-5").mkdir(parents=True)
    (checkpoints / "checkpoint-5/state").write_text("weights")
    assert program.checkpoints.seal(checkpoints / "checkpoint-5", 5, MADE_BY)
    assert program.check_start({}) == []
    if harm == "link":
        checkpoints.rename(tmp_path / "elsewhere")
        checkpoints.symlink_to(tmp_path / "elsewhere")
    else:
        seal = checkpoints / "checkpoint-5.forge.json"
        write_json(seal, {**read_json(seal), "format": 9})
    with pytest.raises(DataError, match=r"is not followed|has format 9"):
        program.check_start({})
