"""Place and version of the workflow, for a user's Snakefile that has it as a module."""

from __future__ import annotations

from pathlib import Path

import forge
from forge.core.paths import SNAKEFILE, shipped
from forge.flow.snakemake_private import refusal


def snakefile_of(version: str) -> str:
    """Path of the workflow that came with the installed Forge, for `snakefile:` of a module. version: of
    Forge, when the user's Snakefile was made. Raises an error of Snakemake for another one."""
    _refuse_other("this Snakefile", version, f'write snakefile_of("{forge.__version__}")')
    return str(shipped() / SNAKEFILE)


def refuse_other_version(version: str) -> None:
    """An error of Snakemake where rules of this version would call another Forge."""
    _refuse_other("this workflow", version, f"take the workflow of the tag v{forge.__version__}")


def _refuse_other(what: str, version: str, instead: str) -> None:
    if version != forge.__version__:
        wheel = f"forge-{version}-py3-none-any.whl"
        raise refusal(
            f"{what} is for Forge {version}, and Forge {forge.__version__} is installed, in"
            f" {Path(forge.__file__).parent}\n"
            f"  fix:   pip install --constraint constraints.txt {wheel} (docs/installation.md),\n"
            f"         or {instead}: CHANGELOG.md has what differs"
        )
