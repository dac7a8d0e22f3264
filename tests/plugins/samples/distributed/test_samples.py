"""Samples of real runs. Threats: windows that the loader did not give, in another order or of another
rank, after a change of ranks, weights or seed; a document of another file; a step too few or too many."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from support import real_text
from support.batches import batches, record_batches
from support.hub import served
from support.live_run import TINY, TWO_RANKS, Run, forge, make_run

from forge.core.paths import RunPaths
from forge.data.end_token import TRAINED_EOS
from forge.plugins.samples.of_export import texts_in
from forge.plugins.samples.order import stretches
from forge.plugins.samples.read import RunSamples

pytestmark = pytest.mark.all
SEQ_LEN, BATCH, GOAL, CHANGE = 64, 8, 24, 10
MIX = [{"step": 0, "code": 0.75, "docs": 0.25}, {"step": CHANGE, "code": 1, "docs": 3}]
TRAIN = {
    **{"seq_len": SEQ_LEN, "batch_size": BATCH, "max_steps": GOAL, "decay_steps": GOAL},
    **{"checkpoint_every": 6, "keep_every": 6, "eval_every": 24},
}
LIBRARY = Path(json.__file__).parents[1]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog"]


def write_config(
    root: Path, tokenize: dict, tokenizer: dict = TINY["tokenizer"], **train: object
) -> Path:
    values = {
        **TINY,
        "tokenizer": tokenizer,
        "data": str(root / "data"),
        "tokenize": {"val_fraction": 0.2, **tokenize},
        "train": {**TINY["train"], **TRAIN, **train},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(values))
    return root / "config.yaml"


def make_project(
    root: Path, tokenize: dict, tokenizer: dict = TINY["tokenizer"], **train: object
) -> Path:
    """A config in a directory, tokenized."""
    config = write_config(root, tokenize, tokenizer, **train)
    for verb in ("tokenizer", "tokenize"):
        outcome = forge(verb, str(config))
        assert outcome.code == 0, outcome.text
    return root


def trained(run: Run, *more: str) -> Run:
    outcome = run.fork("train", *more, arm=record_batches).end()
    assert outcome.code == 0, outcome.text
    return run


def samples_of(run: Run, project: Path) -> RunSamples:
    data = str(project / "data")
    return RunSamples(stretches(RunPaths(run.folder), data), data)


def ids_of(samples: RunSamples, step: int) -> list[tuple[int, ...]]:
    """Ids of the windows of a step, by the shards and places that are told."""
    found = []
    for row in samples.of_step(step):
        shards = samples.sources[row["source"]]
        [shard] = [one for one in shards.train if one.path.name == row["shard"]]
        found.append(tuple(shard.read()[row["token"] :][: SEQ_LEN + 1].tolist()))
    return found


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of real text."""
    sources = {
        "docs": {
            "inputs": [f"{LIBRARY}/html/*.py", f"{LIBRARY}/http/*.py"],
            "document_separator": "\n\n",
        },
        "code": {"inputs": [f"{LIBRARY}/json/*.py", f"{LIBRARY}/email/*.py"]},
    }
    return make_project(tmp_path_factory.mktemp("mixed"), {"sources": sources}, mix=MIX)


@pytest.fixture(scope="module")
def base(mixed: Path) -> Run:
    """Half of the steps on two ranks, the others on one."""
    run = make_run(mixed, mixed / "results", "base", ())
    trained(run, "--train.max_steps=12", *TWO_RANKS)
    return trained(run)


@pytest.fixture(scope="module")
def child(base: Run) -> Run:
    """Other weights and another seed from step 12 on, on two ranks."""
    changes = (
        "--run=child",
        "--parent=base@12",
        "--train.seed=5",
        '--train.mix={"code": 1, "docs": 1}',
    )
    own = replace(
        base, folder=base.folder.with_name("child"), overrides=(*base.overrides, *changes)
    )
    return trained(own, *TWO_RANKS)


