"""Threat: documents and schema that describe another config than the one the code reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from snakemake.exceptions import WorkflowError  # type: ignore[import-untyped]
from snakemake.utils import validate  # type: ignore[import-untyped]

from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.machine import Machine
from tools.config_docs import ROOT, SCHEMA, TABLES, drifted, keys_text, main


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the generated files, to spoil."""
    for path in (SCHEMA, *(table.file for table in TABLES)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def test_schema_and_tables_are_in_step_with_the_config() -> None:
    assert drifted() == [], "run: python -m tools.config_docs"


def test_check_names_a_drifted_file_and_writes_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tree / TABLES[0].file
    spoiled = readme.read_text().replace("Peak learning rate.", "Learning rate.")
    readme.write_text(spoiled)
    assert main(["--check"], root=tree) == 1
    assert str(TABLES[0].file) in capsys.readouterr().out
    assert readme.read_text() == spoiled


def test_writing_repairs_what_has_drifted_and_keeps_the_prose(tree: Path) -> None:
    readme = tree / TABLES[0].file
    original = readme.read_text()
    readme.write_text(original.replace("Peak learning rate.", "Learning rate."))
    (tree / SCHEMA).unlink()
    assert main([], root=tree) == 0
    assert readme.read_text() == original
    assert main(["--check"], root=tree) == 0


def test_file_without_markers_is_refused(tree: Path) -> None:
    (tree / TABLES[1].file).write_text("# no place\n")
    with pytest.raises(ConfigError, match="no place for the table"):
        main([], root=tree)


def test_every_key_is_in_a_table() -> None:
    text = keys_text(Config, with_resume=True) + keys_text(Machine, with_resume=False)
    for model in (Config, Machine):
        for section, values in model().model_dump(mode="json", by_alias=True).items():
            names = (
                [f"{section}.{key}" for key in values] if isinstance(values, dict) else [section]
            )
            assert all(f"`{name}`" in text for name in names if name != "ids")


def row(key: str) -> list[str]:
    text = keys_text(Config, with_resume=True)
    line = next(line for line in text.splitlines() if line.startswith(f"| `{key}` |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize(
    ("key", "kind", "default", "may_change"),
    [
        ("train.max_steps", "integer ≥ 1", "`200`", "yes"),
        ("train.seed", "integer ≥ 0 and < 4294967296", "`0`", "no"),
        ("train.precision", "`fp32` or `bf16` or null", "`null`", "no"),
        ("tokenize.inputs", "list of text", '`["python:stdlib"]`', "no"),
        ("validate.depth", "`digests` or `load` or `probe`", '`"probe"`', "yes"),
        ("ids.tokens", "text", "set by Forge", "no"),
        ("run", "text", '`"base"`', "–"),
    ],
)
def test_row_tells_type_default_and_whether_it_may_change(
    key: str, kind: str, default: str, may_change: str
) -> None:
    cells = row(key)
    assert cells[1:3] == [kind, default]
    assert cells[3], "every key has a meaning"
    assert cells[4] == may_change


def test_snakemake_accepts_the_schema_and_refuses_a_misspelt_key() -> None:
    validate(Config().to_json(), ROOT / SCHEMA)
    with pytest.raises(WorkflowError, match="max_stepz"):
        validate({"train": {"max_stepz": 3}}, ROOT / SCHEMA)


def test_schema_speaks_the_names_of_the_file() -> None:
    properties = json.loads((ROOT / SCHEMA).read_text())["properties"]
    assert "validate" in properties
    assert "validation" not in properties
