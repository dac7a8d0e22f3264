"""What a run's directory holds, against the names in RunPaths."""

from pathlib import Path

from forge.core import hooks
from forge.core.paths import RunPaths
from forge.hosts.lock import LOCK, WORKFLOW_LOCK


def unnamed(root: Path) -> set[str]:
    """Names of files and directories of a run that neither RunPaths nor a plugin has."""
    named = (getattr(attribute, "name", "") for attribute in vars(RunPaths).values())
    known = {name.partition("/")[0] for name in named}
    known |= {LOCK, WORKFLOW_LOCK, *hooks.run_files()}
    return {path.name for path in root.iterdir()} - known
