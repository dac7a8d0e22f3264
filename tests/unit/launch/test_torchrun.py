"""Against a store that the whole network may read and write: torch's own listen on all interfaces."""

import os
import socket
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from forge.launch.torchrun import store_at

TORCHRUN = (sys.executable, "-m", "forge.launch.torchrun", "127.0.0.1:0")
# Prints where it meets the others, and where torchrun, its parent, listens.
RANK = """
import os, psutil, torch.distributed as dist
found = psutil.Process(os.getppid()).net_connections("tcp")
store, rank, size = next(dist.rendezvous("env://"))
store.add("ranks", 1)
print(rank, size, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
print([tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN])
"""


def listening():
    found = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost"])
def test_store_listens_at_its_address_alone_and_the_next_one_shares_its_server(host):
    before = listening()
    store = store_at(host, 0)
    address = (socket.gethostbyname(host), store.port)
    assert listening() - before == {address}
    shared = dist.TCPStore(host, store.port, 1, True, timedelta(seconds=20), multi_tenant=True)
    assert listening() - before == {address}
    shared.set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert shared.get("key") == b"value"


def test_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        store_at("127.0.0.1", server.getsockname()[1])


def test_torchrun_listens_on_the_loopback_interface_alone_for_any_program(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=1", str(tmp_path / "rank.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    meeting, ports = done.stdout.splitlines()
    *rank, host, port = meeting.split()
    assert (*rank, host) == ("0", "1", "127.0.0.1")
    assert ports == f"[('127.0.0.1', {port})]"
