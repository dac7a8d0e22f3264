"""A family of runs on one sheet, from the first command to a parent that is retrained."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from support.clone import started

from forge.core import json_lines

HEAD, BASE = "run\tparent\ttrain.max_steps\ttrain.seed\n", "base\t\t{}\t{}\n"
CHILD = "end\tbase@4\t8\t\n"


def jobs_in(output):
    """Rule -> number of jobs, from the table of a dry run."""
    return {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", output, re.MULTILINE)}


def edges(project):
    """(from, to) of the drawn jobs, by rule and run."""
    _, dot = project.snakemake("--dag", "dot", "train")
    names = dict(re.findall(r'^\s*(\d+)\[label = "(.*?)"', dot, re.MULTILINE))
    drawn = re.findall(r"^\s*(\d+) -> (\d+)", dot, re.MULTILINE)
    return {(names[one], names[other]) for one, other in drawn}


@pytest.mark.weekly
def test_family_trains_in_order_and_a_parent_trained_again_leaves_its_child_to_the_user(project):
    project.one_rank()
    project.write_config(train={"max_steps": 8})
    project.write_runs(HEAD + BASE.format(8, "") + CHILD)
    drawn = edges(project)
    assert any(source.startswith("train_run") and "run: end" in to for source, to in drawn)

    code, output = project.snakemake("train", "compare")
    assert code == 0, output
    page = (project.root / "results/compare.html").read_text()
    assert "└─ end" in page and "├─" not in page
    digest = project.read("trained.json", "end")["parent"]["digest"]
    lines = json_lines.read(project.path("metrics.jsonl", "end"))
    assert [line["step"] for line in lines if line["kind"] == "train"] == [5, 6, 7, 8]
    assert "Nothing to be done" in project.snakemake("train")[1]

    # A parent that trains on, and one whose row is removed, are nothing to the children.
    project.write_runs(HEAD + BASE.format(12, "") + CHILD)
    assert jobs_in(project.snakemake("-n", "train")[1])["train_run"] == 1
    project.write_runs(HEAD + CHILD)
    project.path("validated.json", "end").unlink()
    due = jobs_in(project.snakemake("-n", "train")[1])
    assert {"validate_run", "report_run"} == due.keys() - {"train", "total"}, due

    # A complete child stays as it is while its parent is retrained, and afterwards.
    assert project.snakemake("train")[0] == 0
    before = {path: path.stat().st_mtime_ns for path in project.path("", "end").iterdir()}
    shutil.rmtree(project.path(""))
    project.write_runs(HEAD + BASE.format(8, 7) + CHILD)
    code, output = project.snakemake("train")
    assert code == 0, output
    assert "end: warning: started from base@4 with digest" in output
    assert {job.split()[-1] for job in started(output) if "_run" in job} == {"base"}
    assert {path: path.stat().st_mtime_ns for path in project.path("", "end").iterdir()} == before
    output = project.snakemake("-n", "train")[1]
    assert "Nothing to be done" in output
    assert f"end: warning: started from base@4 with digest {digest[:12]}, which has" in output

    # One with steps to train is refused before anything starts, with the way on.
    project.write_runs(HEAD + BASE.format(8, 7) + CHILD.replace("8", "9"))
    code, output = project.snakemake("train")
    assert code != 0 and not started(output)
    assert f"run end started from base@4 with digest {digest[:12]}, which has digest" in output
    [move] = re.findall(r"rerun the command after (mv \S+ \S+);", output)
    subprocess.run(move.split(), cwd=project.root, check=True)
    code, output = project.snakemake("train")
    assert code == 0, output
    assert project.read("trained.json", "end")["parent"]["digest"] != digest
    assert project.read("trained.json", "end.old")["parent"]["digest"] == digest
    assert project.read("validated.json", "end")["status"] == "valid"
    assert "Nothing to be done" in project.snakemake("train")[1]
