"""Placement of a run: how many ranks, and on which nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forge.core import hooks, memory
from forge.core.config import Config
from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import EnvironmentSettings, Machine
from forge.core.memory import Shape
from forge.core.process import hostname, user_threads
from forge.core.records import LaunchEnvironment
from forge.core.terminal import say
from forge.core.train_settings import (
    ranks_per_copy,
    refuse_bf16_of_ddp,
    refuse_fp8,
    samples_per_rank,
)
from forge.hosts import rendezvous
from forge.hosts.container import Container, container_of
from forge.hosts.modules import Modules, load_modules
from forge.slurm import slurm


@dataclass(frozen=True)
class WorldLayout:
    """Numbers of nodes and ranks, from the resources of the profile or the command line."""

    nodes: int = 1
    ranks_per_node: int = 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Placement:
    """Hosts for the ranks, in rank order, the Slurm job that holds them (None outside of Slurm), and how
    processes are started on them.

    variables: what these processes get in addition, of machine.yaml and its modules. environment: that by
    name. container: in which they run.
    """

    hosts: tuple[str, ...]
    job: slurm.Job | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    environment: LaunchEnvironment | None = None
    container: Container | None = None

    @classmethod
    def here(cls) -> Placement:
        return cls((hostname(),))

    def python(self, outside: str) -> str:
        """The interpreter of processes on these hosts. outside: that of hosts without a container."""
        return self.container.python if self.container else outside

    @property
    def srun_options(self) -> tuple[str, ...]:
        """More options of an srun that starts them."""
        return self.container.srun_options if self.container else ()

    def recorded_environment(self) -> LaunchEnvironment | None:
        """For the lineage of what is trained; None where machine.yaml says nothing of it."""
        if self.container is None:
            return self.environment
        known = self.environment or LaunchEnvironment(variables=[], modules=[], container=None)
        return known.model_copy(update={"container": self.container.recorded()})

    @property
    def threads(self) -> str | None:
        """OMP_NUM_THREADS that ranks get of machine.yaml or of the user; None where Forge chooses it."""
        return self.variables.get("OMP_NUM_THREADS") or user_threads()

    @property
    def is_here(self) -> bool:
        """Return whether this host is the only one, so that no srun is needed."""
        return self.hosts == (hostname(),)

    def only(self, hosts: Sequence[str]) -> Placement:
        """The placement with only these of its hosts."""
        return replace(self, hosts=tuple(host for host in self.hosts if host in hosts))

    def without(self, hosts: Collection[str]) -> Placement:
        """The placement without these hosts."""
        return replace(self, hosts=tuple(host for host in self.hosts if host not in hosts))


def check_layout(
    machine: Machine, layout: WorldLayout, config: Config, *, warns: bool = True
) -> None:
    """ConfigError where the launcher cannot start these ranks, they cannot meet at the endpoint that was
    asked for, or they cannot share the batch evenly. warns: of memory that may not suffice."""
    refuse_no_ranks(layout)
    refuse_ranks_of_single(machine, layout)
    rendezvous.check(machine.fabric, layout.nodes)
    if config.program is None:
        refuse_fp8(config.train, config.model)
        samples_per_rank(config.train.batch_size, layout.world_size)
        ranks = ranks_per_copy(config.train.shard, layout.world_size, layout.ranks_per_node)
        on_cpus = machine.device == "cpu" or machine.fabric.backend == "gloo"
        if ranks == 1 < layout.world_size and (on_cpus or config.train.precision == "fp32"):
            refuse_bf16_of_ddp(config.train)
        _check_memory(machine, layout, config, warns=warns)
        if machine.stage.results == "first_node" and layout.nodes > 1:
            _refuse_other_start(config)
    check_source(machine, layout, config)
    if machine.stage.results == "first_node" and not hooks.is_implemented("run_directories"):
        raise ConfigError(
            "stage.results is first_node, and no plugin is here that gives other nodes what they need",
            cause="a folder below forge/plugins is missing",
            fix="install all of Forge (docs/plugins lists its plugins), or remove stage.results and put"
            " `results` where all nodes see it",
        )


def _refuse_other_start(config: Config) -> None:
    """ConfigError for a run that begins with weights that nodes without `results` do not get."""
    init = config.model.init
    if config.parent or init:
        start = (
            f"parent is {config.parent}" if config.parent else f"model.init is {init and init.name}"
        )
        raise ConfigError(
            f"{start}, and stage.results is first_node: other nodes get checkpoints of the run only",
            fix="train on one node, or put `results` and `data` where all nodes see them, without it",
        )


def check_layouts(machine: Machine, layout: WorldLayout, config: Config) -> None:
    """Check the layout, as `check_layout`, and that of the fewest nodes (slurm.nodes_min), and that some
    fewer nodes can train the config where a run goes on without a node that it loses (slurm.shrink)."""
    check_layout(machine, layout, config)
    fewest = machine.slurm.nodes_min or layout.nodes
    if fewest > layout.nodes:
        raise ConfigError(
            f"slurm.nodes_min is {fewest}, and {layout.nodes} nodes train",
            fix="set it to the number of nodes or less, or raise nodes in the profile",
        )
    if fewest < layout.nodes:
        _check_fewest(machine, layout, config, fewest)
    if machine.slurm.shrink and layout.nodes > 1:
        _check_shrink(machine, layout, config)


def _check_fewest(machine: Machine, layout: WorldLayout, config: Config, fewest: int) -> None:
    if fewest * layout.ranks_per_node < layout.nodes:
        raise ConfigError(
            f"slurm.nodes_min is {fewest}, with {layout.ranks_per_node} ranks a node, for {layout.nodes}"
            " nodes",
            cause="Slurm gives a job no more nodes than it has tasks, and the fewest nodes have"
            f" {fewest * layout.ranks_per_node} tasks",
            fix=f"set it to {-(-layout.nodes // layout.ranks_per_node)} or more, or to null",
        )
    check_layout(machine, replace(layout, nodes=fewest), config)


def _check_shrink(machine: Machine, layout: WorldLayout, config: Config) -> None:
    """ConfigError where slurm.shrink could never do anything."""
    if machine.slurm.nodes_min == layout.nodes:
        raise ConfigError(
            f"slurm.shrink is true, and slurm.nodes_min is {layout.nodes}, which is the number of nodes:"
            " a run that loses one would have too few",
            fix=f"set nodes_min to less than {layout.nodes}, or to null (any number of nodes), or shrink"
            " to false",
        )
    fewer = layout.nodes - 1
    if any(layouts_on(machine, layout, config, fewer)):
        return
    try:
        check_layout(machine, replace(layout, nodes=fewer), config, warns=False)
    except ConfigError as err:
        raise ConfigError(
            f"slurm.shrink is true, and no fewer nodes than {layout.nodes} can train this config;"
            f" {fewer} cannot: {err.what}",
            cause=err.cause,
            fix="set slurm.shrink to false, or preflight.spare_nodes to 1",
        ) from None


def fitting_layout(machine: Machine, layout: WorldLayout, config: Config) -> WorldLayout:
    """The layout on the nodes that this Slurm job has got, where it may be fewer than it asked for
    (slurm.nodes_min, slurm.shrink): the most nodes that the config can be trained on, spare nodes apart.
    Raises SlurmSilent.
    """
    fewest = fewest_nodes(machine, layout)
    job = slurm.this_job() if fewest < layout.nodes else None
    if job is None:
        return layout
    given = len(job.nodes) - machine.preflight.spare_nodes
    fitting = next(layouts_on(machine, layout, config, given), None)
    return fitting or replace(layout, nodes=fewest)


def shrunk_layout(
    machine: Machine, layout: WorldLayout, config: Config, healthy: int
) -> WorldLayout | None:
    """The layout of a run whose allocation has so many healthy nodes left: the same where they are
    enough, else, with slurm.shrink, on the most of them that the config can be trained on. None where
    they are too few."""
    if healthy >= layout.nodes:
        return layout
    if not machine.slurm.shrink:
        return None
    return next(layouts_on(machine, layout, config, healthy), None)


def fewest_nodes(machine: Machine, layout: WorldLayout) -> int:
    """The fewest nodes that the run may be trained on."""
    limits = machine.slurm
    return min(limits.nodes_min or (1 if limits.shrink else layout.nodes), layout.nodes)


def layouts_on(
    machine: Machine, layout: WorldLayout, config: Config, nodes: int
) -> Iterator[WorldLayout]:
    """The layouts on so many nodes or less that the config can be trained on, largest first, down to the
    fewest that are allowed."""
    for number in range(min(nodes, layout.nodes), fewest_nodes(machine, layout) - 1, -1):
        with contextlib.suppress(ConfigError):
            check_layout(machine, replace(layout, nodes=number), config, warns=False)
            yield replace(layout, nodes=number)


def refuse_no_ranks(layout: WorldLayout) -> None:
    """ConfigError for less than one node, or less than one rank on each."""
    if layout.nodes < 1 or layout.ranks_per_node < 1:
        raise ConfigError(
            f"nodes {layout.nodes} and ranks per node {layout.ranks_per_node} must be 1 or more"
        )


def refuse_ranks_of_single(machine: Machine, layout: WorldLayout) -> None:
    """ConfigError where the launcher is `single`, which runs one rank, and there are more."""
    if machine.launcher == "single" and layout.world_size > 1:
        raise ConfigError(
            f"{layout.world_size} ranks ({layout.nodes} nodes, {layout.ranks_per_node} on each) with"
            " launcher single, which runs one",
            fix="set `launcher: torchrun` or `launcher: srun` in machine.yaml, or use one rank",
        )


def _check_memory(machine: Machine, layout: WorldLayout, config: Config, *, warns: bool) -> None:
    """ConfigError where the model cannot fit into the GPUs, a warning where a step may not. Without a
    tokenizer of known size, the model is counted without its embeddings."""
    if machine.gpu_memory_gib and machine.device != "cpu":
        tokenizer = config.tokenizer
        vocab_size = tokenizer.vocab_size if tokenizer.source == "train" else 0
        shape = Shape.of(config, vocab_size, layout.world_size, layout.ranks_per_node)
        memory.refuse_what_cannot_fit(shape, machine.gpu_memory_gib)
        if warns and (warning := memory.warning(shape, machine.gpu_memory_gib)):
            say(f"warning: {warning}")


def check_source(machine: Machine, layout: WorldLayout, config: Config) -> None:
    """ConfigError where another training program would have no directory to run in, here or on the
    nodes."""
    if program := config.program:
        _ = program.folder  # raises where it is missing
        if machine.stage.project is True and _needs_slurm(machine, layout):
            program.require_source(
                "stage.project is true and program.source is not set: the program would have no"
                " directory to run in on the nodes"
            )


def _needs_slurm(machine: Machine, layout: WorldLayout) -> bool:
    return machine.launcher == "srun" or layout.nodes > 1


# --- nodes ---------------------------------------------------------------------------------------


def find_placement(machine: Machine, layout: WorldLayout, folders: Sequence[str] = ()) -> Placement:
    """The nodes of this Slurm job, or this host where the ranks need no srun.

    folders: directories that a container must show, beside the project.

    Raises UnfitError where the ranks need a job and there is none, or one with too few nodes or cores,
    where Slurm's programs are not found, or this host is not the one that has the results.
    """
    nodes = _nodes(machine, layout)
    _refuse_other_node(machine, nodes)
    placement = _with_environment(nodes, machine.environment)
    own = machine.environment.values  # those of modules are of this host: an image's win over them
    container = container_of(machine, folders, own)
    if container is None:
        return placement
    if container.engine == "pyxis" and placement.is_here and machine.launcher != "srun":
        raise ConfigError(
            f"pyxis starts containers with srun, and launcher {machine.launcher} on one node needs none",
            fix="set launcher: srun, or container.engine: apptainer or podman",
        )
    values = {**placement.variables, **container.exports(own)}
    return replace(placement, variables=values, container=container)


def _with_environment(placement: Placement, settings: EnvironmentSettings) -> Placement:
    """The placement with the variables of machine.yaml; those of its modules come second."""
    own = settings.values
    if not own and not settings.modules:
        return placement
    modules = Modules()
    if settings.modules:
        modules = load_modules(settings.modules, placement.hosts[0], placement.job)
        changed = ", ".join(sorted(modules.variables))
        say(f"modules: {' '.join(modules.names)} (changed: {changed or 'nothing'})")
    environment = LaunchEnvironment(
        variables=sorted(own), modules=list(modules.names), container=None
    )
    return replace(placement, variables={**modules.variables, **own}, environment=environment)


def _nodes(machine: Machine, layout: WorldLayout) -> Placement:
    if not _needs_slurm(machine, layout):
        return Placement.here()
    if slurm.this_job_id():
        slurm.refuse_missing("scontrol", "srun")
    job = slurm.this_job()
    if job is None or not job.nodes:
        raise UnfitError(
            f"launcher {machine.launcher} with {layout.nodes} nodes needs a Slurm job, and this"
            f" shell is in none (SLURM_JOB_ID is {slurm.this_job_id() or 'not set'})",
            cause="the subcommand was called outside of sbatch and salloc",
            fix="use snakemake --profile profiles/slurm-cpu, or run the command inside salloc",
        )
    if len(job.nodes) < layout.nodes:
        raise UnfitError(
            f"job {job.id} has {len(job.nodes)} nodes ({', '.join(job.nodes)}), training needs"
            f" {layout.nodes}",
            cause="the allocation differs from `nodes` of the profile",
            fix=f"request {layout.nodes} nodes, or pass --nodes={len(job.nodes)}",
        )
    job = _with_shared_cores(job, layout.ranks_per_node)
    _refuse_uneven(job, layout.ranks_per_node)
    return Placement(job.nodes, job)


def _with_shared_cores(job: slurm.Job, ranks_per_node: int) -> slurm.Job:
    """The job with the cores of a rank where its tasks are fewer than the ranks, as with `salloc
    --gres=gpu:4 --cpus-per-task=64`: the ranks share the cores of their node. They get no more than a
    task was asked to have, where that is more than Slurm's default of one."""
    fewest = min((count for _, count in job.cpus), default=0)
    if job.tasks >= len(job.nodes) * ranks_per_node or fewest < ranks_per_node:
        return job
    if job.cpus_per_task > 1:
        return replace(job, cpus_per_task=min(job.cpus_per_task, fewest // ranks_per_node))
    # job.cpus has each thread of a core, also where Slurm counts cores and srun refuses more.
    fewest = fewest * job.num_cpus // sum(count for _, count in job.cpus)
    return replace(job, cpus_per_task=max(1, fewest // ranks_per_node))


def _refuse_other_node(machine: Machine, placement: Placement) -> None:
    """UnfitError where only the first node sees `results`, and this is another host."""
    first, here = placement.hosts[0], hostname()
    if machine.stage.results == "first_node" and placement.job and first != here:
        raise UnfitError(
            f"stage.results is first_node, and this command runs on {here}: the first node of job"
            f" {placement.job.id} is {first}",
            cause="a job runs its commands on its first node, in the order of their names; or this is the"
            " shell of salloc on a login node",
            fix=f"submit with slurm.options: --nodelist={here}, and leave out nodes whose names sort"
            f" before it (slurm.exclude), if {here} is the node that has the results",
        )


def _refuse_uneven(job: slurm.Job, ranks_per_node: int) -> None:
    """UnfitError for uneven cores, such as 3 + 1 tasks for 2 + 2 ranks: srun would wait forever."""
    needed = ranks_per_node * job.cpus_per_task
    cores = {count for _, count in job.cpus}
    if len(cores) < 2 or min(cores) >= needed:
        return
    given = ", ".join(
        f"{name} {count} ({count // job.cpus_per_task} tasks)" for name, count in job.cpus
    )
    raise UnfitError(
        f"job {job.id} gives its nodes different numbers of cores: {given}; {ranks_per_node} ranks on"
        f" each need {needed}",
        cause="the job requested tasks, not tasks per node",
        fix=f"request --nodes={len(job.nodes)} --ntasks-per-node={ranks_per_node}"
        f" --cpus-per-task={job.cpus_per_task}",
    )
