"""Shards must not depend on the number of workers, nor on how often the work was killed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from forge.core.config import Config, ResolvedConfig
from forge.core.errors import DataError
from forge.core.paths import STATISTICS, tokens_folder
from forge.core.train_settings import Train
from forge.data import content_ids, encoders
from forge.data.shards import ShardSet
from forge.data.statistics import read_statistics
from forge.data.tokenize import split_of, tokenize
from forge.data.tokenizer import LoadedTokenizer, build_tokenizer, load_tokenizer

TOKENIZE = """
import sys
from forge.core.config import ResolvedConfig
from forge.core.errors import ForgeError
from forge.data.tokenize import tokenize
try:
    tokenize(ResolvedConfig.model_validate_json(sys.argv[1]), workers=2)
except ForgeError as err:
    print(err, file=sys.stderr)
    sys.exit(err.code)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus of 12 files and a tokenizer trained on it."""
    root = tmp_path_factory.mktemp("base")
    (root / "texts").mkdir()
    for number in range(12):
        (root / "texts" / f"{number:02}.txt").write_text(
            "\n%%\n".join(
                f"document {number}.{line}: naïve words {line * 7919}" for line in range(99)
            )
        )
    with contextlib.chdir(root):
        build_tokenizer(configure())
    return root


@pytest.fixture
def place(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `base` that a test may change, and works in."""
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    content_ids._cached_listing_digest.cache_clear()
    return tmp_path


def configure(vocab_size: int = 300, **settings: Any) -> ResolvedConfig:
    """Inputs are named relative to the working directory, so that copies of it have equal ids."""
    values = {"inputs": ["texts"], "document_separator": "\n%%\n", "part_mib": 0.005}
    tokenizer = {"vocab_size": vocab_size}
    return content_ids.resolve(Config(data="data", tokenizer=tokenizer, tokenize=values | settings))


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def tokenizer_of(config: ResolvedConfig) -> LoadedTokenizer:
    return load_tokenizer(Path(config.data) / "tokenizers" / config.ids.tokenizer)


# --- what comes out -----------------------------------------------------------------------------


def test_every_document_is_in_the_shards_once_and_ends_with_eos(place: Path) -> None:
    config = configure()
    shards = ShardSet.open(tokenize(config, workers=2))
    tokenizer = tokenizer_of(config)
    for split in ("train", "val"):
        expected = [
            document
            for path in sorted((place / "texts").iterdir())
            for document in path.read_text().split("\n%%\n")
            if split_of(document, config.tokenize.val_fraction) == split
        ]
        ids = np.concatenate([shard.read() for shard in getattr(shards, split)])
        ends = np.flatnonzero(ids == tokenizer.eos_id)
        found = [tokenizer.decode(part[:-1].tolist()) for part in np.split(ids, ends + 1)[:-1]]
        assert found == expected
        assert ends[-1] == len(ids) - 1
        assert shards.manifest.totals[split].documents == len(expected)
    shards.verify()
    assert shards.vocab_size == 300


def test_the_statistics_count_the_text_and_no_digest_covers_them(place: Path) -> None:
    folder = tokenize(configure(), workers=2)
    statistics = read_statistics(folder)
    assert statistics and statistics.text
    documents = [
        document
        for path in (place / "texts").iterdir()
        for document in path.read_text().split("\n%%\n")
    ]
    assert statistics.text.characters == sum(map(len, documents))
    assert statistics.text.bytes == sum(len(document.encode()) for document in documents)
    digest = ShardSet.open(folder).digest
    (folder / STATISTICS).unlink()  # as in sets of earlier versions
    assert read_statistics(tokenize(configure(), workers=2)) is None
    assert ShardSet.open(folder).digest == digest


