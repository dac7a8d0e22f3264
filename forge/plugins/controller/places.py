"""Names of the files of `forge submit`, and of the variable by which its dry run knows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge.core.paths import WORKFLOW

SUBMIT_CHECK = WORKFLOW / "submit-check.json"  # what the dry run of `forge submit` answered
CONTROLLERS = WORKFLOW / "controllers"  # the jobs that it submitted
# Set for the dry run of `forge submit`.
CHECKS = "FORGE_CHECKS_FOR_SUBMIT"


@dataclass(frozen=True)
class ControllerPaths:
    """Files of one job of `forge submit`. job: Slurm's id; or `%j`, which sbatch replaces by that."""

    job: str

    @property
    def record(self) -> Path:
        """Record of the submission."""
        return CONTROLLERS / f"{self.job}.json"

    @property
    def state(self) -> Path:
        """State of the job, or its end."""
        return CONTROLLERS / f"{self.job}.state.json"

    @property
    def log(self) -> Path:
        """Log of Snakemake."""
        return CONTROLLERS / f"{self.job}.log"

    @classmethod
    def all(cls) -> list[ControllerPaths]:
        """Paths of each controller job that has a record, oldest first."""
        names = [path.name.removesuffix(".json") for path in CONTROLLERS.glob("*.json")]
        ids = [name for name in names if name.isdigit()]
        return [cls(job) for job in sorted(ids, key=int)]

    def remove(self) -> None:
        """Forget the job."""
        for path in (self.record, self.state, self.log):
            path.unlink(missing_ok=True)
