"""Checks that run on one node: the node itself, and its connections to the others. No torch.

`forge.node_agent` runs them on the nodes of an allocation; with a single node they run in this
process.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import blake3
import psutil

import forge
from forge.core import hooks, project_plugins
from forge.core.errors import DataError, UnfitError
from forge.core.files import atomic_open, disk_trouble, private_root
from forge.core.machine import Machine
from forge.core.paths import MANIFEST
from forge.core.process import boot_id, hostname, node_local_folder, raise_open_files
from forge.core.provenance import PACKAGES
from forge.core.records import Check, Status
from forge.data.shards import Kind
from forge.hosts import network, rendezvous
from forge.launch.rank_records import ProgramFolders
from forge.preflight import packages
from forge.preflight.gpu_checks import gpu_checks
from forge.slurm import slurm
from forge.staging.on_node import open_copy

# Ranks, shared memory of libraries and compiled kernels need at least this much of /tmp.
LOCAL_MIB = 16

# What a node writes into the run's directory: enough to tell the rate of a save, gone in a second. Of a
# small disk only a part, which tells no rate: whether it suffices, training finds out.
RESULTS_MIB, PART_OF_FREE = 32, 0.1

# A check of a project's plugin may take this long: a file system that hangs is what some look for.
OWN_SEC = 10.0

# Larger than any packet: does not arrive where large packets are lost (MTU mismatch).
PAYLOAD = 2**16
CONNECT_THREADS = 32


@dataclass(frozen=True)
class Wanted:
    """Requirements of training that a node is checked for."""

    results: str  # the run's directory; "" where this node does not see it (stage.results)
    data: str  # the shards on the shared file system; "" where another program trains
    staged: str  # the shards or inputs on this node's own disk; "" where they are not staged
    digest: str  # of them
    machine: Machine
    ranks_per_node: int
    program: WantedProgram | None  # None where Forge's own trainer trains
    master: str  # host name or address of the rendezvous; "" where this node is the only one
    variables: dict[str, str]  # of machine.yaml and its modules, which ranks get in addition
    threads: str | None  # OMP_NUM_THREADS of the ranks; None where Forge chooses it
    plugins: dict[str, str] = field(default_factory=dict)  # those of the project that have checks

    @property
    def environ(self) -> dict[str, str]:
        """Variables of the ranks on this node, without those that Forge sets."""
        return {**os.environ, **self.variables}

    def source_of(self, name: str) -> str:
        """A variable of the ranks with what sets it."""
        return f"{name} of machine.yaml" if name in self.variables else f"your exported {name}"

    def without(self, name: str) -> str:
        """Advice on how to remove this variable from the environment of the ranks."""
        if name in self.variables:
            return f"remove {name} from environment in machine.yaml"
        return f"unset {name}"


@dataclass(frozen=True)
class WantedProgram:
    """Facts that a node must know of another training program."""

    command: str  # its first word
    staged: ProgramFolders  # that its ranks read on this node
    shared: ProgramFolders  # that they read where those are gone


@dataclass(frozen=True)
class ComparedFacts:
    """Facts that are compared between nodes, or needed of them."""

    versions: dict[str, str]
    address: str  # of the interface that ranks use; "" where it has none
    master_trouble: str  # why ranks here cannot meet those of other nodes; "" where they can
    infiniband: bool  # whether a port of InfiniBand or RoCE is active
    ports: dict[str, str]  # those that are active, with their rates
    gpus: int
    driver: str  # version of NVIDIA's; "" without one
    exported: dict[str, str]  # variables for NCCL, Gloo and torch
    bytes_per_sec: float | None  # at which it wrote into the run's directory
    boot: str  # boot id of its kernel


@dataclass(frozen=True)
class PreflightAnswer:
    """The checks and the facts of a node."""

    checks: list[Check]
    facts: ComparedFacts


def check_node(wanted: Wanted) -> PreflightAnswer:
    """The checks of this node, and its facts."""
    interface, _ = _chosen_interface(wanted, wanted.environ)
    folder = _results_folder(wanted)
    # Before a write, which would make a directory of this name on the node's own disk.
    written = write_results(folder) if folder.is_dir() else Written(_unseen(folder))
    facts = ComparedFacts(
        versions=installed_versions(),
        address=_address_of(interface),
        master_trouble=rendezvous.trouble(wanted.master),
        infiniband=network.has_rdma(),
        ports={f"{port.device} port {port.number}": port.rate for port in network.active_ports()},
        gpus=network.count_gpus(),
        driver=packages.driver_version(),
        exported=packages.exported(),
        bytes_per_sec=written.bytes_per_sec,
        boot=boot_id(),
    )
    checks = [*node_checks(wanted, written.check), *own_checks(wanted.plugins)]
    return PreflightAnswer(checks, facts)


def node_checks(wanted: Wanted, results_check: Check) -> Iterator[Check]:
    """All checks that need no other node. results_check: of a write into the run's directory."""
    machine, results = wanted.machine, _results_folder(wanted)
    limits = machine.preflight
    yield _name_resolves()
    yield _project_visible()
    yield _packages()
    if wanted.data:
        yield _data_visible(wanted)
    if wanted.program:
        yield _program_visible(wanted, wanted.program)
    yield results_check
    if results.is_dir():  # else the check before has said so
        yield at_least(
            "disk",
            shutil.disk_usage(results).free / 2**30,
            limits.min_free_disk_gib,
            f"GiB free in {results}",
            "free space there, or point `results` to another disk",
        )
    yield _local_disk()
    yield at_least(
        "memory",
        psutil.virtual_memory().available / 2**30,
        limits.min_free_memory_gib * wanted.ranks_per_node,
        "GiB available",
        "end other programs, use fewer ranks, or ask for more memory",
    )
    yield at_least(
        "open files",
        raise_open_files(),
        limits.min_open_files,
        "open files allowed",
        "raise the hard limit: ulimit -Hn 4096, or ask the administrator",
    )
    yield _cores(wanted)
    yield _interface(wanted)
    if ports := _ports(wanted):
        yield ports
    if network.uses_rdma(machine.fabric):
        yield _rdma(wanted)
        yield _locked_memory()
    if machine.needs_gpus:
        yield _gpus(wanted.ranks_per_node)
        if not wanted.program:  # another program may have a torch of its own
            yield _cuda()
    if machine.device != "cpu":
        yield from gpu_checks()


