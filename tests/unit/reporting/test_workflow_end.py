"""The last lines of a command are all that most people read: nothing that needs a person may be missing,
and a hundred runs must not hide it."""

import re

import pytest
from support import happenings
from support.run_states import KINDS, new_run, train

from forge.reporting.workflow_output import MAX_ROWS, print_end
from forge.slurm import slurm


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    monkeypatch.setattr(slurm, "is_here", lambda: False)


def made(tmp_path, *kinds):
    """Runs a0, a1, … of these kinds."""
    runs = []
    for number, kind in enumerate(kinds):
        run = new_run(tmp_path / f"a{number}")
        KINDS[kind][0](run)
        runs.append(run.paths)
    return runs


def lines(capsys, runs):
    print_end(runs)
    blank, *rest = capsys.readouterr().out.splitlines()
    assert blank == ""
    return rest


def test_one_run_is_one_line_with_its_reason_log_and_next_command(tmp_path, capsys):
    (run,) = runs = made(tmp_path, "unstaged")
    head, line = lines(capsys, runs)
    assert head.split() == ["run", "state", "reason", "log", "next"]
    assert re.split("  +", line) == [
        "a0",
        "failed",
        "stage: no space on node02",
        f"{run.logs}/stage.log",
        f"forge logs {run.root}",
    ]


def test_a_valid_run_shows_its_report(tmp_path, capsys):
    (run,) = runs = made(tmp_path, "validated")
    run.report.write_text("<html>")
    assert lines(capsys, runs)[1].endswith(str(run.report))


def test_of_many_runs_those_that_need_nobody_are_counted(tmp_path, capsys):
    runs = made(tmp_path, *["validated"] * 10, "failed", "stopped", "running", "running")
    _, *rows, last = lines(capsys, runs)
    assert [row.split()[0] for row in rows] == ["a10", "a11"]
    assert last == "12 of 14 runs need nothing: 10 validated, 2 running"


def test_runs_that_wait_for_the_same_are_one_row(tmp_path, capsys):
    runs = made(tmp_path, "stopped", *["not-started"] * MAX_ROWS)
    _, stopped, rest = lines(capsys, runs)
    assert stopped.startswith("a0 ") and rest.startswith(f"a1 (and {MAX_ROWS - 1} more)")


def test_all_well_with_many_runs_is_one_line(tmp_path, capsys):
    runs = made(tmp_path, *["validated"] * (MAX_ROWS + 1))
    assert lines(capsys, runs) == [
        f"{MAX_ROWS + 1} of {MAX_ROWS + 1} runs need nothing: 9 validated"
    ]


def test_a_long_reason_does_not_break_the_table(tmp_path, capsys):
    run = new_run(tmp_path / "base")
    train(run)
    run.event(happenings.failed("x" * 500 + "\n  fix: less"))
    _, line = lines(capsys, [run.paths])
    assert "xxx…" in line and len(line) < 300
