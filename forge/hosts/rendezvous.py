"""Rendezvous endpoint of the ranks: what the user asked for, and what their first node can offer."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import Fabric, port_range
from forge.core.process import free_port, hostname
from forge.core.terminal import say
from forge.hosts.container import Container, inside
from forge.slurm import slurm

# Ranks of an earlier launch, which were killed on another node, release their port within this time.
PATIENCE_SEC = 3.0
LOOPBACK = "127.0.0.1"  # where ranks of one node meet: nobody listens to other hosts
# A resolver that does not answer is asked for 10 s and more.
RESOLVE_SEC = 30.0
PROBE_SEC = 60.0  # for the first node, which may have to import Forge from a slow file system

# Prints Slurm's name of a node that does not resolve the name $1. Without Python, which many nodes at
# once start slowly from a shared file system.
UNRESOLVED = 'getent ahosts "$1" >/dev/null || echo "$SLURMD_NODENAME"'


class EndpointError(UnfitError):
    """The endpoint that the user asked for cannot work on the first node of the ranks."""


class JoinError(UnfitError):
    """A rank did not meet all others in time. Which of them did not come is not known."""


def host(fabric: Fabric, head: str) -> str:
    """Name or address at which ranks look for rank 0: MASTER_ADDR, else fabric.master_addr, else `head`,
    the first of their nodes."""
    return os.environ.get("MASTER_ADDR") or fabric.master_addr or head


def is_asked_for(fabric: Fabric) -> bool:
    """Return whether the user asked for a host or a port."""
    return bool(host(fabric, "")) or _ports(fabric) is not None


def check(fabric: Fabric, nodes: int) -> None:
    """ConfigError for an endpoint that cannot work on any nodes. nodes: number of them."""
    _ports(fabric)
    address = host(fabric, "")
    if nodes > 1 and is_loopback(address):
        raise ConfigError(
            f"{_asked_by('MASTER_ADDR')} is {address}, a loopback address, for ranks on {nodes} nodes",
            cause="every node would look for rank 0 on itself",
            fix=f"{_undo('MASTER_ADDR')} (Forge takes the first node), or give that node's address",
        )


def is_loopback(address: str) -> bool:
    """Return whether a host reaches only itself at this address, as at 127.0.0.1 and 0.0.0.0; of names,
    localhost alone."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    return parsed.is_loopback or parsed.is_unspecified


def _ports(fabric: Fabric) -> range | None:
    """The ports to choose from: MASTER_PORT, else those of fabric.master_port; None for any."""
    exported = os.environ.get("MASTER_PORT")
    if not exported:
        return None if fabric.master_port is None else port_range(fabric.master_port)
    try:
        return port_range(int(exported))
    except ValueError:
        raise ConfigError(
            f"MASTER_PORT={exported} is not a port number: it must be a number from 1 to 65535",
            cause="exported in the shell",
            fix="unset MASTER_PORT; fabric.master_port in machine.yaml may be a range",
        ) from None


def _asked_by(name: str) -> str:
    """The exported variable, or the key of machine.yaml, whose value is used."""
    return name if os.environ.get(name) else f"fabric.{name.lower()}"


def _undo(name: str) -> str:
    return f"unset {name}" if os.environ.get(name) else f"remove {_asked_by(name)}"


# --- on the first node ----------------------------------------------------------------------------


def endpoint(
    fabric: Fabric,
    job_id: str,
    hosts: Sequence[str],
    python: str,
    container: Container | None = None,
    *,
    timeout_sec: float = PROBE_SEC,
) -> tuple[str, int]:
    """Host of the rendezvous, and a port for it that is free on the first node of the ranks.

    job_id: the Slurm job that has the nodes; not used where this host is the only one. hosts: those of
    the ranks, in rank order. python: the interpreter of the ranks, in their container. timeout_sec: for
    the answer of the first node. Raises EndpointError where the host is not the first node, or none of
    the ports that may be used is free; NodeUnfit where the first node does not answer; SlurmSilent.
    """
    head, asked, ports = hosts[0], host(fabric, ""), _ports(fabric)
    limits = [ports[0], ports[-1]] if ports else None
    if head == hostname():
        answer = probe(asked, limits)
    else:
        words = [python, "-m", "forge.hosts.rendezvous", json.dumps([asked, limits])]
        options = container.srun_options if container else ()
        line = inside(container, words)
        answer = json.loads(
            slurm.output_on(job_id, head, line, options=options, timeout_sec=timeout_sec)
        )
    refuse(fabric, head, answer["trouble"])
    if answer["port"] is None:
        raise _no_free_port(ports, head)
    _say_what_was_exported(fabric, head if len(hosts) > 1 else LOOPBACK)
    port = int(answer["port"])
    if asked or len(hosts) == 1:
        return asked or LOOPBACK, port
    return name_or_address(head, lambda name: _unresolved(job_id, hosts, name)), port


