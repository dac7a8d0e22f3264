"""Other bits are excused by other hardware, torch or ranks alone, and only within the tolerance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.manifests import IDS, NUMERICS, lineage_of, manifest_of

from forge.attestation import judgement
from forge.attestation.intervals import Interval
from forge.attestation.judgement import TOLERANCE, judged
from forge.attestation.state_difference import StateDifference
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Code, Hardware, Versions
from forge.core.config import ResolvedConfig

CONFIG = ResolvedConfig(ids=IDS)
LINKS: dict[str, dict[str, Any]] = {
    "export": {"weights": "w" * 64},
    "launches": {"launches": [{"world_size": 2, "resumed_from": 0, "last_step": 9}]},
}
OTHER_CPU = {"hardware": Hardware(host="laptop", cpu="Example 10")}


def checkpoint(folder: Path, **facts: Any) -> Checkpoint:
    folder.mkdir()
    manifest_of(9, lineage=lineage_of(CONFIG, **facts)).write(folder)
    return Checkpoint.open(folder)


def outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: float, links: Any = LINKS, **facts: Any
) -> tuple[str, list[str]]:
    """facts: of what trains again."""
    difference = StateDifference(is_bitwise=not apart, weights=apart, loss=0.0)
    monkeypatch.setattr(judgement, "state_difference", lambda *_: difference)
    stated, made = checkpoint(tmp_path / "stated"), checkpoint(tmp_path / "made", **facts)
    result = judged(Interval(0, 9, None, stated), made, "", links)
    return result.outcome, result.why


def test_other_bits_on_the_same_hardware_are_another_result(tmp_path, monkeypatch):
    assert outcome(tmp_path, monkeypatch, 1e-12) == ("other", [])


def test_other_commit_excuses_nothing(tmp_path, monkeypatch):
    code = Code(version="0.2.0", commit="f" * 40, dirty=False)
    assert outcome(tmp_path, monkeypatch, 1e-12, code=code) == ("other", [])


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (OTHER_CPU, "CPU Example 9000 then, Example 10 here"),
        (
            {"versions": Versions(python="3.11.9", torch="2.14.0", torchao=None)},
            "torch 2.13.0 then, 2.14.0 here",
        ),
        (
            {"numerics": NUMERICS.model_copy(update={"cpu_capability": "AVX512"})},
            "cpu_capability AVX2 then, AVX512 here",
        ),
    ],
)
def test_other_hardware_is_named_and_excuses_what_is_within_the_tolerance(
    tmp_path, monkeypatch, facts, why
):
    assert outcome(tmp_path, monkeypatch, 1e-6, **facts) == ("within tolerance", [why])


def test_other_hardware_does_not_excuse_what_is_beyond_the_tolerance(tmp_path, monkeypatch):
    beyond = 2 * TOLERANCE["weights"]
    assert outcome(tmp_path, monkeypatch, beyond, **OTHER_CPU)[0] == "other"


def test_launch_on_other_ranks_in_the_interval_is_a_reason(tmp_path, monkeypatch):
    launches = [
        {"world_size": 4, "resumed_from": 0, "last_step": 5},
        {"world_size": 2, "resumed_from": 5, "last_step": 9},
        {"world_size": 8, "resumed_from": 9, "last_step": 20},  # after it
    ]
    links = {**LINKS, "launches": {"launches": launches}}
    why = ["2 and 4 ranks then, 2 here"]
    assert outcome(tmp_path, monkeypatch, 1e-6, links) == ("within tolerance", why)


def test_without_a_checkpoint_only_the_stated_weights_will_do(tmp_path):
    made, interval = checkpoint(tmp_path / "made", **OTHER_CPU), Interval(0, 9, None, None)
    assert judged(interval, made, "w" * 64, LINKS).outcome == "bitwise"
    assert judged(interval, made, "0" * 64, LINKS).outcome == "other"


def test_other_packages_are_named_in_one_note_and_those_beyond_five_counted():
    stated = dict.fromkeys(("a", "b", "c", "d", "e", "f", "numpy", "torch"), "1")
    code = lineage_of(CONFIG).code.to_json()
    environment = {"versions": {"torch": "2.13.0"}, "packages": stated, "cpu": "Example 9000"}
    links: Any = {"code": {"forge": code}, "environment": environment}
    packages = {**dict.fromkeys("bcdef", "2"), "numpy": "1", "torch": "2.13.0"}
    [note] = judgement.differences(links, lineage_of(CONFIG, packages=packages))
    assert note.startswith("other packages: a 1 then, none here; b 1 then, 2 here;")
    assert note.endswith("; and 1 more") and "torch" not in note
