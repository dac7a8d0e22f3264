"""`forge preflight`: check the nodes, and that their ranks can communicate, before training starts."""

from __future__ import annotations

import csv
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge.core import events, hooks, project_plugins, records
from forge.core.config import ResolvedConfig
from forge.core.errors import UnfitError
from forge.core.files import atomic_open
from forge.core.machine import Machine
from forge.core.paths import RunPaths, tokens_folder
from forge.core.process import hostname
from forge.core.records import (
    Check,
    NodeResult,
    PreflightPass,
    PreflightResult,
    RanksIdentity,
    RanksResult,
    StageRecord,
)
from forge.core.terminal import duration, say
from forge.hosts import rendezvous
from forge.hosts.lock import lock
from forge.hosts.placement import (
    Placement,
    WorldLayout,
    check_layout,
    find_placement,
    shrunk_layout,
)
from forge.launch.launcher import wait_for_orphans
from forge.preflight import compare_nodes, container_checks, isolate
from forge.preflight.bisection import SearchResult
from forge.preflight.compare_nodes import EXCLUDE_ONE, UNCLEAR, CheckedNode, nodes_to_leave_out
from forge.preflight.isolate import ENDPOINT, REPEAT_SHARE, SEARCH_SHARE, Prober
from forge.preflight.node_checks import ComparedFacts, Wanted, WantedProgram
from forge.preflight.packages import TORCH_SEC
from forge.slurm import exclude, slurm
from forge.staging.stage import program_folders, stage_record

# The nodes' own checks may take this share of the deadline of their ranks, before that begins. Where a
# node is down they take all of it.
NODES_SHARE = 0.5
# After a restart, ranks of new nodes are checked together with those of so many that passed before: it
# takes three nodes to see that one of them is slow.
PARTNERS = 2
# With more nodes than this without any trouble, one line stands for all of these.
MOST_LINES = 16


@dataclass
class Findings:
    """Results of preflight on one allocation. layout: that is to train, on fewer nodes perhaps
    (slurm.shrink)."""

    config: ResolvedConfig
    machine: Machine
    placement: Placement
    layout: WorldLayout
    nodes: list[CheckedNode]
    identity: RanksIdentity
    ranks: list[Check] = field(default_factory=list)

    @property
    def healthy(self) -> list[str]:
        return [node.name for node in self.nodes if node.is_healthy]

    @property
    def training(self) -> WorldLayout | None:
        """The layout that the healthy nodes are enough for; None where they are too few. With
        slurm.shrink, too, if half of the nodes fail: that is rather a mistake in the settings."""
        if 2 * len(self.healthy) <= self.layout.nodes:
            return None
        return shrunk_layout(self.machine, self.layout, self.config, len(self.healthy))

    @property
    def chosen(self) -> list[str]:
        """The nodes that train; [] where too few are healthy."""
        training = self.training
        return self.healthy[: training.nodes] if training and not self.failed_ranks else []

    @property
    def left_out(self) -> dict[str, str]:
        """Unhealthy nodes and why."""
        return {node.name: node.reason for node in self.nodes if not node.is_healthy}

    @property
    def failed_ranks(self) -> list[Check]:
        return records.failed_checks(self.ranks)

    @property
    def failed(self) -> list[Check]:
        return [check for node in self.nodes for check in node.failed] + self.failed_ranks

    @property
    def bytes_per_sec(self) -> float | None:
        """At which the slowest node wrote into the run's directory, while the others did, too."""
        chosen = [node.facts for node in self.nodes if node.name in self.chosen and node.facts]
        return min((f.bytes_per_sec for f in chosen if f.bytes_per_sec), default=None)

    def result(self) -> PreflightResult:
        """The content of preflight.json."""
        return PreflightResult(
            status="ok" if self.chosen else "failed",
            nodes=[NodeResult(node=n.name, line=n.line, checks=n.checks) for n in self.nodes],
            ranks=RanksResult(
                world_size=(self.training or self.layout).world_size, checks=self.ranks
            ),
            chosen=self.chosen,
            left_out=self.left_out,
            restart=self.placement.job.restarts if self.placement.job else 0,
            identity=self.identity,
        )