def name_or_address(head: str, unresolved: Callable[[str], Sequence[str]]) -> str:
    """The name of the ranks' first node, or its address in Slurm (NodeAddr) where one of their nodes does
    not resolve the name, which is printed.

    unresolved: gives the nodes that do not resolve a name or address. Raises SlurmSilent.
    """
    without = unresolved(head)
    if not without:
        return head
    address = slurm.node_address(head)
    if address == head or unresolved(address):
        return head
    where = without[0] + (f" and {len(without) - 1} more" if len(without) > 1 else "")
    say(f"MASTER_ADDR={address}, Slurm's address of {head}: the name does not resolve on {where}")
    return address


def _unresolved(job_id: str, hosts: Sequence[str], name: str) -> list[str]:
    """The nodes that do not resolve a name; [] where they cannot be asked, which the launch will tell."""
    line = slurm.srun(job_id, hosts, options=("--overlap", "--gres=none"))
    command = [*line, "sh", "-c", UNRESOLVED, "sh", name]
    output, _ = slurm.run_step(command, timeout_sec=RESOLVE_SEC)
    return [node for node in hosts if node in output.split()]


def resolves(name: str) -> bool:
    """Return whether this node knows an address for the name."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def refuse(fabric: Fabric, head: str, problem: str) -> None:
    """EndpointError for a host that the user asked for and that has a problem (`trouble`) on `head`."""
    asked = host(fabric, "")
    if asked and problem:
        raise EndpointError(
            f"{_asked_by('MASTER_ADDR')} is {asked}, which {problem} {head}, the first node of the ranks",
            cause="rank 0 listens there; the other ranks would look for it elsewhere until their timeout",
            fix=f"{_undo('MASTER_ADDR')} (Forge then chooses one), or give an address of {head}",
        )


def _no_free_port(ports: range | None, head: str) -> EndpointError:
    assert ports
    asked_by = _asked_by("MASTER_PORT")
    what = f"no port of {ports[0]}-{ports[-1]} ({asked_by}) is free on {head}"
    if len(ports) == 1:
        what = f"port {ports[0]} ({asked_by}) is in use on {head}"
    return EndpointError(
        f"{what}, the first node of the ranks",
        cause="another program listens there, perhaps an earlier run that has not ended",
        fix=f"{_undo('MASTER_PORT')} (Forge takes any free port), or give other ports",
    )


def _say_what_was_exported(fabric: Fabric, default: str) -> None:
    own = {
        "MASTER_ADDR": fabric.master_addr or default,
        "MASTER_PORT": fabric.master_port or "any free port",
    }
    for name, value in own.items():
        exported = os.environ.get(name)
        if exported and exported != str(value):
            say(f"keeping your exported {name}={exported} (Forge would use {value})")


def probe(asked: str, limits: list[int] | None) -> dict[str, Any]:
    """Called on the first node of the ranks: `trouble` of the host that was asked for ("" for none), and
    a free `port` within the limits, both included (None: any port); None where there is none."""
    port = free_port() if limits is None else _free_port_of(range(limits[0], limits[1] + 1))
    return {"trouble": trouble(asked), "port": port}


def trouble(address: str) -> str:
    """Why this node is not at the address, in words before the name of the node; "" where it is, and for
    no address."""
    if not address:
        return ""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    except OSError:
        return "does not resolve on"
    with socket.socket(family, kind) as server:
        try:
            server.bind(place)  # only an address of this node can be bound
        except OSError:
            return f"is not an address (those are {', '.join(_addresses())}) of"
    return ""


def _addresses() -> list[str]:
    """The IPv4 addresses of this node, without the loopback interface."""
    interfaces = psutil.net_if_addrs()
    return [
        a.address
        for n in interfaces
        if n != "lo"
        for a in interfaces[n]
        if a.family == socket.AF_INET
    ]


def _free_port_of(ports: range) -> int | None:
    end = time.monotonic() + PATIENCE_SEC
    while True:
        # At random: jobs that start on one node at the same time rarely choose the same port.
        for port in random.sample(ports, len(ports)):
            with suppress(OSError), socket.create_server(("", port)):
                return port
        if time.monotonic() > end:
            return None
        time.sleep(PATIENCE_SEC / 10)


if __name__ == "__main__":
    print(json.dumps(probe(*json.loads(sys.argv[1]))))
