"""Runs that earlier commits left on disk: finished ones stay so, one that was interrupted resumes."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from support.live_run import forge
from support.past import LOSS_TOLERANCE, compares_bits

from forge.core import json_lines, provenance
from forge.core.config import ResolvedConfig, checked
from forge.core.files import read_json

RUNS = ("finished", "interrupted", "sealed", "queued")


def config_of(run: Path) -> ResolvedConfig:
    return checked(ResolvedConfig, read_json(run / "config.json"), "config.json")


def losses(run: Path) -> dict[str, float]:
    lines = json_lines.read(run / "metrics.jsonl")
    return {str(line["step"]): line["loss"] for line in lines if line["kind"] == "train"}


def test_nothing_is_to_be_done_for_a_finished_run(project_of):
    code, output = project_of("finished").snakemake("-n", "train", "export", "reproduce")
    assert code == 0, output
    assert "Nothing to be done" in output, output


def test_nothing_is_to_be_done_for_the_finished_run_of_another_program(project_of):
    code, output = project_of("sealed").snakemake("-n", "train")
    assert code == 0, output
    assert "Nothing to be done" in output, output


def test_nothing_is_made_again_in_a_copy_without_the_records_of_snakemake(project_of):
    """As `make clean` and a copied project lack them: then files alone say what is current."""
    project = project_of("finished")
    for path in (project.root / ".snakemake").rglob("*"):
        if path.is_file():
            path.unlink()
    code, output = project.snakemake("-n", "train")
    assert code == 0, output
    assert "Nothing to be done" in output, output


@pytest.mark.parametrize("name", RUNS)
def test_config_json_of_then_holds_the_config_that_is_read_from_it(past, name):
    """Else its run would be due again."""
    run = past.folder / name / "results" / name
    assert config_of(run).is_in(run / "config.json")


@pytest.mark.parametrize("name", RUNS)
def test_config_digest_is_the_recorded_one(past, name):
    config = config_of(past.folder / name / "results" / name)
    assert provenance.config_digest(config) == past.recorded[name]["config_digest"]


def test_files_of_a_finished_run_are_read(project_of, capsys):
    project = project_of("finished")
    with contextlib.chdir(project.root):
        assert forge("status").code == 0
        assert forge("show", "finished").code == 0
    said = capsys.readouterr().out
    assert "validated" in said and "step-00000008" in said


def test_an_interrupted_run_resumes_to_the_recorded_digests(project_of, past):
    """GPT-2, Muon and two sources on two ranks."""
    project, recorded = project_of("interrupted"), past.recorded["interrupted"]
    run = project.root / "results/interrupted"
    # Ctrl-C leaves what stage and preflight said of that machine, which holds for no other.
    shutil.rmtree(run / ".allocation")
    code, output = project.snakemake("resume", "--until", "train_run")
    assert code == 0, output
    assert f"step {recorded['stopped_at']} of {recorded['goal']}" in output
    trained = read_json(run / "trained.json")
    assert (trained["step"], trained["config_digest"]) == (
        recorded["goal"],
        recorded["config_digest"],
    )
    found = losses(run)
    assert found.keys() == recorded["losses"].keys()
    if compares_bits(past.recorded):
        assert trained["weights_digest"] == recorded["weights_digest"]
        assert found == recorded["losses"]
    assert found == pytest.approx(recorded["losses"], abs=LOSS_TOLERANCE)
