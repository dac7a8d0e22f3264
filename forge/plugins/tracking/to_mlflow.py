"""Metrics, parameters and state of a run for MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from forge.plugins.tracking.records import Sent
from forge.plugins.tracking.rows import StepRow
from forge.plugins.tracking.settings import Mlflow
from forge.plugins.tracking.tracker import TrackedRun

# Limits of a request, mlflow.utils.validation: MAX_METRICS_PER_BATCH, MAX_PARAMS_TAGS_PER_BATCH,
# MAX_PARAM_VAL_LENGTH.
METRICS, PARAMS, PARAM_CHARACTERS = 1000, 100, 6000
TAG = "forge.id"


class MLflow:
    """The run is found again by a tag. Databases take the same metric (name, step, time, value) only
    once, so that a batch that is sent again after a crash changes nothing."""

    def __init__(self, settings: Mlflow) -> None:
        self._settings = settings

    def open(self, run: TrackedRun, sent: Sent) -> Sent:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._settings.tracking_uri)
        experiment = self._client.get_experiment_by_name(self._settings.experiment)
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(self._settings.experiment)
        )
        runs = self._client.search_runs([number], filter_string=f"tags.`{TAG}` = '{sent.id}'")
        if runs:
            tracked = runs[0]
        else:
            sent = sent.model_copy(update={"step": -1})  # another server, or the run was removed
            tracked = self._client.create_run(number, tags={TAG: sent.id}, run_name=run.name)
        self._run_id = tracked.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_params(run.config, tracked.data.params)
        return sent

    def _log_params(self, config: dict[str, Any], there: dict[str, str]) -> None:
        """Log the parameters that MLflow lacks: a parameter there never changes."""
        from mlflow.entities import Param

        params = [Param(k, str(v)[:PARAM_CHARACTERS]) for k, v in flat(config) if k not in there]
        while params:
            self._client.log_batch(self._run_id, params=params[:PARAMS])
            params = params[PARAMS:]

    def log(self, rows: Sequence[StepRow]) -> None:
        """Returns when the server has stored them."""
        from mlflow.entities import Metric

        points = [
            Metric(name, value, int(1000 * row.time), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for start in range(0, len(points), METRICS):
            self._client.log_batch(self._run_id, metrics=points[start : start + METRICS])

    def finish(self, state: str) -> None:
        self._client.set_tag(self._run_id, "forge.state", state)
        if state != "running":
            kind = state.partition(":")[0]
            status = {"completed": "FINISHED", "failed": "FAILED"}.get(kind, "KILLED")
            self._client.set_terminated(self._run_id, status=status)


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested sections."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
