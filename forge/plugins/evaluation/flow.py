"""Rules of evaluation: which runs they are for, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.core.config import ResolvedConfig
from forge.core.errors import ConfigError
from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths
from forge.flow.resources import of_profile
from forge.flow.rule_inputs import RuleSettings
from forge.hosts.allocation import plain
from forge.plugins.evaluation.settings import Evaluate
from forge.slurm.sbatch import Request

RULE = "evaluate_run"  # its resources in the profile are also those of the jobs during training


def evaluated(runs: Mapping[str, ResolvedConfig]) -> list[str]:
    """Names of the runs with tasks, for the target `evaluate`. Raises ConfigError without any."""
    names = [name for name, run in runs.items() if run.of(Evaluate).tasks]
    if not names:
        raise ConfigError(
            f"nothing to evaluate: evaluate.tasks is [] for {', '.join(runs)}",
            fix="set it in config/config.yaml, such as `evaluate: {tasks: [hellaswag]}`",
        )
    return names


def settings_of_scores(config: ResolvedConfig) -> RuleSettings:
    """The settings of evaluate_run."""
    paths = RunPaths.of(config)
    evaluate = read_object_or_empty(paths.evaluation).get("evaluate")
    made_with = None if evaluate is None else {"evaluate": evaluate}
    sections = {"evaluate": config.of(Evaluate).model_dump(mode="json")}
    return RuleSettings.of_sections(f"{config.run}.evaluate", sections, paths.evaluation, made_with)


def settings_of_data(config: ResolvedConfig) -> RuleSettings:
    """The settings of evaluate_data: which tasks, and nothing of how they are asked."""
    paths = RunPaths.of(config)
    recorded = [read_object_or_empty(paths.evaluation_data)]
    recorded.append(read_object_or_empty(paths.evaluation).get("evaluate") or {})
    made_with = next((_of_data(values) for values in recorded if values.get("tasks")), None)
    sections = _of_data(config.of(Evaluate).model_dump(mode="json"))
    return RuleSettings.of_sections(
        f"{config.run}.evaluate_data", sections, paths.evaluation_data, made_with
    )


def _of_data(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"evaluate": {key: values.get(key) for key in ("tasks", "include_path")}}


def request(settings: Any, mem_mb: int) -> Request:
    """The request of a job that evaluates a checkpoint during training. settings: Snakemake's
    ResourceSettings. mem_mb: memory where the profile has none."""
    own, given = settings.overwrite_resources.get(RULE, {}), of_profile(RULE, settings)
    threads = plain(settings.overwrite_threads.get(RULE)) or 1
    asked = given if "mem_mb" in own else {**given, "mem_mb": mem_mb}
    return Request.of_rule(RULE, asked, threads)
