"""Two users of one group share `data`: each reuses what the other made, and neither stops the other."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support import pages
from support.clone import DEADLINE_SEC, Project, kill_tree, make_project, started, wait

GROUP = 61000
# Without names in this host's list of users: messages then have the number.
ALICE, BOB = 61001, 61002
# Reads what it may not read otherwise, such as an interpreter below /root, and writes as itself only.
READS_ALL = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
HOLD = """
import sys
from pathlib import Path
from forge.hosts.lock import lock
with lock(Path(sys.argv[1]), "tokenizer"):
    print("held", flush=True)
    sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to run commands as two users")


@dataclass
class UserProject(Project):
    """The clone of one user, whose commands run as this user."""

    uid: int = 0
    umask: str = "002"

    def command(self, *words: str) -> list[str]:
        user = ("setpriv", f"--reuid={self.uid}", f"--regid={GROUP}", "--clear-groups", *READS_ALL)
        return [*user, "sh", "-c", f'umask {self.umask}; exec "$@"', "sh", *words]

    def start(self, *arguments: str, profile: str = "profiles/local") -> subprocess.Popen[str]:
        return self.run(sys.executable, "-m", "snakemake", "--profile", profile, *arguments)

    def run(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            cwd=self.root,
            env=self.environment | {"HOME": str(self.root), "LOGNAME": str(self.uid)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def tokenize(self, vocab_size: int = 320) -> tuple[int, str]:
        """Exit status and output of the workflow up to the tokens."""
        path = self.root / "config/config.yaml"
        config = yaml.safe_load(path.read_text())
        config["tokenizer"]["vocab_size"] = vocab_size
        path.write_text(yaml.safe_dump(config))
        return self.snakemake("--until", "tokenize")


@pytest.fixture
def lab() -> Iterator[Path]:
    """The directory of a lab, with `data` made as docs/data.md says: not below tmp_path, which only its
    owner may enter."""
    folder = Path(tempfile.mkdtemp(prefix="forge-lab-"))
    folder.chmod(0o755)
    commands = [command.bare for command in pages.commands_of("tests/workflow/test_shared_data.py")]
    *commands, last = [command.replace("labgroup", str(GROUP)) for command in commands]
    assert last == f"umask {UserProject.umask}"
    subprocess.run(["sh", "-ec", "\n".join(commands)], cwd=folder, check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def users(lab: Path) -> Iterator[tuple[UserProject, UserProject]]:
    projects = tuple(_project(lab, name, uid) for name, uid in (("alice", ALICE), ("bob", BOB)))
    yield projects[0], projects[1]
    for process in (process for project in projects for process in project.processes()):
        kill_tree(process.pid)


def _project(lab: Path, name: str, uid: int) -> UserProject:
    (lab / name).mkdir()
    root = make_project(lab / name).root
    config = yaml.safe_load((root / "config/config.yaml").read_text())
    (root / "config/config.yaml").write_text(yaml.safe_dump(config | {"data": str(lab / "data")}))
    subprocess.run(["chown", "-R", f"{uid}:{GROUP}", str(root)], check=True)
    return UserProject(root, uid)


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Each file below a directory, with the values that change when it is written again."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def _held_by(user: UserProject, folder: Path) -> subprocess.Popen[str]:
    """A process of this user that holds the lock of a directory of data/ whose manifest is gone."""
    (folder / "manifest.json").unlink()
    holder = user.run(sys.executable, "-c", HOLD, str(folder))
    assert holder.stdout and holder.stdout.readline() == "held\n"
    return holder


def test_second_user_reuses_tokenizer_and_tokens_and_adds_others(users, lab):
    alice, bob = users
    code, output = alice.tokenize()
    assert code == 0, output
    made = _files(lab / "data")
    code, output = bob.tokenize()
    assert code == 0 and not started(output), output
    assert _files(lab / "data") == made

    code, output = bob.tokenize(vocab_size=330)
    assert code == 0, output
    code, output = alice.tokenize(vocab_size=330)
    assert code == 0 and not started(output), output
    owners = {path.stat().st_uid for path in lab.glob("data/tokens/*/manifest.json")}
    assert owners == {ALICE, BOB}
    assert all(path.stat().st_mode & 0o060 == 0o060 for path in _files(lab / "data"))


def test_second_user_waits_for_the_first_and_is_told_which_user(users, lab):
    alice, bob = users
    code, output = bob.tokenize()
    assert code == 0, output
    (tokenizer,) = lab.glob("data/tokenizers/*")
    holder = _held_by(alice, tokenizer)
    waiting = bob.start("--until", "tokenizer")
    lines = iter(waiting.stdout or [])
    said = next(line for line in lines if "waiting: " in line)
    assert f"{tokenizer} is being written by `forge tokenizer`" in said
    assert f"of user {ALICE}" in said
    holder.communicate("", timeout=DEADLINE_SEC)
    rest = "".join(lines)
    assert waiting.wait(DEADLINE_SEC) == 0, rest
    assert (tokenizer / "manifest.json").exists()


def test_what_a_killed_user_left_is_taken_over_by_the_other(users, lab):
    alice, bob = users
    code, output = bob.tokenize()
    assert code == 0, output
    (tokens,) = lab.glob("data/tokens/*")
    holder = _held_by(alice, tokens)
    os.killpg(holder.pid, signal.SIGKILL)
    wait(lambda: holder.poll() is not None)
    code, output = bob.tokenize()
    assert code == 0 and "took over" in output, output
    assert (tokens / "manifest.json").exists() and not (tokens / ".lock").exists()


def test_directory_that_the_group_may_not_write_is_named_with_its_owner(users, lab):
    alice, bob = users
    alice.umask = "022"
    code, output = alice.tokenize()
    assert code == 0, output
    code, output = bob.tokenize(vocab_size=330)
    assert code == 1 and "Permission denied" in output, output
    assert f"belongs to user {ALICE} (drwxr-sr-x), and you are {BOB}" in output
