"""Reduction of a statement to what verification needs: unless `forge export --full` it has nothing that
tells of people and machines.

Installed packages, names of the variables and modules of machine.yaml, the container, times of the clock,
the reasons for which launches ended, and the directories of absolute paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge.attestation.verify import Links, part
from forge.plugins.attestation.chain import (
    ChainLink,
    ConfigUsed,
    EnvironmentUsed,
    LaunchesMade,
    Texts,
)

HIDDEN = ".../"  # in place of the directories of a path
# A string that begins as a path is one, blanks and all. Else paths are within it, after what separates
# words of a command (--to=/home/me/x), but not that of an address (https://…).
_PATH = re.compile(
    r"""\A(?:~\w*)?/.*[^/].*\Z|(?<=[=:,;\s'"(])(?:~\w*)?/(?!/)[^\s'":,;)]+""", re.DOTALL
)
# Settings of `tokenizer` and `tokenize` that are text, such as a separator `/* --- */`: the tokens are
# made again by them as they are.
_TEXT = ("document_separator", "text_field", "eos_token")


def reduced(links: Sequence[ChainLink]) -> list[ChainLink]:
    """The links without what a reader does not need. A config that names an absolute path has no
    `values`, since the config's digest is also of the path, but `without_folders`."""
    configs = [link.values for link in links if isinstance(link, ConfigUsed)]
    roots = sorted(set(absolute_paths(configs)))
    return [_reduced(link, roots) for link in links]


def absolute_paths(value: Any) -> Iterator[str]:
    """The absolute paths in strings of JSON."""
    if isinstance(value, Mapping):
        value = [each for key, each in value.items() if key not in _TEXT]
    if isinstance(value, list):
        for each in value:
            yield from absolute_paths(each)
    elif isinstance(value, str):
        yield from _PATH.findall(value)


def without_folders(value: Any, roots: Sequence[str] = ()) -> Any:
    """JSON in which each absolute path has its last name alone, after `.../`. roots: paths of which those
    below keep what is relative to them: /home/me/texts/a.txt is .../texts/a.txt below /home/me/texts."""
    if isinstance(value, Mapping):
        return {
            key: each if key in _TEXT else without_folders(each, roots)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [without_folders(each, roots) for each in value]
    if not isinstance(value, str):
        return value
    return _PATH.sub(lambda match: _short(match[0], roots), value)


def stated_values(links: Links) -> dict[str, Any]:
    """The values of the config of a statement, paths as it has them. VerificationError without any."""
    stated = links["config"]
    is_reduced = stated.get("values") is None and "without_folders" in stated
    return part(stated, "without_folders" if is_reduced else "values", dict)


def _short(path: str, roots: Sequence[str]) -> str:
    above = [root for root in roots if path.startswith(root.rstrip("/") + "/")]
    root = max(above, key=len, default=path).rstrip("/")
    return HIDDEN + root.rpartition("/")[2] + path.rstrip("/")[len(root) :]


def _reduced(link: ChainLink, roots: Sequence[str]) -> ChainLink:
    match link:
        case EnvironmentUsed():
            return link.model_copy(update={"packages": None, "launch": None})
        case LaunchesMade():
            return link.model_copy(update={"launches": [*_relative(link)]})
        case ConfigUsed() if any(absolute_paths(link.values)):
            hidden = without_folders(link.values)
            return link.model_copy(update={"values": None, "without_folders": hidden})
    values = link.model_dump(mode="json")
    if not any(absolute_paths(values)):
        return link
    below = roots if isinstance(link, Texts) else ()
    return type(link).model_validate(without_folders(values, below))


def _relative(link: LaunchesMade) -> Iterator[Any]:
    """Launches, whose times are those since the first began, to a tenth of a second, and whose outcomes
    have no reason: that is a message, and may name nodes and paths."""
    begun = min((launch.started for launch in link.launches), default=0.0)
    for launch in link.launches:
        times = {key: round(getattr(launch, key) - begun, 1) for key in ("started", "ended")}
        yield launch.model_copy(update={**times, "outcome": launch.outcome.partition(":")[0]})
