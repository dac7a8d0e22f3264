"""Threat: documents and schema that describe another config than the one the code reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from support.repository import REPOSITORY as ROOT

from forge.core.config import Config
from forge.core.errors import ConfigError
from forge.core.machine import Machine
from tools import messages, packages
from tools.config_docs import SCHEMAS, TABLES, drifted, keys_text, main, predicates, tables

pytestmark = pytest.mark.tools


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the generated files, to spoil."""
    pages = (*(table.file for table in tables()), packages.PAGE, messages.PAGE)
    for path in (*SCHEMAS, *predicates(), *pages):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def test_schema_and_tables_are_in_step_with_the_config() -> None:
    assert drifted(ROOT) == [], "run: python -m tools.config_docs"


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
    for path in SCHEMAS:
        (tree / path).unlink()
    assert main([], root=tree) == 0
    assert readme.read_text() == original
    assert main(["--check"], root=tree) == 0


def test_page_of_the_packages_follows_a_docstring_and_refuses_a_package_that_it_does_not_order(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge = tree / "forge"
    for name, text in {"core": '"""Files and\nnames. No torch."""', "data": '"""Text?"""'}.items():
        (forge / name / "models").mkdir(parents=True)
        (forge / name / "__init__.py").write_text(text)
    (forge / "data/models/of_text.py").write_text("")
    monkeypatch.setattr(packages, "FORGE", forge)
    assert packages.table("so:\n\ncore < data\n").splitlines()[2:] == [
        "| `core` | Files and names. |  |",
        "| `data` | Text? | `models/of_text` |",
    ]
    with pytest.raises(ConfigError, match="do not have the same packages: data, launch"):
        packages.table("core < launch\n")


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


MODELINE = "# yaml-language-server: $schema="
YAML_FILES = [
    *ROOT.glob("config/config.yaml"),
    *ROOT.glob(".test/config/config.yaml"),
    *ROOT.glob("profiles/*/machine.yaml"),
]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_file_names_its_schema_and_satisfies_it(path: Path) -> None:
    first, _, text = path.read_text().partition("\n")
    schema = (path.parent / first.removeprefix(MODELINE)).resolve()
    assert schema.relative_to(ROOT) in SCHEMAS
    checker = Draft202012Validator(json.loads(schema.read_text()))
    assert list(checker.iter_errors(yaml.safe_load(text))) == []


@pytest.mark.parametrize(
    ("path", "wrong"),
    list(zip(SCHEMAS, [{"train": {"max_stepz": 3}}, {"fabric": {"backend": "mpi"}}], strict=True)),
)
def test_schema_refuses_what_forge_refuses(path: Path, wrong: dict[str, object]) -> None:
    checker = Draft202012Validator(json.loads((ROOT / path).read_text()))
    assert not checker.is_valid(wrong)


@pytest.mark.parametrize(
    ("model", "is_valid"),
    [
        ({"layers": 2}, True),
        ({"architecture": "llama", "kv_heads": 2}, True),
        ({"architecture": "gpt2", "positions": 64}, True),
        ({"positions": 64}, False),
        ({"architecture": "gpt2", "kv_heads": 2}, False),
        ({"architecture": "gpt3"}, False),
    ],
)
def test_schema_has_the_keys_of_each_architecture(model: dict[str, object], is_valid: bool) -> None:
    checker = Draft202012Validator(json.loads((ROOT / next(iter(SCHEMAS))).read_text()))
    assert checker.is_valid({"model": model}) == is_valid


def test_schema_has_the_sheet_that_the_workflow_reads() -> None:
    [path] = [path for path, model in SCHEMAS.items() if model is Config]
    checker = Draft202012Validator(json.loads((ROOT / path).read_text()))
    assert checker.is_valid({"runs": "sweep.tsv", **Config().to_json()})


def test_schema_speaks_the_names_of_the_file() -> None:
    properties = json.loads((ROOT / next(iter(SCHEMAS))).read_text())["properties"]
    assert "validate" in properties
    assert "validation" not in properties


def test_messages_are_read_with_cause_and_fix_and_gaps_for_what_is_filled_in(
    tmp_path: Path,
) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        'FIX = "restart the program"\n'
        'raise DataError(f"cannot read {name}" " at all", cause="edited by | hand", fix=FIX)\n'
        'Check("disk", "fail", f"{folder} is on a slow disk", "choose another directory")\n'
        "raise DataError(what, cause=cause, fix=fix)\n"
    )
    assert list(messages.messages(module)) == [
        messages.Message("cannot read … at all", "edited by | hand", "restart the program"),
        messages.Message("… is on a slow disk", "", "choose another directory"),
    ]


def test_each_package_has_a_place_on_the_page_of_messages() -> None:
    placed = {name for names in messages.PHASES.values() for name in names}
    there = {path.parent.name for path in messages.FORGE.glob("*/__init__.py")}
    assert there <= placed
    assert all((messages.FORGE / name).exists() for name in placed)
