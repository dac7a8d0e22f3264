"""An old export stays verifiable by old and new means, and old checkpoints give the same export today."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from support.clone import Project
from support.live_run import forge
from support.past import Past, compares_bits, digest, flip_a_bit
from support.repository import REPOSITORY

from forge.attestation import verify
from forge.core.files import read_json
from forge.plugins.attestation.certificate import Reproduction
from forge.plugins.attestation.places import REPRODUCED
from forge.plugins.attestation.records import Reproduced

NewProject = Callable[[str], Project]
KEYS = ("--key=author.pub", "--certifier=certifier.pub")
SCHEMA = Draft202012Validator(read_json(REPOSITORY / "docs/plugins/certificate.schema.json"))


@pytest.fixture
def finished(project_of: NewProject) -> Iterator[Path]:
    """The current directory: the project of the finished run."""
    with contextlib.chdir(project_of("finished").root):
        yield Path()


def export_and_certificate(past: Past) -> tuple[str, str]:
    export = past.recorded["finished"]["export"]
    return export, f"--certificate={export}.certificate.json"


def verify_alone(past: Past, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The verify.py of the fixture, as somebody runs it who has no Forge."""
    command = [sys.executable, "-I", str(past.verify_alone), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


# --- the old export ---------------------------------------------------------------------------------


def test_forge_verify_of_today_accepts_export_signature_certificate_and_checkpoints(
    finished: Path, past: Past, capsys: pytest.CaptureFixture[str]
):
    recorded = past.recorded["finished"]
    named = (f"--digest={recorded['statement']}", "--checkpoints=results/finished", "--data=corpus")
    done = forge("verify", *export_and_certificate(past), *KEYS, *named)
    assert done.code == 0, done.text
    said = capsys.readouterr().out
    assert all(f"ok    {what}: " in said for what in ("files", "chain", "signature", "checkpoints"))
    assert "ok    data: 6 text files give the tokenizer and 2 shards of the statement" in said


def test_verify_py_that_was_handed_on_still_accepts_the_export(finished: Path, past: Past):
    named = f"--digest={past.recorded['finished']['statement']}"
    done = verify_alone(past, *export_and_certificate(past), *KEYS, named)
    assert done.returncode == 0, done.stderr


def test_statement_and_certificate_have_their_recorded_digests_by_the_code_of_today(past: Past):
    """A paper may have printed the first."""
    recorded = past.recorded["finished"]
    export = past.folder / "finished" / recorded["export"]
    files = {"statement": export / "statement.json"}
    files["certificate"] = export.with_name(f"{export.name}.certificate.json")
    found = {name: verify.statement_digest(read_json(path)) for name, path in files.items()}
    assert found == {name: recorded[name] for name in files}


def test_certificate_with_a_key_that_is_no_longer_written_is_read_and_fits_the_schema(past: Past):
    export, _ = export_and_certificate(past)
    content = read_json(past.folder / "finished" / f"{export}.certificate.json")["predicate"]
    made = Reproduction.model_validate(content)
    assert "chance" in content
    SCHEMA.validate(content)
    assert (made.result, made.sha256) == ("reproduced", past.recorded["finished"]["certificate"])


# --- exports of today -------------------------------------------------------------------------------


def test_old_checkpoint_gives_the_same_weights_and_verify_py_of_then_accepts_the_export_of_now(
    finished: Path, past: Past
):
    assert forge("key", "now.pem").code == 0
    done = forge("export", "finished", "--to=now", "--sign=now.pem")
    assert done.code == 0, done.text
    assert digest(Path("now/model.safetensors")) == past.recorded["finished"]["weights_file"]
    done = verify_alone(past, "now", "--key=now.pem.pub")
    assert done.returncode == 0, done.stderr


def test_export_that_is_there_is_left_as_it_is_and_its_statement_stays_the_same(
    finished: Path, past: Past
):
    """Else every certificate of it would be worthless."""
    folder = Path(past.recorded["finished"]["export"])
    before = {path.name: digest(path) for path in folder.iterdir()}
    done = forge("export", "finished")
    assert done.code == 0, done.text
    assert {path.name: digest(path) for path in folder.iterdir()} == before


# --- retraining ---------------------------------------------------------------------------------


def test_old_reproduction_is_read_and_nothing_is_to_be_done_for_it(project_of: NewProject):
    project = project_of("finished")
    assert Reproduced.read(project.path(REPRODUCED, "finished")).steps_checked == 8
    code, output = project.snakemake("-n", "reproduce")
    assert code == 0 and "Nothing to be done" in output, output


def test_steps_of_the_old_run_are_bitwise_equal_today_by_a_certificate_that_both_accept(
    finished: Path, past: Past
):
    export, _ = export_and_certificate(past)
    assert forge("key", "now.pem").code == 0
    options = ("--checkpoints=results/finished", "--to=now.json", "--sign=now.pem", "--seed=1")
    done = forge("reproduce", export, *options)
    assert done.code == 0, done.text
    content = read_json(Path("now.json"))["predicate"]
    SCHEMA.validate(content)
    made = Reproduction.model_validate(content)
    assert (made.result, made.steps_checked, made.export) == ("reproduced", 8, "same")
    if compares_bits(past.recorded):
        assert {one.outcome for one in made.intervals} == {"bitwise"}
    named = (export, "--certificate=now.json", "--certifier=now.pem.pub")
    assert forge("verify", *named).code == 0
    assert verify_alone(past, *named).returncode == 0


def test_steps_of_the_old_run_of_another_program_are_bitwise_equal_today(project_of: NewProject):
    with contextlib.chdir(project_of("sealed").root):
        done = forge("export", "sealed")
        assert done.code == 0, done.text
        done = forge("reproduce", "results/sealed", "--trust-program", "--to=now.json")
        assert done.code == 0, done.text
        made = Reproduction.model_validate(read_json(Path("now.json"))["predicate"])
    assert [one.outcome for one in made.intervals] == ["bitwise", "bitwise"]


# --- what is broken is noticed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "statement.json", "statement.dsse.json", "tokenizer.json", "config.json"],
)
def test_flipped_bit_of_the_export_is_refused_by_both(finished: Path, past: Past, name: str):
    export, certificate = export_and_certificate(past)
    flip_a_bit(Path(export, name))
    assert forge("verify", export, certificate, *KEYS).code == 65
    assert verify_alone(past, export, certificate, *KEYS).returncode == 65


