"""Resources of the rule reproduce_run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from forge.core import events
from forge.core.paths import RunPaths
from forge.flow.resources import PROGRAM_MB, of_profile
from forge.hosts.allocation import OF_NODES, plain
from forge.slurm import exclude, sbatch, submission
from forge.slurm.sbatch import Request
from forge.validation.estimates import BASE_BYTES, training_bytes

if TYPE_CHECKING:
    from forge.flow.flow import Flow

RULE = "reproduce_run"
LIMIT_MIN = 60  # its time limit where the profile has none, as on one machine


def resources(flow: Flow) -> dict[str, Any]:
    """Resources that do not depend on the run's size: nodes as for its training, and a time limit where
    default-resources have none."""
    has_limit = "runtime" in (flow.resource_settings.default_resources or {})
    return flow.allocation.of_nodes | ({} if has_limit else {"runtime": LIMIT_MIN})


def mem_mb(flow: Flow, run: str) -> int:
    """Memory in MB, all ranks on one node: by the size of the model, for another program that of all
    nodes of its training; that of default-resources, if it is more."""
    config, layout = flow.runs[run], flow.allocation.layout(run)
    given = plain((flow.resource_settings.default_resources or {}).get("mem_mb"))
    if config.ids.tokens:
        needed = training_bytes(config, layout.world_size) + layout.world_size * BASE_BYTES
        needed_mb = math.ceil(needed / 10**6)
    else:
        of_node = plain(flow.allocation.resources(run).get("mem_mb"))
        needed_mb = layout.nodes * of_node if isinstance(of_node, int) else PROGRAM_MB
    return max(given if isinstance(given, int) else 0, needed_mb)


def slurm_extra(flow: Flow, run: str, threads: int) -> str:
    """More options for sbatch: on no unhealthy node and, where others fit, on none that has trained the
    run. Read again when the job is submitted: only then its run has trained, in the same command. Asks
    no Slurm where rules are no jobs of it."""
    if not flow.submits:
        return ""
    settings, allocation = flow.resource_settings, flow.allocation
    given = of_profile(RULE, settings)
    own = {n: plain(v) for n, v in settings.overwrite_resources.get(RULE, {}).items()}
    of_nodes = {n: v for n, v in allocation.resources(run).items() if n in OF_NODES}
    extra = sbatch.excluding(given.get("slurm_extra") or "", allocation.machine.slurm.exclude)
    asked = {"runtime": LIMIT_MIN, **given, **of_nodes, "mem_mb": mem_mb(flow, run), **own}
    request = Request.of_rule(RULE, {**asked, "slurm_extra": extra}, threads)
    paths = RunPaths.of(flow.runs[run])
    request = request.excluding(exclude.read(paths.bad_nodes))
    if not (trained := events.trained_nodes(paths.events)):
        return request.extra
    return request.excluding(submission.nodes_to_avoid(request, trained)).extra
