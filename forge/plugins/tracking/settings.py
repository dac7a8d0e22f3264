"""Section `tracking`: trackers of a run's numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forge.core import hooks
from forge.core.section import Section, WithPlugins

Text = Annotated[str, Field(min_length=1, max_length=128)]


class Wandb(Section):
    """Weights & Biases. The API key comes from WANDB_API_KEY or `wandb login`."""

    BOUND = ()

    project: Text = "forge"
    """Project of the run, made when it does not exist."""
    entity: Text | None = None
    """User or team; null: the default one of the API key."""
    group: Text | None = None
    """Group of the run in the project; null: none."""
    tags: list[Text] = Field(default=[])
    """Tags of the run."""
    name: Text | None = None
    """Name that is shown; null: the name of the run."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """`offline`: record to files in the run's directory, until `forge sync` on a node with internet;
    `auto`: offline where WANDB_MODE says so, there is no API key, or the server cannot be reached."""


class Mlflow(Section):
    """MLflow, by a server or a database."""

    BOUND = ()

    tracking_uri: Annotated[str, Field(min_length=1)] | None = None
    """Server (`https://…`) or database (`sqlite:////path/mlflow.db`); null: MLFLOW_TRACKING_URI, else
    MLflow's own default."""
    experiment: Annotated[str, Field(min_length=1)] = "forge"
    """Experiment of the run, made when it does not exist."""


class Tracking(WithPlugins, Section):
    """Trackers of a run's numbers, which training never waits for. Needs `make setup EXTRAS=tracking`."""

    BOUND = ()

    tensorboard: bool = False
    """Write event files to `tensorboard/` in the run's directory."""
    wandb: Wandb | None = None
    """null: not sent to Weights & Biases; `{}`: with the defaults."""
    mlflow: Mlflow | None = None
    """null: not sent to MLflow; `{}`: with the defaults."""

    @classmethod
    def sections_of_plugins(cls) -> dict[str, type[Section]]:
        """The sections of trackers of the project's plugins, by key."""
        return hooks.trackers()

    def _check_of_plugins(self) -> None:
        if both := hooks.trackers().keys() & type(self).model_fields.keys():
            raise ValueError(
                f"the plugin's tracker {min(both)} has the name of one of Forge: give it another"
            )

    @property
    def packages(self) -> tuple[str, ...]:
        """Names of Forge's trackers that are on, which are also those of their packages."""
        return tuple(name for name, value in self if value not in (None, False))

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers that are on."""
        return (*self.packages, *self.of_plugins)
