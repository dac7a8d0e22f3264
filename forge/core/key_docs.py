"""Meaning of the keys of a section: type, default and docstring, in tables of keys and in errors."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from forge.core.section import Section, section_of, tagged_sections

_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def meaning(section: type[Section], key: str) -> str:
    """One line on a key, as in a file: `(integer ≥ 1, default 1000): Steps to train.` "" for an unknown
    key, and for one that holds a section."""
    named = {field.alias or name: name for name, field in section.model_fields.items()}
    if key not in named or _holds_section(section.model_fields[named[key]].annotation):
        return ""
    schema = section.model_json_schema(by_alias=True)["properties"][key]
    default = default_of(schema).strip("`")
    kind = default if default == "required" else f"default {default}"
    if "const" not in schema:  # the tag of one of several sections
        kind = f"{type_of(schema).replace('`', '')}, {kind}"
    texts: dict[str, str] = {}
    with suppress(OSError):  # installed without its source
        texts = dict(docstrings(section))
    text = " ".join(texts.get(named[key], "").split())
    return f"({kind}): {text}" if text else f"({kind})"


def _holds_section(annotation: Any) -> bool:
    return bool(section_of(annotation) or tagged_sections(annotation))


def docstrings(
    section: type[BaseModel], root: type[BaseModel] = Section
) -> Iterator[tuple[str, str]]:
    """Each key that has a docstring, and that; inherited ones first. root: the base class of such
    sections. Raises OSError without their source."""
    for base in reversed(section.__mro__):
        if not issubclass(base, root):
            continue
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for key, below in pairwise(definition.body):
            match key, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ) if name in section.model_fields:
                    yield name, inspect.cleandoc(text)


def default_of(schema: dict[str, Any]) -> str:
    """The default in the JSON schema of a key."""
    if "default" not in schema:
        return "required"
    return f"`{json.dumps(schema['default'], ensure_ascii=False)}`"


def type_of(schema: dict[str, Any]) -> str:
    """A JSON schema type in words: `integer ≥ 1`, `"cosine"` or `"wsd"`, `text or null`."""
    if "anyOf" in schema:
        return " or ".join(type_of(part) for part in schema["anyOf"])
    if "$ref" in schema:
        return "section"
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema["type"] == "array":
        return f"list of {type_of(schema['items'])}"
    if schema["type"] == "object":
        [entry] = schema.get("patternProperties", {}).values() or [schema["additionalProperties"]]
        return f"{type_of(entry).replace('number or integer', 'number')} by name"
    word = {"string": "text", "boolean": "true or false"}.get(schema["type"], schema["type"])
    bounds = [f"{sign} {schema[key]:.12g}" for key, sign in _BOUNDS.items() if key in schema]
    return f"{word} {' and '.join(bounds)}".strip()
