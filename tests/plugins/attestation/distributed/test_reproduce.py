"""A run that was trained otherwise than its statement says must be found, and a true one certified."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import forked
from support.forked import RankStart
from support.live_run import TWO_RANKS, Run, forge
from support.processes import Outcome
from support.statements import make_consistent

import forge as forge_package
from forge import __version__ as forge_version
from forge.attestation import verify
from forge.checkpoint.directory import Checkpoint
from forge.core import events
from forge.core.files import canonical, digest_bytes, digest_file, read_json, write_json
from forge.core.paths import RunPaths
from forge.core.process import hostname
from forge.hosts.lock import lock
from forge.plugins.attestation import retrain
from forge.plugins.attestation.certificate import Reproduction, envelope_path
from forge.plugins.attestation.places import CERTIFICATES, REPRODUCED, certificate_at, result_at
from forge.plugins.attestation.recipe_of_trainer import TrainerRecipe
from forge.plugins.attestation.records import Certified, Reproduced

pytestmark = pytest.mark.all

EVERY = ("--train.checkpoint_every=4", "--train.keep_last=9")  # 4, 8 and 12


def in_a_fork(command: list[str], _place: Path, _env: object, log: Path, _minutes: float) -> int:
    """In the place of a Python of its own, which needs seconds for its start."""
    return forked.start(command[3:], log).end().code


@pytest.fixture
def launched() -> None:
    """A test that takes it starts every command in a Python of its own."""


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "launched" not in request.fixturenames:
        monkeypatch.setattr(retrain, "_end_of", in_a_fork)


@pytest.fixture
def project(tiny_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory: a project that has the tokens of the runs, and no results."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text(f"data: {tiny_project / 'data'}\n")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        yield tmp_path


@pytest.fixture(scope="session")
def honest(session_runs: Callable[..., Run]) -> Run:
    run = session_runs("honest", *EVERY)
    outcome = run.fork("train", *TWO_RANKS).end()
    assert outcome.code == 0, outcome.text
    return run


@pytest.fixture(scope="session")
def exported(honest: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_of(honest, tmp_path_factory.mktemp("honest") / "model")


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    """A copy of the honest export, to be changed."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


def export_of(run: Run, to: Path) -> Path:
    outcome = forge("export", str(run.folder), f"--to={to}", "--full", run.data)
    assert outcome.code == 0, outcome.text
    return to


def reproduce(folder: Path, *more: str) -> Outcome:
    return forge("reproduce", str(folder), "--to=certificate.json", *more)


def certificate() -> Reproduction:
    content = read_json(Path("certificate.json"))
    assert isinstance(content, dict)
    return Reproduction.model_validate(content["predicate"])


def outcomes() -> list[tuple[int, int, str]]:
    return [(one.first, one.last, one.outcome) for one in certificate().intervals]


