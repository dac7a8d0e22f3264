"""Random changes of files that a stranger may have made, for fuzzing: the same for the same seed.

FORGE_FUZZ: how many changed inputs each fuzzing test tries (60); FORGE_FUZZ_SEED draws them.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COUNT = int(os.environ.get("FORGE_FUZZ") or 60)
SEED = int(os.environ.get("FORGE_FUZZ_SEED") or 1)
HANG_SEC = 30
MOST_BYTES = 2 * 2**30
# What a value of JSON, or a number in a header, is replaced by.
VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, float("nan"), float("inf")),
    *("", "\x00", "\u202e", "../../../etc/passwd", "/dev/zero", "a" * 100_000, "1" * 5000),
    *([], {}, [[]], {"": {}}, [0] * 1000),
]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes of a file with one to three changes."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        data = chance.choice(_CHANGES)(data, chance)
    return data


def _flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 4, 64))):
        if changed:
            changed[_place(changed, chance)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _overwritten(data: bytes, chance: random.Random) -> bytes:
    """A number as headers have it, of 1, 4 or 8 bytes, over what is there."""
    number = chance.choice((0, 1, 2**7, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1))
    size = chance.choice((1, 4, 8))
    at = _place(data, chance)
    return data[:at] + (number % 2 ** (8 * size)).to_bytes(size, "little") + data[at + size :]


def _cut(data: bytes, chance: random.Random) -> bytes:
    at = _place(data, chance)
    return data[:at] if chance.random() < 0.5 else data[:at] + data[at + chance.randrange(1, 64) :]


def _repeated(data: bytes, chance: random.Random) -> bytes:
    at = _place(data, chance)
    piece = data[at : at + chance.choice((1, 16, 4096))]
    return data[:at] + piece * chance.choice((2, 100)) + data[at:]


def _other_value(data: bytes, chance: random.Random) -> bytes:
    """For JSON: another value in place of a random one; or nesting without end."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _flipped(data, chance)
    if chance.random() < 0.02:
        return b"[" * 100_000
    holder: Any = {"": value}
    key: Any = ""
    while isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.85:
        holder = holder[key]
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    top = holder if holder == {"": value} else None
    if isinstance(holder, dict) and chance.random() < 0.2 and top is None:
        holder[f"{key}x"] = holder.pop(key)
    else:
        holder[key] = chance.choice(VALUES)
    return json.dumps(top[""] if top is not None else value).encode()


def _place(data: bytes | bytearray, chance: random.Random) -> int:
    """Somewhere, in half of the cases near the beginning, where headers are."""
    most = min(len(data), 512) if chance.random() < 0.5 else len(data)
    return chance.randrange(max(1, most))


_CHANGES: list[Callable[[bytes, random.Random], bytes]] = [
    *(_flipped, _overwritten, _cut, _repeated, _other_value, _other_value),
]


@contextmanager
def in_time(what: str) -> Iterator[None]:
    """TimeoutError, which names what was tried, after HANG_SEC."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end within {HANG_SEC} s: {what}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG_SEC)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def try_all(
    original: Path, work: Path, use: Callable[[Path], object], refusals: type[Exception]
) -> Counter[str]:
    """Call `use` with COUNT copies of a folder, one file of each changed; how many it took and refused.

    AssertionError with what was tried for another exception than a refusal, for one that takes longer
    than HANG_SEC, and where memory grows by more than MOST_BYTES. work: an empty place for the copies.
    """
    ends = Counter[str]()
    names = sorted(path for path in original.rglob("*") if path.is_file())
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(COUNT):
        chance = random.Random(f"{SEED} {number}")
        file = chance.choice(names).relative_to(original)
        copy = work / str(number)  # a name of its own: some things are read once in a process
        shutil.copytree(original, copy)
        (copy / file).write_bytes(mutated((original / file).read_bytes(), chance))
        tried = f"FORGE_FUZZ_SEED={SEED}, input {number}: {file}"
        try:
            with in_time(tried):
                use(copy)
            ends["taken"] += 1
        except refusals as err:
            assert str(err), tried
            ends["refused"] += 1
        except Exception as err:
            raise AssertionError(f"{tried}: {type(err).__name__}: {str(err)[:500]}") from err
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun) * 1024
        shutil.rmtree(copy)
        assert grown < MOST_BYTES, f"{tried}: {grown / 2**20:,.0f} MiB"
    return ends
