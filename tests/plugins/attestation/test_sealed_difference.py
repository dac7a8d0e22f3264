"""Two checkpoints of another program count as the same where all tensors that can be read are."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from forge.checkpoint.manifest import Code, SealLineage
from forge.checkpoint.sealed import ProgramCheckpoints, SealedCheckpoint
from forge.core.errors import DataError
from forge.core.paths import RunPaths
from forge.core.program_settings import Checkpoints
from forge.plugins.attestation.intervals import Interval
from forge.plugins.attestation.judgement import judged_program
from forge.plugins.attestation.recipe_of_program import ProgramRecipe
from forge.plugins.attestation.sealed_difference import SealedDifference, sealed_difference

NUMBERS = torch.arange(8.0).reshape(4, 2)
LINEAGE = SealLineage(
    run="p",
    config_digest="0",
    command=["python", "train.py"],
    source=None,
    inputs=None,
    world_size=1,
    code=Code(version="0.1.0", commit=None, dirty=None),
)


def sealed(run: Path, step: int = 8, **files: Any) -> SealedCheckpoint:
    """A checkpoint with these files by name without suffix: tensors as safetensors, bytes as they are, a
    dict as a directory of torch.distributed.checkpoint."""
    paths = RunPaths(run)
    folder = paths.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, torch.Tensor):
            save_file({"w": content, "a": torch.ones(2)}, folder / f"{name}.safetensors")
        elif isinstance(content, bytes):
            (folder / f"{name}.pt").write_bytes(content)
        else:
            dcp.save(content, checkpoint_id=folder / name, no_dist=True)
    checkpoint = ProgramCheckpoints(paths, Checkpoints()).seal(folder, step, LINEAGE)
    assert checkpoint is not None
    return checkpoint


def difference(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> SealedDifference:
    return sealed_difference(
        sealed(tmp_path / "made", **one), sealed(tmp_path / "stated", **other), None
    )


def test_same_files_do_not_differ(tmp_path):
    files = {"model": NUMBERS, "optimizer": b"pickle"}
    assert difference(tmp_path, files, files) == SealedDifference(0.0, [])


def test_other_pickle_beside_same_weights_is_named(tmp_path):
    one, other = ({"model": NUMBERS, "optimizer": content} for content in (b"1", b"2"))
    assert difference(tmp_path, one, other) == SealedDifference(0.0, ["optimizer.pt"])


def test_pickles_alone_say_nothing(tmp_path):
    apart = difference(tmp_path, {"model": b"1"}, {"model": b"2"})
    assert apart == SealedDifference(None, ["model.pt"])


@pytest.mark.parametrize("as_stored", [lambda w: w, lambda w: {"model": {"w": w}}])
def test_weights_that_differ_are_measured_by_how_far_they_went(tmp_path, as_stored):
    begin = sealed(tmp_path / "begin", 4, model=as_stored(NUMBERS))
    stated = sealed(tmp_path / "stated", model=as_stored(NUMBERS + 1))
    made = sealed(tmp_path / "made", model=as_stored(NUMBERS + 1.1))
    assert sealed_difference(made, stated, begin).weights == pytest.approx(0.1, rel=1e-5)
    assert sealed_difference(made, stated, None).weights < 0.05


def test_tensors_of_another_shape_are_infinitely_far_apart(tmp_path):
    assert difference(tmp_path, {"model": NUMBERS}, {"model": NUMBERS[:2]}).weights == math.inf


def test_checkpoint_without_a_file_of_the_stated_one_is_infinitely_far_apart(tmp_path):
    apart = difference(tmp_path, {"model": NUMBERS}, {"model": NUMBERS, "more": NUMBERS})
    assert apart.weights == math.inf


def test_file_with_tensors_that_cannot_be_read_is_an_error(tmp_path):
    begin = sealed(tmp_path / "begin", model=NUMBERS)
    bad = sealed(tmp_path / "bad", model=NUMBERS + 1)
    (bad.folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
        sealed_difference(bad, begin, None)


@pytest.mark.parametrize(
    ("step", "outcome"), [(0.0, "bitwise"), (1e-5, "within tolerance"), (0.1, "other")]
)
def test_bits_of_a_program_may_differ_and_its_weights_may_not(tmp_path, step, outcome):
    """Its hardware and packages are in no seal."""
    begin = sealed(tmp_path / "begin", 4, model=NUMBERS)
    end = sealed(tmp_path / "stated", model=NUMBERS + 1)
    made = sealed(tmp_path / "made", model=NUMBERS + 1 + step)
    result = judged_program(Interval(4, 8, begin, end), made, {})
    assert (result.outcome, result.why) == (outcome, [])


def test_whole_run_without_its_last_checkpoint_is_judged_by_the_stated_digest(tmp_path):
    made = sealed(tmp_path / "made", model=NUMBERS)
    links: dict[str, Any] = {"export": {"checkpoint": made.digest}}
    assert judged_program(Interval(0, 8, None, None), made, links).outcome == "bitwise"
    links["export"]["checkpoint"] = "0"
    with pytest.raises(DataError, match="step 8 is not here"):
        judged_program(Interval(0, 8, None, None), made, links)


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (lambda export: None, True),
        (lambda export: (export / "model.safetensors").write_bytes(b"other"), False),
        (lambda export: (export / "more.safetensors").write_bytes(b"of nowhere"), False),
        (lambda export: (export / "model.safetensors").unlink(), False),
    ],
)
def test_export_has_the_files_of_its_checkpoint_and_no_others(tmp_path, change, is_same):
    checkpoint = sealed(tmp_path / "run", model=NUMBERS)
    export = tmp_path / "export"
    shutil.copytree(checkpoint.folder, export)
    (export / "forge.json").write_text("{}")
    change(export)
    recipe: Any = ProgramRecipe({}, None, tmp_path)  # type: ignore[arg-type]
    assert (not recipe.different_files(export, checkpoint, None)) == is_same
