"""A sheet with a run that starts from another one: refused until it can, then trained like any row."""

import json

import pytest

pytestmark = pytest.mark.xdist_group("parents")


def test_a_row_with_a_parent_waits_for_its_checkpoint_and_then_trains_only_the_new_run(project):
    project.one_rank()
    project.write_config(train={"keep_every": 4})
    project.write_runs("run\tparent\ttrain.lr\nbase\t\t\ncooler\tbase@4\t1e-3\n")
    code, output = project.snakemake("train")
    assert code != 0
    assert "there is no run base in results" in output
    assert "train base first" in output
    assert "Traceback" not in output
    assert not (project.root / "results").exists()

    project.write_runs("run\tparent\ttrain.lr\nbase\t\t\n")
    code, output = project.snakemake("train")
    assert code == 0, output
    before = project.path("trained.json").stat().st_mtime_ns

    project.write_runs("run\tparent\ttrain.lr\nbase\t\t\ncooler\tbase@5\t1e-3\n")
    code, output = project.snakemake("train")
    assert code != 0
    assert "has the steps 4, 8, 12" in output

    project.write_runs("run\tparent\ttrain.lr\nbase\t\t\ncooler\tbase@4\t1e-3\n")
    code, output = project.snakemake("train")
    assert code == 0, output
    assert project.path("trained.json").stat().st_mtime_ns == before
    made_from = project.read("trained.json", "cooler")["parent"]
    assert (made_from["run"], made_from["step"]) == ("base", 4)
    lines = project.path("metrics.jsonl", "cooler").read_text().splitlines()
    steps = [line["step"] for line in map(json.loads, lines) if line["kind"] == "train"]
    assert steps == list(range(5, 13))
    assert project.read("validated.json", "cooler")["status"] == "valid"
    shown = project.forge("show", "results/cooler").stdout
    assert f"base@4 (digest {made_from['digest']})" in shown

    code, output = project.snakemake("train")
    assert code == 0
    assert "Nothing to be done" in output


def test_parents_in_a_circle_are_refused_before_anything_is_made(project):
    project.write_runs("run\tparent\na\tb@4\nb\ta@4\n")
    code, output = project.snakemake("train")
    assert code != 0
    assert "the parents of these runs form a circle: a from b from a" in output
    assert not (project.root / "results").exists()
