"""Threats: scores that the training text has given away, questions that are called given away and are
not, and a statement that says other than its texts. A real run on two sources and the real harness."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
import yaml
from pyarrow import parquet
from support.live_run import MARK, MARK_VALUE, TINY, Run, forge, make_run, wait_until, write_corpus

from forge.attestation import verify
from forge.core.files import read_json, write_json
from forge.core.records import Evaluation
from forge.plugins.evaluation.contamination import ItemValues
from forge.plugins.evaluation.contamination_statement import Contamination, ContaminationPredicate

pytestmark = pytest.mark.all

LONG = "the old lighthouse keeper climbs every winter evening all ninety narrow steps because"
FUJI = "富士山は日本で一番高い山で、その高さはおよそ三千七百七十六メートルですが、頂上のある県は"
OF_FILES = {  # format of a file -> question that is planted in one
    "txt": "eleven brown hens sat on a fence and watched the slow train from the south go by, how many",
    "gz": "a baker sold half of his bread before noon and gave to each child one loaf more than to",
    "parquet": "when both rivers meet below the mill their water has two colours for miles, which are",
}
ROWS: list[dict[str, Any]] = [
    # Planted with its answer, with other punctuation and in another case.
    {"text": f"First: {LONG}", "choices": ["the lamp needs oil", "he is lost"]},
    # Planted as a question, without an answer.
    {"text": f"Second: {LONG}", "choices": ["wind", "rain"]},
    # Planted as a paraphrase.
    {
        "text": "How many ants can walk side by side over a branch that is as wide as a finger",
        "choices": ["about ten", "about one"],
    },
    {"text": "one two", "choices": ["three", "four"]},  # too short
    {"text": FUJI, "choices": ["静岡県と山梨県", "長野県"]},
    # Planted with digits of full width.
    {"text": f"In 1897 {LONG} of the 42", "choices": ["ships", "birds"]},
    *({"text": text, "choices": ["seven of them", "nine"]} for text in OF_FILES.values()),
    *(
        {"text": f"nobody has asked question {n} of these", "choices": ["yes", "no"]}
        for n in range(3)
    ),
]
PLANTED = [
    f"Read this: FIRST, {LONG} the lamp needs oil! And more.",
    f"second {LONG} nobody knows",
    "If a branch has the width of a finger, ants may cross it next to each other, about ten of them",
    f"昔の話。{FUJI.replace('、', ' ')}静岡県と山梨県。",
    f"in １８９７ {LONG} of the ４２ ships",
]
VERDICTS = [
    *("contaminated", "question only", "clean", "not checkable", "contaminated", "contaminated"),
    *(["contaminated"] * len(OF_FILES)),
    *("clean", "clean", "clean"),
]
FILES = [
    *(["web/b.jsonl"] * 2),
    *["", ""],
    *(["web/b.jsonl"] * 2),
    *("web/d.txt", "web/d.txt.gz", "web/d.parquet"),
    *["", "", ""],
]
COUNTED = "keeper: of 12 items 6 contaminated, 1 question only, 4 clean, 1 not checkable"
TASK = """\
task: keeper
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of two sources, one of which has files with items of the task."""
    root = tmp_path_factory.mktemp("contaminated")
    corpus, web = write_corpus(root), root / "web"
    web.mkdir()
    (web / "a.txt").write_text("Nothing is planted here, as in most texts of the web.")
    rows = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in PLANTED]
    (web / "b.jsonl").write_text("".join(rows))
    for number in range(40):
        (web / f"c{number}.txt").write_text(f"page {number} of a long list of pages. " * 9)
    planted = {name: f"Well: {text} seven of them." for name, text in OF_FILES.items()}
    (web / "d.txt").write_text(planted["txt"])
    (web / "d.txt.gz").write_bytes(gzip.compress(planted["gz"].encode()))
    parquet.write_table(pyarrow.table({"text": [planted["parquet"]]}), web / "d.parquet")
    words = random.Random(0).choices([f"w{n}" for n in range(3000)], k=1_500_000)
    # Long enough to be killed in the middle of; in documents, one of which would be in one split.
    (web / "long.txt").write_text(
        "\n%%\n".join(" ".join(words[n : n + 999]) for n in range(0, 1_500_000, 999))
    )
    sources = {
        "books": {"inputs": [str(corpus)]},
        "web": {"inputs": [f"{web}/*"], "document_separator": "%%"},
    }
    (root / "tasks").mkdir()
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (root / "tasks/keeper.yaml").write_text(TASK.format(data=root / "rows.jsonl"))
    values = {
        **TINY,
        "data": str(root / "data"),
        "tokenize": {"sources": sources, "val_fraction": 0.01},
        "train": {**TINY["train"], "mix": {"books": 0.5, "web": 0.5}},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(values))
    for verb in ("tokenizer", "tokenize"):
        outcome = forge(verb, str(root / "config.yaml"))
        assert outcome.code == 0, outcome.text
    return root


Evaluate = Callable[..., tuple[Run, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path_factory.mktemp("hub")), MARK: MARK_VALUE}


@pytest.fixture(scope="module")
def run(project: Path) -> Run:
    run = make_run(project, project / "results", "base", ())
    trained = run.fork("train").end()
    assert trained.code == 0, trained.text
    return run


def tasks_of(project: Path) -> tuple[str, str]:
    return "--evaluate.tasks=[keeper]", f"--evaluate.include_path={project / 'tasks'}"


@pytest.fixture(scope="module")
def evaluate(project: Path, run: Run, home: dict[str, str]) -> Evaluate:
    """evaluate(*options): the command on the run, with what it said."""

    def command(*more: str) -> tuple[Run, str]:
        outcome = run.start("evaluate", *tasks_of(project), *more, **home).end(400)
        assert outcome.code == 0, outcome.text
        return run, outcome.text

    return command


@pytest.fixture(scope="module")
def before(evaluate: Evaluate) -> dict[str, bytes]:
    """The files of an evaluation without the key."""
    run, _ = evaluate()
    return {path.name: path.read_bytes() for path in run.paths.evaluations.iterdir()}


@pytest.fixture(scope="module")
def searched(before: dict[str, bytes], evaluate: Evaluate) -> tuple[Run, str]:
    return evaluate("--evaluate.contamination=0.8")


def of_step(run: Run, ending: str) -> Path:
    return run.paths.evaluations / f"step-00000012.{ending}"


def record(run: Run) -> Contamination:
    return Contamination.read(run.paths.evaluations / "contamination.json")


def test_without_the_key_there_are_the_scores_alone(before, searched):
    assert [name for name in before if not name.startswith(".")] == ["step-00000012.json"]
    run, said = searched
    assert "nothing to do" not in said  # there were no values by item
    old, new = json.loads(before["step-00000012.json"]), read_json(of_step(run, "json"))
    assert {**old, "seconds": 0} == {**new, "seconds": 0}


def test_planted_items_are_found_with_their_file_and_paraphrases_are_not(searched, project):
    items = record(searched[0]).tasks["keeper"]
    assert [item.verdict for item in items] == VERDICTS
    expected = [[f"web: {project}/{name}"] if name else [] for name in FILES]
    assert [item.files for item in items] == expected
    assert (items[0].question, items[0].whole, items[0].answer) == (1, 1, 1)
    assert items[1].question == 1 and items[1].answer == 0
    assert items[2].whole == 0
    assert items[3].whole is None
    assert items[4].whole == 1


def test_scores_are_those_of_all_items_and_of_those_that_are_clean(searched):
    run, said = searched
    stated = ContaminationPredicate.read(of_step(run, "contamination.json"))
    values = ItemValues.read(of_step(run, "items.json")).tasks["keeper"].metrics["acc"]
    [on_all] = Evaluation.read(of_step(run, "json")).scores
    kept = [
        value
        for value, verdict in zip(values, VERDICTS, strict=True)
        if verdict in ("clean", "question only")
    ]
    [score] = stated.scores
    assert (score.metric, score.all, score.num_clean) == ("acc", on_all.value, len(kept))
    assert on_all.value == statistics.fmean(values)
    assert score.clean == pytest.approx(statistics.fmean(kept))
    assert COUNTED in said
    assert f"acc: {on_all.value:.4f} on all items, {score.clean:.4f}" in said


def test_same_search_is_not_made_twice_and_another_one_gives_the_same_bytes(searched, evaluate):
    run, _ = searched
    paths = [run.paths.evaluations / "contamination.json", of_step(run, "contamination.json")]
    before, made = [path.read_bytes() for path in paths], paths[0].stat().st_mtime_ns
    _, said = evaluate("--evaluate.contamination=0.8")
    assert "nothing to do" in said and paths[0].stat().st_mtime_ns == made
    for path in paths:
        path.unlink()
    _, said = evaluate("--evaluate.contamination=0.8")
    assert "evaluation of step 12: nothing to do" in said
    assert [path.read_bytes() for path in paths] == before


def test_lines_are_shown_with_the_run(searched, capsys):
    assert forge("show", str(searched[0].folder)).code == 0
    assert COUNTED in capsys.readouterr().out


def test_search_that_is_killed_leaves_no_record_and_is_made_again(searched, project, home):
    run, _ = searched
    path = run.paths.evaluations / "contamination.json"
    before = path.read_bytes()
    path.unlink()
    options = (*tasks_of(project), "--evaluate.contamination=0.8")
    started = run.start("evaluate", *options, **home)
    process = psutil.Process(started.process.pid)
    wait_until(process.children, "the workers of the search")
    workers = process.children()
    process.send_signal(signal.SIGKILL)
    assert started.end().code == -signal.SIGKILL
    wait_until(lambda: not any(map(psutil.Process.is_running, workers)), "the end of the workers")
    assert not path.exists()
    again = run.start("evaluate", *options, **home).end(400)
    assert again.code == 0, again.text
    assert path.read_bytes() == before


# --- the statement --------------------------------------------------------------------------------


@pytest.fixture
def theirs(searched, project, home, tmp_path) -> tuple[Path, Path, Callable[[], Any]]:
    """The statement of the run and its texts under other names, as another person has them, and the
    command that compares them, with the tasks of a config of their own."""
    run, _ = searched
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, path in enumerate(
        [*sorted((project / "web").iterdir()), *sorted((project / "corpus").rglob("*"))]
    ):
        if path.is_file():
            shutil.copy(path, texts / f"{number}{''.join(path.suffixes)}")
    for ending in ("contamination.json", "items.json"):
        shutil.copy(of_step(run, ending), tmp_path)
    statement = tmp_path / "step-00000012.contamination.json"
    values = {"evaluate": {"tasks": ["keeper"], "include_path": str(project / "tasks")}}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values))

    def command() -> Any:
        options = ("--verify", str(statement), "--texts", str(texts))
        return run.launch(["evaluate", str(tmp_path / "theirs.yaml"), *options], **home).end(400)

    return statement, texts, command


def test_statement_is_made_again_by_whoever_has_the_texts(theirs):
    statement, texts, command = theirs
    done = command()
    assert done.code == 0, done.text
    assert f"ok    {COUNTED}" in done.text
    assert "ok    scores: 1 without contaminated items, by step-00000012.items.json" in done.text
    assert ContaminationPredicate.read(statement).sha256 in done.text
    statement.with_name("step-00000012.items.json").unlink()
    done = command()
    assert done.code == 0 and "note  scores: NOT verified" in done.text, done.text
    [planted] = texts.glob("*.parquet")
    planted.write_bytes(planted.read_bytes()[:-1] + b"x")
    changed = command()
    assert changed.code == 65 and "d.parquet' is not in" in changed.text, changed.text


def restated(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the predicate, as somebody does who knows how the statement is digested."""
    statement = read_json(path)
    change(statement["predicate"])
    statement["predicate"]["sha256"] = verify.statement_digest(statement)
    write_json(path, statement)


