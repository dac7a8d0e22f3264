"""Requests of the allocation of a run: resources of its rules, options of sbatch; and the profile
that sets them."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.core.config import Config
from forge.core.errors import ConfigError, TrainingError
from forge.core.machine import Machine, load_machine
from forge.core.paths import RunPaths, shipped
from forge.core.terminal import say
from forge.hosts import network
from forge.hosts.placement import WorldLayout, check_layouts, refuse_ranks_of_single
from forge.slurm import exclude, jobs, slurm
from forge.slurm.sbatch import OTHER_CLUSTER, slurm_extra

LOCAL = "local"  # Snakemake's executor on this machine
LOCAL_MACHINE = "profiles/local/machine.yaml"  # without a profile
# Keys of --config that are not config keys: the allocation of this one command -> its resource.
OF_COMMAND = {
    "nodes": "nodes",
    "tasks_per_node": "tasks_per_node",
    "partition": "slurm_partition",
}
OF_NODES = ("slurm_account", "slurm_partition", "constraint", "qos", "gres")
BEFORE_TRAINING_MIN = 10  # time limit of stage, and of preflight


class Allocation:
    """Resources of the rules that share an allocation, from what the profile sets for `train_run`.

    Raises ConfigError for what could not work on any cluster.
    """

    def __init__(
        self,
        resources: Mapping[str, Any],
        runs: Mapping[str, Config],
        layouts: Mapping[str, Mapping[str, Any]],
        profile: Profile,
    ) -> None:
        """resources: of the profile for `train_run`, as Snakemake has them. layouts: as `run_layouts`
        gives them. profile: the one in use; inside a job an empty one, as `machine` is in `resources`
        there."""
        self.given = {name: plain(value) for name, value in resources.items()}
        self._runs, self._profile = runs, profile
        profile.refuse_plugin()
        profile.refuse_other_machine()
        self._named = self.given.get("machine") or profile.machine
        machine = self._named or os.path.relpath(shipped() / LOCAL_MACHINE)
        self.machine: Machine = load_machine(machine)
        if profile.executor == LOCAL:
            resources = {**resources, **self._one_rank_a_gpu()}
            self.given = {name: plain(value) for name, value in resources.items()}
        self._made: dict[str, dict[str, Any]] = {}  # run -> resources
        known = {**self.given, **next(iter(layouts.values()), {})}
        of_profile = {**held_allocation(known, self.machine), **self.given}
        for run in runs:
            given = {**of_profile, **layouts.get(run, {})}
            made = {"machine": machine, **allocation_resources(given, self.machine)}
            self._made[run] = {**made, "train_nodes": int(given.get("nodes", 1))}
        by_run = {name for layout in layouts.values() for name in layout}
        alike = {n: value for n, value in resources.items() if n not in by_run}
        self.of_profile = {**alike, "machine": machine}
        """What the profile sets for all runs alike, and the machine, which the Snakemake inside a job
        reads here. The rest must not be in Snakemake's settings, where it would win over the rule's."""

    def _one_rank_a_gpu(self) -> dict[str, Any]:
        """Fewer ranks where the profile asks for more than this machine has GPUs, which is said; {} where
        it has none or enough. Ranks that the sheet or --config asks for are refused instead."""
        ranks, gpus = self.given.get("tasks_per_node", 1), network.usable_gpus()
        alone = self.given.get("nodes", 1) == 1 and slurm.this_job_id() is None
        if not alone or self.machine.device == "cpu" or not 0 < gpus < ranks:
            return {}
        say(
            f"train_run: {gpus} of {ranks} ranks (tasks_per_node), one for each GPU of this machine"
        )
        return {"tasks_per_node": gpus}

    @property
    def whole(self) -> dict[str, Any]:
        """For stage and preflight: all nodes, spare ones too. In a group, times add up."""
        return {**self._resources(), "runtime": BEFORE_TRAINING_MIN}

    @property
    def own(self) -> dict[str, Any]:
        """For training: what the profile does not set itself."""
        return {n: v for n, v in self._resources().items() if n not in self.of_profile}

    @property
    def of_nodes(self) -> dict[str, Any]:
        """Resources that choose the kind of the nodes, and who may use them."""
        return {n: v for n, v in self._resources().items() if n in OF_NODES}

    def resources(self, run: str) -> dict[str, Any]:
        """Resources of the allocation of this run."""
        return dict(self._made[run])

    def _resources(self) -> dict[str, Any]:
        """Each resource, as a function of the wildcards where runs differ."""
        resources: dict[str, Any] = {}
        for name in dict.fromkeys(name for made in self._made.values() for name in made):
            values = {run: made.get(name) for run, made in self._made.items()}
            first = next(iter(values.values()))
            is_same = all(value == first for value in values.values())
            resources[name] = (
                first if is_same else lambda wildcards, values=values: values[wildcards.run]
            )
        return resources

    def layout(self, run: str) -> WorldLayout:
        """Nodes and ranks that train this run."""
        return WorldLayout(self._made[run]["train_nodes"], self._made[run]["tasks_per_node"])

    def slurm_extra(self, run: str) -> str:
        """More options for sbatch, without the nodes that this run found unhealthy."""
        bad = exclude.read(RunPaths.of(self._runs[run]).bad_nodes)
        layout = self.layout(run)
        return slurm_extra(self.machine, layout.nodes, layout.ranks_per_node, bad)

    def check_profile(self, settings: Any, custom: Collection[str], *, submits: bool) -> None:
        """ConfigError for lines of a shipped profile that were not edited, and for names in train_run
        that no resource has; where jobs are submitted, also for a machine that nobody has named.

        settings: Snakemake's ResourceSettings. custom: resources that the user gave a limit for
        (--resources).
        """
        places = {"default-resources": settings.default_resources or {}}
        left = [
            f"{name}: {plain(value)} ({place})"
            for place, values in {**places, **settings.overwrite_resources}.items()
            for name, value in values.items()
            if str(plain(value)).startswith("EDIT_")
        ]
        if left:
            files = " and ".join(map(str, self._profile.files))
            raise ConfigError(
                f"the profile still says {', '.join(left)}",
                fix=f"edit {'these lines' if len(left) > 1 else 'this line'} in"
                f" {files or 'its config.yaml'}: your account, and partitions as `sinfo` lists them",
            )
        refuse_unknown(self.given, custom)
        if submits and not self._named:
            raise ConfigError(
                "no machine.yaml says how ranks start on this cluster",
                cause="no profile is in use, or there is none beside its config.yaml",
                fix="choose a profile (--profile), or name the file: `machine: FILE` in train_run of"
                " its set-resources",
            )

    def check_runs(self, due: Iterable[Any], failed: Mapping[str, str]) -> None:
        """ConfigError for a run whose batch these ranks cannot share, TrainingError for a known failure
        whose training was asked for by file name. due: jobs that will run."""
        due = list(due)
        for job in due:
            if job.rule.name == jobs.TRAIN_RULE and job.wildcards.run in failed:
                raise TrainingError(f"run {job.wildcards.run}: {failed[job.wildcards.run]}")
        self._profile.refuse_replaced({job.rule.name for job in due}, self._instead())
        allocated = [job for job in due if job.rule.name in jobs.ALLOCATION_RULES]
        for name in dict.fromkeys(job.wildcards.run for job in allocated):
            try:
                check_layouts(self.machine, self.layout(name), self._runs[name])
            except ConfigError as err:
                raise ConfigError(f"run {name}: {err.what}", cause=err.cause, fix=err.fix) from None

    def _instead(self) -> str:
        """Words for --config in place of those for --set-resources about the allocation."""
        said = [f"{k}={self.given[name]}" for k, name in OF_COMMAND.items() if name in self.given]
        return " ".join(said) or "nodes=N"


def held_allocation(given: Mapping[str, Any], machine: Machine) -> dict[str, int]:
    """Nodes, and ranks on each, of the allocation that this shell holds (salloc), for a profile that does
    not set both: a rank for each GPU, or without GPUs one for each task. {} outside of one.

    given: what the profile sets. Raises SlurmSilent.
    """
    both = "nodes" in given and "tasks_per_node" in given
    job = None if both or machine.launcher == "single" else slurm.this_job()
    if job is None or not job.nodes:
        return {}
    gpus = 0 if machine.device == "cpu" else job.gpus_per_node
    ranks = gpus or max(1, job.tasks // len(job.nodes))
    return {
        "nodes": max(1, len(job.nodes) - machine.preflight.spare_nodes),
        "tasks_per_node": ranks,
    }


def run_layouts(
    resources: Mapping[str, Any], columns: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Run -> nodes, ranks and GPUs of its allocation, where the sample sheet has such columns, or the
    command such keys; {} where there are none. resources: what the profile sets for `train_run`, which
    holds for empty cells."""
    given = {name: plain(value) for name, value in resources.items()}
    names = {name for columns_of_run in columns.values() for name in columns_of_run}
    layouts: dict[str, dict[str, Any]] = {}
    for run, columns_of_run in columns.items():
        layout = {name: columns_of_run.get(name, given.get(name, 1)) for name in names}
        if "tasks_per_node" in layout and given.get("gres"):
            gpus_per_node(given)  # refuses what is not `gpu:N`
            kind = re.sub(r":[0-9]+$", "", str(given["gres"]))
            layout["gres"] = f"{kind}:{layout['tasks_per_node']}"
        layouts[run] = layout
    return layouts if names else {}