def test_samples_of_a_step_are_those_of_the_loader_on_one_and_two_ranks(
    base: Run, mixed: Path
) -> None:
    drawn, samples = batches(base.folder), samples_of(base, mixed)
    assert sorted(drawn) == list(range(GOAL))
    for step, rows in drawn.items():
        assert ids_of(samples, step + 1) == rows
    assert [row["rank"] for row in samples.of_step(12)] == [0] * 4 + [1] * 4
    assert [row["rank"] for row in samples.of_step(13)] == [0] * 8
    sources = Counter(row["source"] for row in samples.of_step(3))
    assert sources == {"code": 6, "docs": 2}


def test_steps_before_a_parents_checkpoint_are_those_of_the_parent(
    base: Run, child: Run, mixed: Path
) -> None:
    samples, before, own = samples_of(child, mixed), batches(base.folder), batches(child.folder)
    for step in range(12):
        assert ids_of(samples, step + 1) == before[step]
    for step in range(12, GOAL):
        assert ids_of(samples, step + 1) == own[step] != before[step]


def test_every_step_that_has_read_a_text_is_found_and_no_other(child: Run, mixed: Path) -> None:
    samples = samples_of(child, mixed)
    row = next(row for row in samples.of_step(GOAL) if row["source"] == "code")
    part = max(row["documents"], key=lambda one: len(one["text"]))
    phrase, path = part["text"][5:60], Path(part["input"])
    found = samples.of_text(phrase)
    text = path.read_text()
    assert [place["character"] for place in found if place["input"] == str(path)] == [
        at for at in range(len(text)) if text.startswith(phrase, at)
    ]
    windows = {window for place in found for window in place["windows"]}
    expected = {
        (step, row["row"], row["window"], row["epoch"])
        for step in range(1, GOAL + 1)
        for row in samples.of_step(step)
        if row["window"] in windows
    }
    told = {
        (read["step"], read["row"], read["window"], read["epoch"])
        for place in found
        for read in place["steps"]
    }
    assert told == expected
    assert (GOAL, row["row"], row["window"], row["epoch"]) in told
    of_file = samples.of_file(path)
    assert {place["input"] for place in of_file} == {str(path)}
    assert GOAL in {read["step"] for place in of_file for read in place["steps"]}


def test_steps_of_a_parent_are_told_of_a_child_that_has_a_further_source(
    mixed: Path, tmp_path: Path
) -> None:
    """One that sorts before the parent's: windows have other numbers in the child."""
    [tokenizer] = (mixed / "data/tokenizers").glob("*/tokenizer.json")
    of_path = {"source": "path", "path": str(tokenizer), "eos_token": TRAINED_EOS}
    sources = yaml.safe_load((mixed / "config.yaml").read_text())["tokenize"]["sources"]
    make_project(tmp_path, {"sources": sources}, of_path)
    base = trained(make_run(tmp_path, tmp_path / "results", "base", ()))
    further = {"inputs": [f"{LIBRARY}/logging/*.py"], "document_separator": "\n\n"}
    make_project(tmp_path, {"sources": {"about": further, **sources}}, of_path)
    child = replace(
        base,
        folder=base.folder.with_name("child"),
        overrides=(*base.overrides, "--run=child", "--parent=base@12"),
    )
    samples = samples_of(trained(child), tmp_path)
    assert samples.own.first_windows["code"] > 0 == samples.stretches[0].first_windows["code"]
    part = max(samples.of_step(3)[0]["documents"], key=lambda one: len(one["text"]))
    found = samples.of_text(part["text"][5:60])
    places = set()
    for window in {window for place in found for window in place["windows"]}:
        source, _, shard, first = samples.own.place(window)
        places.add((source, shard.path.name, first))
    expected = {
        (step, row["row"], row["window"])
        for step in range(1, GOAL + 1)
        for row in samples.of_step(step)
        if (row["source"], row["shard"], row["token"]) in places
    }
    told = {
        (read["step"], read["row"], read["window"]) for place in found for read in place["steps"]
    }
    assert told == expected
    assert (3, 0) in {(step, row) for step, row, _ in told}


