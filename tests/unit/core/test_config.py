"""A typo in a config that trains with a default costs days: everything unknown is refused."""

import json
from typing import get_args

import pytest
from support.each import hold_for_each

from forge.core.config import (
    ALIASES,
    Config,
    ResolvedConfig,
    Section,
    apply_overrides,
    checked,
    load_config,
    parse_override,
)
from forge.core.errors import ConfigError
from forge.core.machine import Machine, load_machine
from forge.core.section import tagged_sections
from forge.core.values import read_cell


def config_of(**overrides):
    return load_config("/dev/null", overrides)


def test_unknown_key_is_refused_with_the_valid_ones_and_a_guess():
    with pytest.raises(ConfigError) as caught:
        config_of(**{"train.max_stepz": 5})
    assert "unknown key train.max_stepz" in str(caught.value)
    assert "did you mean max_steps?" in str(caught.value)
    assert "warmup_steps" in str(caught.value)


def check_alias(alias):
    section, _, key = ALIASES[alias].partition(".")
    names = type(getattr(Config(), section)).model_fields
    assert key in names and alias not in names
    with pytest.raises(ConfigError) as caught:
        config_of(**{f"{section}.{alias}": 1})
    assert f"unknown key {section}.{alias} (did you mean {key}?)" in str(caught.value)


def test_each_name_of_other_software_is_answered_with_the_key_that_is_meant():
    hold_for_each(((alias, alias) for alias in sorted(ALIASES)), check_alias)


def test_key_of_another_section_is_named_with_it():
    with pytest.raises(ConfigError, match=r"train\.n_layers \(did you mean model\.layers\?\)"):
        config_of(**{"train.n_layers": 2})


def test_unknown_key_of_a_large_section_is_not_answered_with_all_its_keys():
    with pytest.raises(ConfigError) as caught:
        config_of(**{"train.learning_rate": 0.1})
    assert "did you mean lr?" in str(caught.value)
    assert "the nearest of the 38 keys of train: " in str(caught.value)
    assert str(caught.value).splitlines()[0].count(",") < 6


def test_unknown_section_is_refused():
    with pytest.raises(ConfigError, match=r"unknown key trian.*did you mean train\?"):
        config_of(trian={"lr": 1})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.lr", "fast", "train.lr is 'fast'"),
        ("train.lr", 0, "greater than 0"),
        ("train.max_steps", 1.5, "train.max_steps is 1.5"),
        ("train.precision", "fp8", "'fp32' or 'bf16'"),
        *(
            (
                "train.checkpoint_minutes",
                value,
                "must be auto, null, or a number of minutes above 0",
            )
            for value in (0, -1, True, "atuo", "10m", [5])
        ),
        ("tokenize.val_fraction", 1, "less than 1"),
        ("tokenize.inputs", [], "at least 1 item"),
        ("model.dim", 100, "an even integer, got 100 / 8"),
        ("model.kv_heads", 3, "heads 8 is not a multiple of kv_heads 3"),
        ("tokenizer.source", "hub", "hub must be given"),
        ("tokenizer.hub", "no-revision", "owner/name@revision"),
        ("results", "a{b}", "braces"),
        ("report.prompts", [""], "at least 1 character"),
    ],
)
def test_bad_value_is_named_with_its_key(key, value, message):
    with pytest.raises(ConfigError) as caught:
        config_of(**{"model.heads": 8, "model.dim": 256, **{key: value}})
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["slurm.options", "slurm.controller.options"])
def test_options_that_cannot_be_split_into_words_are_named_with_their_key(key):
    with pytest.raises(ConfigError, match=rf"{key} .*--comment=Ada's.*No closing quotation"):
        load_machine(None, {key: "--comment=Ada's"})


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "-rf", "a b", "$(id)", "", ".hidden", "x" * 65, "ü"]
)
def test_run_name_is_never_a_path_an_option_or_shell(name):
    with pytest.raises(ConfigError, match="run"):
        config_of(run=name)


def test_warmup_beyond_decay_is_refused():
    with pytest.raises(ConfigError, match="warmup_steps 50 is larger than decay_steps 10"):
        config_of(**{"train.warmup_steps": 50, "train.decay_steps": 10})


