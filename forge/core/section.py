"""Base class of the sections of config.yaml and machine.yaml, and what their keys have in common."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from forge.core import hooks

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


def later(default: Any, **limits: Any) -> Any:
    """Field of a key that earlier versions did not have. JSON has it only where it is not at its default,
    which stands for what these versions did: finished runs stay finished, and digests of configs
    equal."""
    return Field(default, exclude_if=lambda value: value == default, **limits)


class Retired(NamedTuple):
    """A key that earlier versions had. default: its value where nothing was set; of a section, of each of
    its keys. instead: what to do now, in an error."""

    default: Any
    instead: str

    def is_unset(self, value: Any) -> bool:
        """Compare a value with the default, which files of earlier versions name in full."""
        if isinstance(value, Mapping) and isinstance(self.default, Mapping):
            return {**self.default, **value} == self.default
        return bool(value == self.default)


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

    IS_OF_TRAINER: ClassVar[bool] = False
    """True of a plugin's section that another training program has no use for."""

    RETIRED: ClassVar[Mapping[str, Retired]] = {}
    """Keys of earlier versions: dropped at their default, which files of these versions name, else
    refused by name."""

    @model_validator(mode="before")
    @classmethod
    def _retired_keys_are_unset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        set_here = [
            {"type": "removed", "loc": (key,), "msg": f"this key was removed: {one.instead}"}
            | {"input": values[key]}
            for key, one in cls.RETIRED.items()
            if key in values and not one.is_unset(values[key])
        ]
        if set_here:
            raise _error(cls, set_here)
        return {key: value for key, value in values.items() if key not in cls.RETIRED}

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


def _error(model: type[BaseModel], details: Sequence[Mapping[str, Any]]) -> ValidationError:
    """The error of pydantic with these details, as `ValidationError.errors` has them."""
    lines = [
        InitErrorDetails(
            type=PydanticCustomError(detail["type"], "{said}", {"said": detail["msg"]}),
            loc=detail["loc"],
            input=detail["input"],
        )
        for detail in details
    ]
    return ValidationError.from_exception_data(model.__name__, lines)


AnySection = TypeVar("AnySection", bound=Section)


class WithPlugins(BaseModel):
    """Base of what holds sections of plugins beside its own keys: config.yaml, settings of a run, and a
    section to which plugins add. They are in its JSON only where they are set."""

    _of_plugins: dict[str, Section] = PrivateAttr(default_factory=dict)

    def of(self, section: type[AnySection]) -> AnySection:
        """The section of a plugin, with its defaults where it is not set."""
        found = (one for one in self._of_plugins.values() if isinstance(one, section))
        return next(found, None) or section()

    @classmethod
    def sections_of_plugins(cls) -> dict[str, type[Section]]:
        """The sections by key that plugins add to this one."""
        return hooks.sections()

    @property
    def of_plugins(self) -> dict[str, Section]:
        """The sections of plugins that are set, by key."""
        return dict(self._of_plugins)

    @model_validator(mode="wrap")
    @classmethod
    def _with_plugins(cls, values: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        own = {field.alias or name for name, field in cls.model_fields.items()}
        others = values.keys() - own if isinstance(values, dict) else set()
        # Ranks, whose configs have no such section, look for no plugin.
        known = cls.sections_of_plugins() if others else {}
        of_plugins = {key: known[key] for key in others if key in known}
        if not of_plugins:
            return read(values)
        found: dict[str, Section] = {}
        errors: list[Any] = []
        for key, section in of_plugins.items():
            try:
                found[key] = section.model_validate(values[key])
            except ValidationError as err:
                errors += [{**detail, "loc": (key, *detail["loc"])} for detail in err.errors()]
        try:
            made = read({key: value for key, value in values.items() if key not in of_plugins})
        except ValidationError as err:
            errors = [*err.errors(), *errors]
        if errors:
            raise _error(cls, errors)
        made._of_plugins.update(found)
        made._check_of_plugins()
        return made

    def _check_of_plugins(self) -> None:
        """Check sections of plugins together with the others. Raises ValueError."""

    @model_serializer(mode="wrap")
    def _also_of_plugins(
        self, own: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        values: dict[str, Any] = own(self)
        for key, section in self._of_plugins.items():
            values[key] = section.model_dump(mode=info.mode, exclude_unset=info.exclude_unset)
        return values


def all_values(section: Section) -> dict[str, Any]:
    """JSON values of a section, with those of `later` keys that are at their defaults."""
    fields = type(section).model_fields.items()
    unset = {key: field.default for key, field in fields if field.exclude_if}
    return unset | section.model_dump(mode="json")


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


def with_retired(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section with all retired keys at their defaults, as in digests of earlier
    versions."""
    retired = {key: one.default for key, one in section.RETIRED.items()}
    return {**retired, **_below(with_retired, section, values)}


def without_retired(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section, read from a record, without retired keys, whatever they were set to."""
    kept = {key: value for key, value in values.items() if key not in section.RETIRED}
    return _below(without_retired, section, kept)


def _below(
    change: Callable[[type[Section], Mapping[str, Any]], dict[str, Any]],
    section: type[Section],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """The values with a change made in the sections below this one."""
    changed = dict(values)
    for name, field in section.model_fields.items():
        key, below = field.alias or name, section_of(field.annotation)
        if below and isinstance(values.get(key), Mapping):
            changed[key] = change(below, values[key])
    return changed