@pytest.mark.parametrize("name", ["certificate.json", "certificate.dsse.json"])
def test_flipped_bit_of_the_certificate_is_refused_by_both(finished: Path, past: Past, name: str):
    export, certificate = export_and_certificate(past)
    flip_a_bit(Path(f"{export}.{name}"))
    assert forge("verify", export, certificate, *KEYS).code == 65
    assert verify_alone(past, export, certificate, *KEYS).returncode == 65


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("finished", "step-00000008/*.distcp"),
        ("interrupted", "step-*/*.distcp"),
        ("sealed", "checkpoint-8/state.json"),
    ],
)
def test_flipped_bit_of_a_checkpoint_is_refused(project_of: NewProject, name: str, pattern: str):
    run = project_of(name).root / "results" / name
    flip_a_bit(next(run.glob(f"checkpoints/{pattern}")))
    with contextlib.chdir(run.parents[1]):
        done = forge("validate", f"results/{name}", "--validate.depth=digests")
        assert done.code == 65, done.text


def test_flipped_bit_of_the_archive_is_noticed(past: Past, tmp_path: Path):
    commit = past.archive.name.partition(".")[0]
    for file in (past.archive, past.archive.with_name(f"{commit}.json")):
        shutil.copy(file, tmp_path)
    flip_a_bit(tmp_path / past.archive.name, at=100_000)
    with pytest.raises(ValueError, match="is not the archive whose digest"):
        Past.unpack(commit, tmp_path / "unpacked", fixtures=tmp_path)