@pytest.mark.tools
def test_every_step_that_has_read_a_verse_and_a_page_is_named(tmp_path: Path) -> None:
    bible, help_pages = real_text.book_of_ruth(), real_text.help_pages("ja")
    sources = {
        "bible": {"inputs": [str(bible)], "document_separator": "\n\n"},
        "help": {"inputs": [str(help_pages)]},
    }
    mix = {"bible": 1, "help": 1}
    project = make_project(tmp_path, {"sources": sources}, mix=mix, max_steps=80)
    run = trained(make_run(project, project / "results", "base", ()), *TWO_RANKS)
    samples, drawn = samples_of(run, project), batches(run.folder)
    page = max(help_pages.iterdir(), key=lambda path: path.stat().st_size)
    for path, phrase in [
        (bible, "thy people shall be my people, and"),
        (page, max(page.read_text().splitlines(), key=len)[:12]),
    ]:
        done = command(run, project, "--text", phrase, "--json")
        assert done.returncode == 0, done.stderr
        places = json.loads(done.stdout)
        assert str(path) in {place["input"] for place in places}
        told = {read["step"] for place in places for read in place["steps"]}
        seen = {
            step + 1
            for step, rows in drawn.items()
            for row in rows
            if phrase in samples.tokenizer.decode(list(row))
        }
        assert seen and seen <= told
        epochs = {read["epoch"] for place in places for read in place["steps"]}
        assert path != bible or len(epochs) > 1


def test_text_of_the_documents_of_a_window_is_where_it_says(base: Run, mixed: Path) -> None:
    samples = samples_of(base, mixed)
    for row in samples.of_step(7):
        for part in row["documents"]:
            documents = Path(part["input"]).read_text().removeprefix("\ufeff")
            pieces = documents.split("\n\n") if row["source"] == "docs" else [documents]
            document = [piece for piece in pieces if piece and not piece.isspace()][
                part["document"] - 1
            ]
            assert document[part["character"] :].startswith(part["text"].strip("\ufffd"))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty files of words and one of random characters."""
    root, numbers = tmp_path_factory.mktemp("planted"), random.Random(7)
    (root / "texts").mkdir()
    for n in range(40):
        text = " ".join(numbers.choice(WORDS) for _ in range(300))
        (root / "texts" / f"{n:02}.txt").write_text(text)
    characters = [chr(code) for code in range(0x21, 0x7F)]
    nonsense = "".join(numbers.choice(characters) for _ in range(900))
    (root / "texts/nonsense.txt").write_text(nonsense)
    return make_project(
        root, {"inputs": [str(root / "texts")], "val_fraction": 0.1}, max_steps=30, lr=3e-3
    )


@pytest.fixture(scope="module")
def over_an_epoch(planted: Path) -> Run:
    return trained(make_run(planted, planted / "results", "plain", ()), "--train.max_steps=40")


def test_over_an_epoch_all_steps_together_are_the_corpus_and_each_window_once(
    over_an_epoch: Run, planted: Path
) -> None:
    samples = samples_of(over_an_epoch, planted)
    total = samples.own.windows.num_samples
    assert total <= 40 * BATCH
    read = [row for step in range(1, 41) for row in samples.of_step(step)]
    first = Counter(row["window"] for row in read if row["epoch"] == 0)
    assert first == Counter(range(total))
    shards = samples.sources[""].train
    ids = np.concatenate([shard.read() for shard in shards])
    told = {row["window"]: row["documents"] for row in read}
    text = "".join(part["text"] for window in sorted(told) for part in told[window])
    assert (
        len(text)
        >= len(samples.tokenizer.decode(ids[ids != samples.own.tokens.eos_id].tolist())) * 0.95
    )


def test_losses_name_the_document_of_nonsense(over_an_epoch: Run, planted: Path) -> None:
    samples = samples_of(over_an_epoch, planted)
    found = samples.of_file(planted / "texts/nonsense.txt")
    steps = {read["step"] for place in found for read in place["steps"] if read["step"] > 12}
    done = command(over_an_epoch, planted, "--step", str(min(steps)), "--losses", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    has_nonsense = [
        any(part["input"].endswith("nonsense.txt") for part in row["documents"]) for row in rows
    ]
    others = [row["loss"] for row, has in zip(rows, has_nonsense, strict=True) if not has]
    assert has_nonsense[0] and rows[0]["loss"] > max(others) + 0.5
    assert [row["loss"] for row in rows] == sorted((row["loss"] for row in rows), reverse=True)


def command(run: Run, project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "forge", "samples", str(run.folder), *words]
    return subprocess.run(
        [*line, f"--data={project / 'data'}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_file_that_has_changed_since_is_not_quoted_and_its_text_is_found_by_a_phrase(
    over_an_epoch: Run, planted: Path
) -> None:
    path = planted / "texts/00.txt"
    original = path.read_text()
    samples = samples_of(over_an_epoch, planted)
    assert samples.of_file(path), "a file of the training split"
    try:
        path.write_text(original.replace("cat", "cow"))
        done = command(over_an_epoch, planted, "--file", str(path))
        assert done.returncode == 78
        assert "has the digest of" in done.stderr
        places = samples_of(over_an_epoch, planted).of_text(original[:200])
        assert places and places[0]["windows"] and places[0]["input"] is None
        assert str(path) in places[0]["one_of"]
    finally:
        path.write_text(original)


def test_file_is_found_by_its_digest_under_another_name(
    over_an_epoch: Run, planted: Path, tmp_path: Path
) -> None:
    path, moved = planted / "texts/00.txt", tmp_path / "moved.jsonl"
    expected = samples_of(over_an_epoch, planted).of_file(path)
    try:
        path.rename(moved)
        assert samples_of(over_an_epoch, planted).of_file(moved) == expected != []
    finally:
        moved.rename(path)


def test_file_after_one_that_has_changed_is_refused_by_the_name_of_that_one(
    over_an_epoch: Run, planted: Path
) -> None:
    first, *others = sorted((planted / "texts").glob("*.txt"))
    samples, original = samples_of(over_an_epoch, planted), first.read_text()
    path = next(path for path in others if samples.of_file(path))
    try:
        first.write_text(original.replace("cat", "cow"))
        done = command(over_an_epoch, planted, "--file", str(path))
        assert done.returncode == 65, done.stdout
        assert f"cannot tell which documents are of {path}: {first} is not here" in done.stderr
    finally:
        first.write_text(original)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", "99"), "was trained from step 1 to 40"),
        (("--step", "0"), "was trained from step 1 to 40"),
        (("--step", "3", "--losses"), "has no checkpoint before step 3"),
        (("--step", "3", "--rank", "1"), "--rank is 1, and the step was trained by ranks 0 to 0"),
        (("--text", "cat", "--losses"), "are for the samples of a step"),
        (("--file", "nowhere.txt"), "there is no file nowhere.txt"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_78(
    over_an_epoch: Run, planted: Path, words: tuple[str, ...], message: str
) -> None:
    done = command(over_an_epoch, planted, *words)
    assert done.returncode == 78, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# --- an export and the texts alone ------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of both sources, under other names."""
    folder = tmp_path_factory.mktemp("texts")
    names = ("html", "http", "json", "email")
    found = [path for name in names for path in LIBRARY.glob(f"{name}/*.py")]
    for number, path in enumerate(sorted(found)):
        shutil.copy(path, folder / f"{number:03d}.py")
    return folder


