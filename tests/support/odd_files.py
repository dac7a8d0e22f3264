"""Calls commands that read a run while each of its files is something else, in an empty directory.

In a process of its own, since what goes wrong waits for ever or takes all memory. Prints a line for each
call that took too long, needed too much memory, or ended as a bug; the last line is their number.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from support.recorded_run import interrupted_run

from forge.cli import main

SEC, MEMORY_BYTES = 30, 2**31  # the second beyond what the process has before
RUN = Path("results/base")
COMMANDS = (["show", str(RUN)], ["status"], ["logs", str(RUN)])
FILES = (
    *("config.json", "trained.json", "validation.json", "metrics.jsonl", "events.jsonl", ".lock"),
    *("logs/train.log", "checkpoints/latest", "checkpoints/step-00000200/checkpoint.json"),
)
WRONG = {"format": 1, "run": "a\nb\x1b[31m", "train": [1], "step": "x", "ids": 7, "program": "p"}


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 * 2**30)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "sparse": _sparse,
    "wrong types": lambda path: path.write_text(json.dumps(WRONG)),
}


def trouble_of(command: list[str]) -> str:
    """What is wrong with how a command ended; "" for a result or a message."""

    def too_long(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SEC)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main(command)
    except SystemExit:
        pass
    except BaseException as err:
        return repr(err)
    finally:
        signal.alarm(0)
    words = said.getvalue()
    if "Traceback" in words:
        return words[-500:]
    return "printed a control character" if "\x1b[31m" in words else ""


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def call_all(
    folder: Path,
    commands: Sequence[list[str]] = COMMANDS,
    around: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """around: of the commands that meet an odd file of this name."""
    os.chdir(folder)
    good = Path("good")
    interrupted_run(good)
    (good / "logs").mkdir(exist_ok=True)
    (good / "logs/train.log").write_text("a line\n")
    shutil.copytree(good, "results/other", symlinks=True)
    shutil.copytree(good, RUN, symlinks=True)
    found = [
        f"nothing odd: {command}: {bad}" for command in commands if (bad := trouble_of(command))
    ]
    limit_memory()  # now that everything is imported
    for name in FILES:
        with around(name):
            for kind in KINDS:
                found += troubles(good, name, kind, commands)
    print(*found, len(found), sep="\n")


def troubles(good: Path, name: str, kind: str, commands: Sequence[list[str]]) -> list[str]:
    """What is wrong with how commands end on a copy of the good run with one odd file."""
    shutil.rmtree(RUN)
    shutil.copytree(good, RUN, symlinks=True)
    path = RUN / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    ended = ((command[0], trouble_of(command)) for command in commands)
    return [f"{name} is a {kind}: {subcommand}: {bad}" for subcommand, bad in ended if bad]


if __name__ == "__main__":
    call_all(Path(sys.argv[1]))
