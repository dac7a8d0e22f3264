"""Base class of the sections of config.yaml and machine.yaml, and what their keys have in common."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Tag,
    ValidationInfo,
    field_validator,
)

# Marks keys that may change when a run resumes. A checkpoint is bound to all other keys of model and
# train: a change of those is refused.
FREE: dict[str, Any] = {"resume": "free"}

MAX_NAME_BYTES = 255  # of one file or directory, on every file system of Linux (NAME_MAX)
MAX_PATH_BYTES = 3072  # Linux allows 4096 (PATH_MAX); Forge appends names of its own


def expanded(path: str) -> str:
    """The path with `~`, `~USER` and variables, also in braces, replaced as by a shell.

    A part that is there under its literal name stays: earlier versions expanded nothing. Raises
    ValueError for a variable that is unset or empty, which would lead elsewhere, and for an unknown user.
    """
    first = re.match(r"(?:[^$]*/)?[^$/]*\$[^/]*" if path[:1] != "~" else r"~[^/]*", path)
    if not first or os.path.lexists(first[0]):
        return path

    def value(variable: re.Match[str]) -> str:
        name = variable[1] or variable[2]
        if not os.environ.get(name):
            raise ValueError(
                f"the variable {name} is not set, or empty: export it, or write the path without it"
            )
        return os.environ[name]

    path = re.sub(r"\$(?:(\w+)|\{([^}]*)\})", value, path, flags=re.ASCII)
    path = os.path.expanduser(path)  # noqa: PTH111 (Path would drop "./" and a slash at the end)
    if path.startswith("~"):
        raise ValueError(f"{path.split('/')[0]} is no home directory: there is no such user")
    return path


def _usable_path(path: str) -> str:
    if "\0" in path:
        raise ValueError("a null byte cannot be part of a path")
    longest = max(path.split("/"), key=lambda name: len(name.encode()))
    if len(longest.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"a name in it has more than {MAX_NAME_BYTES} bytes: {longest:.20}…")
    if len(path.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"the path has more than {MAX_PATH_BYTES} bytes")
    return path


LiteralPath = Annotated[str, AfterValidator(_usable_path)]
FilePath = Annotated[str, AfterValidator(lambda path: _usable_path(expanded(path)))]


class Section(BaseModel):
    """Base of all sections. Unknown keys are errors: a misspelled key would train with its default."""

    # The docstring of a key is its description in documents and schemas: tools/config_docs.py.
    # validate_default: the default 64 of a float key must become 64.0, as when a file sets it.
    # allow_inf_nan: infinity would satisfy every lower bound, then fail or diverge hours later.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    BOUND: ClassVar[tuple[str, ...] | None] = None
    """Keys that may not change when a run resumes; None: all that are not marked FREE."""

    @field_validator("*", mode="before")
    @classmethod
    def _boolean_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise ValueError("Input should be a number")
        return value

    @field_validator("*")
    @classmethod
    def _integer_fits(cls, value: Any) -> Any:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("Input should fit into 64 bits")
        return value


def section_of(annotation: Any) -> type[Section] | None:
    """The Section in `Section` or `Section | None`; None where the key may have another value, too."""
    parts = [part for part in get_args(annotation) or (annotation,) if part is not type(None)]
    (part, *others) = parts
    is_section = isinstance(part, type) and issubclass(part, Section)
    return part if is_section and not others else None


def tagged_sections(annotation: Any) -> dict[str, type[Section]]:
    """The sections by tag of which the key holds one, as `architectures.AnyModel`; {} for other keys."""
    parts = [get_args(part) for part in get_args(annotation) if get_origin(part) is Annotated]
    return {tag.tag: section for section, *_, tag in parts if isinstance(tag, Tag)}


def section_of_entries(annotation: Any) -> type[Section] | None:
    """The Section in `dict[…, Section] | None`, a section for each name; else None."""
    parts = [annotation, *get_args(annotation)]
    named = [get_args(part)[1] for part in parts if get_origin(part) is dict]
    return section_of(named[0]) if named else None
