"""Settings of the machine that a run uses: the typed `machine.yaml` of a profile.

No setting here changes the result of training; the config digest leaves them out.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from forge.core.config import Section, apply_overrides, checked, read_values
from forge.core.section import FilePath, LiteralPath, Retired

# 11 days. poll(2) counts milliseconds in 32 bits.
MAX_SEC = 10**6


def port_range(value: int | str) -> range:
    """The ports in `29500` or `15000-20000`, both ends included. Raises ValueError."""
    if numbers := re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", str(value)):
        ports = range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)
        if ports and ports[0] >= 1 and ports[-1] <= 65535:
            return ports
    raise ValueError("Input should be a port from 1 to 65535, or a range such as 15000-20000")


class Fabric(Section):
    """The network between the ranks."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Process group backend; `auto`: nccl on GPUs, gloo on CPUs. gloo on GPUs, for networks on which NCCL
    fails, needs `train.shard: none`."""
    interface: str | None = None
    """Network interface of the ranks; null: each node chooses its own. Ranks that share a node use the
    loopback interface."""
    interfaces: dict[str, str] = Field(default={})
    """Network interface by node name, for nodes where it has another name; overrides `interface`."""
    master_addr: str | None = Field(None, min_length=1)
    """Name or address of the first node, at which the ranks meet (MASTER_ADDR); null: its name, or its
    address in Slurm (NodeAddr) where one of their nodes does not resolve the name; on a single node
    127.0.0.1."""
    master_port: int | str | None = None
    """Port of the first node at which they meet (MASTER_PORT), or a range such as `15000-20000`, of which
    a free one is taken; null: any free port."""
    infiniband: Literal["auto", "always", "never"] = "auto"
    """`auto`: NCCL uses InfiniBand or RoCE where a port is active; `always`: preflight also refuses a
    node without one; `never`: it uses sockets."""
    gid_index: int | None = Field(None, ge=0)
    """NCCL_IB_GID_INDEX, for clusters with RoCE that need one. Preflight looks it up in the ports'
    tables. It is not set on InfiniBand, where NCCL does not read it."""
    timeout_sec: float = Field(300, gt=0, le=MAX_SEC)
    """Timeout of a collective in seconds; after it the rank ends with an error."""
    node_gbits: float | None = Field(None, gt=0)
    """Bandwidth of a node's network in Gbit/s, all its ports together, for the times in `forge plan`;
    null: 400 for each GPU."""
    debug: bool = False
    """Verbose logs of NCCL and torch.distributed."""

    @field_validator("master_port")
    @classmethod
    def _is_port_or_range(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            port_range(value)
        return value


class StageSettings(Section):
    """Copies of the token shards, or of a program's inputs, on the nodes' local disks."""

    mode: Literal["auto", "always", "never"] = "auto"
    """`auto`: copy the shards or inputs, unless they are on the file system of the staging directory, or
    on a shared one that is fast enough as measured on the node (1000 random reads/s, 500 MiB/s). Outside
    of a Slurm job, where nothing would remove the copies, only with `always`, or `keep`."""
    folder: FilePath | None = None
    """Staging directory on each node; null: $SLURM_TMPDIR, else $TMPDIR, else /tmp. Variables in it are
    those of the command that stages, on the first node."""
    keep: bool = False
    """Keep the copies when the job ends, for the next run on the same nodes."""
    project: Literal["auto"] | bool = False
    """Also copy Forge, its Python environment and `program.source`: `true` to every node, `auto` to those
    that do not see them (`proj=missing`, `pkgs=missing` or `source=missing` in what stage prints)."""
    results: Literal["shared", "first_node"] = "shared"
    """Who sees the directory `results`. `shared`: all nodes. `first_node`: only the first node of a job,
    on which its commands run; the others get what their ranks read, and what these write comes back.
    Needs `project: auto` or `true`."""

    @model_validator(mode="after")
    def _blind_nodes_get_all(self) -> Self:
        if self.results == "first_node" and self.project is False:
            raise ValueError(
                "results: first_node is for nodes that do not see the project either: set project: auto,"
                " which copies Forge and its Python there"
            )
        if self.results == "first_node" and self.mode == "never":
            raise ValueError(
                "results: first_node needs copies of shards or inputs on the nodes, and mode is never:"
                " set mode: auto"
            )
        return self


class PreflightSettings(Section):
    """Checks of nodes and ranks before training."""

    deadline_sec: float = Field(90, gt=0, le=MAX_SEC)
    """Deadline of the rank checks on one node in seconds; ranks that have not answered by then are named.
    Each further node adds 1 s, and 0.25 s for each of its ranks. Ranks that fail and name nobody are
    started once more in a job, for half as long, before the search for the node at fault, which has half
    as long at least. In a job the nodes import torch before, within 300 s."""
    min_free_disk_gib: float = Field(1, ge=0)
    """Required free space in the results directory."""
    min_free_memory_gib: float = Field(1, ge=0)
    """Required available memory per rank."""
    min_open_files: int = Field(256, ge=0)
    """Required hard limit of open files (`ulimit -Hn`), to which ranks raise the soft one."""
    max_clock_skew_sec: float = Field(5, gt=0, le=MAX_SEC)
    """Warn when the clocks of two nodes differ by more than this."""
    slow_factor: float = Field(2, gt=1)
    """Warn about a node that is slower than the median of the nodes by this factor."""
    packages: list[str] = Field(default=[])
    """Python packages that every node must be able to import, such as `[transformers, accelerate]`;
    with the Python of another program where its command begins with one."""
    spare_nodes: int = Field(0, ge=0)
    """Nodes to request beyond those that train; they replace unhealthy nodes."""


class MonitorSettings(Section):
    """Load of the nodes while they train, for the report."""

    every_sec: float = Field(10, ge=0, le=MAX_SEC)
    """Each node appends a line to `monitor/NODE.jsonl` in the run's directory after so many seconds:
    utilization, power, temperature and memory of its GPUs, its own load, memory and network. 0: none."""


# Numbers of a rank, which its launcher sets, and what names the launch of another program: the same value
# for every rank would be wrong.
SET_BY_FORGE = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
    r"|(SLURM|PET|TORCHELASTIC)_.*"
    r"|FORGE_(RUN|CHECKPOINTS|RESUME|DATA|HUB|GOAL|RESTART|DEADLINE|HEARTBEAT|SAVED|STOP_SIGNAL"
    r"|IN_WORKFLOW|SUBMITTED|PLUGINS|USER_OMP_NUM_THREADS|JOB_PYTHONPATH|CONTAINER_CLIENT)"
)


class EnvironmentSettings(Section):
    """Environment of the ranks, and of the processes that prepare and check their nodes."""

    variables: dict[str, str | int] = Field(default={})
    """Variables by name, such as `{NCCL_DEBUG: WARN}`. They replace those of the shell and win over what
    Forge would set. Not those that a launcher sets for each rank, such as RANK and MASTER_ADDR."""
    modules: list[str] = Field(default=[])
    """Environment modules, such as `[cuda/12.4]`, in the order to load. Each start of a job loads
    them once, in a login shell of its first node, and the ranks on all nodes get what they change."""

    @field_validator("modules")
    @classmethod
    def _are_names(cls, modules: list[str]) -> list[str]:
        for name in modules:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+/@:~-]*", name):
                raise ValueError(f"{name!r} is no name of a module, such as cuda/12.4")
        return modules

    @field_validator("variables", mode="before")
    @classmethod
    def _are_text(cls, variables: object) -> object:
        for name, value in variables.items() if isinstance(variables, dict) else ():
            if isinstance(value, bool | float):
                raise ValueError(
                    f"{name} should be text: put the value in quotes ({name}: '{value}')"
                )
        return variables

    @field_validator("variables")
    @classmethod
    def _can_be_set(cls, variables: dict[str, str | int]) -> dict[str, str | int]:
        for name, value in variables.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(
                    f"{name!r} is no name of a variable: letters, digits and _ make one"
                )
            if SET_BY_FORGE.fullmatch(name):
                instead = {"MASTER_ADDR": "fabric.master_addr", "MASTER_PORT": "fabric.master_port"}
                use = f"; set {instead[name]}" if name in instead else ""
                raise ValueError(
                    f"{name} is set for each launch, or each rank, by its launcher{use}"
                )
            if "\0" in str(value):
                raise ValueError(f"{name} holds a null byte")
        return variables

    @property
    def values(self) -> dict[str, str]:
        """The variables as a process gets them."""
        return {name: str(value) for name, value in self.variables.items()}


class ContainerSettings(Section):
    """The container in which ranks run, and the processes that stage and check their nodes."""

    image: FilePath = Field(min_length=1)
    """A file (`.sif`; of pyxis `.sqsh`) or an unpacked root directory, by its absolute path, or a name
    that the engine knows on every node, such as `localhost/forge:latest`. podman downloads none."""
    engine: Literal["auto", "apptainer", "singularity", "pyxis", "podman"] = "auto"
    """`auto`: the first of these on the node on which the command runs."""
    python: LiteralPath = "/opt/forge/bin/python"
    """The Python inside that has Forge and its packages. That of the image, as `Containerfile` and
    `forge.def` make it; or that of the project, such as `/shared/project/.venv/bin/python`, where the
    image has the Python from which the environment was made."""
    binds: list[FilePath] = Field(default=[])
    """Further directories, `/path` or `/path:/inside[:ro]`. The project, `results`, `data`, the disk of a
    node ($SLURM_TMPDIR, $TMPDIR or /tmp) and `stage.folder` are always bound, at their own paths."""
    arguments: list[str] = Field(default=[])
    """Further options of `apptainer exec` or `podman run`; with pyxis of srun."""

    @field_validator("image")
    @classmethod
    def _is_no_option(cls, image: str) -> str:
        if image.startswith("-") or not image.isprintable() or image != image.strip():
            raise ValueError("Input should be a path, or a name of an image")
        return image

    @field_validator("python")
    @classmethod
    def _is_absolute(cls, python: str) -> str:
        if not python.startswith("/") or "$" in python:
            raise ValueError(
                "Input should be an absolute path, as it is inside of the container, without variables"
            )
        return python

    @field_validator("binds")
    @classmethod
    def _are_paths(cls, binds: list[str]) -> list[str]:
        for bind in binds:
            if not bind.startswith("/") or "," in bind or not bind.isprintable():
                raise ValueError(f"{bind!r} should be /path or /path:/inside[:ro], without commas")
        return binds


def _are_words(options: str) -> str:
    """Options of a command line, which a shell can split into words. Raises ValueError."""
    try:
        shlex.split(options)
    except ValueError as err:
        raise ValueError(
            f"{options!r} cannot be split into words ({err}): a quote in a value needs quotes around it"
        ) from None
    return options


Options = Annotated[str, AfterValidator(_are_words)]


class ControllerSettings(Section):
    """The job of `forge submit`, in which Snakemake runs."""

    partition: str = ""
    """Partition of this job, one that takes jobs of one core; empty: `slurm_partition` of
    default-resources."""
    account: str = ""
    """Account of this job; empty: `slurm_account` of default-resources."""
    runtime: int | None = Field(None, ge=1, le=10**6)
    """Time limit in minutes, before which the job is requeued; null: a day, or MaxTime of the partition
    where that is less."""
    mem_mb: int = Field(2000, ge=100)
    """Memory in MB: Snakemake's, and that of the rules that run beside it, such as the report."""
    options: Options = ""
    """Further options for its sbatch, such as `--mail-type=END,FAIL`."""


