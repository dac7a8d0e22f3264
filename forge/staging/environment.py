"""Copy Forge, its Python and a program's directory to the nodes (`stage.project`).

- `python-{digest}/env`: the virtual environment; `base`: the Python it was made from, unless the
  system's
- `project-{digest}`: Forge itself, and `python`, a script that runs it in this environment only
- `source-{digest}/source`: the directory in which another training program runs

With `auto`, a node that sees one of them has a link in place of `env`, `forge` or `source`, since the
ranks of all nodes are started with the same paths.

The environment has an archive of its own because the code changes every day, and its gigabytes do not.
A node has no Python before they arrive, so that it unpacks them with sh, tar and sha256sum.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import forge
from forge.core import project_plugins
from forge.core.config import Config
from forge.core.errors import ConfigError, UnfitError
from forge.core.files import private_root, short_id
from forge.core.machine import Machine, StageSettings
from forge.core.process import hostname
from forge.core.program_settings import Program
from forge.core.terminal import say
from forge.data.inputs import source_digest, source_files
from forge.data.shards import Member
from forge.hosts.nodes import NodeFailure, failed_on
from forge.hosts.placement import Placement
from forge.slurm import slurm
from forge.staging.archive import DIRECTORIES, Archive, make_archive
from forge.staging.on_node import SPARE_BYTES, link_mbit
from forge.staging.sbcast import COMPRESS_PROGRAMS_BELOW, Broadcast, SbcastFailed, is_slower

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
ASK_SEC = 30.0
UNPACK_SEC = 600.0
# Directories of a Python that are not needed at run time.
UNUSED = ("test", "idlelib", "turtledemo", "ensurepip", "site-packages")

# $1: a file of Forge. $2: its Python. $3: a file of the program's directory, or "". Prints the state of
# each, `ok` or `missing`.
SEES = r"""
state_of() { if "$@" >/dev/null 2>&1; then echo ok; else echo missing; fi; }
state_of test -r "$1"
state_of "$2" -c 'import pydantic'
[ -z "$3" ] || state_of test -r "$3"
"""
# By part: its name in the line that shows these states.
SHOWN = {"project": "proj", "python": "pkgs", "source": "source"}

# $1: stage.folder or "". Makes the private directory there, and prints it.
ROOT = r"""
base=${1:-${SLURM_TMPDIR:-${TMPDIR:-/tmp}}}; root=$base/forge-$(id -u)
mkdir -p "$base" && { mkdir -m 700 "$root" 2>/dev/null; true; }
if [ -L "$root" ] || [ ! -d "$root" ]; then echo "$root is not a folder (a planted link?)" >&2; exit 1; fi
if [ ! -O "$root" ] || [ "$(stat -c %a "$root")" != 700 ]; then
    echo "$root is not yours alone" >&2; exit 1
fi
echo "$root"
"""

# $1: as of ROOT. $2: path below the root. $3: directory in it. Prints: root, free KiB, and `there`,
# `linked` or `lacks`.
LOOK = (
    ROOT
    + r"""
df -Pk "$root" | awk 'NR == 2 {print $4}'
path=$root/$2/$3
if [ ! -d "$path" ]; then echo lacks; elif [ -L "$path" ]; then echo linked; else echo there; fi
"""
)

# $1: the temporary directory, made anew.
BEGIN = r"""rm -rf "$1" && mkdir -p "$1/chunks" """

# $1: the temporary directory. $2: its final name. $3: the directory of the staged Python, or "". $4: the
# directory in it. $5: the shared directory of which that is a copy or a link. $6: digests of the chunks.
LINK = r"""
[ -d "$2/$4" ] || rm -rf "$2"
rm -rf "$1" && mkdir -p "$1" && cd "$1" && ln -s "$5" "$4" || exit 1
"""
UNPACK = rf"""
if [ -L "$2/$4" ] || [ ! -d "$2/$4" ]; then rm -rf "$2"; fi
cd "$1/chunks" && printf '%s\n' "$6" | sha256sum --check --quiet - || exit 1
tar -C .. --no-same-owner -xf {DIRECTORIES} && rm {DIRECTORIES} || exit 1
ls | xargs -P 4 -I CHUNK sh -c 'tar -C .. --no-same-owner -xf CHUNK && rm CHUNK' || exit 1
cd .. && rmdir chunks || exit 1
"""
# The end of each: another run may have put the same there meanwhile, which its ranks use already.
MOVE = '{ mv -T "$1" "$2" || { [ -d "$2/$4" ] && cd / && rm -rf "$1"; }; }'
PYTHON_READY = rf"""
if [ ! -L env ]; then
    home=$2/base/bin; [ -d base ] || home=/usr/bin
    mkdir env/bin && ln -s "$home/{VERSION}" env/bin/{VERSION} || exit 1
    for name in python python3; do ln -s {VERSION} env/bin/$name || exit 1; done
    printf 'home = %s\ninclude-system-site-packages = false\n' "$home" > env/pyvenv.cfg
