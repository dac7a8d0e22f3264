"""Threat: a directory of results from somebody else. What its files name is executed, contacted, opened
or written to when a command is given that directory, or the config.json in it."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.manifests import IDS, MADE_BY, manifest_of
from support.processes import Outcome
from support.recorded_run import RecordedRun

from forge import cli
from forge.checkpoint.sealed import ProgramCheckpoints
from forge.core.config import Config, ResolvedConfig, checked
from forge.core.files import write_json
from forge.core.paths import RunPaths
from forge.core.records import Validation
from forge.data.content_ids import resolve

PROGRAM = {"command": ["train"], "goal": 5, "checkpoints": {}}
FORMS = ["results/theirs", "results/theirs/config.json"]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one run, `ours`, of a program with a check of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text(yaml.safe_dump({"program": checking("ours")}))
    (tmp_path / "config/runs.tsv").write_text("run\nours\n")
    return tmp_path


def checking(name: str) -> dict[str, Any]:
    """A program whose check leaves a file."""
    return {**PROGRAM, "validate": ["touch", str(Path(f"ran-{name}").absolute())]}


def sealed_run(name: str, **values: Any) -> RunPaths:
    """A run of the program with a sealed checkpoint of step 5."""
    config = checked(Config, {"run": name, **values}, "the test")
    paths = RunPaths(Path("results") / name)
    write_json(paths.config, resolve(config).training_json())
    checkpoint = paths.checkpoints / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_text("weights")
    assert config.program and config.program.checkpoints
    ProgramCheckpoints(paths, config.program.checkpoints, 1).seal(checkpoint, 5, MADE_BY)
    return paths


def forge(capsys: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    capsys.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    return Outcome(code, capsys.readouterr().err)


def check_names(paths: RunPaths) -> list[str]:
    return [check.name for check in Validation.read(paths.validation).checks]


# --- validate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", FORMS)
def test_check_of_a_run_that_is_not_the_projects_is_not_run_and_forges_own_are(
    project: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    paths = sealed_run("theirs", program=checking("theirs"))
    done = forge(capsys, "validate", named)
    assert done.code == 0 and not (project / "ran-theirs").exists()
    assert check_names(paths) == ["digests"]
    [note] = [line for line in done.text.splitlines() if line.startswith("note: ")]
    assert "not used of results/theirs: program.validate ['touch'," in note
    assert "it is not a run of config/runs.tsv" in note and "--config FILE" in note


@pytest.mark.parametrize("named", FORMS)
def test_check_of_the_config_that_is_named_is_run(
    project: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    paths = sealed_run("theirs", program=checking("theirs"))
    done = forge(capsys, "validate", named, "--config=config/config.yaml")
    assert done.code == 0 and (project / "ran-ours").exists()
    assert not (project / "ran-theirs").exists()
    assert check_names(paths) == ["digests", "program"] and "note: " not in done.text


@pytest.mark.parametrize("named", ["results/ours", "results/ours/config.json"])
def test_check_of_the_sample_sheet_is_run_where_the_run_has_its_config(
    project: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    sealed_run("ours", program=checking("ours"))
    assert forge(capsys, "validate", named).code == 0
    assert (project / "ran-ours").exists()


def test_neither_check_is_run_where_a_run_of_that_name_has_another_config(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed_run("ours", program=checking("planted"))
    done = forge(capsys, "validate", "results/ours")
    assert done.code == 0 and not list(project.glob("ran-*"))
    assert "config/runs.tsv has another program.validate for it" in done.text


def test_a_directory_elsewhere_with_the_name_of_a_run_is_not_that_run(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed_run("ours", program=checking("ours"))
    shutil.move("results", "elsewhere")
    assert forge(capsys, "validate", "elsewhere/ours").code == 0
    assert not (project / "ran-ours").exists()


def test_config_in_the_directory_of_a_checkpoint_is_not_read(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RecordedRun(project / "gift")
    run.save(12)
    checkpoint = run.paths.checkpoints / "step-00000012"
    program = {"command": ["true"], "validate": checking("theirs")["validate"]}
    write_json(checkpoint / "config.json", {"program": program})
    for command in ("validate", "export"):
        assert forge(capsys, command, checkpoint).code == 65
        assert forge(capsys, command, shutil.copytree(checkpoint, project / command)).code in (
            65,
            78,
        )
    assert not (project / "ran-theirs").exists()


def test_results_are_written_where_the_user_has_named_and_not_where_the_config_says(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = sealed_run("theirs", program=PROGRAM)
    values = json.loads(paths.config.read_text())
    write_json(paths.config, {**values, "run": "victim", "results": str(project / "home")})
    assert forge(capsys, "validate", paths.config).code == 0
    assert paths.validation.exists()
    assert not (project / "home").exists()


@pytest.mark.parametrize(
    ("link", "arguments"),
    [
        ("events.jsonl", ["validate", "results/theirs"]),
        ("export", ["export", "results/theirs"]),
        ("evaluations", ["evaluate", "results/theirs", "--evaluate.tasks=[words]"]),
        ("tensorboard", ["sync", "results/theirs", "--config=mine.yaml"]),
        ("export", ["export", "results/theirs", "--config=mine.yaml"]),
    ],
)
def test_links_lead_no_file_out_of_a_run_that_is_not_the_projects(
    project: Path, capsys: pytest.CaptureFixture[str], link: str, arguments: list[str]
) -> None:
    paths = sealed_run("theirs", program=PROGRAM)
    target = project / "home"
    Path("mine.yaml").write_text("tracking: {tensorboard: true}")
    target.touch() if link == "events.jsonl" else target.mkdir()
    (paths.root / link).symlink_to(target)
    done = forge(capsys, *arguments)
    assert done.code == 65 and f"{link} is a link to '{target}'" in done.text
    assert target.stat().st_size == 0 if target.is_file() else not any(target.iterdir())


@pytest.mark.parametrize("option", [[], ["--config=config/config.yaml"]])
def test_tokenizer_is_that_of_the_project(
    project: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    run = RecordedRun(project / "results/theirs")
    run.save(12)
    config = ResolvedConfig(ids=IDS, data=str(project / "home"))
    manifest_of(12, config).write(run.paths.checkpoints / "step-00000012")
    write_json(run.paths.config, config.training_json())
    done = forge(capsys, "export", run.root, *option)
    assert done.code == 65 and f"is not in data/tokenizers/{IDS.tokenizer}" in done.text
    done = forge(capsys, "validate", run.paths.config, "--validate.depth=digests")
    assert done.code == 0 and f"not used of {run.root}: data '{project}/home'" in done.text


# --- evaluate and sync ------------------------------------------------------------------------------


def plant(paths: RunPaths, name: str, **values: Any) -> None:
    write_json(paths.root / name / "settings.json", {"format": 1, **values})


@pytest.mark.parametrize("named", [*FORMS, "results/theirs/checkpoints/step-00000012"])
def test_tasks_beside_the_results_are_not_imported(
    project: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    run = RecordedRun(project / "results/theirs")
    run.freeze_config()
    run.save(12)
    tasks = run.paths.evaluations / "tasks"
    tasks.mkdir(parents=True)
    (tasks / "evil.py").write_text(f"open({str(project / 'ran')!r}, 'w')\ndef f(doc): return ''\n")
    (tasks / "evil.yaml").write_text(
        "task: evil\ndataset_path: json\noutput_type: multiple_choice\ntest_split: train\n"
        'doc_to_text: !function evil.f\ndoc_to_choice: ["a", "b"]\ndoc_to_target: 0\n'
    )
    evaluate = {"tasks": ["evil"], "include_path": str(tasks)}
    plant(run.paths, "evaluations", evaluate=evaluate, sbatch=None)
    done = forge(capsys, "evaluate", named)
    assert not (project / "ran").exists()
    assert done.code == 78 and "no tasks to evaluate" in done.text
    assert "note: not used of " in done.text and ": evaluate; it is not a run of" in done.text


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str | None]]]:
    """The address of a server, and the credentials that it was sent."""
    seen: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_error(403)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


@pytest.mark.all  # the user's own address is asked by MLflow
def test_address_beside_the_results_gets_no_token(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    asked: tuple[str, list[str | None]],
) -> None:
    address, seen = asked
    paths = sealed_run("theirs", program=PROGRAM)
    plant(paths, "tracking", tracking={"mlflow": {"tracking_uri": address}})
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "the user's")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    done = forge(capsys, "sync", "theirs")
    assert seen == []
    assert done.code == 78 and "theirs has no trackers" in done.text
    assert "not used of results/theirs: tracking; it is not a run of config/runs.tsv" in done.text
    Path("mine.yaml").write_text(f"tracking: {{mlflow: {{tracking_uri: '{address}'}}}}")
    forge(capsys, "sync", "theirs", "--config=mine.yaml")
    assert seen[:1] == ["Bearer the user's"]
