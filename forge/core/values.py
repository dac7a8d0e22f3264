"""Parsing of values: one rule for config.yaml, machine.yaml, runs.tsv and the command line.

YAML with fewer implicit types: only null, true, false, decimal numbers, and quoted or bracketed
values are special; everything else is text (`010`, `1:30`, `yes`, `2024-01-01`). The type of the key
then decides: a numeric key reads the text `010` as ten. config/README.md explains this to users.
A yaml.SafeLoader is 6 to 12 times as slow; that in C ends by SIGSEGV for 2 MB of `- - -`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml import events as ev

from forge.core.errors import ConfigError

# A config with 10,000 input files has 1 MB. A larger file is none, such as a checkpoint or /dev/zero.
MAX_BYTES = 4 * 2**20
MAX_DEPTH = 20  # a config has three levels; without a limit the stack could overflow
MAX_OPEN = 200  # as MAX_DEPTH, with room for brackets inside quotes
MAX_SHOWN = 80  # characters of a bad value in a message
MAX_DIGITS = 4000  # Python refuses to convert more than 4300

_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


def read_text(path: str | Path, kind: str) -> str:
    """The text of a config file or sample sheet. kind: its name in errors. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        # utf-8-sig: Windows editors and spreadsheets begin their files with a byte order mark.
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"{kind} {path} does not exist", fix="check the name and the current directory"
        ) from None
    except UnicodeDecodeError as err:
        raise ConfigError(
            f"{kind} {path} is not UTF-8: {err}",
            cause="saved in another encoding, or not a text file",
            fix="save it as text in UTF-8",
        ) from None
    except (OSError, ValueError) as err:  # ValueError: a null byte in the name
        raise ConfigError(f"cannot read {kind} {str(path)[:300]!r}: {_reason(err)}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{kind} {path} has more than {MAX_BYTES:,} bytes", cause="another file")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _reason(err: Exception) -> str:
    return (err.strerror if isinstance(err, OSError) else None) or str(err)


def read_scalar(text: str) -> Any:
    """The value of an unquoted word: null, true, false, a decimal number, else the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) <= MAX_DIGITS else text
    return float(text) if _NUMBER.fullmatch(text) else text


def read_cell(text: str) -> Any:
    """The value of a cell of the sample sheet, or of an option. Text that begins with a bracket or a
    quote is read as YAML, if it is valid; all other text is one word, `#` included."""
    if text[:1] in ("[", "{", '"', "'"):
        try:
            return read_yaml(text, whole=True)
        except yaml.YAMLError:
            return text
    return read_scalar(text)


def as_cell(value: Any) -> str:
    """The text that `read_cell` reads as this JSON value; plain words stay without quotes."""
    if isinstance(value, str) and value.isprintable() and read_cell(value) == value:
        return value
    return json.dumps(value)


def read_yaml(text: str, *, whole: bool = False) -> Any:
    """The value of one YAML document; None for an empty one.

    Built from the parser's events, so that the value is not larger than its text: no aliases (300 bytes
    can expand to gigabytes), no tags, dates or sets, no duplicate keys.
    whole: nothing may follow the value, not even a comment. Raises yaml.YAMLError.
    """
    _refuse_deep(text)
    # libyaml is ten times as fast, but refuses the surrogate pairs of JSON.
    fast = None if r"\ud" in text.lower() else getattr(yaml, "CBaseLoader", None)
    events = list(yaml.parse(text, Loader=fast or yaml.BaseLoader))
    if len(events) == 2:  # start and end of the stream
        return None
    rest = iter(events[2:])
    value = _value(next(rest), rest, depth=0)
    if len(list(rest)) != 2:  # the ends of document and stream
        raise _error("a second document follows", events[2])
    end = events[-3].end_mark
    if whole and end and end.index != len(text):
        raise _error("something follows the value", events[-3])
    return value


def _refuse_deep(text: str) -> None:
    """The time of the parser grows with the square of the number of open brackets."""
    depth = 0
    for bracket in re.findall(r"[][{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_OPEN:
            raise yaml.YAMLError(f"more than {MAX_OPEN} open brackets")


def _value(event: Any, rest: Iterator[Any], depth: int) -> Any:
    """The value that begins with `event`; takes the events inside it from `rest`."""
    if isinstance(event, ev.AliasEvent):
        raise _error(f"the alias *{event.anchor} is not supported: write the value out", event)
    if event.tag is not None:
        raise _error(f"the tag {event.tag} is not supported: use quotes for text", event)
    if depth > MAX_DEPTH:
        raise _error(f"more than {MAX_DEPTH} levels", event)
    if isinstance(event, ev.ScalarEvent):
        plain = event.implicit[0]
        return read_scalar(event.value) if plain else _joined(event)
    if isinstance(event, ev.SequenceStartEvent):
        return [_value(item, rest, depth + 1) for item in _until(rest, ev.SequenceEndEvent)]
    return _mapping(rest, depth)


def _mapping(rest: Iterator[Any], depth: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for event in _until(rest, ev.MappingEndEvent):
        if not isinstance(event, ev.ScalarEvent) or event.tag is not None:
            raise _error("a key must be a plain word", event)
        key = _joined(event)
        if key in values:
            raise _error(f"duplicate key {key}", event)
        values[key] = _value(next(rest), rest, depth + 1)
    return values


def _until(rest: Iterator[Any], end: type) -> Iterator[Any]:
    """The events up to the next `end`; the caller takes the events inside each of them from `rest`."""
    for event in rest:
        if isinstance(event, end):
            return
        yield event


def _joined(event: Any) -> str:
    """The text of a scalar. JSON writes a character above U+FFFF as a pair of surrogates."""
    try:
        return str(event.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise _error("half a surrogate pair (\\ud…)", event) from None


def _error(problem: str, event: Any) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def describe(err: yaml.YAMLError) -> str:
    """`line 3: problem`."""
    mark, problem = getattr(err, "problem_mark", None), getattr(err, "problem", None)
    return f"line {mark.line + 1}: {problem}" if mark and problem else " ".join(str(err).split())


def shown(value: Any) -> str:
    """A value as a message shows it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integers of more than 4300 digits
        return "a number with thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
