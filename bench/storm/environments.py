"""Python environments of contenders: packages that Forge does not need, their versions and place.

python -m bench.storm.environments [NAME ...]
installs those that are missing, by pip, from the index that it finds by itself (some 1 GB each).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

from forge.core.errors import ConfigError, ForgeError
from tools.slurm_cluster.machines import REPOSITORY

# The only place that pins them. PyTorch is Forge's own release, so that it does not decide.
PYTORCH = ("torch==2.13.0", "numpy==2.4.6")
PACKAGES: dict[str, tuple[str, ...]] = {
    # 0.4.1: the newest for Python 3.11. It imports the other three without asking for them.
    "nvrx": (
        *PYTORCH,
        "nvidia-resiliency-ext==0.4.1",
        *("defusedxml==0.7.1", "pynvml==13.0.1", "setproctitle==1.3.8"),
    ),
    "torchft": (*PYTORCH, "torchft==0.2.0"),
    "submitit": (*PYTORCH, "submitit==1.5.4"),
    "trainer": (*PYTORCH, "transformers==5.23.0", "accelerate==1.15.0"),
}
INSTALL_SEC = 1800


def folder_of(name: str) -> Path:
    """FORGE_STORM_ENVIRONMENTS/NAME, by default in build/ of this project."""
    base = os.environ.get("FORGE_STORM_ENVIRONMENTS") or REPOSITORY / "build/storm-environments"
    return Path(base).absolute() / name


def program(name: str, command: str) -> Path:
    """A command of an environment, such as python."""
    return folder_of(name) / "bin" / command


def why_not(name: str) -> str | None:
    """Why nothing can run in this environment, with what to do; None if it is there."""
    stamp = _stamp(name)
    if not stamp.exists():
        state = "is not installed"
    elif stamp.read_text() != _text(name):
        state = "has other versions than those pinned now"
    else:
        return None
    return f"its environment {state}: python -m bench.storm.environments {name}"


def versions(name: str) -> dict[str, str]:
    """Those pinned for an environment."""
    found = dict(package.split("==") for package in PACKAGES[name])
    return {package: version for package, version in found.items() if package != "numpy"}


def make(name: str) -> None:
    """Install an environment anew. Raises ForgeError where pip fails or takes too long."""
    folder = folder_of(name)
    _stamp(name).unlink(missing_ok=True)  # first: an interrupted one does not count as installed
    venv.create(folder, clear=True, with_pip=True)
    command = [str(program(name, "python")), "-m", "pip", "install", "--quiet", *PACKAGES[name]]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_SEC
        )
    except subprocess.TimeoutExpired:
        raise ForgeError(f"pip took longer than {INSTALL_SEC} s for {name}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ForgeError(
            f"pip could not install {', '.join(PACKAGES[name])} into {folder}: "
            + "; ".join(errors[-2:] or done.stderr.splitlines()[-1:]),
            cause="no release for Python {}.{}, or no index in reach".format(*sys.version_info),
            fix="let pip reach an index, with Python 3.11; or leave this contender out",
        )
    _stamp(name).write_text(_text(name))


def _stamp(name: str) -> Path:
    return folder_of(name) / "packages.txt"


def _text(name: str) -> str:
    return "\n".join(PACKAGES[name]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.storm.environments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PACKAGES))
    names = parser.parse_args().names or list(PACKAGES)
    try:
        if unknown := [name for name in names if name not in PACKAGES]:
            raise ConfigError(
                f"no environment {unknown[0]!r}", fix=f"there are {', '.join(PACKAGES)}"
            )
        for name in names:
            if why_not(name) is None:
                print(f"{name} is there already", flush=True)
                continue
            print(f"{name}: {' '.join(PACKAGES[name])} …", flush=True)
            make(name)
    except ForgeError as err:
        sys.exit(str(err))


if __name__ == "__main__":
    main()
