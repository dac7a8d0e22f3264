"""Evaluation: scores of checkpoints by tasks of the lm-evaluation-harness. docs/plugins/evaluation.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.core.hooks import hook
from forge.core.values import shown
from forge.plugins.evaluation.settings import Evaluate

if TYPE_CHECKING:
    from forge.core.config import Config, ResolvedConfig
    from forge.core.paths import RunPaths
    from forge.core.records import RunSettings
    from forge.core.section import Section


@hook
def sections() -> dict[str, type[Section]]:
    return {"evaluate": Evaluate}


@hook
def check_config(config: Config) -> None:
    evaluate, kept = config.of(Evaluate), config.train.keep_every
    if evaluate.tasks and evaluate.every and (not kept or evaluate.every % kept):
        raise ValueError(
            f"evaluate.every is {evaluate.every}, and such checkpoints are not kept: train.keep_every"
            f" is {shown(kept)}; set it to {evaluate.every} or a divisor of it"
        )


@hook
def check_run(config: Config, where: str, trains: bool) -> None:
    if config.of(Evaluate).tasks and not trains:
        from forge.plugins.evaluation.tasks import refuse_missing_package, task_files

        refuse_missing_package(config.of(Evaluate), where)
        # A missing directory is refused here: errors of input functions Snakemake shows with a traceback.
        task_files(config.of(Evaluate))


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.evaluation.command import add_evaluate

    add_evaluate(subcommands)


@hook
def rule_file() -> Path:
    return Path(__file__).with_name("rules.smk")


@hook
def rules_on_nodes() -> Sequence[str]:
    return ["evaluate_run"]


@hook
def rules_here() -> Sequence[str]:
    return ["evaluate_data"]


@hook
def rule_settings(runs: Mapping[str, ResolvedConfig]) -> Mapping[str, dict[str, Any]]:
    from forge.plugins.evaluation import flow

    of_rules = {"evaluate_run": flow.settings_of_scores, "evaluate_data": flow.settings_of_data}
    return {rule: {name: of(run) for name, run in runs.items()} for rule, of in of_rules.items()}


@hook
def wanted_files(config: ResolvedConfig, target: str) -> Sequence[str]:
    evaluate = config.of(Evaluate)
    if target in ("train", "resume") and evaluate.tasks and evaluate.every:
        # Needed by the jobs that evaluate while the run trains, and downloaded on this machine.
        return ["evaluations/data.json"]
    return ["evaluation.json"] if target == "compare" and evaluate.tasks else []


@hook
def check_targets(runs: Mapping[str, ResolvedConfig], targets: Sequence[str]) -> None:
    if "evaluate" in targets:
        from forge.plugins.evaluation import flow

        flow.evaluated(runs)


@hook
def check_plan(runs: Mapping[str, ResolvedConfig], rules: Mapping[str, Sequence[str]]) -> None:
    for run in rules.get("evaluate_data", ()):
        from forge.plugins.evaluation.tasks import find_tasks

        find_tasks(runs[run].of(Evaluate))


@hook
def job_requests(settings: Any, mem_mb: int) -> Mapping[str, dict[str, Any]]:
    from forge.plugins.evaluation import flow

    return {flow.RULE: flow.request(settings, mem_mb).to_json()}


@hook
def run_lines(paths: RunPaths) -> Mapping[str, Sequence[str]]:
    found = sorted(paths.evaluations.glob("step-*.contamination.json"))
    if not found:
        return {}
    from forge.plugins.evaluation.contamination_statement import ContaminationPredicate

    return {"contamination": ContaminationPredicate.read(found[-1]).lines}


@hook
def while_training(
    paths: RunPaths, settings: RunSettings, data: str
) -> AbstractContextManager[None]:
    from forge.plugins.evaluation.jobs import checkpoint_jobs

    return checkpoint_jobs(paths, settings, data)
