"""A value means the same in a file, in a cell and on the command line, and no text costs minutes."""

import contextlib
import json
import time
from functools import partial

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from support.each import hold_for_each

from forge.core.config import (
    Config,
    apply_overrides,
    checked,
    load_config,
    parse_override,
    read_values,
)
from forge.core.errors import ConfigError
from forge.core.machine import Machine, load_machine
from forge.core.sample_sheet import run_configs
from forge.core.values import as_cell, read_cell, read_yaml

WORDS = {
    **{
        "010": "010",
        "1:30": "1:30",
        "0o17": "0o17",
        "0x1F": "0x1F",
        "0b1": "0b1",
        "1_000": "1_000",
    },
    **{word: word for word in ("yes", "no", "on", "off", "y", "N", "Yes")},
    **{"2024-01-01": "2024-01-01", "2024-01-01 10:00:00": "2024-01-01 10:00:00"},
    **{
        ".inf": ".inf",
        ".nan": ".nan",
        "inf": "inf",
        "1.2.3": "1.2.3",
        "+": "+",
        "=": "=",
        "<<": "<<",
    },
    **{"7": 7, "-1": -1, "0": 0, "1e-3": 0.001, "1E6": 1e6, ".5": 0.5, "2.": 2.0, "1.5e3": 1500.0},
    **{"true": True, "False": False, "null": None, "~": None},
    **{"[a, 010, 7]": ["a", "010", 7], '"7"': "7", "'null'": "null", '["7", x]': ["7", "x"]},
}


def check_word(word, file):
    text, value = word
    file.write_text(f"key: {text}\nlist: [{text}]\nblock:\n  - {text}\n")
    assert read_values(file) == {"key": value, "list": [value], "block": [value]}
    assert read_cell(text) == value
    assert parse_override(f"--key={text}") == ("key", value)
    for seen in (read_values(file)["key"], read_cell(text)):
        assert type(seen) is type(value)


def test_each_word_is_the_same_value_in_file_cell_and_option(tmp_path):
    check = partial(check_word, file=tmp_path / "config.yaml")
    hold_for_each(((text, (text, value)) for text, value in WORDS.items()), check)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.seed", "010", 10),
        ("train.max_steps", "1_000", 1000),
        ("train.compile", "yes", True),
        ("train.compile", "off", False),
        ("train.lr", "1e-3", 1e-3),
        ("tokenizer.eos_token", "010", "010"),
        ("tokenizer.eos_token", "1:30", "1:30"),
        ("tokenizer.eos_token", "no", "no"),
        ("tokenizer.eos_token", "2024-01-01", "2024-01-01"),
        ("tokenizer.eos_token", "<#eos#>", "<#eos#>"),
        ("tokenizer.eos_token", '"7"', "7"),
        ("tokenizer.eos_token", "null", None),
    ],
)
def test_type_of_the_key_decides_what_a_word_is(tmp_path, key, text, value):
    section, name = key.split(".")
    file, sheet = tmp_path / "config.yaml", tmp_path / "runs.tsv"
    file.write_text(f"{section}:\n  {name}: {text}\n")
    sheet.write_text(f"run\t{key}\nbase\t{text}\n")
    configs = [
        load_config(file),
        load_config("/dev/null", dict([parse_override(f"--{key}={text}")])),
        run_configs({}, sheet)["base"],
    ]
    assert [getattr(getattr(config, section), name) for config in configs] == [value] * 3


@pytest.mark.parametrize("text", ["0o17", "1:30", "0x10", "2024-01-01", "nine", "True"])
def test_word_that_is_no_decimal_number_is_refused_for_a_number(text):
    for key in ("train.seed", "train.lr"):
        with pytest.raises(ConfigError, match=rf"{key} is '?{text}'?: .*"):
            load_config("/dev/null", dict([parse_override(f"--{key}={text}")]))


def test_number_for_a_text_key_says_how_to_make_it_text():
    with pytest.raises(ConfigError, match=r'eos_token is 7: .*put it in quotes: "7"'):
        load_config("/dev/null", {"tokenizer.eos_token": 7})


@pytest.mark.parametrize(
    "text", ["#5", "a #b", "a: b", "- a", "*x", "&x", "!x", "[x] #y", "[a", "|"]
)
def test_cell_is_never_cut_nor_taken_for_a_yaml_document(text):
    assert read_cell(text) == text


def test_characters_above_the_basic_plane_survive_json():
    assert read_yaml(json.dumps({"a": "😀 é\n"})) == {"a": "😀 é\n"}
    assert read_cell(json.dumps(["😀"])) == ["😀"]