def preflight(config: ResolvedConfig, machine: Machine, layout: WorldLayout) -> Path:
    """Check all nodes of the allocation and their ranks; the path of `.allocation/preflight.json`,
    which lists the healthy nodes. The first layout.nodes of them train; where fewer are healthy and
    slurm.shrink allows that, as many as can.

    Writes preflight.json and preflight.tsv once the nodes are checked, passed or not. Raises UnfitError
    that names every unhealthy node where too few are left. Takes as long as `_limits` says at most, and
    the time for which Slurm itself starts no process; raises SlurmSilent when that does not pass.
    """
    started = time.time()
    check_layout(machine, layout, config)
    placement = find_placement(machine, layout, config.folders)
    paths = RunPaths.of(config)
    with lock(paths.root, "preflight"):
        wait_for_orphans(paths)
        paths.preflight_pass.unlink(missing_ok=True)  # of an earlier preflight
        staged = stage_record(paths)
        if placement.job:
            say(_limits(machine, _all_ranks(placement, layout)))
        earlier = _pass_of_earlier_start(placement, paths)
        is_warm = functools.partial(_is_unchanged, earlier.identity if earlier else None)
        findings = _inspected(config, machine, layout, placement, staged=staged, is_warm=is_warm)
        prober = _prober(findings, paths, machine, staged.interpreter)
        findings.ranks = _check_unproven(findings, prober, earlier, _suspects(paths))
        _write(paths, findings)
        _print_summary(findings)
        event = events.Preflight(
            seconds=round(time.time() - started, 3),
            status="ok" if findings.chosen else "failed",
            failed=[check.name for check in findings.failed],
            nodes=findings.chosen,
            left_out=findings.left_out,
            bytes_per_sec=findings.bytes_per_sec,
        )
        events.record(paths.events, event)
        if placement.job and len(findings.healthy) < layout.nodes:
            bad_nodes = compare_nodes.bad_nodes(findings.nodes)
            exclude.add(paths.bad_nodes, bad_nodes, placement.job)
        if not findings.chosen:
            raise _unfit(config, paths, findings)
        # All healthy nodes: training takes the first of them, and another node when it loses one.
        of_job = {}
        if job := placement.job:
            of_job = {"cluster": slurm.this_cluster(), "job": job.id, "restart": job.restarts}
        passed = PreflightPass(host=hostname(), nodes=findings.healthy, **of_job)
        passed.write(paths.preflight_pass)
    return paths.preflight_pass


def recheck(
    config: ResolvedConfig,
    machine: Machine,
    layout: WorldLayout,
    placement: Placement,
    staged: StageRecord,
) -> dict[str, str]:
    """The nodes of this placement that must not train again, and why: those that fail their own checks,
    or whose ranks cannot communicate with each other or with those of the other nodes.

    Called by training, which holds the run's lock; takes as long as `_limits` says at most.
    """
    layout = _all_ranks(placement, layout)
    try:
        findings = _inspected(
            config,
            machine,
            layout,
            placement,
            staged=staged,
            is_warm=lambda *_: True,  # their ranks have just run
        )
    except rendezvous.EndpointError:
        return {}  # their ranks cannot meet at an endpoint that was asked for on another node
    prober = _prober(findings, RunPaths.of(config), machine, staged.interpreter)
    findings.ranks = _check_ranks(findings, prober)
    if layout.nodes > 1:
        return compare_nodes.bad_nodes(findings.nodes)
    failed = records.summary_of_checks(findings.failed)
    return {placement.hosts[0]: failed} if failed else {}


def _inspected(
    config: ResolvedConfig,
    machine: Machine,
    layout: WorldLayout,
    placement: Placement,
    *,
    staged: StageRecord,
    is_warm: compare_nodes.IsWarm,
) -> Findings:
    """The nodes of the placement after their own checks, and those that compare them. is_warm: as
    in `compare_nodes.inspect`."""
    wanted = _wanted(config, staged, machine, layout, placement)
    sec = NODES_SHARE * isolate.deadline_sec(machine, _all_ranks(placement, layout))
    nodes = compare_nodes.inspect(
        placement, wanted, machine, sec=sec, python=staged.interpreter, is_warm=is_warm
    )
    identity = _identity(placement, layout, nodes, machine, wanted)
    return Findings(config, machine, placement, layout, nodes, identity)


