"""Threat: scores of another model, of other questions, or of half an evaluation. A real run, its real
export and the real harness, against log-likelihoods by Forge's own model."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support import live_run
from support.live_run import MARK, MARK_VALUE, Run, forge, wait_until

from forge.checkpoint import directory, storage
from forge.core.config import Config
from forge.core.errors import UnfitError
from forge.core.files import digest_file, read_json
from forge.core.paths import RunPaths, tokenizer_folder
from forge.core.process import Process
from forge.core.records import Evaluation, Lock, Score
from forge.data.tokenizer import load_tokenizer
from forge.hosts.lock import lock
from forge.plugins.evaluation import evaluate as evaluation
from forge.plugins.evaluation.records import Evaluations
from forge.plugins.evaluation.settings import Evaluate
from forge.reporting.run_rows import read_scores
from forge.slurm import slurm
from forge.trainer.models.decoder import Decoder, make_decoder

TASKS = Path(__file__).parent / "tasks"
pytestmark = pytest.mark.all
DOCUMENTS = [json.loads(line) for line in (TASKS / "words.jsonl").read_text().splitlines()]
EVERY = ("--train.keep_every=6", "--evaluate.every=6")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """The tasks, with the path of their data."""
    folder = tmp_path_factory.mktemp("tasks")
    shutil.copytree(TASKS, folder, dirs_exist_ok=True)
    for path in folder.glob("*.yaml"):
        path.write_text(path.read_text().replace("DATA", str(folder / "words.jsonl")))
    return folder


def options(tasks: Path, task: str = "words") -> tuple[str, ...]:
    return (f"--evaluate.tasks=[{task}]", f"--evaluate.include_path={tasks}", *EVERY)


@pytest.fixture(scope="module")
def own(solo, tmp_path_factory) -> Run:
    """A copy of the run, with checkpoints at 6 and 12."""
    return solo.copy(tmp_path_factory.mktemp("evaluated") / "solo")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> dict[str, str]:
    """An empty cache of Hugging Face."""
    return {"HF_HOME": str(tmp_path_factory.mktemp("hub")), MARK: MARK_VALUE}


@pytest.fixture(scope="module")
def evaluated(own, tasks, home) -> Run:
    """Evaluated after an evaluation that was killed when the model had answered."""
    killed = own.start("evaluate", *options(tasks, "held"), **home)
    with mock.patch.object(live_run, "PATIENCE_SEC", 400):
        wait_until(
            lambda: (tasks / "reached").exists() or killed.process.poll() is not None,
            "the model answers",
        )
    killed.process.kill()
    killed.process.wait()
    assert (tasks / "reached").exists(), killed.output.read_text()
    assert not own.paths.evaluation.exists()
    assert not list(own.paths.evaluations.glob("step-*"))
    done = own.start("evaluate", *options(tasks), **home).end(400)
    assert done.code == 0, done.text
    assert not list(own.paths.evaluations.glob(".export-step-*")), "an export was left"
    return own


def model_at(run: Run, step: int) -> Decoder:
    folder = run.paths.checkpoints / f"step-{step:08}"
    index = storage.SafeReader(folder).read_metadata()
    state = {
        name: torch.empty(entry.size)
        for name, entry in index.state_dict_metadata.items()
        if name.startswith("model.")
    }
    storage.read_tensors(state, folder, no_dist=True)
    config = config_at(run, step)
    size = load_tokenizer(tokenizer_folder(config.data, config.ids.tokenizer)).vocab_size
    model = make_decoder(config.model, size).to_empty(device="cpu")
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    return model.eval()


def config_at(run: Run, step: int) -> Config:
    found = directory.Checkpoint.open(run.paths.checkpoints / f"step-{step:08}")
    return Config.model_validate(found.manifest.lineage.config.to_json())


def log_likelihoods(model: Decoder, config: Config, text: str, choices: list[str]) -> list[float]:
    """Of each choice behind a blank, as the harness asks; the beginning of a long text is lost."""
    tokenizer = load_tokenizer(tokenizer_folder(config.data, config.ids.tokenizer))
    found = []
    for choice in choices:
        whole = tokenizer.tokenizer.encode(f"{text} {choice}").ids
        given = len(tokenizer.tokenizer.encode(text).ids)
        if not text:  # nothing is given: the token between documents is
            whole = [tokenizer.eos_id, *tokenizer.tokenizer.encode(f" {choice}").ids]
            given = 1
        num_asked = len(whole) - given
        whole = whole[-(config.train.seq_len + 1) :]
        with torch.no_grad():
            logs = model(torch.tensor([whole[:-1]])).log_softmax(-1)[0]
        asked = torch.tensor(whole[-num_asked:])
        found.append(logs[-num_asked:].gather(1, asked[:, None]).sum().item())
    return found


def accuracies(run: Run, step: int) -> dict[str, float]:
    """acc: the choice with the highest log-likelihood is right; acc_norm: per letter."""
    right = {"acc": 0, "acc_norm": 0}
    model, config = model_at(run, step), config_at(run, step)
    for document in DOCUMENTS:
        choices = document["choices"]
        sums = log_likelihoods(model, config, document["text"], choices)
        lengths = map(len, choices)
        for metric, values in (
            ("acc", sums),
            ("acc_norm", [value / length for value, length in zip(sums, lengths, strict=True)]),
        ):
            best, second, *_ = sorted(values, reverse=True)
            assert best - second > 1e-3, "too close to compare sums in another order"
            right[metric] += values.index(best) == document["answer"]
    return {metric: number / len(DOCUMENTS) for metric, number in right.items()}


@pytest.mark.parametrize("step", [6, 12])
def test_scores_are_those_of_forges_own_model(evaluated, step):
    found = Evaluation.read(evaluated.paths.evaluations / f"step-{step:08}.json")
    scores = {score.metric: score for score in found.scores}
    assert {name: score.value for name, score in scores.items()} == accuracies(evaluated, step)
    assert 0 < scores["acc"].value < 1, "such a score tells nothing"
    for score in scores.values():
        assert (score.task, score.version, score.num_fewshot) == ("words", "3", 0)
        assert score.num_documents == len(DOCUMENTS) and score.stderr and score.data_digest


def test_record_has_all_steps_each_with_the_digest_of_its_checkpoint(evaluated):
    record = Evaluations.read(evaluated.paths.evaluation)
    assert record.step == 12
    for found, step in zip(record.evaluations, (6, 12), strict=True):
        manifest = evaluated.paths.checkpoints / f"step-{step:08}/checkpoint.json"
        assert (found.step, found.of.checkpoint_digest) == (step, digest_file(manifest))
        assert (found.precision, found.device) == ("fp32", "cpu")


def test_same_command_has_nothing_to_do(evaluated, tasks):
    before = evaluated.paths.evaluation.read_bytes()
    done = evaluated.forge("evaluate", *options(tasks), "--evaluate.batch_size=2")
    assert done.code == 0
    assert done.text.count("nothing to do") == 2
    assert json.loads(before)["evaluations"] == read_json(evaluated.paths.evaluation)["evaluations"]


@pytest.fixture
def scored(monkeypatch) -> list[Path]:
    """Exports that were scored, by a stand-in for the harness."""
    seen: list[Path] = []

    def score(exported, evaluate, index, precision, seq_len):
        assert (exported / "model.safetensors").exists()
        seen.append(exported)
        return [Score(task="words", metric="acc", value=0.5, num_documents=8)], {}, "cpu"

    monkeypatch.setattr(evaluation.harness, "score", score)
    monkeypatch.setattr(evaluation.tasks, "find_tasks", lambda evaluate: None)
    monkeypatch.setattr(evaluation.tasks, "load", lambda *arguments: {})
    return seen


def evaluate(run: Run, folder: Path, **changed: object) -> None:
    settings = Evaluate(tasks=["words"], include_path=str(folder)).model_copy(update=changed)
    evaluation.evaluate_run(run.paths, settings, config_at(run, 12).data)


@pytest.mark.parametrize("changed", [{"limit": 3}, {"num_fewshot": 1}, {"tasks": ["held"]}])
def test_changed_settings_are_scored_again_once(solo, tasks, tmp_path, scored, changed):
    run = solo.copy(tmp_path / "solo")
    evaluate(run, tasks)
    evaluate(run, tasks, batch_size=2)
    assert len(scored) == 1
    evaluate(run, tasks, **changed)
    evaluate(run, tasks, **changed)
    assert len(scored) == 2


@pytest.mark.usefixtures("scored")
def test_scores_that_are_replaced_are_told_with_the_settings_that_differ(
    solo, tasks, tmp_path, capsys
):
    run = solo.copy(tmp_path / "solo")
    evaluate(run, tasks, limit=4)
    assert "replaces" not in capsys.readouterr().err
    evaluate(run, tasks, limit=3)
    assert "step 12: replaces the scores of before (limit 4, now 3)" in capsys.readouterr().err


def test_changed_files_of_tasks_and_corrupt_records_are_scored_again(solo, tasks, tmp_path, scored):
    run = solo.copy(tmp_path / "solo")
    shutil.copytree(tasks, tmp_path / "tasks")
    evaluate(run, tmp_path / "tasks")
    with open(tmp_path / "tasks/words.jsonl", "a") as file:
        file.write('{"text": "a", "choices": ["b", "c"], "answer": 0}\n')
    evaluate(run, tmp_path / "tasks")
    assert len(scored) == 2
    record = run.paths.evaluations / "step-00000012.json"
    record.write_text(record.read_text()[:40])
    evaluate(run, tmp_path / "tasks")
    assert len(scored) == 3 and Evaluation.read(record)


def test_existing_export_is_used_and_kept_but_not_one_in_bf16(solo, tasks, tmp_path, scored):
    run = solo.copy(tmp_path / "solo")
    kept = run.paths.exports / "step-00000012"
    for dtype, used in (("bf16", False), ("fp32", True)):
        assert forge("export", str(run.folder), f"--dtype={dtype}", run.data).code == 0
        evaluate(run, tasks, limit=1 + used)
        assert (scored[-1] == kept) == used
        shutil.rmtree(kept)  # fails if it was removed


@pytest.mark.usefixtures("scored")
def test_exports_in_a_run_of_somebody_else_are_not_used(solo, tasks, tmp_path, monkeypatch):
    texts = []

    def score(exported, *_):
        texts.append((exported / "README.md").read_text())
        return [Score(task="words", metric="acc", value=0.5, num_documents=8)], {}, "cpu"

    monkeypatch.setattr(evaluation.harness, "score", score)
    run = solo.copy(tmp_path / "solo")
    export = run.paths.exports / "step-00000012"
    assert forge("export", str(run.folder), run.data).code == 0
    left = shutil.copytree(export, run.paths.evaluations / ".export-step-00000012")
    for folder in (export, left):
        (folder / "README.md").write_text("planted")
    settings = Evaluate(tasks=["words"], include_path=str(tasks))
    evaluation.evaluate_run(run.paths, settings, config_at(run, 12).data, is_ours=False)
    assert len(texts) == 1 and "planted" not in texts[0]
    assert not left.exists()


def test_second_evaluation_of_a_checkpoint_is_refused_and_names_the_first(
    solo, tasks, tmp_path, scored
):
    run = solo.copy(tmp_path / "solo")
    with (
        lock(run.paths.evaluations, "evaluate", name=".step-00000012.lock"),
        pytest.raises(UnfitError, match="is being written by `forge evaluate`"),
    ):
        evaluate(run, tasks)
    assert not scored


@pytest.fixture
def in_job(tmp_path, monkeypatch) -> tuple[RunPaths, SimpleNamespace]:
    """A run and its checkpoint at 12, for a job of a Slurm that is not asked."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm, "is_here", lambda: False)
    monkeypatch.setattr(evaluation.time, "sleep", lambda _: pytest.fail("it waits"))
    paths = RunPaths(tmp_path / "base")
    paths.evaluations.mkdir(parents=True)
    return paths, SimpleNamespace(folder=paths.checkpoints / "step-00000012")


