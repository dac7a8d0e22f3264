"""The README's first command, as it is shipped: the embedded corpus, two ranks, the real config."""

import json

import pytest
from support.clone import REPOSITORY


@pytest.mark.timeout(620)  # 1.5 minutes alone; other tests share the cores
def test_main_job_learns_at_least_one_and_a_half_nats(project):
    for name in ("config.yaml", "runs.tsv"):
        (project.root / "config" / name).write_text((REPOSITORY / "config" / name).read_text())
    code, output = project.snakemake("train", deadline_sec=600)
    assert code == 0, output[-4000:]
    lines = map(json.loads, project.path("metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "eval"]
    assert losses[0] - losses[-1] >= 1.5
    validation = project.read("validation.json")
    assert validation["status"] == "valid"
    assert len(validation["samples"]) == 3
    row = output.splitlines()[-1]
    assert row.split()[:4] == ["base", "validated", "validation", "loss"] and "report.html" in row
    assert str(project.path("report.html").relative_to(project.root)) in output
