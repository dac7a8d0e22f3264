"""How a launch of another program ended, by its checkpoints."""

import pytest

from forge.core.config import Config, checked
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
