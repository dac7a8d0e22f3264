"""`forge init`: a project that uses the workflow of the installed Forge as a module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import forge
from forge.core.config import CONFIG
from forge.core.errors import ConfigError
from forge.core.files import disk_trouble
from forge.core.paths import SHEET, SNAKEFILE, shipped
from forge.core.terminal import say

PROFILE = "profiles/local"
COPIED = (
    *(CONFIG, SHEET, "config/README.md"),
    *(f"{PROFILE}/config.yaml", f"{PROFILE}/machine.yaml", "profiles/README.md"),
    # Named in the first lines of these, for editors.
    *("workflow/schemas/config.schema.json", "workflow/schemas/machine.schema.json"),
)
TEXT = """\
# Forge's rules as a module. Room for rules of your own, before and after: docs/workflow.md of Forge.
from forge.as_module import snakefile_of


configfile: "{config}"


module forge:
    snakefile:
        # The workflow of the installed Forge. Another version than this one is refused.
        snakefile_of("{version}")
    config:
        config


use rule * from forge
"""


def init(folder: Path) -> None:
    """Write a new project into this directory, which need not exist. Raises ConfigError where there is
    something in it, UnfitError where the disk does not let it."""
    source = shipped()
    with disk_trouble(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if there := sorted(path.name for path in folder.iterdir()):
            names = ", ".join(there[:5]) + (", …" if len(there) > 5 else "")
            raise ConfigError(
                f"{folder} is not empty: {names}",
                fix="name a directory that is not there yet; nothing was written",
            )
        for name in COPIED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        text = TEXT.format(config=CONFIG, version=forge.__version__)
        (folder / SNAKEFILE).write_text(text)
    for line in _next_steps(folder):
        say(line)


def _next_steps(folder: Path) -> Iterator[str]:
    yield f"project: {folder}, with {SNAKEFILE}, {CONFIG}, {SHEET} and {PROFILE}"
    yield "try:"
    if folder.resolve() != Path.cwd():
        yield f"  cd {folder}"
    yield f"  snakemake --profile {PROFILE} -n"
    yield f"  snakemake --profile {PROFILE}"
    yield f"then: name your text in {CONFIG} (tokenize.inputs; as it is, Python's own standard library)"
    yield "on a Slurm cluster, for a profile of it:"
    yield "  forge profile mine"