def own_checks(plugins: Mapping[str, str]) -> list[Check]:
    """The checks that these plugins of the project make of this node, all at once. plugins: name ->
    digest. Raises ConfigError where it has no such copy."""
    project_plugins.use(plugins, "preflight")
    answers: dict[int, Check] = {}

    def make(number: int, plugin: str, check: Callable[[], Check]) -> None:
        try:
            made = check()
            if not isinstance(made, Check) or made.status not in get_args(Status):
                raise TypeError(
                    f"it gives {made!r:.80}, and not a Check that is {get_args(Status)}"
                )
        except (Exception, SystemExit) as err:
            said, fix = f"{type(err).__name__}: {err}", f"correct it in the plugin {plugin}"
            made = Check(_name_of(check), "fail", said, fix)
        answers[number] = made

    known = hooks.node_checks()
    threads = [
        threading.Thread(target=make, args=(number, *one), daemon=True)
        for number, one in enumerate(known)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + OWN_SEC
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [answers.get(n) or _late(plugin, check) for n, (plugin, check) in enumerate(known)]


def _late(plugin: str, check: Callable[[], Check]) -> Check:
    return Check(
        _name_of(check),
        "fail",
        f"no answer within {OWN_SEC:g} s",
        f"leave this node out, or see what {_name_of(check)} of the plugin {plugin} waits for",
        cause="a file system or a service that it asks hangs",
    )


def _name_of(check: Callable[[], Check]) -> str:
    return str(getattr(check, "__name__", check))


def _name_resolves() -> Check:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as err:
        # Only a warning: ranks of a single node rendezvous on the loopback address.
        fix = f"add {name} to /etc/hosts"
        return Check("name", "warn", f"{name} does not resolve: {err}", fix)
    return Check("name", "ok", f"{name} is {address}")


def _project_visible() -> Check:
    folder = Path(forge.__file__).parent
    if not os.access(folder / "worker.py", os.R_OK):
        return Check("project", "fail", f"cannot read {folder}", "check its file system and mode")
    return Check("project", "ok", f"code in {folder}")


def _packages() -> Check:
    try:
        versions = {name: version(name) for name in PACKAGES}
    except PackageNotFoundError as err:
        return Check("packages", "fail", f"package {err.name} is missing", "run: make setup")
    text = ", ".join(f"{name} {number}" for name, number in versions.items())
    return Check("packages", "ok", f"Python {platform.python_version()}, {text}")


def installed_versions() -> dict[str, str]:
    """Versions of Python and PACKAGES ("" where one is missing), and a digest of Forge's own code."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    hasher = blake3.blake3()
    folder = Path(forge.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        hasher.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    of_forge = {"forge": forge.__version__, "forge code": hasher.hexdigest()[:12]}
    return {**versions, **packages.cuda_versions(), **of_forge}


def _data_visible(wanted: Wanted) -> Check:
    folder, staged = Path(wanted.data), Path(wanted.staged)
    if wanted.staged and (staged / MANIFEST).exists():
        return _staged("data", "shards", wanted)
    if not os.access(folder / MANIFEST, os.R_OK):
        return Check("data", "fail", f"cannot read {folder}/{MANIFEST}", "run: forge tokenize")
    if wanted.staged:
        message = f"staged shards are gone from {staged}; ranks read {folder}"
        return Check("data", "warn", message, "run: forge stage", "this disk was cleaned up")
    return Check("data", "ok", f"shards in {folder}")


def _program_visible(wanted: Wanted, program: WantedProgram) -> Check:
    """Check that this node sees the directories of another program, and has its command."""
    staged, shared, word = program.staged, program.shared, program.command
    gone = ", ".join(staged.unreadable)
    reads = shared if gone else staged  # as the ranks do
    if reads != shared and (copy := _staged("program", "inputs", wanted)).status != "ok":
        return copy
    if reads.unreadable:
        fix = "choose a directory that all nodes share, or let stage copy it (stage.mode, stage.project)"
        return Check("program", "fail", f"cannot read {', '.join(reads.unreadable)}", fix)
    # As the ranks start it: a path is relative to its directory, a plain name is looked up on the PATH.
    path = shutil.which(str(Path(reads.cwd, word)) if "/" in word else word)
    if not path:
        fix = "give its path, or install it on the nodes"
        where = f"in {reads.cwd}" if "/" in word else "on the PATH of the ranks"
        return Check("program", "fail", f"no command {word!r} {where}", fix)
    used = ", ".join(folder for folder in (reads.cwd, reads.data, reads.hub) if folder)
    if gone:
        message = f"staged files are gone from {gone}; ranks read {used}"
        return Check("program", "warn", message, "run: forge stage", "this disk was cleaned up")
    return Check("program", "ok", f"{path}, reads {used}")


def _staged(name: str, kind: Kind, wanted: Wanted) -> Check:
    folder, digest = Path(wanted.staged), wanted.digest
    try:
        actual = open_copy(kind, folder).digest
    except DataError as err:
        return Check(name, "fail", f"staged {kind}: {err.what}", "run: forge stage", err.cause)
    if actual != digest:
        message = f"staged {kind} in {folder} have digest {actual[:12]}, not {digest[:12]}"
        return Check(name, "fail", message, "run: forge stage", "staged for other data")
    return Check(name, "ok", f"staged {kind} in {folder}")


def _results_folder(wanted: Wanted) -> Path:
    """The directory into which ranks of this node write: the run's, or what stands for it."""
    if wanted.results:
        return Path(wanted.results)
    return private_root(Path(wanted.machine.stage.folder or node_local_folder()))


@dataclass(frozen=True)
class Written:
    """Result of a write into the run's directory. bytes_per_sec: until it was on disk; None where it
    failed, or was small."""

    check: Check
    bytes_per_sec: float | None = None


def write_results(folder: Path) -> Written:
    """Write a file there and remove it, as quickly as a save could."""
    probe = folder / f".writable-{hostname()}-{os.getpid()}"
    free_mib = shutil.disk_usage(folder).free / 2**20 if folder.is_dir() else 0
    num_mib = int(min(RESULTS_MIB, PART_OF_FREE * free_mib))
    chunk = os.urandom(2**20)  # some file systems compress
    started = time.perf_counter()
    try:
        with atomic_open(probe) as file:
            file.write(b"x")
            for _ in range(num_mib):
                file.write(chunk)
        seconds = time.perf_counter() - started
        probe.unlink()
    except UnfitError as err:
        return Written(Check("results", "fail", err.what, err.fix))
    rate = num_mib * 2**20 / seconds if num_mib == RESULTS_MIB else None
    return Written(_results(folder, rate), rate)


def _unseen(folder: Path) -> Check:
    return Check(
        "results",
        "fail",
        f"{hostname()} does not see {folder}",
        "set `results` to a directory that all nodes share; where only the first node has it, set"
        " stage.results: first_node in machine.yaml, and remove the run's bad_nodes.txt",
        "its file system is not mounted on this node",
    )


def _results(folder: Path, rate: float | None) -> Check:
    if slurm.this_job_id() and folder.resolve().is_relative_to(Path.home().resolve()):
        # Home directories of clusters are small, slow and shared by all jobs of a user.
        fix = "set `results` and `data` in config.yaml to scratch storage"
        return Check("results", "warn", f"{folder} is in your home directory", fix)
    measured = f", {rate / 1e6:,.0f} MB/s" if rate else ""
    return Check("results", "ok", f"{folder} is writable{measured}")


def _local_disk() -> Check:
    """Writes a file: neither a quota nor a read-only disk shows in the number of free bytes."""
    folder = node_local_folder()
    try:
        with disk_trouble(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # A name that nobody can know before: all users of the node may write to /tmp.
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".forge-preflight-") as file:
                file.write(bytes(LOCAL_MIB * 2**20))
                file.flush()
                os.fsync(file.fileno())
    except UnfitError as err:
        fix = f"remove old files in {folder} on this node, or set TMPDIR to another disk"
        return Check("local disk", "fail", f"{err.what}, {LOCAL_MIB} MiB needed", fix)
    return Check("local disk", "ok", f"wrote {LOCAL_MIB} MiB to {folder}")


def at_least(name: str, measured: float, needed: float, unit: str, fix: str) -> Check:
    message = f"{measured:,.1f} {unit}, {needed:g} needed"
    return Check(name, "ok", message) if measured >= needed else Check(name, "fail", message, fix)


def _cores(wanted: Wanted) -> Check:
    cores, ranks = network.available_cores(), wanted.ranks_per_node
    message = f"{cores} cores for {ranks} ranks"
    if cores < ranks:
        return Check("cores", "warn", message, "use fewer ranks: they share cores and run slower")
    name, first = "OMP_NUM_THREADS", (wanted.threads or "1").partition(",")[0].strip()
    # OpenMP takes all cores where it cannot read the number.
    threads = int(first) if first.isdecimal() and int(first) else cores
    if threads * ranks > cores:
        own = cores // ranks
        return Check(
            "cores",
            "warn",
            f"{wanted.source_of(name)}={wanted.threads}: {threads} threads x {ranks} ranks on"
            f" {cores} cores, so that threads wait for each other and steps are slower",
            f"{wanted.without(name)}: Forge then gives each rank {own}, its share of the cores",
        )
    return Check("cores", "ok", message)


def _chosen_interface(wanted: Wanted, environ: Mapping[str, str]) -> tuple[str | None, str]:
    return network.choose_interface(
        wanted.machine.fabric, wanted.master or rendezvous.LOOPBACK, environ
    )


def _interface(wanted: Wanted) -> Check:
    fabric, master = wanted.machine.fabric, wanted.master
    here = fabric.interfaces.get(hostname())
    key = f"fabric.interfaces.{hostname()}" if here else "fabric.interface"
    configured = here or fabric.interface
    if configured and (trouble := _trouble_of(configured)):
        return Check(
            "interface",
            "fail",
            f"{configured} ({key}) is {trouble}",
            f"set {key} to one that is up: {_interfaces_up()}",
        )
    for name, message in _exported_troubles(wanted):
        left = {key: value for key, value in wanted.environ.items() if key != name}
        own, reason = _chosen_interface(wanted, left)
        or_name = (
            f"; where that is the wrong one, set fabric.interfaces.{hostname()}. Then remove the run's"
            " bad_nodes.txt, if there is one"
        )
        return Check(
            "interface",
            "fail",
            f"{message}; up here: {_interfaces_up()}",
            f"{wanted.without(name)}: this node then takes {own} ({reason}){or_name * bool(master)}",
            cause="for nodes whose interfaces have other names, or misspelt",
        )
    chosen, reason = _chosen_interface(wanted, wanted.environ)
    if master and chosen in (None, "lo"):
        return Check(
            "interface",
            "fail",
            f"other nodes cannot reach {chosen or 'any interface'} ({reason})",
            f"set fabric.interfaces.{hostname()}, or correct {master} in /etc/hosts",
            cause=f"{master} does not resolve here, or to a loopback address",
        )
    return Check("interface", "ok", f"{chosen}")


def _exported_troubles(wanted: Wanted) -> Iterator[tuple[str, str]]:
    """Each variable by which the ranks would look for an interface that this node lacks, and the message.
    Those that ranks do not read here are left out."""
    environ = wanted.environ
    chosen, reason = _chosen_interface(wanted, environ)
    of_gloo = environ.get("GLOO_SOCKET_IFNAME", "")
    read = [("GLOO_SOCKET_IFNAME", one) for one in of_gloo.split(",")]
    if chosen and reason.startswith("your exported "):
        read.append((reason.split()[-1], chosen))
    for name, interface in read:
        if interface and (trouble := _trouble_of(interface)):
            yield name, f"{interface} ({wanted.source_of(name)}) is {trouble}"
    name, usable = "NCCL_SOCKET_IFNAME", filter(_has_address, psutil.net_if_addrs())
    pattern = environ.get(name, "")
    if (
        pattern
        and wanted.machine.uses_nccl(network.count_gpus())
        and not network.fits(pattern, usable)
    ):
        yield name, f"{pattern} ({wanted.source_of(name)}) is no interface of this node"


def _trouble_of(interface: str) -> str:
    """Why ranks cannot use this interface; "" where they can."""
    there = psutil.net_if_stats()
    if interface not in there:
        return "not there"
    if not there[interface].isup:
        return "down"
    return "" if _has_address(interface) else "without an address"


def _interfaces_up() -> str:
    return ", ".join(name for name in sorted(psutil.net_if_stats()) if not _trouble_of(name))


def _has_address(interface: str) -> bool:
    families = {address.family for address in psutil.net_if_addrs().get(interface, [])}
    return bool(families & {socket.AF_INET, socket.AF_INET6})


def _ports(wanted: Wanted) -> Check | None:
    """A check that does not pass where NCCL_IB_HCA names no active port of this node; else None."""
    name, fabric, ports = "NCCL_IB_HCA", wanted.machine.fabric, network.active_ports()
    devices = wanted.environ.get(name, "")
    if (
        not devices
        or not wanted.machine.uses_nccl(network.count_gpus())
        or fabric.infiniband == "never"
    ):
        return None
    there = [f"{port.device}:{port.number}" for port in ports]
    if network.fits(devices, there) or (network.uses_rdma(fabric) and not ports):
        return None  # the latter: a container may hide them
    return Check(
        "ports",
        "fail" if ports and wanted.master else "warn",
        f"{devices} ({wanted.source_of(name)}) is no active port of this node; active here:"
        f" {', '.join(there) or 'none'}",
        f"{wanted.without(name)}: NCCL then takes the ports that are active",
        cause="NCCL would use sockets in place of InfiniBand or RoCE, many times slower",
    )


def _rdma(wanted: Wanted) -> Check:
    """Check that a port is active where the machine asks for RDMA, and that those which NCCL uses have
    the GID that is asked for."""
    fabric, devices = wanted.machine.fabric, wanted.environ.get("NCCL_IB_HCA", "")
    active = [(port, f"{port.device}:{port.number}") for port in network.active_ports()]
    ports = [port for port, name in active if network.fits(devices, [name])]
    if fabric.infiniband == "always" and not network.has_rdma():
        return Check(
            "infiniband",
            "fail",
            "no port of InfiniBand or RoCE is active, and fabric.infiniband is always",
            "leave this node out, or see ibstat there",
            cause="its cable or port is down, or it has no such card",
        )
    exported = wanted.environ.get("NCCL_IB_GID_INDEX", "")
    index = int(exported) if exported.isdecimal() else fabric.gid_index
    asked_by = "NCCL_IB_GID_INDEX" if exported.isdecimal() else "fabric.gid_index"
    troubles = [] if index is None else [network.gid_trouble(port, index) for port in ports]
    if trouble := next(filter(None, troubles), ""):
        fix = (
            "take the index that `show_gids` or `ibv_devinfo -v` lists for RoCE v2, or leave it out"
        )
        return Check("infiniband", "fail", f"{asked_by} is {index}: {trouble}", fix)
    return Check("infiniband", "ok", ", ".join(map(str, ports)) or network.uses_rdma(fabric))


def _locked_memory() -> Check:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "unlimited")
    return Check(
        "locked memory",
        "warn",
        f"at most {limit / 2**20:,.1f} MiB of memory can be locked",
        "ulimit -l unlimited; on a cluster the administrator sets it for slurmd",
        cause="InfiniBand needs locked memory, and NCCL fails or falls back to sockets without it",
    )