fi
{MOVE} && "$2/env/bin/{VERSION}" -c 'import pydantic'
"""
PROJECT_READY = rf"""
cat > python <<END
#!/bin/sh
# The staged Python. It uses its own directories only, whatever the job's environment says.
unset PYTHONHOME VIRTUAL_ENV
export PATH="$3/env/bin:\$PATH"
export FORGE_JOB_PYTHONPATH="\$PYTHONPATH"  # for another training program
export PYTHONPATH="$2"
export PYTHONSAFEPATH=1  # not the current directory, which may be the project
export LD_LIBRARY_PATH="$3/base/lib\${{LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}}"
exec "$3/env/bin/{VERSION}" "\$@"
END
chmod 755 python && {MOVE} && "$2/python" -c 'import forge.node_agent'
"""
SOURCE_READY = f"mkdir -p source && {MOVE}"

# $1: stage.folder or "". $2: the job's directory below the root. $3: the name that marks a run which uses
# it. As on_node.mark and unmark, for a node without Python.
CLAIM = ROOT + 'mkdir -p "$root/$2" && touch "$root/$2/$3"'
WITHDRAW = ROOT + (
    'rm -f "$root/$2/$3"; ls "$root/$2"/used-by-* >/dev/null 2>&1 || rm -rf "$root/$2"'
)


@dataclass(frozen=True)
class StagedProject:
    """Directories that `stage.project` has copied or linked, at the same paths on all nodes."""

    python: str  # runs Forge there
    source: str = ""  # the directory in which another training program runs
    source_digest: str = ""
    roots: dict[str, str] = field(default_factory=dict)  # as in StageRecord


@dataclass(frozen=True)
class EnvironmentPart:
    """A directory that nodes get as one archive, or as a link to the shared one."""

    name: str  # of SHOWN
    inside: str  # what it is in the directory `{name}-{digest}` of a node
    shared: Path
    members: list[Member]
    ready: str  # the end of the script that unpacks or links it


def stage_project(config: Config, machine: Machine, placement: Placement) -> StagedProject | None:
    """Copy Forge, its Python and the source of the config's program to every node of the placement, or
    with `auto` to those that do not see them; None where all do.

    Raises UnfitError that names the nodes on which this failed, and ConfigError where there is no such
    source, or no virtual environment to copy.
    """
    program = config.program
    blind = _blind_nodes(program, machine.stage, placement)
    if not any(blind.values()):
        return None
    put = partial(_put, Path(config.data), machine.stage, placement)
    if blind["python"]:
        _require_virtual_environment()
    of_run = (config.run, machine.stage, placement)
    roots = _mark(CLAIM, *of_run)  # first: the last run of the job that ends removes all of it
    try:
        python = put(_python(), blind["python"])
        code = put(_code(), blind["project"], python=python)
        source = digest = ""
        if program and blind["source"]:
            folder, outputs = program.folder, (config.results, config.data)
            digest = source_digest(folder, outputs)
            source = put(_source(folder, outputs), blind["source"]) + "/source"
    except BaseException:
        _withdraw(*of_run)
        raise
    if machine.stage.keep:
        _withdraw(*of_run)
        roots = {}
    return StagedProject(f"{code}/python", source, digest, roots)


def _blind_nodes(
    program: Program | None, settings: StageSettings, placement: Placement
) -> dict[str, list[str]]:
    """Nodes that need a copy, by part of the project."""
    hosts = list(placement.hosts)
    if settings.project != "auto":
        return {"project": hosts, "python": hosts, "source": hosts if program else []}
    states = _states(program, placement)
    _print_states(states)
    blind = {part: [h for h in hosts if states[h].get(part) == "missing"] for part in SHOWN}
    if program and blind["source"]:
        program.require_source(
            f"{', '.join(blind['source'])} cannot see {Path.cwd()}, in which the program runs"
        )
    return blind


def _states(program: Program | None, placement: Placement) -> dict[str, dict[str, str]]:
    """Visibility of each part of the project on each node, `ok` or `missing`, by node and part."""
    of_source = str(_any_file(program.folder)) if program else ""
    files = [forge.__file__, sys.executable, of_source]
    answers = _on_each(placement, SEES, files, ASK_SEC, "looking for the project")
    return {
        host: dict(zip(SHOWN, answer.split(), strict=False)) for host, answer in answers.items()
    }


def _print_states(states: Mapping[str, Mapping[str, str]]) -> None:
    lines: dict[str, list[str]] = {}
    for host, state in states.items():
        shown = " ".join(f"{SHOWN[part]}={word}" for part, word in state.items())
        lines.setdefault(shown, []).append(host)
    for shown, hosts in lines.items():
        say(f"stage: {', '.join(hosts)}: {shown}")


def _any_file(folder: Path) -> Path:
    """A file below the directory, or the directory itself where it has none. Where a node does not mount
    the file system, an empty directory may be in its place."""
    files = (Path(top, name) for top, _, names in os.walk(folder) for name in names)
    return next((file for file in files if os.access(file, os.R_OK)), folder)


def _mark(script: str, run: str, settings: StageSettings, placement: Placement) -> dict[str, str]:
    """Mark on each node that this run uses the job's directory there, which is removed after the last run
    of the job; or undo that. Returns the private directory of each node. script: CLAIM or WITHDRAW."""
    assert placement.job
    arguments = [settings.folder or "", f"job-{placement.job.id}", f"used-by-{run}"]
    answers = _on_each(placement, script, arguments, ASK_SEC, "staging the project")
    return {host: answer.strip() for host, answer in answers.items()}


def _withdraw(run: str, settings: StageSettings, placement: Placement) -> None:
    """Undo the mark on the nodes that respond; what this run alone has put there is removed."""
    with suppress(UnfitError):
        _mark(WITHDRAW, run, settings, placement)


def _put(
    data: Path,
    settings: StageSettings,
    placement: Placement,
    part: EnvironmentPart,
    blind: Collection[str],
    *,
    python: str = "",
) -> str:
    """Copy a part of the project to the blind nodes that lack it, link it on the others, and return its
    directory there. python: that of the staged Python."""
    assert placement.job
    members = part.members
    files = [[m.name, m.num_bytes, _version(m.path)] for m in members]
    digest = short_id([part.ready, Path(python).name, *files])  # its script execs that one
    below = f"{part.name}-{digest}"
    name = below if settings.keep else f"job-{placement.job.id}/{below}"
    answers = _look(placement, settings.folder or "", name, part.inside)
    root = _common_root({host: lines[0] for host, lines in answers.items()})
    writing = f"writing-project-{hostname()}-{os.getpid()}"
    temporary, target = f"{root}/job-{placement.job.id}/{writing}", f"{root}/{name}"
    arguments = [temporary, target, python, part.inside, str(part.shared)]
    states = {host: lines[2] for host, lines in answers.items()}
    if linked := [h for h in states if h not in blind and states[h] == "lacks"]:
        script = LINK + part.ready
        _on_each(placement.only(linked), script, arguments, ASK_SEC, f"linking the {part.name}")
    if copied := [h for h in states if h in blind and states[h] != "there"]:
        content = sum(member.num_bytes for member in members)
        _require_space({host: int(answers[host][1]) * 1024 for host in copied}, root, 2 * content)
        started = time.monotonic()
        archive = make_archive(private_root(data / "archives") / digest, members, tree=True)
        nodes = placement.only(copied)
        _send(nodes, archive, temporary)
        script = UNPACK + part.ready
        given = [*arguments, archive.sums]
        _on_each(nodes, script, given, UNPACK_SEC, f"unpacking the {part.name}")
        say(
            f"stage: {part.name} ({content / 2**20:.1f} MiB) on {', '.join(copied)}"
            f" in {time.monotonic() - started:.1f} s"
        )
    return target


# --- the files to copy -----------------------------------------------------------------------------


def _code() -> EnvironmentPart:
    """Forge, and the plugins of the project that this process uses."""
    folder = Path(forge.__file__).parent
    skip = _is_by_product
    files = [*_tree(folder, "forge", skip=skip)]
    for digest in sorted(project_plugins.used().values()):
        copy = project_plugins.folder_of(digest)
        files += _tree(copy, f"{project_plugins.STAGED.name}/{digest}", skip=skip)
    return EnvironmentPart("project", "forge", folder, files, PROJECT_READY)


def _python() -> EnvironmentPart:
    """The Python of this process with its packages."""
    return EnvironmentPart("python", "env", Path(sys.prefix), list(_python_files()), PYTHON_READY)


def _source(folder: Path, outputs: Collection[str]) -> EnvironmentPart:
    """The directory of another program, with files in place of links to them."""
    members = [
        _file(path.resolve(), f"source/{path.relative_to(folder)}")
        for path in source_files(folder, outputs)
    ]
    return EnvironmentPart("source", "source", folder, members, SOURCE_READY)


def _require_virtual_environment() -> None:
    if sys.prefix == sys.base_prefix:
        raise ConfigError(
            f"stage.project needs a virtual environment, this Python is {sys.executable}",
            fix="run forge from the environment that `make setup` creates",
        )


def _python_files() -> Iterator[Member]:
    """The files of the virtual environment and of the Python that it was made from."""
    base = Path(sys.base_prefix)
    for packages in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        name = f"env/lib/{VERSION}/site-packages"
        # Without editable installs, which point back into the project.
        yield from _tree(Path(packages), name, skip=lambda path: path.startswith("__editable__"))
    if base != Path("/usr"):  # else the nodes have it as part of their system
        yield _file((base / "bin" / VERSION).resolve(), f"base/bin/{VERSION}")
        yield from _tree(base / f"lib/{VERSION}", f"base/lib/{VERSION}", skip=_is_unused)
        for path in sorted((base / "lib").glob("lib*.so*")):
            yield _file(path, f"base/lib/{path.name}")


def _tree(
    folder: Path, name: str, *, skip: Callable[[str], bool], below: str = ""
) -> Iterator[Member]:
    """Files and links below a directory, sorted. skip: whether to leave out a path below it."""
    for path in sorted(folder.iterdir()):
        if skip(below + path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            inner = f"{below}{path.name}/"
            yield from _tree(path, f"{name}/{path.name}", skip=skip, below=inner)
        else:
            yield _file(path, f"{name}/{path.name}")


def _file(path: Path, name: str) -> Member:
    return Member(path, name, path.lstat().st_size)


def _is_by_product(path: str) -> bool:
    return path.endswith("__pycache__")


def _is_unused(path: str) -> bool:
    return path in UNUSED or path.startswith("config-")


def _version(path: Path) -> list[int]:
    """Numbers that change with a file. The gigabytes of content are not read for the digest."""
    status = path.lstat()
    return [status.st_mtime_ns, status.st_mode]


# --- copying to the nodes --------------------------------------------------------------------------


def _look(placement: Placement, base: str, name: str, inside: str) -> dict[str, list[str]]:
    """Output of LOOK by node: its private root, free KiB there, and whether it has the files."""
    arguments = [base, name, inside]
    answers = _on_each(placement, LOOK, arguments, ASK_SEC, "looking for space for the project")
    return {host: text.splitlines() for host, text in answers.items()}


def _on_each(
    placement: Placement, script: str, arguments: list[str], timeout_sec: float, action: str
) -> dict[str, str]:
    """The output of a shell script on each node, all at once. UnfitError names the nodes that failed."""
    assert placement.job
    job = placement.job.id
    command = ["sh", "-c", script, "sh", *arguments]

    def ask(host: str) -> str | NodeFailure:
        try:
            return slurm.output_on(job, host, command, timeout_sec)
        except slurm.NodeUnfit as err:
            return NodeFailure(err.what, err.cause, err.fix)

    with ThreadPoolExecutor(len(placement.hosts)) as pool:
        answers = dict(zip(placement.hosts, pool.map(ask, placement.hosts), strict=True))
    failures = {host: reply for host, reply in answers.items() if isinstance(reply, NodeFailure)}
    if failures:
        raise failed_on(failures, action)
    return {host: str(reply) for host, reply in answers.items()}


def _common_root(roots: Mapping[str, str]) -> str:
    if len(set(roots.values())) > 1:
        raise ConfigError(
            "stage.project needs the same directory on every node, but these differ: "
            + ", ".join(f"{host} {root}" for host, root in roots.items()),
            fix="set stage.folder in machine.yaml",
        )
    return next(iter(roots.values()))


def _require_space(free: Mapping[str, int], root: str, needed: int) -> None:
    full = {
        host: NodeFailure(
            f"{root} has {bytes_free / 2**30:.2f} GiB free, the project and its archive need"
            f" {(needed + SPARE_BYTES) / 2**30:.2f} GiB",
            "other jobs or older staged sets fill this disk",
            "remove old sets there, or choose another stage.folder",
        )
        for host, bytes_free in free.items()
        if bytes_free < needed + SPARE_BYTES
    }
    if full:
        raise failed_on(full, "staging the project")


def _send(placement: Placement, archive: Archive, temporary: str) -> None:
    """Send the chunks to a temporary directory on each node, in which they are in `chunks`."""
    assert placement.job
    _on_each(placement, BEGIN, [temporary], ASK_SEC, "staging the project")
    slow = is_slower([link_mbit(placement.hosts[-1])], COMPRESS_PROGRAMS_BELOW)
    try:
        with Broadcast(placement.job.id, placement.hosts, compress=slow) as broadcast:
            files = [archive.folder / chunk for chunk in archive.chunks]
            for _ in broadcast.send(files, f"{temporary}/chunks"):
                pass
    except SbcastFailed as broken:
        raise failed_on(broken.failures, "sending the project") from None
