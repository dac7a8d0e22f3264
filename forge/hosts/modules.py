"""Environment modules of the site (`environment.modules`): loaded once in each start of a job, on its
first node; every command of the job gives the ranks what they change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from forge.core.errors import ConfigError, DataError, UnfitError
from forge.core.machine import SET_BY_FORGE
from forge.core.paths import modules_file
from forge.core.process import hostname
from forge.core.records import LoadedModules
from forge.slurm import slurm

LOAD_SEC = 60.0
MARK = "forge-modules-mark"
# For a login shell, which has the function `module`. Arguments: modules. Prints the environment before
# and after, the status, and what `module` says, each after a mark.
LOAD = rf"""
type module >/dev/null 2>&1 || {{ echo {MARK} no module; exit; }}
said=$(mktemp) || exit 1
printf '{MARK}\0'; env -0
module load "$@" >"$said" 2>&1
status=$?
printf '{MARK}\0'; env -0
printf '{MARK}\0%s\0' $status
cat "$said"; rm -f "$said"
"""
# Of the shell that loads them.
OF_THE_SHELL = re.compile(r"_|SHLVL|PWD|OLDPWD|BASH_FUNC_.*|BASH_ENV|TMPDIR")
LOADED = "LOADEDMODULES"  # of Lmod and Environment Modules: NAME/VERSION, by colons


@dataclass(frozen=True)
class Modules:
    """Modules that were loaded: full names, and variables that they set or change."""

    names: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def load_modules(modules: Sequence[str], host: str, job: slurm.Job | None) -> Modules:
    """Load them in a login shell of this host, or on that one of the job, where an earlier command of
    this start of the job has not loaded them.

    Variables that they remove are kept. Raises ConfigError where a module is not there or does not load,
    with what `module` says; UnfitError where that takes too long; SlurmSilent.
    """
    loaded = _of_earlier_command(modules, host, job)
    if loaded is None:
        loaded = _load(modules, host, job)
        if job:
            loaded.write(modules_file(host))
    return Modules(tuple(loaded.names), _changes(loaded.before, loaded.after))


def _of_earlier_command(
    modules: Sequence[str], host: str, job: slurm.Job | None
) -> LoadedModules | None:
    with suppress(DataError):
        known = LoadedModules.read_if_there(modules_file(host)) if job else None
        if job and known and (known.job, known.restart) == (job.id, job.restarts):
            return known if known.asked == list(modules) else None
    return None


def _load(modules: Sequence[str], host: str, job: slurm.Job | None) -> LoadedModules:
    words = ["bash", "-lc", LOAD, "bash", *modules]
    if host == hostname() or job is None:
        output, trouble = slurm.run(words, timeout_sec=LOAD_SEC)
    else:
        line = slurm.srun(job.id, [host], options=("--overlap", "--gres=none"))
        output, trouble = slurm.run_step([*line, *words], timeout_sec=LOAD_SEC)
    if slurm.is_slurms_own(trouble):
        raise slurm.silent(trouble)
    named = f"environment.modules [{', '.join(modules)}] on {host}"
    if trouble:
        raise UnfitError(
            f"{named}: {trouble.splitlines()[-1]}",
            cause="a start file of the login shell, or the disk of the modules, does not respond",
            fix=f"try it there: time bash -lc 'module load {' '.join(modules)}'",
        )
    parts = output.split(f"{MARK}\0")
    if len(parts) != 4:
        raise ConfigError(
            f"{named}: a login shell knows no command `module`",
            cause="the site has no modules, or its start files do not define the command in batch jobs",
            fix="remove environment.modules, and set environment.variables instead",
        )
    before, after = _variables(parts[1]), _variables(parts[2])
    status, _, said = parts[3].partition("\0")
    loaded = [name for name in after.get(LOADED, "").split(":") if name]
    if status != "0" or (LOADED in after and not all(_is_in(m, loaded) for m in modules)):
        raise ConfigError(
            f"{named}: module load failed: {' '.join(said.split())[:400] or f'status {status}'}",
            cause="there is no module of that name on this node, or another must be loaded before",
            fix="see `module avail` and `module spider NAME` there; name them in the order to load",
        )
    own = [name for name in loaded if name not in before.get(LOADED, "").split(":")]
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    return LoadedModules(
        job=job.id if job else "",
        restart=job.restarts if job else 0,
        asked=list(modules),
        names=own or list(modules),
        before={name: before[name] for name in changed if name in before},
        after=changed,
    )


def _variables(text: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def _is_in(module: str, loaded: Sequence[str]) -> bool:
    """Return whether one of these has the module's name, without its version: gcc/13, cuda/default and
    cuda@12.4 are loaded as gcc/13.2.0 and cuda/12.4."""
    base = re.split(r"[/@]", module)[0]
    return any(name == base or name.startswith(f"{base}/") for name in loaded)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Variables to set for ranks. A path keeps what it has in this process, which may differ from the
    login shell's, such as that of an active environment."""
    changes = {}
    for name, value in after.items():
        if OF_THE_SHELL.fullmatch(name) or SET_BY_FORGE.fullmatch(name):
            continue
        old, own = before.get(name, ""), os.environ.get(name, "")
        if value != old:
            changes[name] = _added(value, old, own) if old and own else value
    return changes


def _added(value: str, old: str, own: str) -> str:
    """own: with what was put before `old`, or behind it; the value itself where that is another one."""
    if value.endswith(old):
        return value.removesuffix(old) + own
    return own + value.removeprefix(old) if value.startswith(old) else value