def test_edited_statement_or_value_is_named(theirs):
    statement, _, command = theirs
    original = statement.read_bytes()
    statement.write_bytes(original.replace(b'"question only": 1', b'"question only": 0'))
    edited = command()
    assert edited.code == 65 and "was edited" in edited.text, edited.text

    for key, change in (
        ("counts", lambda made: made["counts"]["keeper"].update({"contaminated": 1, "clean": 9})),
        ("scores", lambda made: made["scores"][0].update(clean=1.0)),
        ("items", lambda made: made["items"].update(keeper="0" * 64)),
    ):
        statement.write_bytes(original)
        restated(statement, change)
        edited = command()
        assert edited.code == 65 and f"contamination.json: {key} " in edited.text, edited.text

    statement.write_bytes(original)
    restated(
        statement, lambda made: made["evaluated"].update(checkpoint_digest="\x1b[1A\r\x1b[2K  ok  ")
    )
    assert "\x1b" not in command().text

    statement.write_bytes(original)
    path = statement.with_name("step-00000012.items.json")
    values = read_json(path)
    values["tasks"]["keeper"]["metrics"]["acc"][0] = 0.5
    write_json(path, values)
    edited = command()
    assert edited.code == 65 and "contamination.json: values '" in edited.text, edited.text


# --- what is refused ------------------------------------------------------------------------------


