"""Proof of what another training program has trained: its statement, and its intervals retrained."""

import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from support.counting_program import (
    COUNT,
    GOAL,
    LAB,
    MARKS,
    TWO_RANKS,
    latest_step,
    make_counting_run,
)
from support.live_run import forge, wait_until

import forge as forge_package
from forge.attestation.verify import VerificationError, verify
from forge.checkpoint.manifest import Seal
from forge.checkpoint.sealed import ProgramCheckpoints
from forge.core.errors import Exit
from forge.core.files import digest_bytes, read_json
from forge.core.program_settings import Checkpoints

pytestmark = pytest.mark.all


@pytest.fixture(autouse=True)
def launches():
    """Really launched: ranks of a program are processes of their own."""


@pytest.fixture
def program(tmp_path):
    """Makes a run of the counting program: program(arguments, **keys of `program`)."""
    return partial(make_counting_run, tmp_path)


def test_export_of_a_program_has_a_statement_from_its_inputs_to_its_checkpoints(program, tmp_path):
    inputs = tmp_path / "in"
    inputs.mkdir()
    (inputs / "a.txt").write_text("text")
    run = program(inputs=[str(inputs)], export=["state.json"])
    assert run.forge("inputs", f"--data={tmp_path / 'data'}").code == 0
    done = run.forge("train", f"--data={tmp_path / 'data'}", *TWO_RANKS)
    assert done.code == 0, done.text
    done = forge("export", str(run.folder), f"--config={run.config}", f"--data={tmp_path / 'data'}")
    assert done.code == 0, done.text
    [folder] = run.paths.exports.iterdir()
    links = verify(folder)
    assert [file["blake3"] for file in links["texts"]["files"][""]] == [digest_bytes(b"text")]
    assert links["program"]["command"][1] == f".../{COUNT.name}"
    assert links["config"]["without_folders"]["program"]["goal"] == GOAL
    assert [one["step"] for one in links["checkpoints"]["saved"]][-1] == GOAL
    (folder / "state.json").write_text("{}")
    with pytest.raises(VerificationError, match="has SHA-256"):
        verify(folder)


# --- forge reproduce --trust-program ----------------------------------------------------------------


@pytest.fixture
def exported(program, tmp_path, monkeypatch):
    """A run with checkpoints 5, 10, 15 and 20, and its export: (run, directory)."""
    monkeypatch.chdir(tmp_path)
    run = program(source=str(COUNT.parent))
    done = run.forge("train", *TWO_RANKS)
    assert done.code == 0, done.text
    done = forge("export", str(run.folder), f"--config={run.config}", "--to=model")
    assert done.code == 0, done.text
    return run, tmp_path / "model"


def reproduced(run, *more):
    trust = ("--trust-program", f"--config={run.config}")
    return forge("reproduce", "model", f"--checkpoints={run.folder}", *trust, *more)


def certificate():
    return read_json(Path("model.certificate.json"))["predicate"]


@pytest.mark.weekly
def test_program_that_is_trusted_trains_intervals_again_up_to_their_ends(exported):
    run, _ = exported
    done = reproduced(run, "--intervals=4")
    assert done.code == 0, done.text
    made = certificate()
    ends = [(one["first"], one["last"], one["outcome"]) for one in made["intervals"]]
    assert ends == [(first, first + 5, "bitwise") for first in (0, 5, 10, 15)]
    assert (made["result"], made["export"], made["steps_checked"]) == ("reproduced", "same", GOAL)
    assert forge("verify", "model", "--certificate=model.certificate.json").code == 0


def test_program_of_a_statement_is_not_run_where_the_users_own_is_another(exported, tmp_path):
    run, _ = exported
    values = yaml.safe_load(run.config.read_text())
    values["program"]["command"] = ["touch", str(tmp_path / "was-run")]
    run.config.write_text(yaml.safe_dump(values))
    done = reproduced(run)
    assert done.code == Exit.CONFIG, done.text
    assert "program.command of the statement is" in done.text
    assert not (tmp_path / "was-run").exists()


def test_program_whose_files_were_edited_is_not_run(exported, tmp_path):
    run, _ = exported
    source = shutil.copytree(COUNT.parent, tmp_path / "edited")
    (source / "count.py").write_text("raise SystemExit(1)")
    values = yaml.safe_load(run.config.read_text())
    values["program"]["source"] = str(source)
    run.config.write_text(yaml.safe_dump(values))
    done = reproduced(run)
    assert done.code == Exit.CONFIG, done.text
    assert "program.source of the statement is" in done.text


def test_checkout_whose_code_would_not_train_is_refused(exported, tmp_path):
    """Beside a `forge/` in the directory of the program, Python would take that one."""
    run, _ = exported
    (tmp_path / "forge").mkdir()
    (tmp_path / "forge/__init__.py").touch()
    checkout = Path(forge_package.__file__).parents[1]
    refused = reproduced(run, f"--code={checkout}")
    assert refused.code == 78 and f"--code={checkout} has no effect here" in refused.text
    assert not Path("model.certificate.json").exists()


def test_program_is_not_run_without_a_config_of_the_user_or_his_word(exported):
    run, _ = exported
    named = ("reproduce", "model", f"--checkpoints={run.folder}")
    done = forge(*named, "--trust-program")
    assert done.code == Exit.CONFIG, done.text
    assert "your own config, which has none for the run p" in done.text
    done = forge(*named, f"--config={run.config}")
    assert done.code == Exit.DATA, done.text
    assert "nothing was run: --trust-program" in done.text
    assert not Path("model.certificate.json").exists()