def _gpus(ranks: int) -> Check:
    count = len(network.mig_slices()) or network.count_gpus()
    if count >= ranks:
        return Check("gpus", "ok", f"{count} GPUs for {ranks} ranks")
    return Check(
        "gpus",
        "fail",
        f"{count} GPUs for {ranks} ranks",
        "use fewer ranks a node, or leave this node out",
        cause="a GPU has fallen off the bus (see nvidia-smi), or the node never had so many",
    )


def _cuda() -> Check:
    """Check that torch is a build for CUDA, and that this node's driver runs it."""
    driver, cuda = packages.driver_version(), packages.cuda_of_torch()
    fix = "install the build for the CUDA of this driver (docs/new-cluster.md, step 3)"
    if cuda == "cpu":
        message = f"torch {version('torch')} is a build for CPUs"
        return Check("cuda", "fail", message, fix, cause="pip found no other")
    oldest, major = packages.oldest_driver(cuda), driver.partition(".")[0]
    if major.isdecimal() and int(major) < oldest and not packages.has_own_libcuda():
        message = f"torch is for CUDA {cuda}, which needs NVIDIA driver {oldest}; this is {driver}"
        return Check("cuda", "fail", message, f"{fix}, or ask the site for a newer driver")
    return Check("cuda", "ok", f"torch for CUDA {cuda or 'unknown'}, driver {driver or 'unknown'}")


