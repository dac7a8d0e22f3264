"""Other bits are accepted of other hardware, torch or ranks alone, and only within the tolerance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.manifests import IDS, NUMERICS, lineage_of, manifest_of

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Code, Hardware, Versions
from forge.core.config import ResolvedConfig
from forge.plugins.attestation import judgement
from forge.plugins.attestation.intervals import Interval
from forge.plugins.attestation.judgement import TOLERANCE, differences, judged
from forge.plugins.attestation.state_difference import StateDifference
from forge.validation import replay

CONFIG = ResolvedConfig(ids=IDS)
CPU, TORCH = "Example 9000", "2.13.0"
WITHIN = 1e-6
LINKS: dict[str, dict[str, Any]] = {
    "export": {"weights": "w" * 64},
    "launches": {"launches": [{"world_size": 2, "resumed_from": 0, "last_step": 9}]},
    "code": {"forge": lineage_of(CONFIG).code.to_json()},
    "environment": {"versions": {"torch": TORCH}, "packages": None, "cpu": CPU},
}
RESIZED = {
    **LINKS,
    "launches": {
        "launches": [
            {"world_size": 4, "resumed_from": 0, "last_step": 5},
            {"world_size": 2, "resumed_from": 5, "last_step": 9},
            {"world_size": 8, "resumed_from": 9, "last_step": 20},  # after the interval
        ]
    },
}
OTHER_CODE = Code(version="0.2.0", commit="f" * 40, dirty=False)
OTHER_CPU = Hardware(host="laptop", cpu="Example 10")
OTHER_TORCH = Versions(python="3.11.9", torch="2.14.0", torchao=None)
AVX512 = NUMERICS.model_copy(update={"cpu_capability": "AVX512"})
GPU = NUMERICS.model_copy(update={"device": "cuda"})


def checkpoint(folder: Path, **facts: Any) -> Checkpoint:
    """Step 9. facts: of its manifest (compiled), of its config (shard), or of its lineage."""
    folder.mkdir()
    why_not = "" if facts.pop("compiled", False) else "not asked for"
    config = ResolvedConfig.model_validate(
        {"ids": IDS.model_dump(), "train": {"shard": facts.pop("shard", "none")}}
    )
    lineage = lineage_of(config, **facts)
    manifest_of(9, lineage=lineage, why_not_compiled=why_not).write(folder)
    return Checkpoint.open(folder)


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The outcome where all weights are so far apart. then, now: facts of the checkpoint of the run, and
    of the one that this machine has made again."""

    def of(
        apart: float,
        *,
        then: dict[str, Any] | None = None,
        now: dict[str, Any] | None = None,
        links: Any = LINKS,
    ) -> str:
        stated = checkpoint(tmp_path / "stated", **(then or {}))
        made = checkpoint(tmp_path / "made", **(now or {}))
        lineage = made.manifest.lineage
        monkeypatch.setattr(replay, "cpu_name", lambda: lineage.hardware.cpu)
        monkeypatch.setattr(replay, "versions", lambda: {"torch": lineage.versions.torch})
        difference = StateDifference(is_bitwise=not apart, weights=apart, loss=0.0)
        monkeypatch.setattr(judgement, "state_difference", lambda *_: difference)
        result = judged(Interval(0, 9, None, stated), made, "", links)
        assert result.why == []
        return result.outcome

    return of


@pytest.mark.parametrize(
    "fact", [{}, {"compiled": True}, {"shard": "all"}], ids=["eager", "compiled", "sharded"]
)
def test_other_bits_of_the_same_arithmetic_are_another_result(outcome, fact):
    assert outcome(1e-12, then=fact, now=fact) == "other"


def test_other_commit_excuses_nothing(outcome):
    assert outcome(1e-12, now={"code": OTHER_CODE}) == "other"


