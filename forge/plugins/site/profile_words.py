"""Words of a profile: Slurm's names as values and in comments, places and times for people."""

from __future__ import annotations

import builtins
import math
import re

import yaml

from forge.core.errors import DataError
from forge.core.values import shown
from forge.plugins.site.site_places import Place

# Snakemake evaluates resources as Python expressions, and the names are those of others.
_OF_SNAKEMAKE = frozenset(
    (
        *("as_py_module", "async_run", "attempt", "branch", "choose_file", "choose_folder"),
        *("choose_tmp", "collect", "evaluate", "exists", "extract_checksum", "flatten", "input"),
        *("lookup", "output", "params", "parse_input", "prepend_param", "resources", "shutil"),
        *("subpath", "system_tmpdir", "threads", "wildcards"),
    )
)
_HARMLESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+@-]*")


def has_in_words(place: Place) -> str:
    """Hardware of a partition, in a few words."""
    gpus = f" with {place.gpus} {place.model.text}" if place.model else ""
    away = "" if place.num_available else ", none of them up now"
    state = f", {place.partition.state}" if place.partition.state != "UP" else ""
    whole = ", whole nodes only" if place.partition.is_exclusive else ""
    nodes, time = nodes_in_words(len(place.nodes)), in_words(place.minutes[0])
    return f"{nodes}{gpus}{away}, up to {time}{whole}{state}"


def cores_of(place: Place) -> str:
    """Words for the unit that Slurm counts as cores there."""
    has_threads = any(node.threads_per_core > 1 for node in place.nodes)
    return "hardware threads" if has_threads else "cores"


def nodes_in_words(number: int) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} node{'s' if number != 1 else ''}"


def preempted_in_words(place: Place) -> str:
    """Words for the effect of preemption there."""
    if not place.preemption.mode:
        return "not preempted"
    return f"preempted ({place.preemption.mode}) by {comment(place.preemption.by)}"


def in_words(minutes: float) -> str:
    """Minutes as `2 d 5 h`; `any time` for no limit."""
    if math.isinf(minutes):
        return "any time"
    days, rest = divmod(int(minutes), 24 * 60)
    hours, mins = divmod(rest, 60)
    parts = ((days, "d"), (hours, "h"), (mins, "min"))
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "0 min"


def comment(text: str) -> str:
    """A name from Slurm inside of a comment."""
    return re.sub(r"[^\x20-\x7e]", "?", text)


def name_of(text: str) -> str:
    """A name from Slurm as a value of YAML, of which Snakemake makes the same text. Raises DataError for
    one that could be more than a name."""
    if not _HARMLESS.fullmatch(text):
        raise DataError(
            f"Slurm's answers have the name {shown(text)}, which cannot stand in a profile",
            cause="a file of answers that somebody has edited; Slurm's own names have no such characters",
            fix="ask the cluster itself, without --from",
        )
    first = re.match(r"[A-Za-z_]\w*", text)
    is_python = not first or hasattr(builtins, first[0]) or first[0] in _OF_SNAKEMAKE
    return f"\"'{text}'\"" if is_python or yaml.safe_load(text) != text else text
