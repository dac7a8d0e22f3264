"""Runs that earlier commits left on disk: finished ones stay so, one that was interrupted resumes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from support.live_run import forge
from support.past import LOSS_TOLERANCE, compares_bits, digest
from support.run_directory import unnamed

from forge.core import events, json_lines, provenance
from forge.core.config import ResolvedConfig, checked
from forge.core.files import read_json
from forge.core.records import (
    Exported,
    PreflightPass,
    PreflightResult,
    Record,
    StageRecord,
    Trained,
    Validated,
    Validation,
)

RUNS = ("finished", "interrupted", "sealed", "queued")
RECORDS: dict[str, type[Record]] = {
    "trained.json": Trained,
    "validated.json": Validated,
    "validation.json": Validation,
    "exported.json": Exported,
    "preflight.json": PreflightResult,
    ".allocation/stage.json": StageRecord,
    ".allocation/preflight.json": PreflightPass,
}
# By run, so that a record under another name is missed.
NUM_RECORDS = {"finished": 5, "interrupted": 3, "sealed": 4, "queued": 0}


def config_of(run: Path) -> ResolvedConfig:
    return checked(ResolvedConfig, read_json(run / "config.json"), "config.json")


def losses(run: Path) -> dict[str, float]:
    lines = json_lines.read(run / "metrics.jsonl")
    return {str(line["step"]): line["loss"] for line in lines if line["kind"] == "train"}


def test_nothing_is_to_be_done_for_a_finished_run(project_of):
    code, output = project_of("finished").snakemake("-n", "train", "export")
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


@pytest.mark.parametrize("name", RUNS)
def test_files_of_a_run_have_their_names_and_records_and_events_are_read(past, name):
    run = past.folder / name / "results" / name
    assert unnamed(run) == set()
    there = {file: record for file, record in RECORDS.items() if (run / file).exists()}
    found = [record.read(run / file) for file, record in there.items()]
    assert len(found) == NUM_RECORDS[name]
    log = run / "events.jsonl"
    known = [type(event).__name__.lower() for event in events.read(log)]
    assert known == [line["event"] for line in json_lines.read(log)]


def test_a_finished_run_is_shown_as_validated(project_of, capsys):
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


def test_checkpoint_of_gpt2_and_muon_loads_for_export(project_of, past):
    with contextlib.chdir(project_of("interrupted").root):
        done = forge("export", "interrupted", "--to=model")
        assert done.code == 0, done.text
        found = digest(Path("model/model.safetensors"))
    assert found == past.recorded["interrupted"]["weights_file"]
