"""Copy Forge and its Python to nodes that do not see them (`stage.project`).

- `python-{digest}/env`: the virtual environment; `base`: the Python it was made from, unless the
  system's
- `project-{digest}`: Forge itself, and `python`, which starts it with nothing else in its path

There are two archives because the code changes every day and the environment, gigabytes, does not.
No Python can run on such a node before they arrive, so the nodes' part is sh, tar and sha256sum.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forge
from forge.cluster import slurm
from forge.cluster.nodes import Trouble, named
from forge.cluster.placement import Placement
from forge.core.config import Config
from forge.core.errors import ConfigError, UnfitError
from forge.core.files import short_id
from forge.core.machine import Machine, Stage
from forge.core.terminal import say
from forge.staging.archive import DIRECTORIES, SUMS, Member, Pack, make_pack
from forge.staging.on_node import SPARE_BYTES, link_mbit
from forge.staging.sbcast import COMPRESS_PROGRAMS_BELOW, Broadcast, Broken, is_slower

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
ASK_SEC = 30.0
UNPACK_SEC = 600.0
# Parts of a Python that nothing at run time needs.
UNUSED = ("test", "idlelib", "turtledemo", "ensurepip", "site-packages")

# $1: stage.folder or "". $2: where below the root. Prints: root, free KiB, whether it is there.
LOOK = r"""
base=${1:-${SLURM_TMPDIR:-${TMPDIR:-/tmp}}}; root=$base/forge-$(id -u)
mkdir -p "$base" && { mkdir -m 700 "$root" 2>/dev/null; true; }
if [ -L "$root" ] || [ ! -d "$root" ]; then echo "$root is not a folder (a planted link?)" >&2; exit 1; fi
if [ ! -O "$root" ] || [ "$(stat -c %a "$root")" != 700 ]; then
    echo "$root is not yours alone" >&2; exit 1
