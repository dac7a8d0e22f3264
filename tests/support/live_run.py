"""Runs of a tiny config by real processes: how tests start them, wait for them and find them."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from support import forked
from support.processes import Outcome, running

from forge import cli
from forge.core import json_lines
from forge.core.files import read_json
from forge.core.paths import RunPaths

# Every process of these tests carries it in its environment, however it was started.
MARK, MARK_VALUE = "FORGE_TESTS", uuid.uuid4().hex

PATIENCE_SEC = 60.0  # no wait is longer, but for those that name another time

TINY: dict[str, Any] = {
    "tokenizer": {"vocab_size": 300, "sample_mib": 1},
    "model": {"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 64},
    "train": {
        **{"seq_len": 16, "batch_size": 8, "max_steps": 12, "decay_steps": 12, "warmup_steps": 3},
        **{"log_every": 1, "eval_every": 100, "eval_samples": 8, "checkpoint_every": 100},
    },
    "report": {"prompts": ["the "], "sample_tokens": 4},
}

TWO_RANKS = ("--machine.launcher=torchrun", "--ranks-per-node=2")

GOAL = 200
LONG = (
    "--model.dropout=0.1",
    f"--train.max_steps={GOAL}",
    f"--train.decay_steps={GOAL}",
    "--train.checkpoint_every=15",
)


@dataclass
class Started:
    """A `forge` command under way in a process of its own."""

    process: subprocess.Popen[bytes]
    output: Path

    def end(self, patience_sec: float = PATIENCE_SEC) -> Outcome:
        code = self.process.wait(patience_sec)
        return Outcome(code, self.output.read_text())


@dataclass(frozen=True)
class Run:
    """One run of the tiny config, and the commands that work on it."""

    config: Path
    folder: Path
    overrides: tuple[str, ...] = field(default=())

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.folder)

    @property
    def data(self) -> str:
        """The option that names its data: a command takes the path from no directory of results."""
        return f"--data={read_json(self.paths.config)['data']}"

    def arguments(self, verb: str, *more: str) -> list[str]:
        return [verb, str(self.config), *self.overrides, *more]

    def forge(self, verb: str, *more: str) -> Outcome:
        """The command in this process (its ranks have their own), to its end."""
        return forge(*self.arguments(verb, *more))

    def start(self, verb: str, *more: str, **environ: str) -> Started:
        """The command in a process of its own."""
        return self.launch(self.arguments(verb, *more), **environ)

    def launch(self, arguments: list[str], **environ: str) -> Started:
        """As `start`, of a command that takes no config."""
        output = self.folder.parent / f"{self.folder.name}.{time.monotonic_ns()}.out"
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output, "w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "forge", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **environ},
            )
        return Started(process, output)

    def fork(self, verb: str, *more: str, arm: forked.Arm | None = None) -> forked.Command:
        """The command in a child of the fork server, with forked ranks: the start costs little."""
        output = self.folder.parent / f"{self.folder.name}.{time.monotonic_ns()}.out"
        return forked.start(self.arguments(verb, *more), output, arm)

    def copy(self, folder: Path) -> Run:
        """The same run in another folder."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return replace(
            self,
            folder=folder,
            overrides=(*self.overrides, f"--run={folder.name}", f"--results={folder.parent}"),
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in json_lines.read(self.paths.events) if event["event"] == name]

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of each training step that was logged, repeated ones too."""
        lines = json_lines.read(self.paths.metrics)
        return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]

    def step(self) -> int:
        """The last training step that was logged."""
        losses = self.losses()
        return losses[-1][0] if losses else 0

    def weights_digest(self) -> str:
        return str(read_json(self.paths.trained)["weights_digest"])


def forge(*arguments: str) -> Outcome:
    """A `forge` command in this process, with what it said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = cli.main(list(arguments))
    return Outcome(code, said.getvalue())


def wait_until(true: Callable[[], object], what: str, patience_sec: float = PATIENCE_SEC) -> None:
    end = time.monotonic() + patience_sec
    while not true():
        assert time.monotonic() < end, f"waited {patience_sec:g} s in vain: {what}"
        time.sleep(0.005)


def living() -> list[psutil.Process]:
    """The processes of these tests, however deep."""
    found = forked.living()
    for process in running():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            mine = process.environ().get(MARK) == MARK_VALUE and process.pid != os.getpid()
            # Python's own resource tracker outlives what it tracks, and ends with the tests.
            tracker = "resource_tracker" in " ".join(process.cmdline())
            if mine and not tracker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def ranks() -> list[psutil.Process]:
    """The living rank processes, by pid."""
    found = []
    for process in living():
        with contextlib.suppress(psutil.NoSuchProcess):
            line = process.cmdline()
            # torchrun names the module too, behind its own.
            if "forge.worker" in line and line.count("-m") == 1:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def kill_all() -> None:
    for process in living():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def write_corpus(root: Path) -> Path:
    """A folder of 24 small texts that differ."""
    corpus = root / "corpus"
    corpus.mkdir()
    for number in range(24):
        words = (f"{number * word % 97} times {word} is the word" for word in range(60))
        (corpus / f"{number:02}.txt").write_text(", ".join(words))
    return corpus


def make_run(tiny_project: Path, results: Path, name: str, overrides: tuple[str, ...]) -> Run:
    return Run(
        tiny_project / "config.yaml",
        results / name,
        (f"--run={name}", f"--results={results}", *overrides),
    )