def _prober(findings: Findings, paths: RunPaths, machine: Machine, python: str) -> Prober:
    """Launches ranks on the nodes; its clock begins now."""
    return Prober(
        paths,
        machine,
        findings.layout.ranks_per_node,
        findings.placement,
        python=python,
        addresses={node.name: node.facts.address for node in findings.nodes if node.facts},
    )


def _all_ranks(placement: Placement, layout: WorldLayout) -> WorldLayout:
    """The layout with the spare nodes of the placement."""
    return WorldLayout(len(placement.hosts), layout.ranks_per_node)


def _limits(machine: Machine, layout: WorldLayout) -> str:
    """Time limits of a preflight, in one line."""
    sec = isolate.deadline_sec(machine, layout)
    nodes_sec = NODES_SHARE * sec + (container_checks.MOST_SEC if machine.container else 0)
    limits = (nodes_sec, TORCH_SEC, sec, (REPEAT_SHARE + SEARCH_SHARE) * sec)
    nodes, torch, ranks, more = (duration(limit, precise=True) for limit in limits)
    return (
        f"preflight of {layout.world_size} ranks on {layout.nodes} nodes takes {nodes} for the nodes,"
        f" {torch} for their import of torch and {ranks} for the ranks at most; {more} more if those fail"
    )


def _programs(
    config: ResolvedConfig, placement: Placement, record: StageRecord
) -> dict[str, WantedProgram]:
    """Facts that each node must know of another program; {} where Forge's own trainer trains."""
    program = config.program
    if program is None:
        return {}
    staged, shared = program_folders(config, program, record)
    return {
        host: WantedProgram(program.command[0], staged.get(host, shared), shared)
        for host in placement.hosts
    }


def _wanted(
    config: ResolvedConfig,
    staged: StageRecord,
    machine: Machine,
    layout: WorldLayout,
    placement: Placement,
) -> dict[str, Wanted]:
    """Requirements for each node, by host."""
    master = rendezvous.host(machine.fabric, placement.hosts[0])
    programs, tokens = _programs(config, placement, staged), config.ids.tokens
    results = str(RunPaths.of(config).root.absolute())
    own = {name: project_plugins.used()[name] for name, _ in hooks.node_checks()}
    return {
        host: Wanted(
            results=results if _sees_results(machine, host) else "",
            data=str(tokens_folder(config.data, tokens).absolute()) if tokens else "",
            staged=staged.folders.get(host, ""),
            digest=staged.digest,
            machine=machine,
            ranks_per_node=layout.ranks_per_node,
            program=programs.get(host),
            master=master if len(placement.hosts) > 1 else "",
            variables=dict(placement.variables),
            threads=placement.threads,
            plugins=own,
        )
        for host in placement.hosts
    }


def _sees_results(machine: Machine, host: str) -> bool:
    return machine.stage.results == "shared" or host == hostname()


# --- ranks ----------------------------------------------------------------------------------------


def _check_ranks(findings: Findings, prober: Prober) -> list[Check]:
    """Checks of the ranks of all healthy nodes. A node at fault where they fail gets a failed check.

    Also runs where too few nodes are healthy already, so that one submission finds all faults.
    """
    # Ranks on an unhealthy node would only fail with a less readable error.
    everyone = findings.healthy
    if not everyone:
        return []
    ranks = prober.together(everyone)
    if len(everyone) == 1 or not records.failed_checks(ranks) or ranks[0].name == ENDPOINT:
        return ranks
    broken = prober.search(everyone)
    _blame(findings.nodes, broken, prober)
    if findings.training is None:
        return ranks
    if findings.healthy != everyone and (known := prober.known(findings.healthy)):
        return known
    if prober.has_time:
        return prober.together(findings.healthy)
    return [*ranks, _still_in_doubt(broken)]