class Slurm(Section):
    """Options of the Slurm job, and its requeues."""

    RETIRED: ClassVar = {
        "time_min": Retired(
            None,
            "set a shorter `runtime` of train_run in the profile: a run that reaches its time limit saves"
            " and is requeued",
        ),
        "validate_time_min": Retired(
            None, "set a shorter `runtime` of validate_run in set-resources of the profile"
        ),
    }

    warn_sec: int = Field(120, ge=0, le=65535)
    """Slurm sends SIGUSR1 this many seconds before the time limit (up to 30 s later than that); the ranks
    then commit a checkpoint and exit."""
    max_restarts: int = Field(50, ge=0)
    """A job that Slurm has restarted this often is not requeued again."""
    when_running: Literal["stop", "wait"] = "stop"
    """When a job of this run is already in the queue: `stop` with an error, or `wait` for its end."""
    exclude: list[str] = Field(default=[])
    """Nodes to exclude, in addition to those in the run's bad_nodes.txt."""
    export: Literal["all"] | list[str] = "all"
    """Variables of the shell in which the workflow was started that the ranks inherit. A list of names
    and patterns, such as `[WANDB_MODE, MY_*]`, leaves out all others but those of the system, Slurm,
    Forge, NCCL, Gloo, torch and Hugging Face; tokens, secrets and keys too, unless named in full."""
    nodes_min: int | None = Field(None, ge=1)
    """Start as soon as so many nodes are free, and train on what Slurm gives, up to `nodes`: as many of
    them as share the batch evenly. A requeue may get another number. At least `nodes` divided by the
    ranks of a node. null: `nodes`."""
    shrink: bool = False
    """A run that loses a node, and has no spare one, resumes inside its allocation on the nodes that are
    left: as many as share the batch evenly, and nodes_min at least (null: 1). Else it is requeued. A
    requeue asks for all nodes again."""
    max_gpu_hours: float | None = Field(None, gt=0)
    """Nothing is submitted where the runs that one command would train need more GPU-hours than this in
    sum; null: no limit. A run counts with the GPUs of all its nodes, spare ones too, times the time from
    its last checkpoint up to its goal as `forge plan` estimates it, without restarts. Without an estimate
    (`gpu` is not set or not known, or another program trains) the time is the limit of its job, without
    requeues. Jobs in the queue, validation and evaluation are not counted."""
    options: Options = ""
    """Further options for sbatch, as on its command line, such as `--mail-type=FAIL`."""
    controller: ControllerSettings = ControllerSettings()


