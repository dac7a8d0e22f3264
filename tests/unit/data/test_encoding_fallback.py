"""Whatever the fast encoder raises, at whatever moment, the shards get the reference's ids or none."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from forge.core.config import Config, ResolvedConfig
from forge.core.errors import DataError
from forge.core.paths import RunPaths
from forge.data import tokenize
from forge.data.content_ids import resolve
from forge.data.encoders import fast_encoder
from forge.data.shards import ShardSet
from forge.data.tokenize import split_of
from forge.data.tokenizer import LoadedTokenizer, build_tokenizer, load_tokenizer

TEXTS = [f"Line {number}: 12 + {number * 7919} = ?! naïve, 世界 it's" for number in range(60)]

Split = pre_tokenizers.PreTokenizer
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
# As StarCoder and SmolLM split text, and shapes that gigatoken cannot read either.
SPLITS: dict[str, Split] = {
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "punctuation": pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), BYTES]),
    "both": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.Punctuation("contiguous"), BYTES]
    ),
    "bytes in a sequence": pre_tokenizers.Sequence([BYTES]),
    "an empty sequence": pre_tokenizers.Sequence([]),
    "no regex": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
}

# Stands in for gigatoken in this process and in the workers, and fails at FAIL_AT.
GIGATOKEN = """
import numpy as np
import tokenizers

class Panic(BaseException):
    "As pyo3's PanicException: no Exception."

def fail(moment):
    if moment == FAIL_AT:
        raise KIND("a reason\\n\\nLocation:\\n    src/hidden.rs:626")

fail("import")

class Tokenizer:
    def __init__(self, source):
        self.tokenizer = tokenizers.Tokenizer.from_str(source)
        self.seen = 0

    @classmethod
    def from_json(cls, source):
        fail("load")
        return cls(source)

    def encode(self, text):
        fail("sample")
        self.seen += "number 59" in text
        if "number 59" in text and self.seen == 2:  # the first time is the comparison
            fail("middle")
        return np.array(self.tokenizer.encode(text).ids, dtype=np.uint32)