# --- what YAML can do that no config needs ------------------------------------------------------------

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + below] * 9)}]\n"
    for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, r"line 2: the alias \*a is not supported"),
        ("a: &a [*a]\n", r"alias \*a"),
        ("train: {seed: 1, seed: 2}\n", "line 1: duplicate key seed"),
        ("run: a\ntrain:\n  lr: 1\nrun: b\n", "line 4: duplicate key run"),
        ("a: !!set {x, y}\n", "tag .*set is not supported"),
        ("a: !!python/object:os.system x\n", "tag .*python.*not supported"),
        ("a: !!binary aGk=\n", "tag .*binary"),
        ("? [a]\n: b\n", "a key must be a plain word"),
        ("---\nrun: a\n---\nrun: b\n", "second document"),
        ("a: " + "[" * 30 + "]" * 30, "more than 20 levels"),
        ("a: " + "[" * 100_000, "more than 200 open brackets"),
        ("\n".join(" " * n + "a:" for n in range(1000)), "more than 20 levels"),
        ('a: "\\ud83d"\n', "half a surrogate pair"),
        ("a: [1\n", "line"),
        ("a:\t- b\n\tc", "line"),
        ("- a\n- b\n", "must hold keys and values"),
        ("word\n", "must hold keys and values"),
    ],
)
def test_config_file_beyond_plain_keys_and_values_is_refused_at_once(tmp_path, text, message):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    begun = time.process_time()
    with pytest.raises(ConfigError, match=message) as caught:
        read_values(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - begun < 5


def test_integers_of_any_length_are_refused_by_key(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"train: {{seed: {'9' * 5000}}}\n")
    sheet = tmp_path / "runs.tsv"
    sheet.write_text(f"run\ttrain.seed\nbase\t{'9' * 5000}\n")
    for read in (
        lambda: load_config(file),
        lambda: load_config("/dev/null", dict([parse_override(f"--train.seed={'9' * 5000}")])),
        lambda: load_config("/dev/null", dict([parse_override(f"--train.lr={'9' * 5000}")])),
        lambda: load_config("/dev/null", dict([parse_override(f"--train.compile={'9' * 4000}")])),
        lambda: load_config("/dev/null", {"train.max_steps": 10**30}),
        lambda: run_configs({}, sheet),
    ):
        with pytest.raises(ConfigError, match=r"train\.(seed|lr|compile|max_steps)") as caught:
            read()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", [b"\xff\xfe\x00a", b"a: \xe9\n", bytes(5 * 2**20)])
def test_file_that_is_no_text_is_refused(tmp_path, content):
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"not UTF-8|more than|cannot read"):
        read_values(file)


def test_endless_file_is_refused():
    with pytest.raises(ConfigError, match="/dev/zero has more than"):
        read_values("/dev/zero")


def test_folder_and_unusable_names_are_refused(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (tmp_path, "x" * 300, "a\0b", tmp_path / "file/x", loop):
        with pytest.raises(ConfigError, match=r"cannot read config file|does not exist"):
            read_values(path)


# --- fuzzing ----------------------------------------------------------------------------------------

CHARACTERS = st.characters(codec="utf-8") | st.sampled_from(
    list("[]{}:,#&*!|>'\"%@`-?\n\t 0123456789")
)
TEXTS = st.text(CHARACTERS, max_size=60)


@given(TEXTS)
@example("[\0]")
@example("{a: {b: [")
def test_any_file_is_values_or_yamlerror(text):
    with contextlib.suppress(yaml.YAMLError):
        read_yaml(text)


FINITE = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers() | FINITE | st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_json_of_any_value_is_read_as_that_value(value):
    assert read_yaml(json.dumps(value)) == value


@given(VALUES | TEXTS | st.sampled_from([*WORDS, "a\nb", "\0", "[x", "#"]))
def test_cell_of_any_value_is_read_as_that_value(value):
    assert read_cell(as_cell(value)) == value


@pytest.mark.parametrize("text", ["probe", "def x():", "[x", "#", "ü"])
def test_cell_of_a_plain_text_has_no_quotes(text):
    assert as_cell(text) == text


KEYS = [
    *("run", "results", "data", "ids", "train"),
    *(
        f"{section}.{key}"
        for section in ("tokenizer", "tokenize", "model", "train", "report")
        for key in type(getattr(Config(), section)).model_fields
    ),
]


@example("tokenizer.hub", "9" * 5000)
@given(
    st.sampled_from(KEYS), TEXTS | st.sampled_from([*WORDS, "9" * 5000, "1e308", "-0", "{a: b}"])
)
def test_any_override_is_a_config_or_a_config_error(key, text):
    try:
        values = apply_overrides({}, dict([parse_override(f"--{key}={text}")]))
        config = checked(Config, values, "a test")
        assert Config.model_validate(json.loads(json.dumps(config.to_json()))) == config
    except ConfigError as err:
        assert len(str(err)) < 2000


MACHINE_KEYS = [
    f"{section}.{key}"
    for section in ("fabric", "stage", "preflight", "slurm")
    for key in Machine.model_fields[section].annotation.model_fields
]


@given(
    st.sampled_from([*MACHINE_KEYS, *Machine.model_fields]),
    TEXTS | st.sampled_from([*WORDS, "1e308"]),
)
def test_any_override_of_machine_yaml_is_a_machine_or_a_config_error(key, text):
    with contextlib.suppress(ConfigError):
        load_machine(None, dict([parse_override(f"--{key}={text}")]))


@given(st.lists(st.lists(TEXTS, min_size=1, max_size=4), max_size=5), st.sampled_from(KEYS))
def test_any_sheet_is_runs_or_a_config_error(tmp_path_factory, rows, key):
    sheet = tmp_path_factory.getbasetemp() / "fuzzed.tsv"
    text = "\n".join([f"run\t{key}", *("\t".join(row) for row in rows)])
    sheet.write_bytes(text.encode())
    with contextlib.suppress(ConfigError):
        run_configs({}, sheet)
