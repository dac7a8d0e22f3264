"""Files that are generated from the code: JSON schemas for editors, tables of keys, of packages and of
messages.

`python -m tools.config_docs` writes them, `--check` exits 1 where they have drifted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from forge.checkpoint.manifest import Part
from forge.core import hooks
from forge.core.config import FOLDERS, OUTSIDE_TRAINING, Config, is_free
from forge.core.errors import ConfigError
from forge.core.files import atomic_open
from forge.core.key_docs import default_of, docstrings, type_of
from forge.core.machine import Machine
from forge.core.paths import SHEET
from forge.core.records import RecordPart
from forge.core.section import Section, section_of, section_of_entries, tagged_sections
from tools import messages, packages

ROOT = Path(__file__).resolve().parents[1]
# The YAML files name them in their first line, by which editors complete, explain and check keys.
SCHEMAS: dict[Path, type[Section]] = {
    Path("workflow/schemas/config.schema.json"): Config,
    Path("workflow/schemas/machine.schema.json"): Machine,
}


def predicates() -> dict[Path, type[BaseModel]]:
    """Predicates of in-toto statements; none without the plugin that writes them."""
    if "attestation" not in hooks.names():
        return {}
    from forge.plugins.attestation.certificate import Reproduction
    from forge.plugins.attestation.chain import Predicate

    pages = Path("docs/plugins")
    return {
        pages / "statement.schema.json": Predicate,
        pages / "certificate.schema.json": Reproduction,
    }


@dataclass(frozen=True)
class Table:
    """Tables of keys in a Markdown file, between `<!-- keys -->` and `<!-- end of keys -->`."""

    file: Path
    model: type[Section]
    with_resume: bool  # a column "may change on resume"
    name: str = ""  # key of the section; "" for a file as a whole


DRAFT = "https://json-schema.org/draft/2020-12/schema"
TABLES = (
    Table(Path("config/README.md"), Config, with_resume=True),
    Table(Path("profiles/README.md"), Machine, with_resume=False),
)


def tables() -> list[Table]:
    """All tables: those of a plugin's sections are on its page."""
    of_plugins = [
        Table(Path("docs/plugins") / f"{section.__module__.split('.')[2]}.md", section, True, key)
        for key, section in hooks.sections().items()
    ]
    return [*TABLES, *of_plugins]


def _marked(what: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {what} -->\n).*?(<!-- end of {what} -->)", re.DOTALL)


def generated(root: Path = ROOT) -> dict[Path, str]:
    """Path below `root` -> the text it should have. Raises ConfigError without a file's markers."""
    texts = {path: schema_text(model) for path, model in SCHEMAS.items()}
    texts |= {path: predicate_schema(model) for path, model in predicates().items()}
    for table in tables():
        keys = keys_text(table.model, table.name, with_resume=table.with_resume)
        texts[table.file] = _filled(root / table.file, "keys", keys)
    page = root / packages.PAGE
    texts[packages.PAGE] = _filled(page, "packages", packages.table(_text(page)))
    texts[messages.PAGE] = _filled(root / messages.PAGE, "messages", messages.tables())
    return texts


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _filled(path: Path, what: str, table: str) -> str:
    """The text of a page with a table between its marks. Raises ConfigError without these marks."""
    text = _text(path)
    if not _marked(what).search(text):
        raise ConfigError(
            f"{path} has no place for the table of {what}",
            fix=f"put the lines <!-- {what} --> and <!-- end of {what} --> there",
        )
    return _marked(what).sub(lambda match: f"{match[1]}\n{table}\n{match[2]}", text)


def drifted(root: Path = ROOT) -> list[Path]:
    """The generated files that are not what the config says now."""
    return [
        path
        for path, text in generated(root).items()
        if not (root / path).exists() or (root / path).read_text() != text
    ]