def test_program_that_saves_other_files_is_no_proof_of_anything(exported):
    """What count.py saves has no tensors: only equal files say something."""
    run, _ = exported
    changed = run.paths.checkpoints / "checkpoint-10"
    (changed / "part-1.json").write_text('{"step": 10, "rank": 1, "at": "another time"}')
    saved = ProgramCheckpoints(run.paths, Checkpoints(complete=MARKS))
    assert saved.seal(changed, 10, Seal.read(saved.seal_of(changed)).lineage)
    shutil.rmtree("model")
    assert forge("export", str(run.folder), f"--config={run.config}", "--to=model").code == 0
    done = reproduced(run, "--intervals=4")
    assert done.code == Exit.DATA, done.text
    assert certificate()["result"] == "incomplete"
    [one] = [one for one in certificate()["intervals"] if one["last"] == 10]
    assert one["outcome"] == "unchecked"
    assert "whose tensors are not read: part-1.json" in one["why"][0]


@pytest.fixture
def stopped(program, tmp_path, monkeypatch):
    """A run of 60 steps that was stopped behind its checkpoint at 20, and the step at which. One rank: of
    several, each stops where the signal finds it, at different steps."""
    monkeypatch.chdir(tmp_path)
    run = program("--save-every", 20, "--sleep", 0.1, goal=60)
    started = run.start("train")
    wait_until(run.paths.latest.is_symlink, "a sealed checkpoint")
    started.process.send_signal(signal.SIGTERM)
    assert started.end().code == Exit.STOPPED
    stopped_at = latest_step(run)
    assert 20 < stopped_at < 60 and stopped_at % 20
    return run, stopped_at


@pytest.mark.weekly
def test_step_at_which_a_program_was_stopped_ends_no_interval(stopped):
    run, stopped_at = stopped
    assert run.forge("train").code == 0
    assert forge("export", str(run.folder), f"--config={run.config}", "--to=model").code == 0
    done = reproduced(run, "--intervals=9")
    assert done.code == 0, done.text
    assert stopped_at not in [one["last"] for one in certificate()["intervals"]]
    assert certificate()["steps_checked"] == 60


def test_program_with_no_checkpoint_but_that_of_a_stop_is_refused_with_that_reason(stopped):
    run, stopped_at = stopped
    for step in (20, 40):
        shutil.rmtree(run.paths.checkpoints / f"checkpoint-{step}", ignore_errors=True)
    assert forge("export", str(run.folder), f"--config={run.config}", "--to=model").code == 0
    done = reproduced(run)
    assert done.code == Exit.DATA, done.text
    assert f"steps at which launches ended, such as {stopped_at}" in done.text


@pytest.mark.weekly
def test_plain_ddp_script_goes_on_bitwise_from_its_checkpoints(program, tmp_path, monkeypatch):
    """In the middle of an epoch of 64 batches, too."""
    monkeypatch.chdir(tmp_path)
    run = program(
        command=[sys.executable, "train.py", "--steps", "{goal}", "--save-every", "40"],
        source=str(LAB),
        goal=120,
        checkpoints={"pattern": "checkpoint-{step}.pt"},
    )
    done = run.forge("train", *TWO_RANKS)
    assert done.code == 0, done.text
    assert forge("export", str(run.folder), f"--config={run.config}", "--to=model").code == 0
    done = reproduced(run)
    assert done.code == 0, done.text
    assert [one["outcome"] for one in certificate()["intervals"]] == ["bitwise"] * 3


def test_program_whose_input_files_are_others_is_not_run(program, tmp_path, monkeypatch):
    """First without their list, then with one of another content."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "in.txt"
    text.write_text("text")
    run = program(inputs=[str(text)])
    assert run.forge("inputs").code == 0
    assert run.forge("train", *TWO_RANKS).code == 0
    assert forge("export", str(run.folder), f"--config={run.config}", "--to=model").code == 0
    shutil.rmtree("data/inputs")
    done = reproduced(run)
    assert done.code == Exit.CONFIG, done.text
    assert "has no list of the program's input files" in done.text
    text.write_text("tuxt")
    assert run.forge("inputs").code == 0
    done = reproduced(run)
    assert done.code == Exit.DATA, done.text
    assert "its program read input files of digest" in done.text
    assert not Path("model.certificate.json").exists()


@pytest.mark.weekly
def test_step_that_another_command_has_saved_is_unchecked(exported):
    """Its seal says another command, as where the config was changed between two launches."""
    run, _ = exported
    saved = ProgramCheckpoints(run.paths, Checkpoints(complete=MARKS))
    at_10 = run.paths.checkpoints / "checkpoint-10"
    seal = Seal.read(saved.seal_of(at_10))
    lineage = seal.lineage.model_copy(update={"command": ["python", "other.py"]})
    seal.model_copy(update={"lineage": lineage}).write(saved.seal_of(at_10))
    done = reproduced(run, "--intervals=4")
    assert done.code == Exit.DATA, done.text
    [one] = [one for one in certificate()["intervals"] if one["outcome"] == "unchecked"]
    assert (one["last"], "was saved by another command" in one["why"][0]) == (10, True)