def exported(run: Run, target: Path) -> Path:
    outcome = forge("export", str(run.folder), f"--to={target}", run.data, "--full")
    assert outcome.code == 0, outcome.text
    return target


def of_export(
    export: Path, data: Path, texts: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    """In a directory without anything of the run."""
    given = (f"--data={data}", f"--texts={texts}", *words)
    line = [sys.executable, "-m", "forge", "samples", str(export), *given]
    return subprocess.run(
        line, cwd=export.parent, check=False, capture_output=True, text=True, timeout=300
    )


def test_export_and_the_texts_tell_the_samples_of_a_step_as_the_run_does(
    base: Run, mixed: Path, texts: Path, tmp_path: Path
) -> None:
    """Of a run with a mix in stages and a change of ranks; tokens are made again."""
    export, kept = exported(base, tmp_path / "model"), tmp_path / "kept"
    outcome = forge("verify", str(export), f"--data={texts}", f"--keep={kept}")
    assert outcome.code == 0, outcome.text
    samples = samples_of(base, mixed)
    for step in (3, 12, 13, GOAL):
        done = of_export(export, kept, texts, "--step", str(step), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == samples.of_step(step)
    phrase = of_export(export, kept, texts, "--text", "def loads(", "--json")
    assert json.loads(phrase.stdout) == samples.of_text("def loads(") != []

    # Wrong things.
    assert "--losses" in of_export(export, kept, texts, "--step", "13", "--losses").stderr
    beyond = of_export(export, kept, texts, "--step", str(GOAL + 1))
    assert (beyond.returncode, "from step 1 to 24" in beyond.stderr) == (78, True)
    again = forge("verify", str(export), f"--data={texts}", f"--keep={kept}")
    assert (again.code, "is there already" in again.text) == (78, True)
    shutil.copytree(kept, tmp_path / "edited")
    shard = next((tmp_path / "edited/tokens").glob("*/train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\0")
    edited = of_export(export, tmp_path / "edited", texts, "--step", "3")
    assert (edited.returncode, shard.name in edited.stderr) == (65, True)

    tokenizer = next((tmp_path / "edited/tokenizers").glob("*/tokenizer.json"))
    tokenizer.write_text(tokenizer.read_text() + " ")
    of_other = of_export(export, tmp_path / "edited", texts, "--step", "3")
    assert (of_other.returncode, "the tokenizer in" in of_other.stderr) == (65, True)

    changed = tmp_path / "changed"
    shutil.copytree(texts, changed)
    first = next(changed.glob("*.py"))
    first.write_text(first.read_text() + "# more\n")
    differs = forge("verify", str(export), f"--data={changed}", f"--keep={tmp_path / 'k2'}")
    assert differs.code == 65 and not (tmp_path / "k2").exists()
    statement = export / "statement.json"
    statement.write_bytes(statement.read_bytes()[:-20])
    assert of_export(export, kept, texts, "--step", "3").returncode == 65


def test_export_of_a_child_over_sources_is_refused_by_what_its_statement_lacks(
    child: Run, mixed: Path, texts: Path, tmp_path: Path
) -> None:
    export = exported(child, tmp_path / "model")
    done = of_export(export, mixed / "data", texts, "--step", "14")
    assert done.returncode == 65
    assert "began with base@12, and the statement does not say how many samples" in done.stderr


# --- files of a hub, and under other names ------------------------------------------------------------


@pytest.fixture(scope="module")
def of_hub(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A project whose text is on a hub, rows of which a file is compressed, and a run in it."""

    def rows(seed: int) -> bytes:
        numbers = random.Random(seed)
        texts = (" ".join(numbers.choices(WORDS, k=60)) for _ in range(60))
        return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()

    root = tmp_path_factory.mktemp("hub")
    files = {"en/a.jsonl": rows(1), "en/b.jsonl.gz": gzip.compress(rows(2))}
    tokenize = {"inputs": ["hf://datasets/team/texts@main/en/*"]}
    with served({"datasets/team/texts": files}) as hub:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-m", "forge", "inputs", str(write_config(root, tokenize))],
            env=environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(root / "home")},
            check=False,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 0, done.stderr
    project = make_project(root, tokenize)
    return project, trained(make_run(project, project / "results", "base", ()))


def test_documents_of_a_hub_are_named_as_the_manifest_names_them(of_hub: tuple[Path, Run]) -> None:
    project, run = of_hub
    rows = [row for step in range(1, GOAL + 1) for row in samples_of(run, project).of_step(step)]
    assert {part["input"] for row in rows for part in row["documents"]} == {
        "hf://datasets/team/texts/en/a.jsonl",
        "hf://datasets/team/texts/en/b.jsonl.gz",
    }


def test_texts_under_other_names_are_read_by_the_endings_that_they_had(
    of_hub: tuple[Path, Run], tmp_path: Path
) -> None:
    project, run = of_hub
    downloads = sorted((project / "data/inputs").glob("*/hub/datasets/team/texts/en/*"))
    for number, path in enumerate(downloads):
        shutil.copy(path, tmp_path / f"{number:04d}")
    data = str(project / "data")
    renamed = RunSamples(stretches(RunPaths(run.folder), data), data, texts_in(str(tmp_path)))
    for step in (3, GOAL):
        assert renamed.of_step(step) == samples_of(run, project).of_step(step)