def _blame(nodes: Sequence[CheckedNode], broken: SearchResult, prober: Prober) -> None:
    """Add what the search found to the checks of the nodes."""
    by_name = {node.name: node for node in nodes}
    for name in broken.nodes:
        cause = "it fails alone, or with every other node, while those work with each other"
        fix = f"leave {name} out, or check its network and the ranks' logs in {prober.trials}"
        check = Check("collectives", "fail", prober.reason(name), fix, cause)
        by_name[name].checks.append(check)
    pairs = broken.pairs + broken.unclear
    both_ways = [*pairs, *((other, one) for one, other in pairs)]
    gone = nodes_to_leave_out(both_ways, list(by_name))
    for pair in pairs:
        message = f"{' and '.join(pair)} fail together: {prober.reason(*pair)}"
        for name in pair:
            if name not in gone:
                fix = "nothing to do here: the other node is left out"
                check = Check("collectives", "warn", message, fix)
            elif pair in broken.unclear:
                cause = "one of the two is at fault; a third node would tell which"
                check = Check(UNCLEAR, "fail", message, EXCLUDE_ONE, cause)
            else:
                cause = "each works with other nodes: the link between these two is broken"
                check = Check("collectives", "fail", message, f"leave {name} out", cause)
            by_name[name].checks.append(check)


def _still_in_doubt(broken: SearchResult) -> Check:
    return Check(
        "search",
        "fail",
        f"time ran out after {broken.probes} trials; the fault is among {', '.join(broken.among)}",
        "raise preflight.deadline_sec, or exclude these nodes",
    )


# --- a pass of an earlier start of the same job ---------------------------------------------------


def _identity(
    placement: Placement,
    layout: WorldLayout,
    nodes: Sequence[CheckedNode],
    machine: Machine,
    wanted: dict[str, Wanted],
) -> RanksIdentity:
    return RanksIdentity(
        job=placement.job.id if placement.job else None,
        nodes={node.name: node.facts.versions if node.facts else None for node in nodes},
        boots={node.name: node.facts.boot for node in nodes if node.facts},
        ranks_per_node=layout.ranks_per_node,
        launcher=machine.launcher,
        fabric=machine.fabric.model_dump(mode="json"),
        staged=sorted({wish.digest for wish in wanted.values()}),
    )


def _pass_of_earlier_start(placement: Placement, paths: RunPaths) -> PreflightResult | None:
    """The result of an earlier start of this job that passed with all of its nodes; None without one."""
    job = placement.job
    if job is None or not job.restarts:
        return None
    earlier = PreflightResult.read_if_there(paths.preflight)
    if earlier is None or earlier.status != "ok" or earlier.left_out:
        return None
    if earlier.identity.job != job.id or earlier.restart >= job.restarts:
        return None
    return earlier


def _suspects(paths: RunPaths) -> list[str] | None:
    """The nodes that started no process any more when ranks were lost since the last preflight. None
    where ranks were lost or failed otherwise: the fabric may have been the reason."""
    found: list[str] = []
    for event in reversed(events.read(paths.events)):
        if isinstance(event, events.Preflight):
            break
        if isinstance(event, events.Lost) and event.silent:
            found += event.silent
        elif isinstance(event, events.End) and event.is_failure:
            return None
    return found


def _is_unchanged(earlier: RanksIdentity | None, host: str, facts: ComparedFacts) -> bool:
    """Return whether this node passed with these very packages since its kernel has started: ranks have
    imported torch there."""
    if earlier is None:
        return False
    return (earlier.boots.get(host), earlier.nodes.get(host)) == (facts.boot, facts.versions)


def _check_unproven(
    findings: Findings,
    prober: Prober,
    earlier: PreflightResult | None,
    suspects: Sequence[str] | None,
) -> list[Check]:
    """Checks of the ranks of nodes that did not pass before, together with those of some that did; of all
    healthy nodes where those would be as many, or fail.

    earlier, suspects: of `_pass_of_earlier_start` and `_suspects`.
    """
    everyone = findings.healthy
    if earlier is None or suspects is None or not _is_same_launch(earlier, findings):
        return _check_ranks(findings, prober)
    start = f"passed in start {earlier.restart} of job {findings.identity.job}"
    facts = {node.name: node.facts for node in findings.nodes}
    proven = [
        name
        for name in everyone
        if name not in suspects
        and (known := facts[name])
        and _is_unchanged(earlier.identity, name, known)
    ]
    if proven == everyone:
        return [Check("ranks", "ok", f"skipped: the same nodes, shards and versions {start}")]
    together = [name for name in everyone if name not in proven[PARTNERS:]]
    if together != everyone:
        ranks = prober.together(together)
        if not records.failed_checks(ranks):
            only = Check("ranks", "ok", f"of {', '.join(together)} only: all others {start}")
            return [only, *ranks]
    return _check_ranks(findings, prober)


