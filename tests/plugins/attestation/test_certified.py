"""A part that was not reproduced must be seen by whoever looks at the run."""

import json
from typing import Any

import pytest
from support.recorded_run import RecordedRun
from support.run_states import hold, new_run, train

from forge.plugins.attestation.places import CERTIFICATES, result_at
from forge.plugins.attestation.records import Certified
from forge.reporting import show, status
from forge.reporting.run_files import RunFiles
from forge.reporting.run_state import judge
from forge.reporting.summary import summarize
from forge.slurm import slurm


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    monkeypatch.setattr(slurm, "is_here", lambda: False)
    monkeypatch.setattr(slurm, "cluster_name", lambda **_: "forge")


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path / "base")


def judged(run):
    return judge(RunFiles(run.paths), None)


def counted(run):
    return "\n".join(summarize(run.paths).of_plugins["certified"])


def retrained(run: RecordedRun, **values: Any) -> None:
    """Leave the record of `forge reproduce CHECKPOINT`."""
    usual = {"first": 8, "last": 10, "result": "reproduced", "trained_on": ["n1"], "again_on": "n3"}
    made = Certified.model_validate({**usual, **values})
    (run.root / CERTIFICATES).mkdir(exist_ok=True)
    made.write(result_at(run.paths, made.last))


def test_a_part_that_was_not_reproduced_is_the_reason_whoever_is_asked(run, capsys):
    hold(run)
    train(run)
    retrained(run, last=10, is_bitwise=True)
    assert (judged(run).reason, judged(run).next) == ("training", "")
    retrained(run, result="not reproduced", first=18, last=20, trained_on=list("abcdef"))
    line = "NOT reproduced: steps 19 to 20, trained on a, b, c, d and 2 more, again on n3"
    found = judged(run)
    assert (found.state, found.reason) == ("running", f"training; {line}")
    assert found.next == f"forge reproduce {run.root}/checkpoints/step-00000020 on a third node"
    for shown in (show.show, status.status):
        shown([run.paths])
        assert line in capsys.readouterr().out
    status.status([run.paths], as_json=True)
    assert json.loads(capsys.readouterr().out)["runs"][0]["not_reproduced"] == line


def test_parts_that_were_trained_again_are_counted_by_show(run, capsys):
    train(run)
    show.show([run.paths])
    assert "certified" not in capsys.readouterr().out
    for last in (10, 20, 30):
        retrained(run, first=last - 2, last=last, is_bitwise=True)
    assert counted(run) == "3 of 3 parts retrained bitwise equal"
    show.show([run.paths])
    assert f"certified       {counted(run)}\n" in capsys.readouterr().out
    retrained(run, first=None, last=30, result="unchecked", why="no room\nfor it")
    show.show([run.paths])
    said = capsys.readouterr().out
    assert "certified       2 of 3 parts retrained bitwise equal\n" in said
    assert "  steps up to 30 could not be retrained: no room\n" in said
    retrained(run, last=10, is_bitwise=False)
    assert "2 of 3 parts retrained as they were, 1 bitwise equal" in counted(run)
    retrained(run, last=10, again_on="n1")
    assert "1 bitwise equal, 1 on a node that had trained it" in counted(run)


def test_record_of_a_part_that_cannot_be_read_is_named_and_hides_nothing_else(run, capsys):
    train(run)
    retrained(run)
    file = result_at(run.paths, 10)
    file.write_text("{}")
    assert judged(run).state == "unknown" and str(file) in judged(run).reason
    show.show([run.paths])
    assert "validation loss" in capsys.readouterr().out