def test_overrides_win_over_the_file_and_leave_its_other_keys(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("train: {lr: 0.5, seed: 7}\n")
    config = load_config(file, {"train.lr": 0.25})
    assert (config.train.lr, config.train.seed) == (0.25, 7)


@pytest.mark.parametrize(
    ("key", "rule"), [("time_min", "train_run"), ("validate_time_min", "validate_run")]
)
def test_least_time_of_a_job_is_read_as_null_and_else_refused_with_what_replaces_it(
    tmp_path, key, rule
):
    file = tmp_path / "machine.yaml"
    file.write_text(f"slurm: {{warn_sec: 60, {key}: null}}\n")
    assert load_machine(file) == load_machine(None, {"slurm.warn_sec": 60})
    file.write_text(f"slurm: {{{key}: 30}}\n")
    said = f"slurm.{key} is 30: this key was removed: set a shorter `runtime` of {rule}"
    with pytest.raises(ConfigError, match=said):
        load_machine(file)


def test_the_workflows_sample_sheet_is_named_in_its_file_and_nowhere_else(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("runs: sweep.tsv\ntrain: {seed: 7}\n")
    assert load_config(file) == config_of(**{"train.seed": 7})
    for key in ("runs", "train.runs"):
        with pytest.raises(ConfigError, match=f"unknown key {key}"):
            load_config(file, {key: "sweep.tsv"})


def test_a_full_section_can_be_overridden_with_json():
    key, value = parse_override('--model={"dim": 64, "heads": 2}')
    assert config_of(**{key: value}).model.dim == 64


def test_two_configs_that_train_the_same_are_equal_of_training():
    ids = {"ids": {"tokenizer": "0" * 12, "tokens": "1" * 12}}
    one, later, longer = (
        ResolvedConfig.model_validate(config_of(**overrides).to_json() | ids)
        for overrides in ({}, {"validate.depth": "load"}, {"train.max_steps": 7})
    )
    assert one.of_training == later.of_training != longer.of_training


def test_numbers_in_scientific_notation_are_numbers():
    assert read_cell("1e-3") == 0.001
    assert read_cell("3") == 3
    assert read_cell("true") is True


def test_config_survives_its_own_json_unchanged():
    config = config_of()
    again = Config.model_validate(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert json.dumps(again.to_json()) == json.dumps(config.to_json())


def keys_of(model, kind, prefix=""):
    """Dotted names of the keys that take a value of type `kind`."""
    for name, field in model.model_fields.items():
        tagged = tagged_sections(field.annotation).values()
        below = [*tagged] or get_args(field.annotation) or (field.annotation,)
        dotted = prefix + (field.alias or name)
        if isinstance(below[0], type) and issubclass(below[0], Section):
            yield from keys_of(below[0], kind, f"{dotted}.")
        elif kind in below:
            yield dotted


INFINITE = ["inf", "-inf", "nan", ".inf", ".nan", "Infinity", "1e999"]


def check_infinite(case):
    load, key, value = case
    with pytest.raises(ConfigError, match=f"{key} is '?{value.replace('1e999', 'inf')}'?: "):
        load("/dev/null", dict([parse_override(f"--{key}={value}")]))
    with pytest.raises(ConfigError, match=f"{key} is "):
        load("/dev/null", {key: float(value.replace(".", ""))})


def test_no_number_is_infinite():
    """Infinity satisfies every lower bound: train.grad_clip=.inf passed, then ended in a traceback."""
    keys = [(load_config, key) for key in keys_of(Config, float)]
    keys += [(load_machine, key) for key in keys_of(Machine, float)]
    cases = ((f"{key}={value}", (load, key, value)) for load, key in keys for value in INFINITE)
    hold_for_each(cases, check_infinite)


def check_true(key):
    with pytest.raises(ConfigError, match=f"{key} is True: Input should be a number"):
        load_config("/dev/null", {key: True})


def test_true_is_no_number():
    """Else train.max_steps=true trains one step."""
    keys = [*keys_of(Config, int), *keys_of(Config, float)]
    hold_for_each(((key, key) for key in keys), check_true)


@pytest.mark.parametrize("key", ["results", "data", "tokenizer.path", "tokenize.inputs"])
@pytest.mark.parametrize(
    ("path", "message"),
    [("a\0b", "null byte"), ("a/" + "x" * 256, "more than 255 bytes"), ("a/" * 2000, "3072 bytes")],
)
def test_path_that_no_file_can_have_is_refused(key, path, message):
    with pytest.raises(ConfigError, match=rf"{key}.* is .*: .*{message}"):
        config_of(**{key: [path] if key == "tokenize.inputs" else path})


def test_text_that_is_not_utf8_is_refused():
    """What a terminal in another encoding gives: Python keeps such bytes as surrogates."""
    with pytest.raises(ConfigError, match=r"results is .*: .*unicode"):
        config_of(results=b"caf\xe9".decode(errors="surrogateescape"))


def test_override_below_a_value_is_refused():
    with pytest.raises(ConfigError, match="run is not a section"):
        apply_overrides({"run": "x"}, {"run.y": 1})


def test_missing_and_broken_config_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match=r"cannot read config file .*bad\.yaml"):
        load_config(tmp_path / "bad.yaml")


def test_vocabulary_of_a_tokenizer_that_is_not_made_here_is_estimated_from_above():
    assert config_of(**{"tokenizer.vocab_size": 999}).tokenizer.expected_vocab_size == 999
    given = {"tokenizer.source": "path", "tokenizer.path": "t.json", "tokenizer.vocab_size": 999}
    assert config_of(**given).tokenizer.expected_vocab_size >= 262_144


@pytest.mark.parametrize("shard", ["nodes", 1, 0, -2, 2.5, True, None, "1"])
def test_shard_that_is_no_number_of_ranks_is_refused_in_one_sentence(shard):
    with pytest.raises(ConfigError) as error:
        checked(Config, {"train": {"shard": shard}}, "config.yaml")
    [line] = [line for line in str(error.value).splitlines() if "train.shard is" in line]
    assert line.endswith("must be none, node, all, or a number of ranks, 2 or more")


@pytest.mark.parametrize(
    ("written", "read"), [(None, None), ("auto", "auto"), (0.5, 0.5), (5, 5.0), ("5", 5.0)]
)
def test_checkpoint_minutes_are_a_number_auto_or_null(written, read):
    assert config_of(**{"train.checkpoint_minutes": written}).train.checkpoint_minutes == read


@pytest.mark.parametrize("shard", ["none", "node", "all", 2, 128])
def test_shard_is_a_name_or_a_number(shard):
    assert checked(Config, {"train": {"shard": shard}}, "config.yaml").train.shard == shard


@pytest.mark.parametrize(
    ("given", "meanings"),
    [
        (
            {"train": {"max_steps": 0}},
            ["train.max_steps (integer ≥ 1, default 200): Train up to this step; "],
        ),
        ({"train": {"max_step": 9}}, ["train.max_steps (integer ≥ 1, default 200): "]),
        ({"max_steps": 9}, ["train.max_steps (integer ≥ 1, default 200): "]),
        ({"learning_rate": 9}, ["train.lr (number > 0, default 0.003): Peak learning rate."]),
        ({"model": {"architecture": "gpt2", "dimm": 9}}, ["model.dim (integer ≥ 8, default "]),
        ({"tokenize": {"inputs": [3]}}, ["tokenize.inputs (list of text, default ["]),
        ({"tokenize": {"sources": {"web": {"inputs": 3}}}}, ["tokenize.sources.web.inputs ("]),
        (
            {"model": {"dim": 190, "heads": 6}},
            ["model.dim (", "model.heads (", "model.head_dim (integer ≥ 2 or null, default null)"],
        ),
        (
            {"train": {"lr": "fast"}, "evaluate": {"tasks": 3}},
            ["train.lr (number > 0", "evaluate.tasks (list of text, default []): Names of tasks"],
        ),
        ({"run": "a b"}, ['run (text, default "base"): Name of the run and of its directory']),
        ({"foo": 3}, ["config/README.md, profiles/README.md and docs/plugins list every key"]),
    ],
)
def test_error_has_the_meaning_of_the_keys_that_it_names(given, meanings):
    with pytest.raises(ConfigError) as error:
        checked(Config, given, "config.yaml")
    for line, meaning in zip(error.value.fix.splitlines(), meanings, strict=True):
        assert line.strip().startswith(meaning)


def test_tab_in_a_config_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text("train:\n\tmax_steps: 3\n")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "config.yaml")
    assert "line 2" in error.value.what
    assert error.value.cause == "a tab in this line: YAML is indented by blanks"


@pytest.mark.parametrize("named", ["wide", "results/wide"])
def test_run_in_place_of_a_config_is_refused_with_the_file_to_name(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results/wide").mkdir(parents=True)
    (tmp_path / "results/wide/config.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        load_config(named)
    assert error.value.fix == "name the run's: results/wide/config.json"
    assert load_config(error.value.fix.rpartition(" ")[2]).run == "base"


def test_rewind_is_refused_with_what_to_do_instead():
    with pytest.raises(ConfigError) as error:
        config_of(**{"train.spike": "rewind"})
    [line] = [line for line in str(error.value).splitlines() if "train.spike is" in line]
    assert "train.spike is 'rewind': Forge does not rewind any more: use stop or skip" in line
    assert "parent: RUN@STEP and another train.seed" in line


@pytest.mark.parametrize(
    ("key", "unset", "value", "instead"),
    [
        (
            "certify.every",
            None,
            100,
            "certify: this key was removed: `forge rep",
        ),
        (
            "train.keep_pairs",
            False,
            True,
            "train.keep_pairs is True: this key was removed: a smaller",
        ),
    ],
)
def test_keys_that_were_removed_are_refused_where_they_are_set(key, unset, value, instead):
    assert config_of(**{key: unset}) == config_of()
    with pytest.raises(ConfigError) as error:
        config_of(**{key: value})
    assert instead in str(error.value)