def command_resources(given: Mapping[str, Any]) -> dict[str, Any]:
    """Resources of `train_run` that --config sets for one command. Raises ConfigError.

    given: what --config says, of which the keys in OF_COMMAND are read.
    """
    resources: dict[str, Any] = {}
    for key, resource in OF_COMMAND.items():
        if key not in given:
            continue
        value = given[key]
        if key == "partition":
            is_good = type(value) in (str, int) and bool(re.fullmatch(r"[\w.,-]+", str(value)))
            resources[resource], wanted = str(value), "the name of a partition"
        else:
            is_good, wanted = type(value) is int and value >= 1, "a number of 1 or more"
            resources[resource] = value
        if not is_good:
            raise ConfigError(f"--config has {key}={value!r}", fix=f"give {wanted}")
    return resources


def plain(value: Any) -> Any:
    """A resource of the profile as a number or text: on Snakemake's command line all are texts, and one
    in quotes of its own ("'all'") is a name that Python knows, too. None for one that Snakemake
    computes."""
    raw = getattr(value, "raw", value)
    if isinstance(raw, str) and (quoted := re.fullmatch(r"'([^'\\]*)'", raw)):
        return quoted[1]
    return int(raw) if isinstance(raw, str) and raw.isdigit() else raw


def allocation_resources(given: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Resources of the rules of an allocation, from those that the profile sets for `given`.

    `mpi=""` keeps the executor from wrapping rules in an srun: a second srun inside would wait forever
    or run one rank. Raises ConfigError for resources that cannot work.
    """
    _refuse_own(given)
    ranks, nodes = _number(given, "tasks_per_node"), _number(given, "nodes")
    gpus = gpus_per_node(given)
    if gpus is not None and gpus != ranks:
        raise ConfigError(
            f"profile: train_run asks for {gpus} GPUs a node and {ranks} ranks a node (tasks_per_node)",
            cause="each rank uses one GPU",
            fix=f'set tasks_per_node: {gpus}, or gres: "gpu:{ranks}"',
        )
    refuse_ranks_of_single(machine, WorldLayout(nodes, ranks))
    asked = nodes + machine.preflight.spare_nodes
    resources = {**given, "mpi": "", "nodes": asked, "tasks_per_node": ranks}
    if gpus is None:  # with GPUs it would become --ntasks-per-gpu
        fewest = min(machine.slurm.nodes_min or nodes, nodes) + machine.preflight.spare_nodes
        resources["tasks"] = fewest * ranks
    return resources


def _refuse_own(given: Mapping[str, Any]) -> None:
    """ConfigError for resources of `train_run` that Forge derives itself."""
    fixes = {
        "tasks": "set nodes and tasks_per_node; Forge derives the number of tasks from them",
        "mpi": "remove it; `launcher` in machine.yaml decides how ranks start",
        "slurm_extra": "write these options as slurm.options in machine.yaml, where Forge adds its own",
        "gpu": 'set GPUs per node, as gres: "gpu:4"',
        "cpus_per_gpu": "set cpus_per_task to this number: each rank uses one GPU, and Slurm tells the"
        " cores of a rank by tasks",
    }
    for key, fix in fixes.items():
        if key in given:
            raise ConfigError(
                f"profile: set-resources of train_run has {key}={given[key]!r}", fix=fix
            )


# Resources that Snakemake or its Slurm executor reads (submit_string.py and __init__.py of 2.8.0), and
# `machine`, which Forge reads.
_KNOWN_RESOURCES = (
    *("machine", "nodes", "tasks_per_node", "tasks_per_gpu", "gres", "gpu_model"),
    *("cpus_per_task", "cpus_per_gpu", "mem", "mem_mb", "mem_mib", "mem_mb_per_cpu"),
    *("disk", "disk_mb", "disk_mib", "runtime", "tmpdir", "constraint", "qos"),
    *("slurm_account", "slurm_partition", *OTHER_CLUSTER),
)


def refuse_unknown(given: Mapping[str, Any], custom: Collection[str]) -> None:
    """ConfigError for an unknown resource, which Snakemake would ignore silently.

    custom: names for which the user set a limit with --resources.
    """
    for name, value in given.items():
        if name in _KNOWN_RESOURCES or name in custom:
            continue
        close = difflib.get_close_matches(name, _KNOWN_RESOURCES, n=1)
        raise ConfigError(
            f"profile: set-resources of train_run has {name}={value!r}, and no such resource is known"
            f"{f' (did you mean {close[0]}?)' if close else ''}",
            fix="correct the name, or set a limit for the resource with `resources` in config.yaml of"
            " the profile",
        )


def _number(given: Mapping[str, Any], key: str) -> int:
    value = given.get(key, 1)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"profile: train_run has {key}={value!r}", fix="set an integer of 1 or more"
        )
    return value


def gpus_per_node(given: Mapping[str, Any]) -> int | None:
    """GPUs a node in `gres` (`gpu:4`, `gpu:h100:4`); None without GPUs. Raises ConfigError."""
    gres = str(given.get("gres", ""))
    if not gres:
        return None
    match = re.fullmatch(rf"gpu(?::({slurm.GPU_TYPE}))?(?::(\d+))?", gres)
    if match and "-" in (match[1] or ""):
        raise ConfigError(
            f"profile: train_run has gres {gres!r}",
            cause="the executor plugin takes no type of a GPU with a dash (2.8.0)",
            fix=f'write "gpu:{match[2] or 1}", and choose such nodes by constraint or slurm_partition',
        )
    if not match:
        raise ConfigError(
            f"profile: train_run has gres {gres!r}", fix='write it as "gpu:4" or "gpu:h100:4"'
        )
    return int(match[2] or 1)


# --- the profile of Snakemake ---------------------------------------------------------------------


MACHINE = "machine.yaml"
EXECUTOR = "forge"  # of Snakemake: the package snakemake_executor_plugin_forge
PLUGIN = "slurm"  # the executor that this one extends
# Options of the plugin that Forge's executor lacks: it requeues and keeps logs without them, and has its
# own status checks.
_WITHOUT = (
    *("requeue", "keep-successful-logs", "status-command", "status-attempts"),
    "init-seconds-before-status-checks",
)
_NAMED = f"executor: {PLUGIN}"


@dataclass(frozen=True)
class Profile:
    """Settings that a Snakemake command reads from its profile; empty without a profile, and inside a
    job."""

    files: tuple[Path, ...] = ()  # config.yaml of each, of which the last wins
    replaced: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Rule -> resources that the profile sets for it, and the command line has removed."""
    named: str = ""  # the key `machine` of train_run
    executor: str = ""  # of the command, also in a dry run, where Snakemake has another one
    of_plugin: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """File, or "this command" -> options of the plugin there, as they are written; also its name as the
    executor."""

    @classmethod
    def of_command(
        cls, arguments: Sequence[str], resources: Mapping[str, Mapping[str, Any]]
    ) -> Profile:
        """arguments: of the command, without its name. resources: by rule, as Snakemake has them."""
        from snakemake.cli import parse_args

        # It says again which profile it uses. SystemExit: --directory has led away from the profile.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
            parser, command = parse_args(list(arguments))
            files = [Path(file) for file in parser._default_config_files]
            own = [word for file in files for word in ("--profile", str(file))]
            given = parse_args(own)[1].set_resources if own else {}
            left = {rule: values.keys() - resources.get(rule, {}) for rule, values in given.items()}
            replaced = {rule: sorted(names) for rule, names in left.items() if names}
            # Resources.get() has no default.
            of_train = dict(given.get(jobs.TRAIN_RULE, {}))
            named = str(of_train["machine"].raw) if "machine" in of_train else ""
            of_plugin = _of_plugin(parser.get_source_to_settings_dict())
            return cls(tuple(files), replaced, named, command.executor or "", of_plugin)
        return cls()

    @property
    def submits(self) -> bool:
        """Return whether rules become Slurm jobs."""
        return self.executor == EXECUTOR

    @property
    def machine(self) -> str | None:
        """The machine.yaml beside the profile's config.yaml, if there is one."""
        beside = (file.with_name(MACHINE) for file in reversed(self.files))
        return next((str(path) for path in beside if path.exists()), None)

    def refuse_plugin(self) -> None:
        """ConfigError where the plugin would submit jobs, and for options of the plugin, which Snakemake
        ignores with another executor."""
        places = {place: list(options) for place, options in self.of_plugin.items()}
        if self.executor == PLUGIN and not any(_NAMED in options for options in places.values()):
            places.setdefault("this command", []).insert(0, f"--executor {PLUGIN}")
        if self.executor not in (EXECUTOR, PLUGIN) or not places:
            return
        options = [option for options in places.values() for option in options]
        needless = [option for option in options if option.partition("slurm-")[2] in _WITHOUT]
        renamed = [option for option in options if option not in needless]
        named = [f"`{o.replace(PLUGIN, EXECUTOR, 1)}` instead of `{o}`" for o in renamed]
        write = [f"write {', '.join(named)}"] if named else []
        remove = [f"remove {', '.join(needless)}, not needed any more"] if needless else []
        raise ConfigError(
            " and ".join(f"{place} has {', '.join(words)}" for place, words in places.items()),
            cause=f"Forge has an executor of its own, named {EXECUTOR}, and Snakemake ignores options of"
            " another one",
            fix="; ".join(write + remove),
        )

    def refuse_other_machine(self) -> None:
        """ConfigError where the profile names a machine.yaml other than that beside the profile."""
        beside = self.machine
        if self.named and beside and Path(self.named).resolve() != Path(beside).resolve():
            raise ConfigError(
                f"{self.files[-1]} says machine: {self.named}, and {beside} lies beside it",
                cause="a copy of another profile still names that one's file: what you change in"
                " the copy's own would not be read",
                fix=f"remove the line `machine: {self.named}` (the {MACHINE} beside it is then"
                f" read), or remove {beside}",
            )

    def refuse_replaced(self, due: Collection[str], words: str) -> None:
        """ConfigError where --set-resources has removed what the profile sets for a rule.

        due: rules that will run. words: what to give --config instead.
        """
        for rule in self.replaced.keys() & due:
            raise ConfigError(
                f"--set-resources leaves {rule} without {', '.join(self.replaced[rule])}, which"
                f" {self.files[-1]} sets",
                cause="Snakemake takes this option of the command line in place of all that the"
                " profile sets for all rules",
                fix=f"for another size in one command give `--config {words}` instead; for other"
                " resources edit a copy of the profile",
            )


def _of_plugin(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Value of `Profile.of_plugin`. sources: where settings are from, as Snakemake's parser says: keys
    of each file, and under "" the words of the command."""
    found: dict[str, list[str]] = {}
    for source, settings in sources.items():
        file = source.partition("|")[2]
        words = settings if file else settings.get("", (None, []))[1]
        options = [word.partition("=")[0] for word in words]
        options = [option for option in options if re.match(r"(--)?slurm-(?!jobstep)", option)]
        if settings.get("executor", ("", ""))[1] == PLUGIN:
            options.insert(0, _NAMED)
        if options:
            found[file or "this command"] = options
    return found
