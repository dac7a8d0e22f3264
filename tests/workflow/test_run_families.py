"""A family of runs on one sheet, from the first command to a parent that is made anew."""

from __future__ import annotations

import re
import shutil

from support.clone import started_rules

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


def test_family_trains_in_order_and_a_parent_made_anew_restarts_its_child(project):
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

    # It stays due until it has started anew, whatever else an interrupted command has done.
    shutil.rmtree(project.path(""))
    project.write_runs(HEAD + BASE.format(8, 7) + CHILD)
    done = ("base/trained.json", "end/config.json", "end/.parent_trained")
    code, output = project.snakemake(*(f"results/{name}" for name in done))
    assert code == 0, output
    assert "end starts anew: base@4, from which it started, is made anew" in output
    code, output = project.snakemake("train")
    assert code == 0, output
    assert started_rules(output).count("train_run") == 1
    [aside] = project.path("superseded", "end").iterdir()
    assert aside.name == f"base-4-{digest[:12]}"
    assert project.read("trained.json", "end")["parent"]["digest"] != digest
    assert project.read("validated.json", "end")["status"] == "valid"
    assert "Nothing to be done" in project.snakemake("train")[1]