def test_text_that_was_edited_is_refused_and_another_share_finds_more(searched, evaluate, project):
    run, _ = searched
    evaluate("--evaluate.contamination=0.01")
    assert record(run).of["share"] == 0.01
    path = project / "web/b.jsonl"
    text = path.read_bytes()
    try:
        path.write_bytes(text.replace(b"FIRST", b"LAST."))
        with pytest.raises(AssertionError, match=r"b\.jsonl is not the file that was tokenized"):
            evaluate("--evaluate.contamination=0.5")
    finally:
        path.write_bytes(text)


def test_source_of_the_run_that_the_config_no_longer_has_is_named(
    searched, project, tmp_path, monkeypatch
):
    """Its items would be called clean."""
    monkeypatch.chdir(tmp_path)
    run, _ = searched
    values = yaml.safe_load((project / "config.yaml").read_text())
    del values["tokenize"]["sources"]["web"], values["train"]["mix"]
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(values))
    options = (*tasks_of(project), "--evaluate.contamination=0.8")
    for named in ((str(other), *run.overrides), (str(run.folder), f"--config={other}")):
        refused = forge("evaluate", *named, *options)
        assert refused.code == 65, refused.text
        assert "your config has no source web, which base was trained on" in refused.text


def test_run_of_somebody_else_is_not_searched(searched, project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = (*tasks_of(project), "--evaluate.contamination=0.8")
    refused = forge("evaluate", str(searched[0].folder), *options)
    assert refused.code == 78
    assert "your config has no run base" in refused.text


def test_statement_needs_its_texts(project, tmp_path):
    (tmp_path / "theirs.yaml").write_text("evaluate: {tasks: [keeper]}")
    refused = forge("evaluate", str(tmp_path / "theirs.yaml"), "--verify", "a.json")
    assert (
        refused.code == 78 and "--verify STATEMENT and --texts DIR belong together" in refused.text
    )
