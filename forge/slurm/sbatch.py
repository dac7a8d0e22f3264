"""Options of sbatch, all that Forge makes: of the jobs of the workflow, as the executor plugin submits
them, and of jobs that Forge submits itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forge.core.errors import ConfigError
from forge.core.machine import Machine
from forge.slurm import slurm
from forge.slurm.jobs import TRAIN_RULE

# The job keeps the rest of its allocation when a node dies: a spare node replaces it, or the run shrinks.
# Slurm then keeps the job even without its first node (`JobWatch`).
NO_KILL = "--no-kill"
# Resources by which the executor plugin submits a job to another cluster.
OTHER_CLUSTER = ("slurm_cluster", "cluster", "clusters")


@dataclass(frozen=True)
class Request:
    """The request of one job. Sizes are per node; times in minutes, memory in MB."""

    rules: tuple[str, ...]  # more than one for the allocation of a run
    minutes: int
    other_minutes: int = 0  # of an allocation, without `train_run`
    account: str = ""
    partition: str = ""  # "": Slurm's default; may be a list, such as a,b
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    mem_mb: int = 0
    gres: str = ""
    constraint: str = ""
    qos: str = ""
    extra: str = ""  # further options of sbatch
    options: tuple[str, ...] = ()
    """All options of sbatch, as the executor plugin makes them."""

    @classmethod
    def of(cls, job: Any, executor_settings: Any = None) -> Request:
        """The request of a job, or group of jobs, of Snakemake. executor_settings: of the plugin."""
        members = list(job.jobs) if job.is_group() else [job]
        asked = job.resources.get
        nodes = _int(asked("nodes")) or 1
        tasks = _int(asked("tasks_per_node")) or -(-_int(asked("tasks")) // nodes) or 1
        cpus = _int(asked("cpus_per_task")) or _int(job.threads) or 1
        others = [m.resources.get("runtime") for m in members if m.rule.name != TRAIN_RULE]
        return cls(
            rules=tuple(sorted(member.rule.name for member in members)),
            minutes=_int(asked("runtime")),
            other_minutes=sum(map(_int, others)) if job.is_group() else 0,
            nodes=nodes,
            tasks_per_node=tasks,
            cpus_per_task=cpus,
            mem_mb=_int(asked("mem_mb")) or _int(asked("mem_mb_per_cpu")) * cpus * tasks,
            options=_plugin_options(dict(job.resources.items()), job.threads, executor_settings),
            **_texts(asked),
        )

    @classmethod
    def of_rule(cls, rule: str, resources: Mapping[str, Any], threads: int) -> Request:
        """The request of a rule of one task, from the resources that the profile gives it."""
        asked = resources.get
        return cls(
            rules=(rule,),
            minutes=_int(asked("runtime")),
            cpus_per_task=_int(asked("cpus_per_task")) or threads,
            mem_mb=_int(asked("mem_mb")),
            options=_plugin_options(resources, threads),
            **_texts(asked),
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Request:
        """A request that was kept as `to_json` gives it."""
        texts = {name: tuple(values[name]) for name in ("rules", "options")}
        return cls(**{**values, **texts})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def excluding(self, nodes: Collection[str]) -> Request:
        """The same on none of these nodes."""
        if not nodes:
            return self
        options = tuple(shlex.split(excluding(shlex.join(self.options), nodes)))
        return replace(self, extra=excluding(self.extra, nodes), options=options)

    @property
    def name(self) -> str:
        return "the allocation of a run" if self.is_allocation else f"rule {self.rules[0]}"

    @property
    def is_allocation(self) -> bool:
        return len(self.rules) > 1 or self.rules == (TRAIN_RULE,)

    @property
    def profile_keys(self) -> str:
        """The keys of a profile that set its resources."""
        if self.is_allocation:
            return "set-resources of train_run"
        return f"default-resources, or set-resources of {self.rules[0]}"

    @property
    def cpus(self) -> int:
        """Cores on each node."""
        return self.cpus_per_task * self.tasks_per_node

    @property
    def gpus(self) -> tuple[str, int]:
        """Model ("" for any) and number of GPUs on each node."""
        match = re.fullmatch(rf"gpu(?::({slurm.GPU_TYPE}))?(?::(\d+))?", self.gres)
        return (match.group(1) or "", int(match.group(2) or 1)) if match else ("", 0)

    @property
    def features(self) -> frozenset[str]:
        """Features that every node must have; none where the constraint is an expression."""
        plain = re.fullmatch(r"[\w.,&-]*", self.constraint)
        return frozenset(filter(None, re.split("[,&]", self.constraint))) if plain else frozenset()

    @property
    def excluded(self) -> frozenset[str]:
        return frozenset(_without_exclude(shlex.split(self.extra))[0])


class _Resources(dict[str, Any]):
    """Resources as the executor plugin reads them, by key and as attributes."""

    __getattr__ = dict.__getitem__


def _plugin_options(
    resources: Mapping[str, Any], threads: int, settings: Any = None
) -> tuple[str, ...]:
    """The options that the executor plugin gives sbatch for a job, without the names of job and log.

    Raises WorkflowError of Snakemake for resources that the plugin refuses.
    """
    # Needs 0.4 s, and Snakemake has it in memory where it submits.
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    job = SimpleNamespace(resources=_Resources(resources), threads=threads)
    named = {"account": "-A", "partition": "-p"}
    given = {name: resources.get(f"slurm_{name}") for name in named}
    params = {n: f"{named[n]} {shlex.quote(str(v))}" if v else "" for n, v in given.items()}
    params |= {"run_uuid": "forge", "slurm_logfile": "forge", "comment_str": "forge", "workdir": ""}
    words = shlex.split(get_submit_command(job, params, settings) + set_gres_string(job))
    return tuple(words[words.index("--comment") + 2 :])


def _texts(asked: Callable[[str], Any]) -> dict[str, Any]:
    """Values of the profile that Slurm gets unchanged; "" for each that the profile does not set."""
    keys = {"account": "slurm_account", "partition": "slurm_partition", "extra": "slurm_extra"}
    keys |= {key: key for key in ("gres", "constraint", "qos")}
    return {name: str(asked(key) or "") for name, key in keys.items()}


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def requests_of(jobs: Iterable[Any], executor_settings: Any = None) -> list[Request]:
    """The different requests of these jobs of Snakemake. ConfigError for one to another cluster."""
    submitted = [job for job in jobs if not job.is_local]
    for job in submitted:
        if name := next(filter(None, map(job.resources.get, OTHER_CLUSTER)), None):
            raise ConfigError(
                f"{' and '.join(Request.of(job).rules)} of the profile: slurm_cluster {name}",
                cause="the command does not find its jobs of another cluster again",
                fix=f"remove it from the profile, and export SLURM_CLUSTERS={name}",
            )
    return list(dict.fromkeys(Request.of(job, executor_settings) for job in submitted))


def slurm_extra(machine: Machine, nodes: int, ranks_per_node: int, bad_nodes: Sequence[str]) -> str:
    """The sbatch options that the executor does not set, for slurm_extra. nodes: that train, at most.

    `--signal` without `B:` signals the ranks; with `B:` it would end Snakemake in the batch shell. The
    executor refuses `--nodes`, takes an integer only, and sbatch takes the last of two.
    """
    options = [f"--ntasks-per-node={ranks_per_node}", "--open-mode=append"]
    spare, fewest = machine.preflight.spare_nodes, machine.slurm.nodes_min
    if fewest and fewest < nodes:
        options.append(f"-N{fewest + spare}-{nodes + spare}")
    if machine.slurm.warn_sec:
        options.append(f"--signal=SIGUSR1@{machine.slurm.warn_sec}")
    if spare or (machine.slurm.shrink and nodes > 1):
        options.append(NO_KILL)
    own = excluding(machine.slurm.options, [*machine.slurm.exclude, *bad_nodes])
    return f"{shlex.join(options)} {own}".rstrip()


def excluding(given: str, nodes: Iterable[str]) -> str:
    """These options, also without these nodes: of two --exclude sbatch takes the last. Raises ConfigError
    for a file of nodes that cannot be read."""
    own, others = _without_exclude(shlex.split(given))
    excluded = ",".join(dict.fromkeys([*own, *nodes]))
    return shlex.join([f"--exclude={excluded}", *others] if excluded else others)


def _without_exclude(options: Iterable[str]) -> tuple[list[str], list[str]]:
    """The nodes that options of sbatch exclude by name, in any spelling, and the other options."""
    nodes: list[str] = []
    others, words = [], iter(options)
    for word in words:
        if word in ("-x", "--exclude"):
            given = next(words, "")
        elif match := re.match("--exclude=|-x", word):
            given = word[match.end() :]
        else:
            others.append(word)
            continue
        nodes += _nodes_in(given) if "/" in given else slurm.expand(given)
    return nodes, others


def _nodes_in(file: str) -> list[str]:
    """The nodes in a file that --exclude names, as sbatch reads it: host lists, with commas or line ends
    between them, and comments after `#`."""
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "it is no text"
        raise ConfigError(
            f"--exclude={file}: the file of nodes cannot be read: {reason}",
            cause="options of sbatch in machine.yaml or in the profile name it, and paths are relative to"
            f" {Path.cwd()}",
            fix="make it readable on this machine, or name the nodes themselves",
        ) from None
    lists = ",".join(line.partition("#")[0] for line in lines)
    # `host*3` names a host several times.
    return slurm.expand(re.sub(r"\s+|\*\d+", "", lists))


def flexible_request(resources: Mapping[str, Any]) -> dict[str, object]:
    """Arguments of `scontrol update` that ask for nodes as at the submission; {} for a job that takes no
    fewer nodes. resources: of Snakemake's job, with its `slurm_extra`."""
    match = re.search(r"-N(\d+)-\d+", str(resources.get("slurm_extra", "")))
    if not match:
        return {}
    tasks = int(match[1]) * _int(resources.get("tasks_per_node"))
    return {"NumNodes": match[0].removeprefix("-N"), "NumTasks": tasks}


def batch_line(
    name: str, output: Path, options: Iterable[str], command: Sequence[str]
) -> list[str]:
    """The sbatch command of a job that Forge submits itself, which prints the job's id. options: of the
    request. The job runs in this directory, and Slurm may requeue it."""
    return [
        *("sbatch", "--parsable", "--requeue", f"--job-name={name}"),
        *(f"--chdir={Path.cwd()}", "--open-mode=append", f"--output={output}"),
        *options,
        f"--wrap=exec {shlex.join(command)}",
    ]
