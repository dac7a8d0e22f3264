"""The commands of a run's job, for `forge.batch_step`, which runs them without Snakemake."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from forge.core.files import canonical, digest_bytes
from forge.core.paths import WORKFLOW
from forge.core.records import Record, RecordPart
from forge.flow.resources import of_profile
from forge.slurm.jobs import ALLOCATION_RULES

BEFORE = ["exec", "forge"]  # of every command of Forge's rules
SYSTEM_TMPDIR = "system_tmpdir"  # Snakemake's default


class BatchStep(RecordPart):
    """A rule of the job. name: with that of the run. arguments: of `forge`."""

    name: str
    arguments: list[str]
    inputs: list[str]
    outputs: list[str]
    logs: list[str]


class BatchSteps(Record):
    """The rules of a run's job in their order. folder: the project's. wait_sec: for files that a network
    file system shows late."""

    PRIVATE = True

    folder: str
    steps: list[BatchStep]
    wait_sec: float


def write_steps(workflow: Any, job: Any) -> Path | None:
    """Write down what a job does that Snakemake is about to submit, for `forge.slurm.jobs.write_steps`.
    None for a job that needs Snakemake: of other rules than the three of a whole allocation, or one for
    which Snakemake does more than run their commands on files.

    Raises UnfitError on a full disk.
    """
    rules = sorted(job.rules) if job.is_group() else []
    if rules != sorted(ALLOCATION_RULES) or workflow.deployment_settings.deployment_method:
        return None
    steps = []
    for [member] in job.toposorted:
        resources = of_profile(member.rule.name, workflow.resource_settings)
        words = shlex.split(member.shellcmd or "")
        of_rule = [*BEFORE, member.rule.name.removesuffix("_run")]
        own_tmpdir = resources.get("tmpdir", SYSTEM_TMPDIR) != SYSTEM_TMPDIR
        if words[:3] != of_rule or member.benchmark or own_tmpdir:
            return None
        files = {"inputs": member.input, "outputs": member.output, "logs": member.log}
        steps.append(
            BatchStep(
                name=member.format_wildcards("{rule} {wildcards.run}"),
                arguments=words[2:],
                **{name: list(map(str, paths)) for name, paths in files.items()},
            )
        )
    wait_sec = workflow.execution_settings.latency_wait
    record = BatchSteps(folder=str(Path.cwd()), steps=steps, wait_sec=wait_sec)
    digest = digest_bytes(canonical(record.model_dump(mode="json")))[:16]
    path = WORKFLOW.absolute() / f"steps-{digest}.json"
    if not path.exists():
        record.write(path)
    return path
