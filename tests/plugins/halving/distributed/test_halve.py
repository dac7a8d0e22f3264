"""Halving of a sweep. Threats: runs are compared whose learning rate has decayed already, or at different
steps; a kept run does not go on exactly as if it had been meant to be longer from the beginning."""

from __future__ import annotations

import json

import pytest
from support.clone import Project, make_project, started

pytestmark = pytest.mark.all
STEPS = 8
WSD = {"schedule": "wsd", "decay_steps": 40, "warmup_steps": 2, "keep_every": None}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Four rates, of which one never learns, trained to a first common step."""
    project = make_project(tmp_path_factory.mktemp("sweep"))
    project.one_rank()
    project.write_config(train={**WSD, "max_steps": STEPS, "eval_every": 4, "checkpoint_every": 4})
    project.write_runs(
        f"# rates\nrun\ttrain.max_steps\tgrid:train.lr\nrate\t{STEPS}\t4e-3, 2e-3, 1e-3, 1e-8\n"
    )
    code, output = project.snakemake("train")
    assert code == 0, output
    return project


RATES = ["rate-lr4e-3", "rate-lr2e-3", "rate-lr1e-3", "rate-lr1e-8"]


def losses(project: Project, step: int) -> dict[str, float]:
    found = {}
    for run in RATES:
        lines = map(json.loads, project.path("metrics.jsonl", run).read_text().splitlines())
        [found[run]] = [n["loss"] for n in lines if (n["kind"], n["step"]) == ("eval", step)]
    return found


REFUSED = {
    "a cosine": ({"schedule": "cosine"}, (), "has train.schedule cosine"),
    "no end of the schedule": ({"decay_steps": None}, (), "train.decay_steps None"),
    "a decay that has begun": ({"decay_steps": 9}, ("--to", "9"), "decays from step 7 to 9"),
    "an end behind the schedule": ({}, ("--to", "41"), "decays from step 32 to 40"),
    "no later step": ({}, ("--to", "8"), "--to is 8, and these runs are at step 8"),
    "a run that is not there": ({}, ("nobody",), "has no run nobody"),
    "one run": ({}, (RATES[0],), "train.max_steps of the runs to compare is"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_runs_that_do_not_compare_are_refused_and_the_sheet_stays(
    sweep: Project, name: str
) -> None:
    keys, options, message = REFUSED[name]
    sheet = sweep.root / "config/runs.tsv"
    before = sheet.read_text()
    config = (sweep.root / "config/config.yaml").read_text()
    try:
        sweep.write_config(train={**WSD, "max_steps": STEPS, **keys})
        done = sweep.forge("halve", "--keep", "1/2", "--to", "16", *options)
    finally:
        (sweep.root / "config/config.yaml").write_text(config)
    assert done.returncode == 78, done.stdout + done.stderr
    assert message in done.stderr
    assert sheet.read_text() == before


def test_best_runs_train_on_from_where_they_are_and_the_others_stay(sweep: Project) -> None:
    """With the bits of a run that was meant to be as long from the beginning."""
    ranked = sorted(RATES, key=lambda run: losses(sweep, STEPS)[run])
    kept, left = ranked[:2], ranked[2:]
    assert RATES[3] == ranked[3]
    dry = sweep.forge("halve", "--keep", "0.5", "--to", "16", "--dry-run")
    assert "is unchanged (--dry-run)" in dry.stdout
    done = sweep.forge("halve", "--keep", "1/2", "--to", "16")
    assert done.returncode == 0, done.stderr
    shown = [line.split() for line in done.stdout.splitlines() if line.startswith("   ")]
    assert [line[2] for line in shown] == ranked
    assert [line[2] for line in shown if line[3:] == ["to", "step", "16"]] == kept
    assert (sweep.root / "config/runs.tsv").read_text().startswith("# rates\nrun\t")

    code, output = sweep.snakemake("train")
    assert code == 0, output
    trained = [job.split()[1] for job in started(output) if job.startswith("train_run ")]
    assert sorted(trained) == sorted(kept)
    assert [sweep.steps(run) for run in (*kept, *left)] == [16, 16, 8, 8]
    again = sweep.forge("halve", "--keep", "1/2", "--to", "24")
    assert again.returncode == 0, again.stderr  # of the two that are longer now
    assert again.stdout.count("to step 24") == 1

    sheet = f"run\ttrain.max_steps\ttrain.lr\nwhole\t16\t{float(kept[0][7:])}\n"
    sweep.write_runs(sheet)
    code, output = sweep.snakemake("train")
    assert code == 0, output
    digests = [sweep.read("trained.json", run)["weights_digest"] for run in ("whole", kept[0])]
    assert digests[0] == digests[1]


def test_run_that_has_not_come_to_the_step_is_refused_by_name(sweep: Project) -> None:
    sweep.write_runs(f"run\ttrain.max_steps\nnew\t{STEPS}\n{RATES[2]}\t{STEPS}\n")
    done = sweep.forge("halve", "--keep", "1/2", "--to", "16")
    assert done.returncode == 78
    assert f"run new has no validation at step {STEPS}" in done.stderr
