"""Against weights that are not what a person meant: every wrong mix is refused, with what to write."""

from __future__ import annotations

from fractions import Fraction

import pytest

from forge.core.config import Config, checked, parse_override
from forge.core.errors import ConfigError
from forge.core.mix import MixStage, stage_at, stages
from forge.core.sample_sheet import run_configs

SOURCES = {"web": {"inputs": ["web"]}, "code": {"inputs": ["code"], "text_field": "content"}}
STAGES = [{"step": 0, "web": 0.7, "code": 0.3}, {"step": 8000, "web": 3, "code": 7}]


def config_of(mix=None, sources=SOURCES, **values):
    return checked(
        Config, {"tokenize": {"sources": sources}, "train": {"mix": mix}, **values}, "the test"
    )


@pytest.mark.parametrize("mix", [None, {"web": 0.7, "code": 0.3}, {"code": 0, "web": 1}, STAGES])
def test_config_with_sources_is_read_again_as_it_is_written(mix):
    config = config_of(mix)
    assert Config(**config.to_json()) == config
    assert config.to_json()["train"]["mix"] == mix
    assert set(config.to_json()["tokenize"]) == {
        "sources",
        "fast",
        "val_fraction",
        "shard_tokens",
        "part_mib",
    }


def test_config_without_sources_has_no_key_of_them():
    assert "sources" not in Config().to_json()["tokenize"]


def test_cell_of_the_sheet_and_option_give_stages():
    text = "[{step: 0, web: 0.7, code: 0.3}, {step: 8000, web: 3, code: 7}]"
    assert parse_override(f"--train.mix={text}") == ("train.mix", STAGES)


def test_wrong_cell_of_the_sheet_is_named_by_line_and_column(tmp_path):
    (tmp_path / "runs.tsv").write_text("run\ttrain.mix\nbase\t{wep: 1, code: 1}\n")
    told = (
        r"line 2 \(run base\), column train\.mix: value .*names the source wep \(did you mean web"
    )
    with pytest.raises(ConfigError, match=told):
        run_configs({"tokenize": {"sources": SOURCES}}, tmp_path / "runs.tsv")


@pytest.mark.parametrize(
    ("mix", "told"),
    [
        (
            0.5,
            "train.mix is 0.5: must be weights by source, such as {web: 0.7, code: 0.3}, or a list",
        ),
        ([], "must be weights by source"),
        ({"wep": 1, "code": 1}, r"names the source wep \(did you mean web\?\).* code, web"),
        ({"code": 1}, "train.mix has no weight of web; write 0"),
        ({"web": -1, "code": 1}, "the weight of web is -1; it must be a number, 0 or more"),
        ({"web": 10**400, "code": 1}, "the weight of web is 1000.*…; it must be a number"),
        ({"web": True, "code": 1}, "the weight of web is True"),
        ({"web": "much", "code": 1}, "the weight of web is 'much'"),
        ({"web": float("inf"), "code": 1}, "the weight of web is inf"),
        ({"web": float("nan"), "code": 1}, "the weight of web is nan"),
        ({"web": 0, "code": 0}, "at least one source must have a weight above 0"),
        ({"web": 1e-9, "code": 1}, "source web has 1e-09 of the samples from step 0 on.*or 0"),
        ([{"web": 1, "code": 1}], "stage 1 is .*; it needs the step at which it begins"),
        ([{"step": 1.5, "web": 1, "code": 1}], "stage 1 is .*; it needs the step"),
        ([7], "stage 1 is 7; it needs the step"),
        (
            [{"step": 5, "web": 1, "code": 1}],
            "begins at step 5, but the run at step 0: add a stage",
        ),
        ([STAGES[1], STAGES[0]], "stage 2 begins at step 0, the one before it at 8000"),
        ([STAGES[0], {"step": 9, "web": 1}], "no weight of code in the stage of step 9"),
    ],
)
def test_wrong_mix_is_refused_with_what_to_write(mix, told):
    with pytest.raises(ConfigError, match=told):
        config_of(mix)


@pytest.mark.parametrize(
    ("tokenize", "told"),
    [
        (
            {"sources": SOURCES, "inputs": ["x"]},
            "place of inputs, which each source has of its own: remove",
        ),
        ({"sources": SOURCES, "format": "text"}, "takes the place of format"),
        ({"sources": {}}, "at least 1 item"),
        ({"sources": {"web": {}}}, "tokenize.sources.web.inputs: Field required"),
        (
            {"sources": {"web": {"inpts": ["x"]}}},
            "web.inpts .did you mean inputs.*web: document_sep",
        ),
        ({"sources": {"my web": {"inputs": ["x"]}}}, "my web"),
        ({"sources": {"step": {"inputs": ["x"]}}}, "a source cannot have the name step"),
    ],
)
def test_wrong_sources_are_refused_by_key(tokenize, told):
    with pytest.raises(ConfigError, match=told):
        checked(Config, {"tokenize": tokenize}, "the test")


def test_mix_without_sources_is_refused():
    with pytest.raises(
        ConfigError, match=r"train\.mix has weights of sources, and tokenize\.sources"
    ):
        checked(Config, {"train": {"mix": {"web": 1}}}, "the test")


def test_stages_of_a_child_may_begin_with_its_parents_step():
    late = [{"step": 5000, "web": 1, "code": 1}]
    assert config_of(late, parent="first@5000").train.mix == late
    with pytest.raises(ConfigError, match="begins at step 5000, but the run at step 4999"):
        config_of(late, parent="first@4999")


def test_weights_count_as_the_decimal_numbers_that_people_write():
    assert MixStage(0, {"web": 0.7, "code": 0.3}).shares == {
        "code": Fraction(3, 10),
        "web": Fraction(7, 10),
    }
    assert MixStage(0, {"web": 7, "code": 3}).has_shares_of(
        MixStage(9, {"code": 0.3, "web": 0.7, "new": 0})
    )


def test_a_stage_holds_from_its_step_until_the_next_one():
    first, second = stages(STAGES)
    assert [stage_at([first, second], step) for step in (0, 7999, 8000, 10**9)] == [
        *(first, first),
        *(second, second),
    ]
