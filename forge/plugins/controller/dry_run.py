"""Answers of the dry run of `forge submit`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from forge.core.errors import ConfigError, ForgeError, TrainingError
from forge.core.paths import RunPaths
from forge.flow.flow import Flow
from forge.flow.runs import SUBMITTED
from forge.hosts.allocation import EXECUTOR
from forge.plugins.controller.places import SUBMIT_CHECK
from forge.plugins.controller.records import SubmitCheck

KNOWN_FAILURE = "known_failure_run"  # the rule that only fails


def answer(flow: Flow, refusal: ForgeError | None) -> None:
    """Write down what a start would be refused with, else what the controller needs to know."""
    check = SubmitCheck()
    try:
        if refusal:
            raise refusal
        if due := flow.due:
            check = _checked(flow, due)
    except ForgeError as err:
        check = SubmitCheck(refused=str(err), code=err.code)
    check.write(SUBMIT_CHECK)


def _checked(flow: Flow, due: Sequence[Any]) -> SubmitCheck:
    """due: jobs of Snakemake that will run. Raises ForgeError."""
    if flow.executor != EXECUTOR:
        raise ConfigError(
            f"the jobs of this command run by the executor {flow.executor or 'local'}, not by"
            f" {EXECUTOR}",
            fix="give a profile for Slurm: forge submit --profile profiles/mine train",
        )
    rules = {job.rule.name for job in due if job.output}  # targets have none
    if rules == {KNOWN_FAILURE}:
        raise TrainingError("\n".join(str(job.params.message) for job in due if job.output))
    asked = dict.fromkeys((request.account, request.partition) for request in flow.check_start())
    given = flow.default_resources
    return SubmitCheck(
        rules=sorted(rules),
        submitted=os.environ[SUBMITTED],
        runs={name: str(RunPaths.of(config).root) for name, config in flow.runs.items()},
        shared=sorted(str(o) for job in due if "run" not in job.wildcards_dict for o in job.output),
        machine=flow.allocation.of_profile["machine"],
        account=str(given.get("slurm_account") or ""),
        partition=str(given.get("slurm_partition") or ""),
        qos=str(given.get("qos") or ""),
        requests=[list(one) for one in asked],
    )
