"""`forge profile`: a profile for a cluster, from what its Slurm says."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from forge.core.errors import ConfigError
from forge.core.files import disk_trouble
from forge.core.terminal import print_plain, say
from forge.core.values import shown
from forge.plugins.site.profile_text import config_text, feature, lines_to_edit, machine_text
from forge.plugins.site.profile_words import (
    cores_of,
    has_in_words,
    in_words,
    nodes_in_words,
    preempted_in_words,
)
from forge.plugins.site.site_choice import Choice, Wishes, choose
from forge.slurm.site import SiteAnswers

PROFILES = Path("profiles")
# Snakemake reads this one in every command, after that of --profile.
_OF_SNAKEMAKE = "default"


def profile(name: str, wishes: Wishes, answers_file: Path | None, save: Path | None) -> None:
    """Write profiles/NAME, from Slurm's answers or those in a file; "" only saves the answers.

    Raises ConfigError where there is nothing to write, or something there already, and what
    SiteAnswers.ask and .read, and choose raise. Nothing is written then.
    """
    _refuse_nothing(name, answers_file, save)
    folder = _new_folder(name) if name else None
    if save and os.path.lexists(save):
        raise ConfigError(f"--save {save} exists already", fix="name a new file")
    answers = SiteAnswers.read(answers_file) if answers_file else _ask()
    if save:
        answers.write(save)
        say(f"saved in {save}: Slurm's answers; nothing of jobs or of other users")
    if folder:
        choice = choose(answers, wishes)
        config, machine = config_text(choice), machine_text(choice)
        _write(folder, {"config.yaml": config, "machine.yaml": machine})
        print_plain("\n".join(_report(choice, folder, config)))


def _ask() -> SiteAnswers:
    say("asking Slurm (sinfo, scontrol, sacctmgr) …")
    return SiteAnswers.ask()


def _refuse_nothing(name: str, answers_file: Path | None, save: Path | None) -> None:
    if not name and not save:
        raise ConfigError(
            "no NAME for the profile", fix="forge profile NAME, or forge profile --save FILE"
        )
    if answers_file and save:
        raise ConfigError(
            f"--from {answers_file} and --save {save}: these answers are saved already",
            fix="leave one of them out",
        )


def _new_folder(name: str) -> Path:
    """profiles/NAME, which does not exist yet. Raises ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name, re.ASCII):
        raise ConfigError(
            f"{shown(name)} cannot be the name of a profile",
            cause="it is the plain name of a folder that will be made in profiles/",
            fix="letters, digits, dots, - and _, such as: forge profile mine",
        )
    if name == _OF_SNAKEMAKE:
        raise ConfigError(
            "a profile cannot have the name default",
            cause="Snakemake reads profiles/default in every command, and its keys win over --profile",
            fix="another name, such as: forge profile mine",
        )
    if not PROFILES.is_dir():
        raise ConfigError(
            f"there is no directory profiles/ in {Path.cwd()}",
            fix="run this in the project's directory, beside workflow/ and config/",
        )
    folder = PROFILES / name
    if os.path.lexists(folder):
        raise ConfigError(
            f"{folder} exists already, and is left as it is",
            fix=f"another name, or remove it first: rm -r {folder}",
        )
    return folder


def _write(folder: Path, files: dict[str, str]) -> None:
    """A new directory with these files, all or none of them. Raises UnfitError for a full disk."""
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    with disk_trouble(folder, "write"):
        try:
            new.mkdir()
            for name, text in files.items():
                (new / name).write_text(text, encoding="utf-8")
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)


# --- what people read ------------------------------------------------------------------------------


def _report(choice: Choice, folder: Path, config: str) -> Iterator[str]:
    place, size = choice.train, choice.size
    yield f"{folder}/config.yaml and machine.yaml were written:"
    yield ""
    each = (
        f" x {size.ranks} {place.model.text}" if place.model else f" x {size.ranks} ranks on CPUs"
    )
    disk_mb = min(node.disk_mb for node in place.nodes)
    rows = {
        "partition": f"{place.partition.name} ({has_in_words(place)})",
        "account": place.account or "none given",
        "training": f"{nodes_in_words(size.nodes)}{each}",
        "a node": f"{size.ranks} x {size.cpus_per_task} {cores_of(place)}, {size.mem_mb} MB",
        "time": f"{in_words(size.minutes)} ({size.minutes_rule})",
        "preemption": preempted_in_words(place),
        "own disk": f"{disk_mb} MB (TmpDisk)" if disk_mb else "not known (TmpDisk=0)",
        "other rules": choice.rules.partition.name if choice.rules else "EDIT_cpu_partition",
    }
    extra = {"qos": place.unusual_qos, "constraint": feature(place)}
    rows |= {name: value for name, value in extra.items() if value}
    yield from (f"  {name:<12} {value}" for name, value in rows.items())
    yield ""
    yield from (f"not known: {line}" for line in unknown(choice, config))
    yield "next:"
    yield f"  snakemake --profile {folder} preflight"
    layout = f"--nodes {size.nodes} --ranks-per-node {size.ranks}"
    yield f"  forge plan config/config.yaml {layout} --machine {folder}/machine.yaml"
    yield f"  snakemake --profile {folder} train"


def unknown(choice: Choice, config: str) -> Iterator[str]:
    """Facts that Slurm did not say, or cannot know."""
    site, place = choice.site, choice.train
    if keys := lines_to_edit(config):
        yield f"{', '.join(keys)}: edit the lines that begin with EDIT_"
    for name, answer in site.answers.answers.items():
        if answer.error:
            yield f"{name} ({' '.join(answer.command[:1])}): {answer.error.splitlines()[0]}"
    if place.model and not place.model.memory_gib:
        yield "the memory of a GPU: gpu_memory_gib in machine.yaml (nvidia-smi)"
    if choice.rules and choice.rules.model:
        yield f"whether {choice.rules.partition.name} takes jobs without GPUs"
    if site.settings.get("JobSubmitPlugins", "(null)") not in ("(null)", ""):
        yield (
            "this site's own rules for jobs (JobSubmitPlugins): where sbatch refuses slurm_partition"
            " or qos, write what the site's documentation says"
        )
    if choice.closed:
        yield f"GPUs of {', '.join(choice.closed[:8])}: no account of yours runs there"
    yield "network, Python, storage: docs/new-cluster.md"