fi
echo "$root"
df -Pk "$root" | awk 'NR == 2 {print $4}'
if [ -d "$root/$2" ]; then echo there; else echo lacks; fi
"""

# $1: the folder that gets the parts, made afresh.
BEGIN = r"""rm -rf "$1" && mkdir -p "$1/parts" """

# $1: the folder with the parts. $2: its name in the end. $3: the folder of the staged Python, or "".
UNPACK = rf"""
cd "$1/parts" && sha256sum --check --quiet {SUMS} && rm {SUMS} || exit 1
tar -C .. --no-same-owner -xf {DIRECTORIES} && rm {DIRECTORIES} || exit 1
ls | xargs -P 4 -I PART sh -c 'tar -C .. --no-same-owner -xf PART && rm PART' || exit 1
cd .. && rmdir parts || exit 1
"""
PYTHON_READY = rf"""
home=$2/base/bin; [ -d base ] || home=/usr/bin
mkdir env/bin && ln -s "$home/{VERSION}" env/bin/{VERSION} || exit 1
printf 'home = %s\ninclude-system-site-packages = false\n' "$home" > env/pyvenv.cfg
mv "$1" "$2" && "$2/env/bin/{VERSION}" -c 'import pydantic'
"""
PROJECT_READY = rf"""
cat > python <<END
#!/bin/sh
# The staged Python. It looks into its own folders only, whatever the job's environment says.
unset PYTHONHOME VIRTUAL_ENV
export PYTHONPATH="$2"
export PYTHONSAFEPATH=1  # not into the current folder, which may be the project
export LD_LIBRARY_PATH="$3/base/lib\${{LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}}"
exec "$3/env/bin/{VERSION}" "\$@"
END
chmod 755 python && mv "$1" "$2" && "$2/python" -c 'import forge.node_agent'
"""


def stage_project(config: Config, machine: Machine, placement: Placement) -> str:
    """Put the project and its Python on every node of the placement; what runs it there.

    The path is the same on all nodes. Raises UnfitError that names nodes in trouble.
    """
    packs, settings = Path(config.data) / "packs", machine.stage
    python = _put("python", list(_python()), packs, settings, placement, ready=PYTHON_READY)
    code = _put(
        "project", list(_code()), packs, settings, placement, ready=PROJECT_READY, python=python
    )
    return f"{code}/python"


def _put(
    what: str,
    members: list[Member],
    packs: Path,
    settings: Stage,
    placement: Placement,
    *,
    ready: str,
    python: str = "",
) -> str:
    """Put these files on the nodes that lack them; their folder there."""
    assert placement.job
    digest = short_id([[m.name, m.num_bytes, _version(m.path)] for m in members])
    name = f"{what}-{digest}" if settings.keep else f"job-{placement.job.id}/{what}-{digest}"
    found = _look(placement, settings.folder or "", name)
    root = _common_root({host: lines[0] for host, lines in found.items()})
    lacking = [host for host, lines in found.items() if lines[2] == "lacks"]
    if lacking:
        content = sum(member.num_bytes for member in members)
        _require_space({host: int(found[host][1]) * 1024 for host in lacking}, root, 2 * content)
        started = time.monotonic()
        pack = make_pack(packs / digest, members, tree=True)
        temporary = _send(placement.only(lacking), pack, root)
        arguments = [temporary, f"{root}/{name}", python]
        _on_each(
            placement.only(lacking), UNPACK + ready, arguments, UNPACK_SEC, f"unpacking the {what}"
        )
        say(
            f"stage: {what} ({content / 2**20:.1f} MiB) on {', '.join(lacking)}"
            f" in {time.monotonic() - started:.1f} s"
        )
    return f"{root}/{name}"


# --- what belongs to it ----------------------------------------------------------------------------


def _code() -> Iterator[Member]:
    """The files of Forge, by their names in the pack."""
    yield from _tree(Path(forge.__file__).parent, "forge", skip=_is_cache)


def _python() -> Iterator[Member]:
    """The files of the environment and of the Python behind it, by their names in the pack."""
    env, base = Path(sys.prefix), Path(sys.base_prefix)
    if env == base:
        raise ConfigError(
            f"stage.project needs a virtual environment, this Python is {sys.executable}",
            fix="run forge from the environment that `make setup` makes",
        )
    for packages in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        name = f"env/lib/{VERSION}/site-packages"
        yield from _tree(Path(packages), name, skip=_is_editable)
    if base != Path("/usr"):  # else nodes have it by themselves, as part of their system
        yield _file((base / "bin" / VERSION).resolve(), f"base/bin/{VERSION}")
        yield from _tree(base / f"lib/{VERSION}", f"base/lib/{VERSION}", skip=_is_unused)
        for library in sorted((base / "lib").glob("lib*.so*")):
            yield _file(library, f"base/lib/{library.name}")


def _tree(
    folder: Path, name: str, *, skip: Callable[[str], bool], below: str = ""
) -> Iterator[Member]:
    """Files and links below a folder, in one order; skip: paths below it that stay out."""
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


def _is_cache(path: str) -> bool:
    return path.rpartition("/")[2] == "__pycache__"


def _is_editable(path: str) -> bool:
    """What an editable install leaves: it points back into the project."""
    return path.startswith("__editable__")


def _is_unused(path: str) -> bool:
    return path in UNUSED or path.startswith("config-")


def _version(path: Path) -> list[int]:
    """What changes when a file does; contents of gigabytes are not read for it."""
    found = path.lstat()
    return [found.st_mtime_ns, found.st_mode]


# --- onto the nodes --------------------------------------------------------------------------------


def _look(placement: Placement, base: str, name: str) -> dict[str, list[str]]:
    """By node: its private root, free KiB there, and whether the project is there already."""
    answers = _on_each(placement, LOOK, [base, name], ASK_SEC, "looking for room for the project")
    return {host: text.splitlines() for host, text in answers.items()}


def _on_each(
    placement: Placement, script: str, arguments: list[str], timeout_sec: float, doing: str
) -> dict[str, str]:
    """What a shell script prints on each node, all at once. UnfitError names nodes in trouble."""
    assert placement.job
    job = placement.job.id
    command = ["sh", "-c", script, "sh", *arguments]

    def ask(host: str) -> str | Trouble:
        try:
            return slurm.output_on(job, host, command, timeout_sec)
        except UnfitError as err:
            return Trouble(err.what, err.cause, err.fix)

    with ThreadPoolExecutor(len(placement.hosts)) as pool:
        answers = dict(zip(placement.hosts, pool.map(ask, placement.hosts), strict=True))
    troubles = {host: reply for host, reply in answers.items() if isinstance(reply, Trouble)}
    if troubles:
        raise named(troubles, doing)
    return {host: str(reply) for host, reply in answers.items()}


def _common_root(roots: Mapping[str, str]) -> str:
    if len(set(roots.values())) > 1:
        raise ConfigError(
            "stage.project needs the same folder on every node, these differ: "
            + ", ".join(f"{host} {root}" for host, root in roots.items()),
            fix="set stage.folder in machine.yaml",
        )
    return next(iter(roots.values()))


def _require_space(free: Mapping[str, int], root: str, needed: int) -> None:
    full = {
        host: Trouble(
            f"{root} has {bytes_free / 2**30:.2f} GiB free, the project and its pack need"
            f" {(needed + SPARE_BYTES) / 2**30:.2f} GiB",
            "other jobs or older staged sets fill this disk",
            "remove old sets there, or choose another stage.folder",
        )
        for host, bytes_free in free.items()
        if bytes_free < needed + SPARE_BYTES
    }
    if full:
        raise named(full, "staging the project")


def _send(placement: Placement, pack: Pack, root: str) -> str:
    """Send the parts; the folder that holds them on each node, in `parts`."""
    assert placement.job
    temporary = f"{root}/job-{placement.job.id}/writing-project"
    _on_each(placement, BEGIN, [temporary], ASK_SEC, "staging the project")
    slow = is_slower([link_mbit(placement.hosts[-1])], COMPRESS_PROGRAMS_BELOW)
    try:
        with Broadcast(placement.job.id, placement.hosts, compress=slow) as broadcast:
            files = [pack.folder / part for part in pack.parts]
            for _ in broadcast.send(files, f"{temporary}/parts"):
                pass
    except Broken as broken:
        raise named(broken.troubles, "sending the project") from None
    return temporary
