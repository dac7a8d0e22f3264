"""Provenance of a model, recorded in each checkpoint: code, config, data, versions and hardware."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import forge
from forge.core.config import FOLDERS, OUTSIDE_TRAINING, Config, ResolvedConfig, as_recorded
from forge.core.files import canonical, digest_bytes, short_id
from forge.core.section import with_retired

# On which the last bits of a result may depend; preflight compares them between nodes.
PACKAGES = ("torch", "tokenizers", "numpy", "pydantic", "blake3")

# In digests of configs at their defaults since commit 81f9dc7, when they were sections of the kernel.
SECTIONS_OF_PLUGINS = {
    "evaluate": {
        **dict.fromkeys(("include_path", "num_fewshot", "limit", "every")),
        **{"tasks": [], "batch_size": 8},
    }
}
NEVER_DIGESTED = "tracking"  # which was a section of the kernel, too


def config_digest(config: ResolvedConfig) -> str:
    """Digest of a run's config, without its name, directories and sections that training does not read,
    which do not change what is trained."""
    return digest_bytes(canonical(trained_values(config.of_training.to_json())))


def recorded_digest(values: dict[str, Any]) -> str:
    """The same of a run's config.json, which has no sections that training does not read. No plugin is
    needed for it."""
    defaults = Config().to_json()
    outside = {key: defaults[key] for key in OUTSIDE_TRAINING}
    return digest_bytes(canonical(trained_values({**outside, **as_recorded(values)})))


def trained_values(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a config that `config_digest` digests, in whatever file they are recorded. Keys that were
    removed are among them, at their defaults: the digests that people have stay true."""
    values = {**SECTIONS_OF_PLUGINS, **with_retired(Config, values)}
    ids = {name: content_id for name, content_id in values["ids"].items() if content_id}
    left_out = (*FOLDERS, NEVER_DIGESTED)
    return {key: value for key, value in {**values, "ids": ids}.items() if key not in left_out}


def versions(*, fp8: bool = False) -> dict[str, str]:
    """Versions of Python and of the packages that affect the results. fp8: of a run with train.fp8."""
    packages = (*PACKAGES, "torchao") if fp8 else PACKAGES
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def installed_packages() -> dict[str, str]:
    """Name -> version of every package that this Python finds, in order of name: what would have to be
    installed again."""
    found: dict[str, str] = {}
    # Without the copies that setuptools has inside of itself: it puts them into the path once torch's
    # compiler has imported it, and a list must not depend on what a process has imported.
    path = [folder for folder in sys.path if Path(folder).name != "_vendor"]
    for package in distributions(path=path):
        # All of the metadata, as `package.name` reads them, would take 0.1 s for 200 packages; this 6 ms.
        text = package.read_text("METADATA") or ""
        fields = dict(
            re.findall(r"^(Name|Version): (.+)$", text.partition("\n\n")[0], re.MULTILINE)
        )
        if len(fields) == 2:  # else the rest of an installation that failed
            found.setdefault(fields["Name"], fields["Version"])  # the first is the one imported
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))


def code() -> dict[str, Any]:
    """Version of Forge; in a git checkout also the commit, whether tracked files differ from it, and
    where they do the digest of the difference."""
    folder = Path(forge.__file__).parent
    head = _git(folder, "rev-parse", "HEAD")
    commit = head.decode().strip() if head else None
    dirty = bool(_git(folder, "status", "--porcelain", "--untracked-files=no")) if commit else None
    facts = {"version": forge.__version__, "commit": commit, "dirty": dirty}
    # Not as the user's own settings of git show it: with colors, or through another program.
    plain = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv")
    diff = _git(folder, "diff", "HEAD", *plain) if dirty else None
    return facts if diff is None else {**facts, "diff": digest_bytes(diff)}


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            check=False,
            capture_output=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git, or its file system hangs; the version is recorded in any case
    return done.stdout if done.returncode == 0 else None


def cpu_id() -> str:
    """A short digest of the kind of this CPU: the same for two on which the same machine code runs."""
    names = ("model name", "flags", "CPU implementer", "CPU part", "Features")  # of x86; of ARM
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text().partition("\n\n")[0] if cpuinfo.exists() else ""
    lines = [line for line in text.splitlines() if line.partition(":")[0].strip() in names]
    return short_id("\n".join([platform.machine(), *lines]))


def cpu_name() -> str:
    """The model of the processor, as the kernel names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