# --- connections to the other nodes ---------------------------------------------------------------


class _Echo(socketserver.BaseRequestHandler):
    """Sends the time of this node's clock, then receives the payload and sends as many bytes back."""

    def handle(self) -> None:
        with suppress(OSError):  # the node that connected reports the error
            peer = _Peer(self.request, 30)
            peer.send(f"{time.time():.6f}\n".encode())
            peer.receive(PAYLOAD)
            peer.send(bytes(PAYLOAD))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128


_servers: list[_Server] = []  # keeps them open until the process ends


@dataclass(frozen=True)
class Listener:
    """Endpoint at which a node accepts connections of the others."""

    address: str
    port: int


def listen(machine: Machine, master: str) -> Listener:
    """Accept connections of other nodes until this process ends.

    The address is that of the interface that ranks use. Raises UnfitError where it has none.
    """
    interface, reason = network.choose_interface(machine.fabric, master)
    address = _address_of(interface)
    if not address:
        exported = reason.startswith("your exported ")
        raise UnfitError(
            f"{interface or 'no interface'} ({reason}) has no IPv4 address",
            fix=f"unset {reason.split()[-1]}"
            if exported
            else f"set fabric.interfaces.{hostname()} in machine.yaml",
        )
    server = _Server(("", 0), _Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _servers.append(server)
    return Listener(address, server.server_address[1])


def _address_of(interface: str | None) -> str:
    """The first IPv4 address of an interface of this node; "" where it has none."""
    addresses = psutil.net_if_addrs().get(interface or "", [])
    return next((a.address for a in addresses if a.family == socket.AF_INET), "")


def reach_sec(num_nodes: int, patience_sec: float) -> float:
    """Upper bound of what `reach` takes: CONNECT_THREADS nodes at a time, connect and exchange."""
    return 2 * patience_sec * -(-num_nodes // CONNECT_THREADS)


@dataclass(frozen=True)
class Link:
    """The connection to another node."""

    trouble: str  # why it cannot be reached; "" where it can
    ahead_sec: float | None = None  # how far its clock is ahead; None where unknown


def reach(
    listeners: dict[str, Listener], head: str, master: str, patience_sec: float
) -> dict[str, Link]:
    """The connection to each other node.

    listeners: the answer of `listen` on each node. head: the node at which the ranks meet, under the name
    or address `master`. Takes at most `reach_sec`, name resolution apart.
    """
    others = {name: at for name, at in listeners.items() if name != hostname()}

    def link_to(name: str) -> Link:
        return _try(others[name], master if name == head else "", patience_sec)

    with ThreadPoolExecutor(CONNECT_THREADS) as pool:
        return dict(zip(others, pool.map(link_to, others), strict=True))


def _try(at: Listener, master: str, patience_sec: float) -> Link:
    """master: of the node at which the ranks meet; "" for the others."""
    ahead: float | None = None
    # Ranks connect to that node as `master`, and to each other by the address of the interface.
    addresses = [at.address]
    try:
        addresses += [socket.gethostbyname(master)] if master else []
    except OSError as err:
        return Link(f"{master} does not resolve: {err.strerror}")
    for target in dict.fromkeys((address, at.port) for address in addresses):
        doing = f"connect to {target[0]}"
        try:
            with socket.create_connection(target, patience_sec) as connection:
                peer = _Peer(connection, patience_sec)
                doing = f"receive from {target[0]}"
                ahead = peer.clock_ahead()
                doing = f"send {PAYLOAD // 1024} KiB to {target[0]} and back"
                peer.send(bytes(PAYLOAD))
                peer.receive(PAYLOAD)
        except OSError as err:
            return Link(f"cannot {doing}: {err.strerror or err}", ahead)
    return Link("", ahead)


class _Peer:
    """The other end of a connection; all sends and receives together may take patience_sec."""

    def __init__(self, connection: socket.socket, patience_sec: float) -> None:
        self._connection, self._end = connection, time.monotonic() + patience_sec

    def send(self, data: bytes) -> None:
        self._limit_wait()
        self._connection.sendall(data)

    def receive(self, wanted: int, stop: bytes = b"") -> bytes:
        """Receive `wanted` bytes, or those up to `stop`. ConnectionError where the peer closes before."""
        data = b""
        while len(data) < wanted and not (stop and data.endswith(stop)):
            self._limit_wait()
            more = self._connection.recv(wanted - len(data))
            if not more:
                raise ConnectionError("connection closed")
            data += more
        return data

    def clock_ahead(self) -> float:
        """Seconds that the peer's clock is ahead of ours, taken to be read at half of the round trip."""
        asked = time.time()
        their_time = float(self.receive(64, stop=b"\n"))
        return their_time - (asked + time.time()) / 2

    def _limit_wait(self) -> None:
        # A timeout of 0 would make the socket non-blocking.
        self._connection.settimeout(max(0.001, self._end - time.monotonic()))


CALLS: tuple[Callable[..., Any], ...] = (
    *(rendezvous.resolves, check_node, packages.import_packages, packages.import_torch),
    *(listen, reach),
)
