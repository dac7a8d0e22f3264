"""What is around the tests and belongs to their user: variables of the shell, files in the clone.

A plugin of pytest. Variables that act on Forge, or on what it starts, are removed before tests are
imported. Tests work in a copy of the repository. A session that changes files of the user fails and names
them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import pytest
from support.repository import CLONE, REPOSITORY

# Of Forge, Slurm and other launchers, and of libraries: docs/environment.md. Also those that git and make
# set for their children. A hub of a test is on this machine, where a site's proxy does not lead.
OF_USER = re.compile(
    r"(FORGE|SLURMD?|SBATCH|SRUN|SALLOC|SQUEUE|SACCT|SCONTROL|SINFO|SCANCEL|PMIX?|OMPI|PET|TORCHELASTIC"
    r"|SNAKEMAKE|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|WANDB|MLFLOW|TORCH|TORCHINDUCTOR|PYTORCH|CUBLAS"
    r"|OMP|MKL|NUMEXPR|GIT|CONDA|GPU|ROCR|ZE|IB)_"
    r"|(MASTER_(ADDR|PORT)|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|VIRTUAL_ENV|PYTHON(SAFEPATH|HASHSEED)?"
    r"|PROFILE|EXTRAS|WHEELHOUSE|TWIN|MAKEFLAGS|MFLAGS|MAKEOVERRIDES|NO_COLOR|FORCE_COLOR|COLUMNS|LINES)$"
    r"|(?i:(https?|all|no)_proxy)$"
)
OF_GPU = re.compile(r"(CUDA|NVIDIA|NCCL|GLOO)_")  # a site's own, with which its GPUs work
STEERING = re.compile(
    r"FORGE_(TEST_|GPU_|FAULTS|FUZZ|LABS|ABSENCES$|SLURM_DIR$|RENEW_SITES$|STORM_)|GIT_SSL|GIT_SSH"
)
HAS_GPU = os.environ.get("FORGE_GPU_CHECKS") == "gpu" or any(Path("/dev").glob("nvidia[0-9]*"))
# Where a run, a user or `make` writes. Other files are a developer's, who may edit them meanwhile.
FILES = (
    *("results", "data", ".snakemake", "build", "profiles"),
    *("config/config.yaml", "config/runs.tsv"),
)


def clear(variables: MutableMapping[str, str], *, gpu: bool) -> None:
    """Take away the user's variables, and other environments from PATH. gpu: checks run on a GPU."""
    places = [variables.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    others = {f"{place}/bin" for place in places if place and Path(place) != Path(sys.prefix)}
    path = variables.get("PATH", os.defpath).split(os.pathsep)
    variables["PATH"] = os.pathsep.join(folder for folder in path if folder not in others)
    for name in list(variables):
        theirs = OF_USER.match(name) or (not gpu and OF_GPU.match(name))
        if theirs and not STEERING.match(name):
            del variables[name]


clear(os.environ, gpu=HAS_GPU and os.environ.get("FORGE_GPU_CHECKS") != "cpu")


@pytest.fixture(scope="session", autouse=True)
def _works_in_a_copy() -> Iterator[None]:
    """A relative path, or a command that says no directory, is about a copy of the repository."""
    before = Path.cwd()
    os.chdir(REPOSITORY)
    yield
    os.chdir(before)


# --- files in the clone ---------------------------------------------------------------------------

State = dict[str, tuple[int, int]]
_found = pytest.StashKey[State]()
_changed = pytest.StashKey[list[str]]()


def files_of_user(clone: Path) -> State:
    """Size and time of each file in FILES."""
    state = {}
    for place in map(clone.joinpath, FILES):
        for path in (place, *place.rglob("*")):
            if path.is_symlink() or path.is_file():
                facts = path.lstat()
                state[str(path.relative_to(clone))] = (facts.st_size, facts.st_mtime_ns)
    return state


def differing(before: State, after: State) -> list[str]:
    names = before.keys() | after.keys()
    return sorted(name for name in names if before.get(name) != after.get(name))


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # not in a process of xdist
        session.config.stash[_found] = files_of_user(CLONE)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _found in session.config.stash:
        changed = differing(session.config.stash[_found], files_of_user(CLONE))
        session.config.stash[_changed] = changed
        if changed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name in config.stash.get(_changed, []):
        terminalreporter.write_line(
            f"ERROR {name} was changed in the clone while tests ran: by one of them, or by somebody else"
        )