@pytest.mark.parametrize("separator", ["\n%%\n", r"\n%%\n", "<|endoftext|>"])
def test_a_separator_that_never_occurs_is_said(
    place: Path, separator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(document_separator=separator, val_fraction=0.3)
    build_tokenizer(config)
    tokenize(config, workers=2)
    said = capsys.readouterr().err
    assert ("divides none of 12 text files" in said) == (separator != "\n%%\n")
    assert ("double quotes" in said) == ("\\" in separator)


def test_equal_files_are_all_read_and_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        (place / f"texts/{name}.txt").write_text("the same words")
    for name in ("d", "e"):
        (place / f"texts/{name}.txt").write_text("")
    config = configure()
    build_tokenizer(config)
    statistics = read_statistics(tokenize(config, workers=2))
    assert statistics and statistics.equal_files == [["texts/a.txt", "texts/b.txt", "texts/c.txt"]]
    assert "2 of " in (said := capsys.readouterr().err)
    assert "input files equal another one, such as texts/a.txt and texts/b.txt" in said


def test_the_number_of_workers_does_not_change_a_byte(place: Path) -> None:
    config = configure()
    one = files_of(tokenize(config, workers=1))
    shutil.rmtree(place / "data" / "tokens")
    assert files_of(tokenize(config, workers=3)) == one
    assert len(one) > 20


def test_shards_end_at_document_ends(place: Path) -> None:
    config = configure(shard_tokens=1024, part_mib=1)
    shards = ShardSet.open(tokenize(config, workers=1))
    eos_id = shards.manifest.eos_id
    assert len(shards.train) > 5
    for shard in shards.train:
        assert shard.read()[-1] == eos_id
    for shard in shards.train[:-1]:
        assert 1024 <= shard.num_tokens < 1024 + 100


def test_documents_may_spell_the_end_of_text_token(place: Path) -> None:
    (place / "texts" / "00.txt").write_text("about <|endoftext|> tokens")
    config = configure()
    build_tokenizer(config)
    shards = ShardSet.open(tokenize(config, workers=1))
    num_ends = sum(
        int((shard.read() == shards.manifest.eos_id).sum()) for shard in shards.train + shards.val
    )
    assert num_ends == sum(total.documents for total in shards.manifest.totals.values())


def test_equal_documents_never_land_in_both_splits() -> None:
    splits = [split_of(f"document {number}", 0.05) for number in range(4000)]
    assert splits == [split_of(f"document {number}", 0.05) for number in range(4000)]
    assert 0.03 < splits.count("val") / len(splits) < 0.07


def test_long_documents_encode_in_pieces_to_the_same_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    atoms = ["a", "naïve", " ", "\n", "\n", "\r\n", "\t", "\x1c", "\u2028", "'s", "7", "世", "."]
    texts = ["".join(random.choice(atoms, 400)) for _ in range(200)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").write_text("".join(texts))  # so that runs of white space become tokens
    build_tokenizer(configure(vocab_size=600))
    tokenizer = tokenizer_of(configure(vocab_size=600))
    whole = encoders.reference_encoder(tokenizer)(texts)
    monkeypatch.setattr(encoders, "BATCH_BYTES", 5)
    num_pieces = sum(len(list(encoders._pieces(text))) for text in texts)
    pieces = encoders.reference_encoder(tokenizer)(texts)
    assert num_pieces > 1000
    for text, left, right in zip(texts, whole, pieces, strict=True):
        assert left.tolist() == right.tolist() == tokenizer.encode(text)


# --- ids ----------------------------------------------------------------------------------------


def test_ids_depend_on_what_determines_the_data_and_nothing_else(place: Path) -> None:
    (place / "more").mkdir()
    (place / "more" / "x.txt").write_text("more")
    base = configure(inputs=["texts", "more"]).ids
    turned = configure(inputs=["more/*.txt", "texts"]).ids
    assert turned == base
    trained_otherwise = configure(inputs=["texts", "more"]).model_copy(
        update={"run": "other", "train": Train(lr=1.0)}
    )
    assert content_ids.resolve_ids(trained_otherwise) == base
    split = configure(inputs=["texts", "more"], val_fraction=0.1).ids
    assert (split.tokenizer, split.tokens != base.tokens) == (base.tokenizer, True)
    fewer = configure().ids
    assert (fewer.tokenizer != base.tokenizer, fewer.tokens != base.tokens) == (True, True)


def test_resolving_keeps_existing_ids(place: Path) -> None:
    config = configure()
    (place / "texts" / "more.txt").write_text("more")
    content_ids._cached_listing_digest.cache_clear()
    assert content_ids.resolve(Config.model_validate(config.to_json())) == config
    assert configure().ids != config.ids


# --- what is refused ----------------------------------------------------------------------------


def test_without_a_tokenizer_the_error_names_the_command(place: Path) -> None:
    shutil.rmtree(place / "data" / "tokenizers")
    with pytest.raises(DataError, match="there is no tokenizer") as caught:
        tokenize(configure(), workers=1)
    assert "forge tokenizer" in caught.value.fix


def test_an_empty_split_is_refused_with_counts(place: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"the val split of inputs \[.*texts.*\] is empty: 1188 documents for training, 0",
    ):
        tokenize(configure(val_fraction=1e-9), workers=1)
    with pytest.raises(
        DataError, match=r"the train split of .* is empty: 0 documents .* 1188 for validation"
    ):
        tokenize(configure(val_fraction=1 - 1e-9), workers=1)


def test_an_empty_corpus_is_refused(place: Path) -> None:
    config = configure()
    build_tokenizer(config)
    for path in (place / "texts").iterdir():
        path.write_text(" " * path.stat().st_size)
    with pytest.raises(DataError, match=r"inputs \[.*texts.*\] has no documents: 12 files"):
        tokenize(config, workers=1)


def test_bad_bytes_are_named_from_a_worker_and_no_manifest_is_left(place: Path) -> None:
    config = configure()
    path = place / "texts" / "05.txt"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"05\.txt is not UTF-8 at byte offset 0") as caught:
        tokenize(config, workers=2)
    assert "invalid_utf8" in caught.value.fix
    folder = tokens_folder("data", config.ids.tokens)
    assert not (folder / "manifest.json").exists()
    assert not list(folder.rglob(".*"))


def test_replaced_bytes_are_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "texts" / "05.txt").write_bytes(b"one \xff two \xff")
    config = configure(invalid_utf8="replace")
    build_tokenizer(config)
    capsys.readouterr()
    tokenize(config, workers=2)
    assert capsys.readouterr().err.count("05.txt is not UTF-8 at byte offset 4") == 1


