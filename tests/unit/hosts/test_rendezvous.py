"""Ranks that look for rank 0 in the wrong place wait until their timeout: this is found out before."""

import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from forge.core.errors import ConfigError, Exit
from forge.core.machine import load_machine
from forge.core.process import hostname
from forge.hosts import rendezvous
from forge.hosts.rendezvous import EndpointError
from forge.slurm import slurm


@pytest.fixture(autouse=True)
def nothing_exported(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["here", "elsewhere"])
def endpoint(request, monkeypatch):
    """The function, for two nodes of which the first is this host, or one that srun reaches."""
    head = hostname() if request.param == "here" else "n1"

    def output_on(job_id, node, command, **_):
        assert (job_id, node) == ("42", "n1")
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    monkeypatch.setattr(slurm, "output_on", output_on)
    monkeypatch.setattr(rendezvous, "_unresolved", lambda *_: [])

    def ask(**keys):
        found = rendezvous.endpoint(fabric(**keys), "42", [head, "n9"], sys.executable)
        return found[0].replace(head, "HEAD"), found[1]

    return ask


@pytest.fixture
def taken():
    """A port that is in use; the one after it is free."""
    while True:
        with suppress(OSError), socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
            socket.create_server(("", port + 1)).close()
            yield port
            return


def fabric(**keys):
    return load_machine(None, {f"fabric.{key}": value for key, value in keys.items()}).fabric


# --- refused on every node ------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "0.0.0.0"])
def test_loopback_address_is_refused_for_several_nodes_only(monkeypatch, address):
    with pytest.raises(ConfigError, match=f"fabric.master_addr is {address}, .* on 2 nodes") as own:
        rendezvous.check(fabric(master_addr=address), 2)
    assert own.value.fix.startswith("remove fabric.master_addr")
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(ConfigError, match=f"MASTER_ADDR is {address}, a loopback") as exported:
        rendezvous.check(fabric(master_addr="n1"), 2)
    assert exported.value.fix.startswith("unset MASTER_ADDR")
    rendezvous.check(fabric(), 1)


@pytest.mark.parametrize("port", ["0", "65536", "http", "15000-20000"])
def test_exported_port_that_is_none_is_refused(monkeypatch, port):
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"MASTER_PORT={port} is not a port number") as caught:
        rendezvous.check(fabric(), 1)
    assert caught.value.code == Exit.CONFIG


@pytest.mark.parametrize("value", [0, 65536, "20000-15000", "1-65536", "15000-", "-1", "any", True])
def test_wrong_range_is_refused_with_what_it_should_be(value):
    with pytest.raises(
        ConfigError, match=r"fabric\.master_port is .* Input should be a (port|number)"
    ):
        fabric(master_port=value)


def test_other_addresses_and_ports_pass(monkeypatch):
    for keys in ({}, {"master_addr": "10.0.0.1", "master_port": 29500}, {"master_port": "1-65535"}):
        rendezvous.check(fabric(**keys), 2)
    monkeypatch.setenv("MASTER_PORT", "29500")
    rendezvous.check(fabric(), 2)


# --- the first node -------------------------------------------------------------------------------


def test_without_a_wish_it_is_the_first_node_and_a_port_that_is_free_there(endpoint):
    host, port = endpoint()
    assert host == "HEAD"
    socket.create_server(("", port)).close()


def test_free_port_of_the_range_is_taken(endpoint, taken):
    free = taken + 1
    assert endpoint(master_port=f"{taken}-{free}") == ("HEAD", free)
    assert endpoint(master_port=free) == ("HEAD", free)


def test_range_without_a_free_port_is_named(endpoint, taken, monkeypatch):
    monkeypatch.setattr(rendezvous, "PATIENCE_SEC", 0.1)
    which = f"no port of {taken}-{taken + 1} \\(fabric.master_port\\) is free on"
    with socket.create_server(("", taken + 1)), pytest.raises(EndpointError, match=which) as caught:
        endpoint(master_port=f"{taken}-{taken + 1}")
    assert caught.value.code == Exit.UNFIT
    assert "remove fabric.master_port" in caught.value.fix
    monkeypatch.setenv("MASTER_PORT", str(taken))
    with pytest.raises(EndpointError, match=f"port {taken} .MASTER_PORT. is in use on") as caught:
        endpoint(master_port="1-65535")
    assert "unset MASTER_PORT" in caught.value.fix


def test_port_that_is_released_soon_is_waited_for(monkeypatch):
    server = socket.create_server(("", 0))
    port = server.getsockname()[1]
    monkeypatch.setattr(rendezvous, "PATIENCE_SEC", 30.0)
    monkeypatch.setattr(rendezvous.time, "sleep", lambda _: server.close())  # at the first wait
    assert rendezvous.probe("", [port, port]) == {"trouble": "", "port": port}


