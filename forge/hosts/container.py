"""Commands that start in a container on a node (`container` in machine.yaml).

Ranks, node agents and probes of a launch go through `Container.around`. The subcommands of the workflow
stay outside: they run the engine, and Slurm's commands, which an image does not have.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forge.core.errors import ConfigError, UnfitError
from forge.core.files import digest_file
from forge.core.machine import ContainerSettings, Machine
from forge.core.process import hostname, node_local_folder
from forge.core.records import ContainerImage
from forge.slurm import slurm

ENGINES = ("apptainer", "singularity", "pyxis", "podman")  # in the order in which `auto` takes them
PYXIS = "--container-image"  # the option of srun that pyxis adds
# The task of Slurm, and the child of the launcher: a shell around `podman run`, which passes signals on.
# podman's own way (--sig-proxy) starts a process for each signal and ends where that fails: Slurm signals
# the whole group of the task, twice within a moment, and killed that process (podman 4.3.1). scancel
# signals all that the task has started, which ends the client: the container lives on, and is waited for.
# Before it has a process, a stop ends the task, as it ends a program without handlers.
RUN = r"""
pidfile=$(mktemp) || exit 1
trap 'rm -f "$pidfile"' EXIT
# Without another process, which the next signal would kill.
pass_on() { read -r pid <"$pidfile"; [ -n "$pid" ] || exit 143; kill -s "$1" "$pid"; }
for name in TERM USR1 INT; do trap "pass_on $name" "$name"; done
exec 3<&0  # a shell gives /dev/null to what runs in the background
setsid podman run --sig-proxy=false --pidfile="$pidfile" --env=FORGE_CONTAINER_CLIENT=$$ "$@" <&3 3<&- &
exec 3<&-
while wait $!; status=$?; kill -0 $! 2>/dev/null; do :; done  # a signal interrupts `wait`
# Where a signal came as the client ended, `wait` told the signal; 127: it has told the client's status.
wait $!; again=$?; [ $again = 127 ] || status=$again
read -r pid <"$pidfile"
while [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; do sleep 0.2 & wait $!; done
exit $status
"""
GUARD = ("-m", "forge.launch.container_guard")
INFINIBAND = Path("/dev/infiniband")
GPU = Path("/dev/nvidiactl")
ASK_SEC = 20.0
START_SEC = 120.0  # an image of 10 GB on a network disk, read by all nodes at once


@dataclass(frozen=True)
class Container:
    """The container of a machine, as all processes of a command use it."""

    settings: ContainerSettings
    engine: str  # one of ENGINES
    folders: tuple[str, ...] = ()  # of this host, at the same path inside; those that exist
    variables: tuple[str, ...] = ()  # names; their values win over those of the image
    gpus: bool = False

    @property
    def python(self) -> str:
        """The interpreter inside that has Forge."""
        return self.settings.python

    @property
    def srun_options(self) -> tuple[str, ...]:
        """Options of srun that start its tasks in the container: of pyxis, else none."""
        if self.engine != "pyxis":
            return ()
        mounts = [bind if ":" in bind else f"{bind}:{bind}" for bind in self._binds()]
        return (
            f"{PYXIS}={self.settings.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={Path.cwd()}",
            *([f"--container-env={','.join(self.variables)}"] if self.variables else []),
            *self.settings.arguments,
        )

    def around(self, words: Sequence[str], *, guarded: bool = True) -> list[str]:
        """The command that runs `words` in the container, on a node; with pyxis only `words`: srun itself
        starts the container. guarded: killed with its client, which needs Forge inside."""
        if self.engine == "pyxis":
            return list(words)
        if self.engine == "podman":
            guard = [self.python, *GUARD] if guarded else []
            return ["sh", "-c", RUN, "podman", *self._podman_options(), *guard, *words]
        return [
            *(self.engine, "exec", f"--pwd={Path.cwd()}"),
            *["--nv"] * self.gpus,
            *(f"--bind={bind}" for bind in self._binds()),
            *self.settings.arguments,
            self.settings.image,
            *words,
        ]

    def exports(self, values: Mapping[str, str]) -> dict[str, str]:
        """Variables by which values win over those that the image sets, where the engine needs them."""
        if self.engine not in ("apptainer", "singularity"):
            return {}
        return {f"{self.engine.upper()}ENV_{name}": value for name, value in values.items()}

    def recorded(self) -> ContainerImage:
        """For the lineage: which image, on this host, by its digest."""
        asked = ["srun" if self.engine == "pyxis" else self.engine, "--version"]
        version = slurm.run(asked, timeout_sec=ASK_SEC)[0].strip()
        image = self.settings.image
        return ContainerImage(
            engine=self.engine, version=version, image=image, digest=self._digest()
        )

    def _digest(self) -> str:
        file = Path(self.settings.image)
        if file.is_file():
            status = file.stat()
            return _digest_of(file, status.st_size, status.st_mtime_ns)
        if self.engine != "podman" or file.is_absolute():
            return ""
        asked = ["podman", "image", "inspect", "--format={{.Id}}", self.settings.image]
        return slurm.run(asked, timeout_sec=ASK_SEC)[0].strip()

    def _podman_options(self) -> list[str]:
        """Namespaces of the host: ranks meet on its network, and are known by its pids."""
        image = self.settings.image
        return [
            *("--rm", "--interactive", "--pull=never", "--log-driver=none", "--label=forge"),
            *("--network=host", "--ipc=host", "--pid=host", "--uts=host", "--env-host"),
            "--security-opt=label=disable",  # SELinux would hide the directories below
            *([] if os.getuid() == 0 else ["--userns=keep-id"]),
            *([f"--device={INFINIBAND}"] if INFINIBAND.exists() else []),
            *(["--device=nvidia.com/gpu=all"] if self.gpus else []),
            *(f"--env={name}" for name in self.variables),
            *(f"--volume={b if ':' in b else f'{b}:{b}'}" for b in self._binds()),
            f"--workdir={Path.cwd()}",
            *self.settings.arguments,
            # A directory: what is written into it is lost with the container.
            *(["--rootfs", f"{image}:O"] if image.startswith("/") else [image]),
        ]

    def _binds(self) -> list[str]:
        """Directories of this host that exist, and those that the user asked for."""
        found = [folder for folder in self.folders if Path(folder).is_dir()]
        return [*dict.fromkeys(found), *self.settings.binds]


def container_of(
    machine: Machine, folders: Sequence[str], variables: Mapping[str, str]
) -> Container | None:
    """The container of this machine, in which commands see the project and these directories; None
    without one.

    Raises UnfitError where no engine is found, ConfigError for a directory that cannot be bound.
    """
    settings = machine.container
    if settings is None:
        return None
    wanted = [*folders, str(Path.cwd()), str(node_local_folder()), machine.stage.folder or ""]
    wanted.append(os.environ.get("FORGE_LOG_DIR", ""))
    return Container(
        settings,
        engine_of(settings),
        _with_their_targets([folder for folder in wanted if folder]),
        tuple(variables),
        gpus=machine.device != "cpu" and (machine.needs_gpus or GPU.exists()),
    )


@cache
def _digest_of(file: Path, _size: int, _mtime_ns: int) -> str:
    """blake3 of a file of gigabytes, once a command."""
    return digest_file(file)


def inside(container: Container | None, words: Sequence[str]) -> list[str]:
    """The command that runs `words`: in the container, where there is one."""
    return container.around(words) if container else list(words)


def _with_their_targets(folders: Sequence[str]) -> tuple[str, ...]:
    """Absolute paths, and what links among them lead to. ConfigError for one that no engine can bind."""
    paths: dict[str, None] = {}
    for folder in folders:
        for path in (Path(folder).absolute(), Path(folder).resolve()):
            if set(str(path)) & set(":,"):
                raise ConfigError(
                    f"{path} cannot be bound into a container: its name has a colon or a comma",
                    fix="rename it, or leave `container` out of machine.yaml",
                )
            paths[str(path)] = None
    return tuple(paths)


def engine_of(settings: ContainerSettings) -> str:
    """The engine that the settings name; with `auto` the first of ENGINES on this host. UnfitError where
    there is none."""
    if settings.engine != "auto":
        return settings.engine
    for engine in ENGINES:
        if _has_pyxis() if engine == "pyxis" else shutil.which(engine):
            return engine
    raise UnfitError(
        f"no container engine on {hostname()}: none of apptainer, singularity, podman is in"
        f" PATH={os.environ.get('PATH', '')}, and srun has no option {PYXIS} (pyxis)",
        cause="it is not installed here, or needs `module load`",
        fix="load it, then rerun the same command; or name the engine of the nodes (container.engine)",
    )


def _has_pyxis() -> bool:
    return (
        bool(shutil.which("srun"))
        and PYXIS in slurm.run(["srun", "--help"], timeout_sec=ASK_SEC)[0]
    )
