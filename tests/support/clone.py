"""A user's clone, small: the real workflow and profiles, a few real texts, a tiny model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from support.processes import running
from support.repository import REPOSITORY

STDLIB = Path(os.__file__).parent
TEXTS = ("abc", "argparse", "ast", "bisect", "calendar", "cmd", "codecs", "copy", "csv", "difflib")
DEADLINE_SEC = 400

TINY = {
    "tokenizer": {"vocab_size": 320},
    "tokenize": {
        "inputs": ["corpus"],
        "document_separator": "\n\n\n",
        "val_fraction": 0.1,
        "part_mib": 0.1,
    },
    "model": {"dim": 32, "layers": 2, "heads": 2, "dropout": 0.1},
    "train": {
        "seq_len": 32,
        "batch_size": 8,
        "max_steps": 12,
        "warmup_steps": 2,
        "log_every": 1,
        "eval_every": 6,
        "eval_samples": 8,
        "checkpoint_every": 4,
        "keep_every": 4,  # for runs that start from an earlier step
    },
    # Recomputing losses starts ranks: a test that is about the validation asks for it.
    "validate": {"depth": "digests"},
    "report": {"sample_tokens": 8},
}


@dataclass
class Project:
    """A user's clone. `snakemake` runs to its end; `start` leaves it running."""

    root: Path

    def write_config(self, **sections: dict[str, object]) -> None:
        """The tiny config, with keys of sections replaced."""
        merged = {name: {**values, **sections.get(name, {})} for name, values in TINY.items()}
        merged |= {name: values for name, values in sections.items() if name not in TINY}
        (self.root / "config/config.yaml").write_text(yaml.safe_dump(merged))

    def write_runs(self, text: str) -> None:
        (self.root / "config/runs.tsv").write_text(text)

    def machine(self, **values: object) -> None:
        """Replace keys of the local profile's machine.yaml."""
        path = self.root / "profiles/local/machine.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))

    def one_rank(self) -> None:
        """Half the processes, where a second rank would show nothing new."""
        self.machine(launcher="single")
        profile = self.root / "profiles/local/config.yaml"
        profile.write_text(profile.read_text().replace("tasks_per_node: 2", "tasks_per_node: 1"))

    @property
    def environment(self) -> dict[str, str]:
        # One thread a process: tests run side by side, and idle threads of tiny models spin.
        return {**os.environ, "TMPDIR": f"{self.root}/tmp", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str, profile: str = "profiles/local") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "snakemake", "--profile", profile, *arguments]
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def snakemake(
        self, *arguments: str, profile: str = "profiles/local", deadline_sec: float = DEADLINE_SEC
    ) -> tuple[int, str]:
        """Exit status and everything printed."""
        process = self.start(*arguments, profile=profile)
        try:
            output, _ = process.communicate(timeout=deadline_sec)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            output, _ = process.communicate()
            pytest.fail(f"not through after {deadline_sec} s:\n{output[-4000:]}")
        return process.returncode, output

    def forge(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "forge", *arguments],
            cwd=self.root,
            env=self.environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SEC,
        )

    def with_make(self) -> None:
        """Also the Makefile and what it reads, and a .venv for which nothing is left to install."""
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "hashes.txt", "tools"):
            source = REPOSITORY / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, self.root / name)
        link_environment(self.root)
        (self.root / ".venv/ready").touch()

    def shell(self, text: str, **variables: str) -> tuple[int, str]:
        """Exit status and output of a command as in a shell with an active .venv; see with_make."""
        path = f"{self.root}/.venv/bin:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=self.root,
            env={**self.environment, "PATH": path, **variables},
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_SEC,
        )
        return done.returncode, done.stdout

    def path(self, name: str, run: str = "base") -> Path:
        return self.root / "results" / run / name

    def read(self, name: str, run: str = "base") -> dict[str, object]:
        return json.loads(self.path(name, run).read_text())

    def steps(self, run: str = "base") -> int:
        """The last step in metrics.jsonl."""
        path = self.path("metrics.jsonl", run)
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        return max((line["step"] for line in lines if line["kind"] == "train"), default=0)

    def wait_for_step(self, step: int, process: subprocess.Popen[str], run: str = "base") -> None:
        wait(lambda: self.steps(run) >= step or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0][-4000:]

    def processes(self) -> list[psutil.Process]:
        """Every living process that works on this project."""
        found = []
        for process in running():
            try:
                if process.cwd() == str(self.root) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def started(output: str) -> list[str]:
    """The jobs that a command says have started, in order: rule and wildcards."""
    return re.findall(r"^\[\S+ \S+\] (.+): started$", output, re.MULTILINE)


def started_rules(output: str) -> list[str]:
    return [job.split()[0] for job in started(output)]


def wait(condition, seconds: float = DEADLINE_SEC) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still waiting after {seconds} s"
        time.sleep(0.05)


def kill_tree(pid: int) -> None:
    """kill -9 of a process and all its children, the parent first."""
    try:
        parent = psutil.Process(pid)
        tree = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def link_environment(root: Path) -> None:
    """A .venv in `root` that is the environment of this process."""
    (root / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.is_dir() or part.name == "pyvenv.cfg":
            (root / ".venv" / part.name).symlink_to(part)


def make_project(root: Path) -> Project:
    for name in ("workflow", "profiles", "config"):
        shutil.copytree(REPOSITORY / name, root / name)
    (root / "corpus").mkdir()
    (root / "tmp").mkdir()
    for name in TEXTS:
        shutil.copy(STDLIB / f"{name}.py", root / "corpus" / f"{name}.txt")
    project = Project(root)
    project.write_config()
    project.write_runs("run\ttrain.seed\nbase\t0\n")
    return project


@contextmanager
def killed_and_resumed(project: Project) -> Iterator[None]:
    """Kill the run of a project after its first checkpoint, train it to its end by the same command, and
    export it to build/base; end its processes behind the block."""
    try:
        process = project.start("train")
        latest = project.path("checkpoints/latest")
        wait(lambda: latest.exists() or process.poll() is not None)
        kill_tree(process.pid)
        process.communicate()
        assert latest.exists() and not project.path("trained.json").exists()
        code, output = project.snakemake("train")
        assert code == 0, output
        assert "resume from" in output
        done = project.forge("export", "base", "--to", "build/base")
        assert done.returncode == 0, done.stderr
        yield
    finally:
        for left in project.processes():
            kill_tree(left.pid)