def test_what_was_exported_wins_and_is_said(endpoint, taken, monkeypatch, capsys):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(taken + 1))
    assert endpoint(master_addr="10.0.0.1", master_port=taken) == ("127.0.0.1", taken + 1)
    said = capsys.readouterr().err
    assert "keeping your exported MASTER_ADDR=127.0.0.1 (Forge would use 10.0.0.1)" in said
    assert f"MASTER_PORT={taken + 1} (Forge would use {taken})" in said
    endpoint(master_addr="127.0.0.1", master_port=taken + 1)
    assert capsys.readouterr().err == ""  # it would use the same


@pytest.mark.parametrize(
    ("address", "trouble"),
    [
        (
            "203.0.113.7",
            r"is not an address \(those are .*\) of",
        ),  # of the documentation, nobody has it
        ("no-such-host.invalid", "does not resolve on"),
    ],
)
def test_address_that_is_not_on_the_first_node_is_refused(endpoint, monkeypatch, address, trouble):
    with pytest.raises(EndpointError, match=f"fabric.master_addr is {address}, which {trouble}"):
        endpoint(master_addr=address)
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(EndpointError, match=f"MASTER_ADDR is {address}, which {trouble}") as caught:
        endpoint()
    assert "unset MASTER_ADDR" in caught.value.fix


# --- a first node whose name does not resolve -----------------------------------------------------

# As Slurm 22.05 prints it.
SHOWN = "NodeName=n1 Arch=x86_64 CPUTot=8 NodeAddr={} NodeHostName=n1 Version=22.05.8 State=MIXED"
GETENT = """#!/bin/sh
case " $KNOWN " in *" $2 "*) echo "10.78.0.11 STREAM $2";; *) exit 2;; esac
"""


@pytest.fixture
def find(monkeypatch, tmp_path):
    """find("n1", n1="n1", n2=""): the endpoint where these are the nodes and the names that each of them
    resolves, and where the first one is the address in Slurm."""
    (tmp_path / "getent").write_text(GETENT)
    (tmp_path / "getent").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "output_on", lambda *_, **__: '{"trouble": "", "port": 29500}')

    def find(address, **known):
        def run(command, **_):
            if command[0] == "scontrol":
                return SHOWN.format(address), ""
            assert command[0] == "srun" and f"--nodelist={','.join(known)}" in command
            said = [
                subprocess.run(
                    command[command.index("sh") :],
                    check=True,
                    capture_output=True,
                    text=True,
                    env={**os.environ, "SLURMD_NODENAME": node, "KNOWN": names},
                ).stdout
                for node, names in known.items()
            ]
            return "".join(said), ""

        monkeypatch.setattr(slurm, "run", run)
        return rendezvous.endpoint(fabric(), "42", list(known), sys.executable)[0]

    return find


def test_name_that_every_node_resolves_is_kept(find, capsys):
    assert find("10.78.0.11", n1="n1 n2", n2="n1 n2") == "n1"
    assert capsys.readouterr().err == ""


def test_name_that_a_node_does_not_resolve_gives_way_to_slurms_address_of_the_node(find, capsys):
    address = "10.78.0.11"
    assert find(address, n1=f"n1 {address}", n2=address, n3=f"n1 {address}", n4=address) == address
    said = (
        f"MASTER_ADDR={address}, Slurm's address of n1: the name does not resolve on n2 and 1 more"
    )
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("address", ["n1", "n1-ib"])
def test_name_is_kept_where_slurm_has_no_better_one(find, capsys, address):
    assert find(address, n1="n1 n1-ib", n2="n2") == "n1"
    assert capsys.readouterr().err == ""


def test_exported_and_configured_addresses_win_over_slurms(find, monkeypatch):
    monkeypatch.setattr(slurm, "node_address", lambda _: pytest.fail("Slurm was asked"))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    assert find("10.78.0.11", n1="", n2="") == "10.0.0.9"
    monkeypatch.delenv("MASTER_ADDR")
    own = rendezvous.endpoint(fabric(master_addr="10.0.0.8"), "42", ["n1", "n2"], sys.executable)
    assert own[0] == "10.0.0.8"


# --- a single node --------------------------------------------------------------------------------


def test_ranks_of_one_node_meet_at_the_loopback_address_unless_another_was_asked_for(
    monkeypatch, capsys
):
    def alone(**keys):
        return rendezvous.endpoint(fabric(**keys), "", [hostname()], sys.executable)

    monkeypatch.setattr(slurm, "run", lambda *_, **__: pytest.fail("Slurm was asked"))
    assert alone()[0] == "127.0.0.1"
    assert alone(master_addr="localhost")[0] == "localhost"
    monkeypatch.setenv("MASTER_ADDR", "0.0.0.0")
    assert alone()[0] == "0.0.0.0"
    assert "MASTER_ADDR=0.0.0.0 (Forge would use 127.0.0.1)" in capsys.readouterr().err


def test_host_or_port_may_be_asked_for(monkeypatch):
    assert not rendezvous.is_asked_for(fabric())
    assert rendezvous.is_asked_for(fabric(master_addr="n1"))
    assert rendezvous.is_asked_for(fabric(master_port="15000-20000"))
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert rendezvous.is_asked_for(fabric())