def test_job_waits_for_the_one_that_evaluates_the_checkpoint(in_job, monkeypatch, capsys):
    with ExitStack() as other:
        other.enter_context(lock(in_job[0].evaluations, "evaluate", name=".step-00000012.lock"))
        monkeypatch.setattr(evaluation.time, "sleep", lambda _: other.close())
        with evaluation._held(*in_job):
            pass
    assert "waiting: " in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_job_does_not_wait_for_a_disk_that_cannot_be_written(in_job, monkeypatch, number):
    def link(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(UnfitError, match=os.strerror(number)), evaluation._held(*in_job):
        pass


def test_job_does_not_wait_for_a_holder_of_which_nobody_knows_whether_it_lives(in_job):
    there = {**Process.current().to_json(), "host": "node07", "command": "evaluate", "restart": 0}
    path = in_job[0].evaluations / ".step-00000012.lock"
    Lock(**there).write(path)
    with pytest.raises(UnfitError, match="cannot ask") as refused, evaluation._held(*in_job):
        pass
    assert f"rm {path}" in refused.value.fix


def test_data_that_is_not_cached_is_refused_offline_with_the_command_that_downloads_it(
    own, tasks, home
):
    refused = own.start("evaluate", *options(tasks, "absent"), **home).end(400)
    assert refused.code == 69
    assert "the data of task absent is not in the cache" in refused.text
    assert f"forge evaluate --download {own.folder} '--evaluate.tasks=[absent]'" in refused.text
    assert "Traceback" not in refused.text


def test_run_without_tasks_is_refused(own):
    refused = forge("evaluate", str(own.folder))
    assert refused.code == 78
    assert "evaluate.tasks is []" in refused.text


def test_readers_of_scores_have_them(evaluated, solo, capsys):
    found = {row.metric: row.last.value for row in read_scores(evaluated.paths)}
    acc = accuracies(evaluated, 12)["acc"]
    assert found["acc"] == acc and read_scores(solo.paths) == []
    assert forge("show", str(evaluated.folder)).code == 0
    assert f"{acc:.4f}" in capsys.readouterr().out


def test_merge_has_scores_of_its_own_beside_those_of_its_step(evaluated, tasks, home):
    paths, name = evaluated.paths, "step-00000012"
    before = (paths.evaluations / f"{name}.json").read_bytes()
    merge = shutil.copytree(paths.checkpoints / name, paths.merged / name)
    words = ["evaluate", str(merge), evaluated.data, *options(tasks)]
    done = evaluated.launch(words, **home).end(400)
    assert done.code == 0, done.text
    scores = Evaluation.read(paths.evaluations / f"merged-{name}.json")
    assert scores.step == 12 and scores.scores
    assert (paths.evaluations / f"{name}.json").read_bytes() == before


def test_checkpoint_and_merge_of_its_step_are_exported_to_directories_of_their_own(
    solo, tasks, tmp_path, scored
):
    """Both may be evaluated at once, under locks of their own."""
    run, name = solo.copy(tmp_path / "solo"), "step-00000012"
    checkpoint = run.paths.checkpoints / name
    merge = Path(shutil.copytree(checkpoint, run.paths.merged / name))
    settings = Evaluate(tasks=["words"], include_path=str(tasks))
    for folder in (checkpoint, merge):
        evaluation.evaluate_checkpoint(folder, settings, config_at(run, 12).data)
    assert [path.name for path in scored] == [f".export-{name}", f".export-merged-{name}"]