class Notify(Section):
    """A program that `forge submit` tells how its runs end."""

    command: list[str] = Field(default=[])
    """Program and arguments, such as `[/home/me/bin/to-chat, --channel, runs]`. It is called once when a
    run ends, once when a run needs a person, and once when the controller ends, with the event as JSON
    on standard input. It has 30 seconds; its failure is a line in the controller's log."""


class Machine(Section):
    """All of machine.yaml."""

    launcher: Literal["single", "torchrun", "srun"] = "single"
    """`single`: one rank on this host; `torchrun`: one torchrun per node, which srun starts under Slurm;
    `srun`: one srun task per rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the ranks compute on. `auto`: a GPU of its own for each rank; the CPU only where no node has
    GPUs, so that a rank that cannot use its GPU is an error and not a slow run."""
    stop_grace_sec: float = Field(60, gt=0, le=MAX_SEC)
    """Seconds that ranks have after a stop signal to commit a checkpoint, before they are killed."""
    async_save: bool = True
    """Write checkpoints while training continues, from a copy of the state in host memory. With false, or
    too little memory, training waits for each save."""
    gpu: str | None = None
    """Name of the GPUs, such as `A100`, `H100` or `H200`, for the times in `forge plan`; null: H100.
    Before submission, time up to the goal is estimated only for GPUs that are named here."""
    gpu_memory_gib: float | None = Field(None, gt=0)
    """Memory of one GPU in GiB. A run that cannot fit is refused before its job waits in the queue, and
    `forge plan` shows what would; null: not compared."""
    max_minutes: float | None = Field(None, gt=0, le=10**7)
    """Stop with a checkpoint before this many minutes have passed, for machines that are reclaimed
    without warning; null: only Slurm's time limit counts."""
    max_restarts_without_progress: int = Field(5, ge=1)
    """The run ends after so many launches in a row without a new checkpoint, and names their causes."""
    fabric: Fabric = Fabric()
    stage: StageSettings = StageSettings()
    preflight: PreflightSettings = PreflightSettings()
    monitor: MonitorSettings = MonitorSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    container: ContainerSettings | None = None
    slurm: Slurm = Slurm()
    notify: Notify = Notify()

    @model_validator(mode="after")
    def _backend_fits_device(self) -> Self:
        if self.device == "cpu" and self.fabric.backend == "nccl":
            raise ValueError(
                "fabric.backend nccl needs GPUs, and device is cpu: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _container_has_the_project(self) -> Self:
        if self.container and self.stage.results == "first_node":
            raise ValueError(
                "stage.results: first_node does not work with a container yet: its nodes must see"
                " `results`. Remove one of them"
            )
        if self.container and self.stage.project is not False:
            raise ValueError(
                "stage.project copies Forge and its Python to nodes; with a container they come with the"
                " image: remove stage.project"
            )
        return self

    @property
    def needs_gpus(self) -> bool:
        """Return whether each rank must have a GPU, without a look at the nodes."""
        return self.device == "cuda" or self.fabric.backend == "nccl"

    def uses_nccl(self, gpus: int) -> bool:
        """Return whether ranks of nodes with so many GPUs communicate by NCCL."""
        has_gpus = self.device != "cpu" and gpus > 0
        return self.fabric.backend == "nccl" or (self.fabric.backend == "auto" and has_gpus)


def load_machine(path: str | Path | None, overrides: dict[str, Any] | None = None) -> Machine:
    """The machine in a file (defaults for None), with overrides applied. Raises ConfigError."""
    values = apply_overrides(read_values(path) if path else {}, overrides or {})
    return checked(Machine, values, str(path or "the machine"))