@pytest.mark.parametrize(
    "now",
    [
        {"hardware": OTHER_CPU},
        {"versions": OTHER_TORCH},
        {"numerics": AVX512},
        {"compiled": True},
    ],
    ids=["CPU", "torch", "kernels", "compiled"],
)
def test_other_arithmetic_may_give_other_bits_within_the_tolerance(outcome, now):
    assert outcome(WITHIN, now=now) == "within tolerance"


@pytest.mark.parametrize("fact", [{"numerics": GPU}, {"shard": "node"}], ids=["GPU", "node"])
def test_gpus_and_ranks_of_a_node_may_give_other_bits_to_each_other(outcome, fact):
    assert outcome(WITHIN, then=fact, now=fact) == "within tolerance"


def test_launch_on_other_ranks_in_the_interval_may_give_other_bits(outcome):
    assert outcome(WITHIN, links=RESIZED) == "within tolerance"


def test_other_hardware_does_not_excuse_what_is_beyond_the_tolerance(outcome):
    assert outcome(2 * TOLERANCE["weights"], now={"hardware": OTHER_CPU}) == "other"


def test_same_bits_are_bitwise_on_other_hardware_too(outcome):
    assert outcome(0.0, now={"hardware": OTHER_CPU}) == "bitwise"


def test_without_a_checkpoint_only_the_stated_weights_will_do(tmp_path):
    made, interval = checkpoint(tmp_path / "made", hardware=OTHER_CPU), Interval(0, 9, None, None)
    assert judged(interval, made, "w" * 64, LINKS).outcome == "bitwise"
    assert judged(interval, made, "0" * 64, LINKS).outcome == "other"


# --- differences ------------------------------------------------------------------------------------


def named(tmp_path: Path, links: Any = LINKS, **now: Any) -> set[str]:
    stated, made = checkpoint(tmp_path / "stated"), checkpoint(tmp_path / "made", **now)
    return {*differences(Interval(0, 9, None, stated), made, links)}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, set()),
        ({"hardware": OTHER_CPU}, {"CPU Example 9000 then, Example 10 here"}),
        ({"versions": OTHER_TORCH}, {"torch 2.13.0 then, 2.14.0 here"}),
        ({"numerics": AVX512}, {"cpu_capability AVX2 then, AVX512 here"}),
        ({"compiled": True}, {"compiled on one side only"}),
    ],
    ids=["nothing", "CPU", "torch", "kernels", "compiled"],
)
def test_what_differs_is_named(tmp_path, now, said):
    assert named(tmp_path, **now) == said


def test_other_ranks_in_the_interval_are_named(tmp_path):
    assert named(tmp_path, RESIZED) == {"2 and 4 ranks then, 2 here"}


def test_machine_of_the_interval_is_named_beside_that_of_the_statement(tmp_path):
    links = {**LINKS, "environment": {**LINKS["environment"], "cpu": "Example 1"}}
    both = {f"CPU {cpu} then, Example 10 here" for cpu in ("Example 1", CPU)}
    assert named(tmp_path, links, hardware=OTHER_CPU) == both


def test_numerics_of_the_statement_are_compared_where_the_last_checkpoint_is_not_here(tmp_path):
    numerics = {"numerics": NUMERICS.to_json()}
    links = {**LINKS, "environment": {**LINKS["environment"], **numerics}}
    made = checkpoint(tmp_path / "made", numerics=AVX512)
    [said] = differences(Interval(0, 9, None, None), made, links)
    assert said == "cpu_capability AVX2 then, AVX512 here"


def test_other_packages_are_named_in_one_note_and_those_beyond_five_counted(tmp_path):
    stated = dict.fromkeys(("a", "b", "c", "d", "e", "f", "numpy", "torch"), "1")
    links = {**LINKS, "environment": {**LINKS["environment"], "packages": stated}}
    packages = {**dict.fromkeys("bcdef", "2"), "numpy": "1", "torch": TORCH}
    [note] = named(tmp_path, links, packages=packages)
    assert note.startswith("other packages: a 1 then, none here; b 1 then, 2 here;")
    assert note.endswith("; and 1 more") and "torch" not in note