def test_inputs_that_changed_since_the_config_was_resolved_are_refused(place: Path) -> None:
    config = configure()
    (place / "texts" / "more.txt").write_text("more")
    content_ids._cached_listing_digest.cache_clear()
    with pytest.raises(DataError, match="was resolved to tokens"):
        tokenize(config, workers=1)


# --- a second run -------------------------------------------------------------------------------


def test_a_second_time_there_is_nothing_to_do(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tokenize(configure(), workers=1)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    tokenize(configure(), workers=1)
    assert "nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_only_the_part_of_a_changed_input_is_rebuilt(place: Path) -> None:
    folder = tokenize(configure(), workers=1)
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "parts").iterdir()}
    path = place / "texts" / "11.txt"
    path.write_text(path.read_text().replace("words", "WORDS"))
    tokenize(configure(), workers=1)
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "parts").iterdir()}
    assert [name for name in sorted(after) if after[name] != before[name]] == [max(after)]
    ShardSet.open(folder).verify()


def test_another_tokenizer_rebuilds_all_parts(place: Path) -> None:
    config = configure()
    folder = tokenize(config, workers=1)
    for path in (place / "texts").iterdir():  # equal sizes, so equal ids
        path.write_text(path.read_text().replace("naïve words", "words naïve"))
    shutil.rmtree(place / "data" / "tokenizers")
    tokenizer = load_tokenizer(build_tokenizer(config))
    tokenize(config, workers=1)
    assert ShardSet.open(folder).manifest.tokenizer_digest == tokenizer.digest
    assert {
        json.loads(path.read_text())["tokenizer_digest"] for path in folder.glob("parts/*")
    } == {tokenizer.digest}


def test_a_corrupt_shard_is_rebuilt_when_tokenizing_resumes(place: Path) -> None:
    folder = tokenize(configure(), workers=1)
    whole = files_of(folder)
    (folder / "manifest.json").unlink()
    (folder / "train-00003-000.bin").write_bytes(b"\1" * len(whole["train-00003-000.bin"]))
    (folder / "train-00004-000.bin").unlink()
    tokenize(configure(), workers=2)
    assert files_of(folder) == whole


# --- killed -------------------------------------------------------------------------------------


def start_long_work(place: Path, long_part: bool = False) -> tuple[subprocess.Popen[str], Path]:
    """Tokenizing in a process group of its own, long enough to be killed; and its folder."""
    text = (place / "texts" / "00.txt").read_text()
    for number in range(40):
        (place / "texts" / f"{number:02}.txt").write_text(f"{number} {text}\n%%\n" * 25)
    if long_part:
        (place / "texts" / "03.txt").write_text(text * 2500)
    config = configure()
    build_tokenizer(config)
    folder = place / tokens_folder("data", config.ids.tokens)
    process = subprocess.Popen(
        [sys.executable, "-c", TOKENIZE, json.dumps(config.to_json())],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where tests run in the background of a script, its shell has had SIGINT ignored for all.
        preexec_fn=lambda: signal.signal(  # noqa: PLW1509  before any thread
            signal.SIGINT, signal.default_int_handler
        ),
    )
    wait_for(lambda: len(list(folder.glob("parts/part-*.json"))) >= 3)
    assert process.poll() is None
    return process, folder


def wait_for(condition: Any, timeout_sec: float = 60) -> None:
    deadline = time.monotonic() + timeout_sec
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def check_resumes(place: Path, folder: Path) -> None:
    """The same command keeps finished parts and ends as an uninterrupted one."""
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("parts/part-*.json")}
    assert kept
    assert not (folder / "manifest.json").exists()
    tokenize(configure(), workers=2)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    disturbed = files_of(folder)
    shutil.rmtree(folder)
    assert files_of(place / tokenize(configure(), workers=2)) == disturbed


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_killed_tokenizing_leaves_no_workers_and_resumes(place: Path, kind: signal.Signals) -> None:
    process, folder = start_long_work(place)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(kind)
    assert process.wait(timeout=30) == -kind
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    check_resumes(place, folder)


def test_ctrl_c_ends_the_workers_at_once(place: Path) -> None:
    process, folder = start_long_work(place, long_part=True)  # which takes a worker 10 s
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, alive = psutil.wait_procs([psutil.Process(process.pid), *family], timeout=5)
    assert alive == []
    assert "KeyboardInterrupt" in process.communicate()[1]
    assert not (folder / "manifest.json").exists()


def test_a_killed_worker_is_reported_as_out_of_memory(place: Path) -> None:
    process, folder = start_long_work(place)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    workers[0].kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 69, errors
    assert "a worker process was killed after" in errors
    assert "fewer workers" in errors
    check_resumes(place, folder)