"""


def config_of(root: Path, texts: list[str], **tokenizer: str | int) -> ResolvedConfig:
    (root / "texts").mkdir()
    for number, text in enumerate(texts):
        (root / "texts" / f"{number:02}.txt").write_text(text)
    config = Config(
        data=str(root / "data"),
        tokenizer=tokenizer,
        # Ten files or so a part: the last part starts when others are finished.
        tokenize={"inputs": [str(root / "texts")], "part_mib": 5e-4, "val_fraction": 0.3},
    )
    resolved = resolve(config)
    build_tokenizer(resolved)
    return resolved


def train(split: Split, path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    if split is not SPLITS["an empty sequence"]:  # which is not byte-level
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(path))
    return path


def ids_by_reference(texts: list[str], tokenizer: LoadedTokenizer, split: str) -> list[int]:
    return [
        number
        for text in texts
        if split_of(text, 0.3) == split
        for number in [*tokenizer.encode(text), tokenizer.eos_id]
    ]


def assert_ids_are_the_reference(folder: Path, config: ResolvedConfig, texts: list[str]) -> None:
    shards = ShardSet.open(folder)
    shards.verify()
    tokenizer = load_tokenizer(Path(config.data) / "tokenizers" / shards.manifest.tokenizer_id)
    for split in ("train", "val"):
        found = np.concatenate([shard.read() for shard in getattr(shards, split)]).tolist()
        assert found == ids_by_reference(texts, tokenizer, split)
        assert found


@pytest.mark.parametrize("name", SPLITS)
def test_a_tokenizer_that_gigatoken_cannot_read_is_encoded_by_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = train(SPLITS[name], tmp_path / "tokenizer.json")
    config = config_of(tmp_path, TEXTS, source="path", path=str(path))
    folder = tokenize.tokenize(config, workers=1)
    assert_ids_are_the_reference(folder, config, TEXTS)
    assert capsys.readouterr().err.count("encoding with tokenizers, the same ids but many") == 1


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder whose gigatoken.py this process and the workers import."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gigatoken", raising=False)
    return tmp_path


@pytest.mark.parametrize("kind", ["RuntimeError", "Panic"])
@pytest.mark.parametrize("moment", ["import", "load", "sample"])
def test_what_gigatoken_raises_at_the_start_is_a_reason(
    failing: Path, capsys: pytest.CaptureFixture[str], moment: str, kind: str
) -> None:
    config = config_of(failing, TEXTS, vocab_size=400)
    code = GIGATOKEN.replace("FAIL_AT", repr(moment)).replace("KIND", kind)
    (failing / "gigatoken.py").write_text(code)
    folder = tokenize.tokenize(config, workers=1)
    assert_ids_are_the_reference(folder, config, TEXTS)
    said = capsys.readouterr().err
    assert said.count(f"({kind}: a reason): encoding with tokenizers, the same ids") == 1
    assert "src/hidden.rs" not in said


def without_fast(config: ResolvedConfig) -> ResolvedConfig:
    values = config.to_json()
    values["tokenize"]["fast"] = False
    again = resolve(Config.model_validate({**values, "ids": None}))
    assert again.ids == config.ids, "the key changes no ids"
    return again


@pytest.mark.parametrize("kind", ["RuntimeError", "Panic"])
def test_what_gigatoken_raises_midway_is_refused_and_its_parts_are_kept_without_it(
    failing: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    texts = [*TEXTS[:-1], "the text with number 59"]
    config = config_of(failing, texts, vocab_size=400)
    code = GIGATOKEN.replace("FAIL_AT", repr("middle")).replace("KIND", kind)
    (failing / "gigatoken.py").write_text(code)
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            tokenize.tokenize(config, workers=1)
        reason = f"gigatoken cannot encode a text ({kind}: a reason)"
        assert caught.value.what == f"{failing}/texts/59.txt, document 1: {reason}"
        assert "the tokenizers library would do" in caught.value.cause
        assert "set tokenize.fast: false and rerun" in caught.value.fix
        assert "finished parts are kept" in caught.value.fix
    folder = Path(config.data) / "tokens" / config.ids.tokens
    fast = {path: path.stat().st_mtime_ns for path in folder.glob("parts/part-*.json")}
    tokenize.tokenize(without_fast(config), workers=1)
    assert_ids_are_the_reference(folder, config, texts)
    all_parts = {path: path.stat().st_mtime_ns for path in folder.glob("parts/part-*.json")}
    assert 0 < len(fast) < len(all_parts)
    assert fast.items() <= all_parts.items(), "kept"
    capsys.readouterr()
    tokenize.tokenize(config, workers=1)
    assert "nothing to do" in capsys.readouterr().err


def test_key_may_change_when_the_text_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, TEXTS, vocab_size=400)
    tokenize.tokenize(config, workers=1)
    config.write(RunPaths.of(config).config)
    shutil.rmtree(tmp_path / "texts")
    without_fast(config)


def test_without_fast_gigatoken_is_not_imported(
    failing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = without_fast(config_of(failing, TEXTS, vocab_size=400))
    code = GIGATOKEN.replace("FAIL_AT", repr("import")).replace("KIND", "SystemExit")
    (failing / "gigatoken.py").write_text(code)
    folder = tokenize.tokenize(config, workers=1)
    assert_ids_are_the_reference(folder, config, TEXTS)
    assert "slower" not in capsys.readouterr().err, "as it was asked for"


def test_ctrl_c_is_not_a_reason(failing: Path) -> None:
    config_of(failing, TEXTS, vocab_size=400)
    code = GIGATOKEN.replace("FAIL_AT", repr("sample")).replace("KIND", "KeyboardInterrupt")
    (failing / "gigatoken.py").write_text(code)
    (folder,) = (failing / "data" / "tokenizers").iterdir()
    with pytest.raises(KeyboardInterrupt):
        fast_encoder(load_tokenizer(folder))
