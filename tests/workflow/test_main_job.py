"""The README's first command, as it is shipped: the embedded corpus, two ranks, the real config."""

import json
import re

import pytest
from support.clone import REPOSITORY

from forge.core.files import read_json
from forge.core.provenance import cpu_id

pytestmark = pytest.mark.weekly  # CI begins with `make train` in its clone


@pytest.fixture(scope="module")
def trained(shared_project):
    """The project after its main job, and what that printed."""
    project = shared_project
    for name in ("config.yaml", "runs.tsv"):
        (project.root / "config" / name).write_text((REPOSITORY / "config" / name).read_text())
    code, output = project.snakemake("train", deadline_sec=600)
    assert code == 0, output[-4000:]
    return project, output


def test_main_job_learns_at_least_one_and_a_half_nats(trained):
    project, output = trained
    lines = map(json.loads, project.path("metrics.jsonl").read_text().splitlines())
    evaluations = [line for line in lines if line["kind"] == "eval"]
    losses = [line["loss"] for line in evaluations]
    assert losses[0] - losses[-1] >= 1.5
    validation = project.read("validation.json")
    assert validation["status"] == "valid"
    assert validation["bpb"] == pytest.approx(evaluations[-1]["bpb"], rel=1e-6)
    assert len(validation["samples"]) == 3
    row = output.splitlines()[-1]
    assert row.split()[:4] == ["base", "validated", "validation", "loss"] and "report.html" in row
    assert f"{validation['bpb']:.4f} bits per byte" in row
    assert str(project.path("report.html").relative_to(project.root)) in output


def test_weights_are_those_that_the_documents_state_for_this_kind_of_machine(trained):
    project, _ = trained
    lineage = read_json(project.path("checkpoints/latest/checkpoint.json"))["lineage"]
    here = (lineage["tokens"]["digest"][:12], cpu_id(), lineage["versions"]["torch"])
    document = (REPOSITORY / "docs/measured/reproducibility.md").read_text()
    row = r"^\| library of .* \| (\w+) \| (\w+) .*\| (\S+) \| (\w+) \|$"
    stated = {tuple(found[:3]): found[3] for found in re.findall(row, document, re.MULTILINE)}
    assert stated
    if here not in stated:
        pytest.skip(f"no weights are stated for tokens, CPU and torch of this machine: {here}")
    assert project.read("trained.json")["weights_digest"][:12] == stated[here]