def _is_same_launch(earlier: PreflightResult, findings: Findings) -> bool:
    """Return whether nothing that ranks depend on has changed but the nodes, which are all healthy."""
    identity = findings.identity
    nodes = {"nodes": identity.nodes, "boots": identity.boots}
    return not findings.left_out and earlier.identity.model_copy(update=nodes) == identity


# --- output ---------------------------------------------------------------------------------------


def _write(paths: RunPaths, findings: Findings) -> None:
    """Write preflight.json and preflight.tsv, and a copy in logs/ that no later start replaces."""
    result, job = findings.result(), findings.placement.job
    start = f"{job.id}.{job.restarts}" if job else f"local.{time.strftime('%Y%m%dT%H%M%S')}"
    result.write(paths.preflight)
    result.write(paths.logs / f"preflight.{start}.json")
    keys = ("name", "status", "message", "fix", "cause")
    by_place = [*((node.name, node.checks) for node in findings.nodes), ("ranks", findings.ranks)]
    with atomic_open(paths.preflight_table, "w") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(["where", *keys])
        for where, of_place in by_place:
            table.writerows([where, *(getattr(check, key) for key in keys)] for check in of_place)


def _print_summary(findings: Findings) -> None:
    nodes = sorted(findings.nodes, key=lambda node: node.name)
    fine = [node for node in nodes if all(check.status == "ok" for check in node.checks)]
    if len(fine) > MOST_LINES:
        say(f"{fine[0].line}   ({fine[0].name} to {fine[-1].name}: {len(fine)} nodes like this)")
        nodes = [node for node in nodes if node not in fine]
    for node in nodes:
        say(node.line)
        _print_troubles(node.checks)
    by_name = {check.name: check for check in findings.ranks}
    if "ranks" in by_name:
        say(f"RANKS {by_name['ranks'].message}")
    if "all-reduce" in by_name:
        say(f"RANKS {by_name['mapping'].message}; all-reduce {by_name['all-reduce'].message}")
    _print_troubles(findings.ranks)
    if findings.chosen and len(findings.nodes) > len(findings.chosen):
        out = ", ".join(findings.left_out) or "none"
        say(f"training gets {', '.join(findings.chosen)}; unhealthy: {out}")


def _print_troubles(results: Sequence[Check]) -> None:
    for check in results:
        if check.status != "ok":
            cause = f"   cause: {check.cause}" if check.cause else ""
            fix = f"   fix: {check.fix}" if check.fix else ""
            say(f"  {check.status}: {check.name}: {check.message}{cause}{fix}")


def _unfit(config: ResolvedConfig, paths: RunPaths, findings: Findings) -> UnfitError:
    """The error of a preflight that failed: every unhealthy node and every failed check of the ranks."""
    failed = records.summary_of_checks(findings.failed_ranks)
    if len(findings.nodes) == 1:
        reasons = "; ".join(filter(None, [findings.nodes[0].reason, failed]))
        what = (
            f"{findings.nodes[0].name} is not healthy, so it cannot train {config.run}: {reasons}"
        )
    else:
        what = f"{len(findings.healthy)} of {len(findings.nodes)} nodes are healthy, {config.run} needs"
        what += f" {findings.layout.nodes}:\n" + "\n".join(
            f"    {name}: {reason}" for name, reason in sorted(findings.left_out.items())
        )
        what += f"\n    ranks: {failed}" if failed and not findings.left_out else ""
    fixes = dict.fromkeys(check.fix for check in findings.failed if check.fix)
    causes = dict.fromkeys(check.cause for check in findings.failed if check.cause)
    return UnfitError(
        what,
        cause="; ".join(causes),
        fix=f"{'; '.join(fixes)}   (all checks: {paths.preflight_table})",
    )