def schema_text(model: type[Section]) -> str:
    """JSON schema of config.yaml or machine.yaml."""
    describe_keys()
    schema = model.model_json_schema(by_alias=True)
    if model is Config:
        # Read by the workflow alone: a run has no sheet.
        schema["properties"]["runs"] = {
            "type": "string",
            "default": SHEET,
            "description": "The sample sheet, one row a run.",
        }
        schema["properties"]["plugins"] = {
            "type": "array",
            "items": {"type": "string"},
            "default": [],
            "description": "Files, directories and installed packages with plugins of the project,"
            " docs/plugins/own.md.",
        }
        schema["properties"]["plugins_may_change"] = {
            "type": "boolean",
            "default": False,
            "description": "Train a run on after its plugins were edited, docs/plugins/own.md.",
        }
        for key, section in hooks.sections().items():
            own = section.model_json_schema(by_alias=True)
            schema["$defs"] |= {**own.pop("$defs", {}), section.__name__: own}
            default = section().model_dump(mode="json")
            reference = f"#/$defs/{section.__name__}"
            schema["properties"][key] = {"$ref": reference, "default": default}
    return json.dumps({"$schema": DRAFT, **schema}, indent=2) + "\n"


def predicate_schema(model: type[BaseModel]) -> str:
    """JSON schema of the predicate of an export's statement, or of a certificate."""
    describe_keys(Part)
    describe_keys(RecordPart)
    schema = model.model_json_schema()
    return json.dumps({"$schema": DRAFT, **schema}, indent=2) + "\n"


@cache
def describe_keys(root: type[BaseModel] = Section) -> None:
    """Make the docstring of each key of every section, or of what else has this base, its description.

    pydantic does so itself (use_attribute_docstrings), but in every process that imports a section, by
    parsing its source: 50 ms in the start of each command and rank.
    """
    hooks.sections()  # which loads those of plugins
    for section in _subclasses(root):
        for key, text in docstrings(section, root):
            section.model_fields[key].description = text
        section.model_rebuild(force=True)


def _subclasses(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Subclasses in Forge, in the order of their definition: a section after those that its keys have."""
    for below in section.__subclasses__():
        if below.__module__.startswith("forge."):
            yield below
            yield from _subclasses(below)


# --- tables -------------------------------------------------------------------------------------


def keys_text(model: type[Section], top: str = "", *, with_resume: bool) -> str:
    """One Markdown table for the top level and one for each section of `model`. top: its key."""
    describe_keys()
    columns = ["key", "type", "default", "meaning"] + ["may change on resume"] * with_resume
    parts = []
    for name, section in dict.fromkeys(_sections(top, model)):
        schema = section.model_json_schema(by_alias=True)["properties"]
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for key, field in section.model_fields.items():
            if section_of(field.annotation) or tagged_sections(field.annotation):
                continue
            shown = field.alias or key
            cells = [f"`{name}.{shown}`" if name else f"`{shown}`"]
            default = "set by Forge" if name == "ids" else default_of(schema[shown])
            cells += [type_of(schema[shown]), default]
            cells += [" ".join((field.description or "").split())]
            cells += [_may_change(name, section, key)] * with_resume
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        heading = f"### `{name}`" if name else "### Top level"
        if "const" in schema.get("architecture", {}):
            heading += f" of architecture `{schema['architecture']['const']}`"
        parts.append(f"{heading}\n\n{section.__doc__}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _sections(name: str, model: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """(dotted name, section): the top level ("") first, each section before those in it; of a key that
    holds one of several sections, all."""
    yield name, model
    for key, field in model.model_fields.items():
        below = f"{name}.{field.alias or key}".removeprefix(".")
        for tagged in tagged_sections(field.annotation).values():
            yield from _sections(below, tagged)
        if section := section_of(field.annotation):
            yield from _sections(below, section)
        elif entry := section_of_entries(field.annotation):
            yield from _sections(f"{below}.NAME", entry)


def _may_change(name: str, section: type[Section], key: str) -> str:
    if not name:
        return "–" if key in FOLDERS else "no"  # names of folders are no part of any checkpoint
    outside = (*OUTSIDE_TRAINING, *hooks.sections())
    return "yes" if name.partition(".")[0] in outside or is_free(section, key) else "no"


# --- command ------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write what has drifted, or with --check only name it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.config_docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on drift")
    check = parser.parse_args(arguments).check
    drift = drifted(root)
    texts = generated(root)
    for path in drift:
        if check:
            print(f"{path} has drifted from forge/: run python -m tools.config_docs")
        else:
            with atomic_open(root / path, "w") as file:
                file.write(texts[path])
            print(f"wrote {path}")
    return 1 if check and drift else 0


if __name__ == "__main__":
    sys.exit(main())