def restate(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change links of the statement, and make all digests right again, as their author can."""
    content = read_json(folder / verify.STATEMENT)
    links = {link["link"]: link for link in content["predicate"]["chain"]}
    change(links)
    links["config"]["blake3"] = digest_bytes(canonical(links["config"]["values"]))
    facts = read_json(folder / "forge.json")
    write_json(folder / "forge.json", {**facts, "config_digest": links["config"]["blake3"]})
    names = [name for name in verify.files_in(folder) if name not in verify.OURS]
    content["subject"] = [
        {"name": name, "digest": {"sha256": verify.file_digest(folder / name)[0]}} for name in names
    ]
    make_consistent(content)
    write_json(folder / verify.STATEMENT, content)


# --- a true statement -------------------------------------------------------------------------------


def test_drawn_intervals_of_an_honest_run_are_bitwise_equal(project, honest, exported, capsys):
    done = reproduce(exported, f"--checkpoints={honest.folder}", "--intervals=2", "--seed=3")
    assert done.code == 0, done.text
    made = certificate()
    assert [outcome for *_, outcome in outcomes()] == ["bitwise", "bitwise"]
    assert (made.seed, made.steps, made.steps_coverable, made.steps_checked) == (3, 12, 12, 8)
    assert (made.parts, made.parts_coverable, made.export) == (3, 3, "same")
    said = capsys.readouterr().out
    assert "\n2 of 3 parts of the run, in 2 intervals drawn by seed 3\n" in said
    first = certificate()
    assert (
        reproduce(exported, f"--checkpoints={honest.folder}", "--intervals=2", "--seed=3").code == 0
    )
    assert certificate() == first


def test_checkpoints_are_found_in_the_results_of_the_project(project, honest, exported):
    config = f"results: {honest.folder.parent}\n" + Path("config/config.yaml").read_text()
    Path("config/config.yaml").write_text(config)
    done = reproduce(exported, "--intervals=1")
    assert done.code == 0, done.text
    assert certificate().parts_coverable == 3


def test_run_that_is_named_gives_its_last_export_its_checkpoints_and_a_record(
    project, honest, capsys
):
    run = honest.copy(project / "results/honest")
    assert forge("export", str(run.folder), run.data).code == 0
    done = forge("reproduce", "results/honest", "--intervals=1", "--log=reproduce.log")
    assert done.code == 0, done.text
    said = capsys.readouterr().out
    assert "reproduced: 4 of 12 steps retrained" in said
    log = Path("reproduce.log").read_text()
    assert all(line in log for line in said.splitlines())
    record = Reproduced.read(run.folder / REPRODUCED)
    assert (record.step, record.steps, record.steps_checked) == (12, 12, 4)
    assert record.file == "export/step-00000012.certificate.json"
    named = ("verify", "results/honest/export/step-00000012")
    done = forge(*named, f"--certificate={run.folder / record.file}")
    assert done.code == 0, done.text

    refused = forge("reproduce", "results/honest", f"--digest={'0' * 64}")
    assert refused.code == 65
    assert Reproduced.read(run.folder / REPRODUCED) == record, "nothing was retrained"

    shutil.rmtree(run.paths.checkpoints)
    assert forge("reproduce", "results/honest").code == 65
    assert not (run.folder / REPRODUCED).exists()


@pytest.mark.parametrize(
    ("nodes", "machine"), [([hostname()], "the same"), (["other"], "another"), ([], "unknown")]
)
def test_certificate_says_whether_the_machine_has_trained_the_run(
    project, honest, exported, nodes, machine
):
    run = honest.copy(project / "elsewhere")
    launches = [
        event for event in events.read(run.paths.events) if isinstance(event, events.Launch)
    ]
    run.paths.events.unlink()
    events.record(run.paths.events, launches[0].model_copy(update={"nodes": nodes}))
    done = reproduce(exported, f"--checkpoints={run.folder}", "--intervals=1")
    assert done.code == 0, done.text
    assert certificate().by.machine == machine


def test_whole_run_is_made_from_texts_alone_by_launched_ranks(
    launched, project, exported, tiny_project, capsys
):
    Path("config/config.yaml").unlink()
    done = reproduce(exported, "--whole", f"--data={tiny_project / 'corpus'}")
    assert done.code == 0, done.text
    made = certificate()
    assert outcomes() == [(0, 12, "bitwise")]
    assert (made.texts, made.export, made.seed) == ("made again", "same", None)
    assert "\n3 of 3 parts of the run, all steps\n" in capsys.readouterr().out


def test_statement_without_full_paths_is_reproduced_but_not_from_texts(
    project, honest, tiny_project
):
    assert forge("export", str(honest.folder), "--to=short", honest.data).code == 0
    done = reproduce(Path("short"), f"--checkpoints={honest.folder}", "--whole")
    assert done.code == 0, done.text
    assert outcomes() == [(0, 12, "bitwise")]
    done = reproduce(Path("short"), "--whole", f"--data={tiny_project / 'corpus'}")
    assert done.code == 65
    assert "the statement of `forge export --full`" in done.text


def test_certificate_is_a_signed_statement_about_the_statement(project, honest, exported):
    assert forge("key", "keys/own").code == 0
    done = reproduce(exported, f"--checkpoints={honest.folder}", "--intervals=1", "--sign=keys/own")
    assert done.code == 0, done.text
    path = Path("certificate.json")
    [subject] = read_json(path)["subject"]
    digest = verify.file_digest(exported / verify.STATEMENT)[0]
    assert subject == {"name": verify.STATEMENT, "digest": {"sha256": digest}}
    assert read_json(path)["predicate"]["sha256"] == verify.statement_digest(read_json(path))
    envelope = read_json(envelope_path(path))
    shutil.copy(envelope_path(path), verify.ENVELOPE)
    read = verify.read_envelope(Path())
    assert read and read.payload == path.read_bytes() and len(envelope["signatures"]) == 1
    verify.check_by_key(read, Path("keys/own.pub").read_bytes())


@pytest.fixture
def certified(project, honest, exported) -> Path:
    """A signed certificate of the honest run, by the key keys/own."""
    assert forge("key", "keys/own").code == 0 and forge("key", "keys/other").code == 0
    more = (f"--checkpoints={honest.folder}", "--intervals=1", "--seed=0", "--sign=keys/own")
    assert reproduce(exported, *more).code == 0
    return Path("certificate.json")


def test_certificate_is_verified_with_the_export(certified, exported, capsys):
    named = ("verify", str(exported), f"--certificate={certified}")
    assert forge(*named).code == 0
    said = "certificate: 4 of 12 steps retrained, 1 of 1 intervals bitwise equal; "
    assert f"note  {said}by whom: NOT verified" in capsys.readouterr().out
    assert forge(*named, "--certifier=keys/own.pub").code == 0
    assert f"ok    {said}signed by" in capsys.readouterr().out
    done = forge(*named, "--certifier=keys/other.pub")
    assert done.code == 65
    assert "not by your key" in done.text


def test_certificate_that_was_edited_or_is_of_another_statement_is_refused(certified, model):
    named = ("verify", str(model), f"--certificate={certified}", "--certifier=keys/own.pub")
    content = read_json(certified)
    write_json(certified, {**content, "predicate": {**content["predicate"], "steps_checked": 12}})
    assert "certificate.json was edited" in forge(*named).text
    content["predicate"]["sha256"] = ""
    content["predicate"]["sha256"] = verify.statement_digest(content)
    write_json(certified, {**content, "subject": content["subject"] * 2})
    assert "was edited" in forge(*named).text
    write_json(certified, content)
    for name in verify.SIGNATURES:
        (model / name).unlink(missing_ok=True)
    restate(model, lambda links: links["validation"].update(loss=1.0))
    assert "certifies another statement" in forge(*named).text


def test_certificate_that_was_signed_before_it_was_changed_is_refused(certified, exported):
    content = read_json(certified)
    content["predicate"]["seed"] = 12
    content["predicate"]["sha256"] = verify.statement_digest(content)
    write_json(certified, content)
    named = ("verify", str(exported), f"--certificate={certified}")
    assert forge(*named).code == 0  # without a key nothing binds it to anybody
    done = forge(*named, "--certifier=keys/own.pub")
    assert done.code == 65
    assert "is not what was signed" in done.text


def test_code_of_a_checkout_trains_and_is_named(launched, project, honest, exported, capsys):
    then = shutil.copytree(Path(forge_package.__file__).parent, project / "then/forge")
    text = (then / "__init__.py").read_text()
    (then / "__init__.py").write_text(text.replace(forge_version, "0.0.7"))
    more = (f"--checkpoints={honest.folder}", "--intervals=1", "--code=then")
    done = reproduce(exported, *more)
    assert done.code == 0, done.text
    assert certificate().by.code.version == "0.0.7"
    assert f"note  version of Forge {forge_version} then, 0.0.7 here" in capsys.readouterr().out


def test_pruned_checkpoints_leave_longer_intervals_and_no_gap(project, honest, exported, tmp_path):
    run = honest.copy(tmp_path / "pruned")
    shutil.rmtree(run.paths.checkpoints / "step-00000004")
    done = reproduce(exported, f"--checkpoints={run.folder}", "--intervals=9")
    assert done.code == 0, done.text
    assert outcomes() == [(0, 8, "bitwise"), (8, 12, "bitwise")]
    assert certificate().parts_coverable == 3


def test_steps_of_another_number_of_ranks_are_within_the_tolerance(project, runs, tmp_path, capsys):
    run = runs("shrunk", "--train.checkpoint_every=6", "--train.keep_last=1")
    assert run.fork("train", "--train.max_steps=6").end().code == 0
    assert run.fork("train", *TWO_RANKS).end().code == 0
    folder = export_of(run, tmp_path / "shrunk-model")
    done = reproduce(folder, f"--checkpoints={run.folder}")
    assert done.code == 0, done.text
    [one] = certificate().intervals
    assert (one.first, one.last) == (0, 12)
    assert one.outcome in (
        "bitwise",
        "within tolerance",
    )  # two ranks often add the same sums as one
    assert one.why == []
    assert certificate().differences == ["1 and 2 ranks then, 2 here"]
    assert "note  1 and 2 ranks then, 2 here" in capsys.readouterr().out


# --- planted faults ---------------------------------------------------------------------------------

AT = 5  # counted from 0: the sixth step, between the checkpoints at 4 and 8


def skip_a_batch(_start: RankStart) -> None:
    from forge.trainer.step import TrainStep

    read = TrainStep._read
    TrainStep._read = lambda self, step: read(self, step + 100 if step == AT else step)  # type: ignore[method-assign]


def raise_the_rate_once(_start: RankStart) -> None:
    from forge.trainer import optim

    rate = optim.learning_rate
    optim.learning_rate = lambda step, *rest: rate(step, *rest) * (1.1 if step == AT else 1.0)  # type: ignore[assignment]


def change_one_weight(_start: RankStart) -> None:
    import torch

    from forge.trainer import step as step_module

    call = step_module.TrainStep.__call__

    def changed(self: Any, step: int, *flags: Any) -> Any:
        launched = call(self, step, *flags)
        if step == AT:
            with torch.no_grad():
                next(self.parallel.decoder.parameters()).view(-1)[0] += 1e-3
        return launched

    step_module.TrainStep.__call__ = changed  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [skip_a_batch, raise_the_rate_once, change_one_weight])
def test_fault_in_one_step_is_found_in_its_interval(project, runs, tmp_path, fault, capsys):
    run = runs(fault.__name__, *EVERY)
    outcome = run.fork("train", *TWO_RANKS, arm=fault).end()
    assert outcome.code == 0, outcome.text
    folder = export_of(run, tmp_path / "model")
    verify.verify(folder)  # it proves nothing of the training
    done = reproduce(folder, f"--checkpoints={run.folder}", "--intervals=3")
    assert done.code == 65
    assert "is not reproduced: steps 5 to 8" in done.text
    assert outcomes() == [(0, 4, "bitwise"), (4, 8, "other"), (8, 12, "bitwise")]
    assert certificate().result == "not reproduced"
    assert "FAIL  steps 5 to 8: other weights, 0." in capsys.readouterr().out


def test_token_shard_that_texts_do_not_give_is_found(project, runs, tiny_project, tmp_path):
    """The author changed a shard before the training, and made its manifest fit."""
    data = shutil.copytree(tiny_project / "data", tmp_path / "changed")
    [manifest] = data.glob("tokens/*/manifest.json")
    content = read_json(manifest)
    shard = content["splits"]["train"][0]
    ids = np.fromfile(manifest.parent / shard["file"], "<u2")
    ids[3] = (ids[3] + 1) % 256
    ids.tofile(manifest.parent / shard["file"])
    shard["digest"] = digest_file(manifest.parent / shard["file"])
    write_json(manifest, content)
    run = runs("corrupted", *EVERY, f"--data={data}")
    assert run.fork("train").end().code == 0
    folder = export_of(run, tmp_path / "model")
    done = reproduce(folder, f"--checkpoints={run.folder}", f"--data={tiny_project / 'corpus'}")
    assert done.code == 65
    assert f"{shard['file']} has" in done.text
    assert not Path("certificate.json").exists()


def test_weights_of_an_export_that_are_not_the_checkpoints_are_found(project, honest, model):
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    restate(model, lambda links: None)
    verify.verify(model)
    done = reproduce(model, f"--checkpoints={honest.folder}", "--intervals=1")
    assert done.code == 65
    assert "the files of the export" in done.text
    assert certificate().export == "other"


def test_file_of_an_export_that_its_checkpoint_does_not_give_is_found(
    project, honest, model, capfd
):
    """Weights that are right do not make the rest right."""
    config = read_json(model / "config.json")
    write_json(model / "config.json", {**config, "auto_map": {"AutoModel": "evil.Evil"}})
    (model / "evil.py").write_text("import os\n")
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    restate(model, lambda links: None)
    verify.verify(model)
    done = reproduce(model, f"--checkpoints={honest.folder}", "--intervals=1")
    assert done.code == 65
    assert certificate().export == "other"
    assert "config.json, evil.py, pytorch_model.bin" in capfd.readouterr().out


def test_statement_that_is_swapped_after_it_was_verified_is_not_certified(
    project, honest, model, monkeypatch
):
    path, verified = model / verify.STATEMENT, verify.verify
    before = path.read_bytes()

    def verify_and_swap(*arguments: Any, **named: Any) -> verify.Links:
        links = verified(*arguments, **named)
        restate(model, lambda links: links["validation"].update(loss=1.0))
        return links

    monkeypatch.setattr(verify, "verify", verify_and_swap)
    assert reproduce(model, f"--checkpoints={honest.folder}", "--intervals=1").code == 0
    assert path.read_bytes() != before
    [subject] = read_json(Path("certificate.json"))["subject"]
    assert subject["digest"]["sha256"] == verify.sha256(before)


def test_config_of_the_statement_that_did_not_make_the_checkpoints_is_found(project, honest, model):
    restate(model, lambda links: links["config"]["values"]["train"].update(lr=1e-3))
    verify.verify(model)
    done = reproduce(model, f"--checkpoints={honest.folder}")
    assert done.code == 65
    assert "was not made by the config of the statement" in done.text
    assert "train.lr is 0.001" in done.text


# --- a checkpoint of a run, which may be training ---------------------------------------------------


def result_of(run: Run, step: int) -> Certified:
    return Certified.read(result_at(run.paths, step))


def test_steps_up_to_a_checkpoint_that_is_named_are_trained_again_while_the_run_is_locked(
    project, honest, capsys
):
    run = honest.copy(project / "results/honest")
    with lock(run.folder, "train"):
        done = forge("reproduce", "results/honest/checkpoints/step-00000008")
    assert done.code == 0, done.text
    said = capsys.readouterr().out
    assert "ok    steps 5 to 8: bitwise equal" in said
    assert "reproduced: 4 of 8 steps retrained (8 could be)" in said
    assert "\n1 of 2 parts of the run, the steps that were named\n" in said
    assert result_of(run, 8) == Certified(
        **{"first": 4, "last": 8, "result": "reproduced", "is_bitwise": True},
        **{"trained_on": [hostname()], "again_on": hostname()},
    )
    assert not run.paths.exports.exists() and not (run.folder / REPRODUCED).exists()

    made = read_json(certificate_at(run.paths, 8))["predicate"]
    assert (made["seed"], made["export"], "chance" in made) == (None, "same", False)
    model = export_of(run, project / "model")  # of the last step: another statement
    verified = ("verify", "model", "--certificate=results/honest/certificates/step-00000008.json")
    assert "certifies another statement" in forge(*verified).text
    shutil.rmtree(model)
    exported = forge("export", "results/honest/checkpoints/step-00000008", "--to=model")
    assert exported.code == 0, exported.text
    shutil.copy(run.folder / CERTIFICATES / "step-00000008.statement.json", "model/statement.json")
    done = forge(*verified)
    assert done.code == 0, done.text


def test_fault_before_a_checkpoint_that_is_named_is_recorded_and_ends_with_65(
    project, runs, monkeypatch, capsys
):
    run = runs("named-fault", *EVERY)
    outcome = run.fork("train", *TWO_RANKS, arm=change_one_weight).end()
    assert outcome.code == 0, outcome.text
    folder = run.paths.checkpoints / "step-00000008"
    done = forge("reproduce", str(folder))
    assert done.code == 65
    assert f"{folder} is not reproduced: steps 5 to 8" in done.text
    assert (result_of(run, 8).result, result_of(run, 8).first) == ("not reproduced", 4)
    assert forge("status", str(run.folder)).code == 0
    assert "NOT reproduced: steps 5 to 8" in " ".join(capsys.readouterr().out.split())
    with monkeypatch.context() as patch:  # a second try that does not end hides nothing
        patch.setattr(retrain, "_end_of", lambda *_: None)
        assert forge("reproduce", str(folder)).code == 69
    assert result_of(run, 8).result == "not reproduced"
    assert forge("reproduce", str(run.paths.latest)).code == 0  # steps 9 to 12 had no fault
    assert result_of(run, 12).result == "reproduced"


def test_steps_that_could_not_be_trained_again_are_recorded_as_unchecked(
    project, honest, monkeypatch
):
    run = honest.copy(project / "results/honest")
    monkeypatch.setattr(retrain, "_end_of", lambda *_: None)
    done = forge("reproduce", "results/honest/checkpoints/step-00000008", "--minutes=7")
    assert done.code == 69
    assert "steps 5 to 8 did not end within 7 minutes" in result_of(run, 8).why
    assert result_of(run, 8).result == "unchecked"
    assert not certificate_at(run.paths, 8).exists()


def test_checkpoint_that_is_pruned_while_it_is_read_is_unchecked_with_what_keeps_it(
    project, honest, monkeypatch
):
    run = honest.copy(project / "results/honest")
    copy = TrainerRecipe.copy

    def pruned(recipe: TrainerRecipe, checkpoint: Checkpoint, paths: RunPaths) -> None:
        shutil.rmtree(checkpoint.folder)
        copy(recipe, checkpoint, paths)

    monkeypatch.setattr(TrainerRecipe, "copy", pruned)
    done = forge("reproduce", "results/honest/checkpoints/step-00000008")
    assert done.code == 65
    assert "was removed while it was read" in done.text and "train.keep_every" in done.text
    assert result_of(run, 8).result == "unchecked"


def test_interrupted_reproduction_of_a_checkpoint_leaves_no_result_and_no_export(
    project, honest, monkeypatch
):
    (project / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(project / "scratch"))
    monkeypatch.setattr(retrain, "_end_of", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    run = honest.copy(project / "results/honest")
    assert forge("reproduce", "results/honest/checkpoints/step-00000008").code == 75
    assert not list((project / "scratch").iterdir())
    assert not list((run.folder / CERTIFICATES).glob("*.json"))


def test_checkpoint_that_is_gone_or_that_options_do_not_fit_is_refused_with_what_to_do(
    project, honest
):
    honest.copy(project / "results/honest")
    done = forge("reproduce", "results/honest/checkpoints/step-00000009")
    assert done.code == 78
    assert "has those of the steps 4, 8, 12" in done.text
    named = ("reproduce", "results/honest/checkpoints/step-00000008")
    done = forge(*named, "--whole", "--seed=0")
    assert done.code == 78
    assert "--seed, --whole: not for a checkpoint" in done.text
    done = forge(*named, "--minutes=0")
    assert done.code == 78
    (project / "results/honest/certificates").rmdir()
    (project / "results/honest/certificates").symlink_to(project / "data")
    done = forge(*named)
    assert done.code == 65
    assert "certificates is a link" in done.text


def test_first_checkpoint_of_a_run_that_began_with_another_cannot_be_trained_again(
    project, honest, runs
):
    parent = runs("parent", "--train.max_steps=4")
    assert parent.fork("train").end().code == 0
    child = runs("child", "--train.checkpoint_every=2", "--train.max_steps=8", "--parent=parent@4")
    assert child.fork("train").end().code == 0
    done = forge("reproduce", str(child.paths.checkpoints / "step-00000006"))
    assert done.code == 65
    assert "no checkpoint before it is there" in done.text
    assert result_of(child, 6).first is None
    assert forge("reproduce", str(child.paths.checkpoints / "step-00000008")).code == 0


# --- what a statement cannot make Forge do ----------------------------------------------------------


def test_folder_that_fails_its_verification_is_not_trained(project, honest, model):
    (model / "config.json").write_text("{}")
    done = reproduce(model, f"--checkpoints={honest.folder}")
    assert done.code == 65
    assert "'config.json' has SHA-256" in done.text
    assert "training" not in done.text


def test_program_of_a_statement_is_not_run(project, model, tmp_path):
    def exchange(links: dict[str, Any]) -> None:
        links["tokens"].clear()
        touch = ["touch", str(tmp_path / "was-run")]
        links["tokenizer"].clear()
        links["tokenizer"] |= {"link": "program", "command": touch, "source": None, "inputs": None}

    content = read_json(model / verify.STATEMENT)
    restate(model, exchange)
    content = read_json(model / verify.STATEMENT)
    content["predicate"]["chain"] = [
        link for link in content["predicate"]["chain"] if "link" in link
    ]
    write_json(model / verify.STATEMENT, content)
    restate(model, lambda links: None)
    done = reproduce(model)
    assert done.code == 65
    assert "another training program, and nothing was run" in done.text
    assert not (tmp_path / "was-run").exists()


def test_paths_and_addresses_of_a_config_reach_no_training(project, honest, model, monkeypatch):
    def name_places(links: dict[str, Any]) -> None:
        values = links["config"]["values"]
        values["tokenizer"] |= {"source": "path", "path": "/dev/zero"}
        values["tokenize"] |= {"inputs": ["/dev/zero", "hf://datasets/a/b@main/*"]}
        values["tracking"] = {"mlflow": {"uri": "http://192.0.2.1/"}}
        values["evaluate"] = {"tasks": ["x"], "include_path": "/tmp/tasks"}
        values["program"] = {"command": ["touch", "was-run"]}

    restate(model, name_places)
    trained: list[dict[str, Any]] = []

    def looked_at(command: list[str], place: Path, env: dict[str, str], *rest: Any) -> int:
        if command[3] == "train":
            trained.append(read_json(Path(command[4])))
            assert env["HF_HUB_OFFLINE"] == "1"
            assert not [name for name in env if name.startswith("SLURM")]
        return in_a_fork(command, place, env, *rest)

    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(retrain, "_end_of", looked_at)
    done = reproduce(model, f"--checkpoints={honest.folder}", "--intervals=1")
    assert done.code == 0, done.text
    [config] = trained
    said = json.dumps(config)
    assert not any(
        word in said for word in ("/dev/zero", "hf://", "192.0.2.1", "touch", "/tmp/tasks")
    )


def test_weights_that_a_config_alone_names_are_not_opened(project, model, tmp_path):
    """The statement says that the run began with new weights."""
    os.mkfifo(tmp_path / "config.json")  # to open it would wait forever
    init = {"path": str(tmp_path)}
    restate(model, lambda links: links["config"]["values"]["model"].update(init=init))
    done = reproduce(model, "--whole")
    assert done.code == 65
    assert "from pretrained weights, which are not retrained" in done.text


@pytest.mark.parametrize("folder", ["../../elsewhere", "/etc"])
def test_record_of_an_export_that_leads_out_of_the_run_is_refused(project, honest, folder):
    run = honest.copy(project / "theirs")
    write_json(run.paths.exported, {"format": 1, "step": 12, "folder": folder, "files": {}})
    done = forge("reproduce", "theirs")
    assert done.code == 65
    assert "exported.json cannot be read: folder" in done.text


@pytest.mark.parametrize("tokens", ["../../etc", "/etc", "x" * 5000])
def test_content_id_that_is_a_path_is_refused(project, honest, model, tokens):
    restate(model, lambda links: links["config"]["values"]["ids"].update(tokens=tokens))
    done = reproduce(model, f"--checkpoints={honest.folder}")
    assert done.code == 65
    assert "no content ids" in done.text


def test_model_that_no_machine_has_memory_for_is_refused_and_not_tried(project, model):
    def grow(links: dict[str, Any]) -> None:
        links["config"]["values"]["model"].update(dim=2**20, ffn_dim=2**22, heads=2**14, layers=96)

    restate(model, grow)
    done = reproduce(model, "--whole")
    assert done.code == 69
    assert "GiB are free" in done.text


def test_world_that_is_too_large_for_this_machine_is_refused(project, model):
    def grow(links: dict[str, Any]) -> None:
        for launch in links["launches"]["launches"]:
            launch["world_size"] = 10**6

    restate(model, grow)
    done = reproduce(model, "--whole")
    assert done.code == 69
    assert "1,000,000 ranks" in done.text


def test_steps_that_do_not_end_are_stopped(project, honest, model):
    def hurry(links: dict[str, Any]) -> None:
        for launch in links["launches"]["launches"]:
            launch["ended"] = launch["started"]

    restate(model, hurry)
    done = reproduce(model, f"--checkpoints={honest.folder}", "--minutes=0.0001")
    assert done.code == 69
    assert "did not end within 0.0001 minutes" in done.text
    assert not Path("certificate.json").exists()


# --- what could not be retrained ------------------------------------------------------------------


def at_the_second_training(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something in the place of it; if that returns, the training did not end in time."""
    commands: list[str] = []

    def end_of(command: list[str], *rest: Any) -> int | None:
        commands.append(command[3])
        if commands.count("train") != 2 or command[3] != "train":
            return in_a_fork(command, *rest)
        act()
        return None

    monkeypatch.setattr(retrain, "_end_of", end_of)


def test_interval_that_does_not_end_in_time_loses_no_other_and_is_no_success(
    project, honest, exported, monkeypatch, capsys
):
    at_the_second_training(monkeypatch, lambda: None)
    done = reproduce(exported, f"--checkpoints={honest.folder}", "--minutes=7")
    assert done.code == 69
    why = "steps 5 to 8 did not end within 7 minutes"
    assert f"1 of 3 intervals could not be retrained: {why}" in done.text
    assert outcomes() == [(0, 4, "bitwise"), (4, 8, "unchecked"), (8, 12, "bitwise")]
    made = certificate()
    assert (made.result, made.steps_checked, made.intervals[1].why) == ("incomplete", 8, [why])
    said = capsys.readouterr().out
    assert "\n2 of 3 parts of the run, in 2 intervals drawn by seed " in said
    assert f"note  steps 5 to 8: unchecked ({why})" in said
    verified = forge("verify", str(exported), "--certificate=certificate.json")
    assert verified.code == 65
    assert "certificate.json says 'incomplete'" in verified.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_reproduction_leaves_the_certificate_of_what_was_trained(
    project, honest, exported, monkeypatch, number
):
    (project / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(project / "scratch"))
    at_the_second_training(monkeypatch, lambda: os.kill(os.getpid(), number))
    assert forge("key", "keys/own").code == 0
    done = reproduce(exported, f"--checkpoints={honest.folder}", "--seed=5", "--sign=keys/own")
    assert done.code == 75
    assert "certificate.json has what was trained so far; --seed=5 draws the same" in done.text
    assert outcomes() == [(0, 4, "bitwise"), (4, 8, "unchecked"), (8, 12, "unchecked")]
    assert (certificate().result, certificate().steps_checked) == ("incomplete", 4)
    assert Path("certificate.dsse.json").is_file()
    assert list((project / "scratch").iterdir()) == []


def test_difference_outweighs_what_could_not_be_trained(project, honest, model, monkeypatch):
    at_the_second_training(monkeypatch, lambda: None)
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    restate(model, lambda links: None)
    done = reproduce(model, f"--checkpoints={honest.folder}", "--intervals=2")
    assert done.code == 65
    assert "is not reproduced: the files of the export" in done.text
    assert certificate().result == "not reproduced"


def test_interval_that_took_too_long_is_not_drawn_and_counts_as_unchecked(
    project, honest, model, capsys
):
    def say_how_long(links: dict[str, Any]) -> None:
        [launch] = links["launches"]["launches"]
        slow = launch | {"last_step": 8, "ended": launch["started"] + 16 * 3600}
        links["launches"]["launches"] = [slow, launch | {"resumed_from": 8}]

    restate(model, say_how_long)
    done = reproduce(model, f"--checkpoints={honest.folder}", "--minutes=5")
    assert done.code == 0, done.text
    assert outcomes() == [(8, 12, "bitwise")]
    made = certificate()
    assert (made.steps_coverable, made.parts_coverable) == (4, 1)
    said = capsys.readouterr().out
    assert "\n1 of 3 parts of the run, in 1 interval drawn by seed " in said
    assert "2 of 3 intervals are not drawn: they took 8 h and more in the run" in said
    done = reproduce(model, f"--checkpoints={honest.folder}", "--minutes=0.0001")
    assert done.code == 69
    assert "none of the 3 parts of the run can be retrained in 0.0001 minutes" in done.text
    assert "--minutes N" in done.text


# --- what a tired person types ----------------------------------------------------------------------


def test_missing_tokens_say_which_option_gives_the_texts(project, honest, exported):
    Path("config/config.yaml").unlink()
    done = reproduce(exported, f"--checkpoints={honest.folder}")
    assert done.code == 78
    assert "--data TEXTS" in done.text


def test_missing_checkpoints_say_what_helps(project, exported):
    done = reproduce(exported)
    assert done.code == 65
    assert "none of the 3 parts" in done.text
    assert "--checkpoints RUN" in done.text and "--whole" in done.text


def test_corrupt_checkpoint_is_named(project, honest, exported, tmp_path):
    run = honest.copy(tmp_path / "corrupt")
    [tensors] = (run.paths.checkpoints / "step-00000008").glob("__0_0.distcp")
    data = bytearray(tensors.read_bytes())
    data[100] ^= 1
    tensors.write_bytes(data)
    done = reproduce(exported, f"--checkpoints={run.folder}")
    assert done.code == 65
    assert "step-00000008 is corrupt: __0_0.distcp has digest" in done.text
    assert outcomes() == [(0, 4, "bitwise"), (4, 8, "unchecked"), (8, 12, "unchecked")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--intervals=0",), "--intervals is 0"),
        (("--minutes=0",), "--minutes is 0"),
        (("--minutes=nan",), "--minutes is nan"),
        (("--code=.",), "no checkout of Forge"),
        (("--checkpoints=nowhere",), "nowhere does not exist"),
        (("--to=MODEL/certificate.json",), "is in the directory that is certified"),
        (("--to=nowhere/certificate.json",), "cannot be written"),
        (("--to=config/config.yaml",), "is there, and is no certificate"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_trained(project, model, words, said):
    done = reproduce(model, *(word.replace("MODEL", str(model)) for word in words))
    assert done.code == 78
    assert said in done.text
    assert "fix" in done.text or "does not exist" in done.text or "minutes" in done.text


def test_directory_of_a_run_is_not_taken_for_an_export(project, honest):
    done = reproduce(honest.folder)
    assert done.code == 78
    assert f"forge export {honest.folder}" in done.text
    assert "name the directory that `forge export` has made" in done.text


def test_name_that_is_none_says_what_to_name(project):
    done = reproduce(Path("base"))
    assert done.code == 78
    assert "base does not exist" in done.text and "such as results/base" in done.text
