"""`python -m forge.launch.torchrun HOST:PORT ARGUMENTS…`: torchrun for the ranks of one node, whose
key-value store listens at this address alone. Port 0: any free one.

torch's own stores listen on all interfaces, even where they are given 127.0.0.1, and let everybody read
and write. Static rendezvous, since the dynamic one also unpickles what it finds in the store.
"""

from __future__ import annotations

import socket
import sys

import torch.distributed as dist
from torch.distributed import run


def store_at(host: str, port: int) -> dist.TCPStore:
    """A store that listens at this address alone; its `port` is the real one.

    The next store of this process for that port shares its server: they are multi-tenant. Raises OSError
    where the address is not this node's, or taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def main(endpoint: str, arguments: list[str]) -> None:
    """Run torchrun with a store at this endpoint to its end."""
    host, _, port = endpoint.rpartition(":")
    store = store_at(host, int(port))  # named, so that it lives until torchrun shares its server
    meeting = ["--rdzv-backend=static", f"--rdzv-endpoint={host}:{store.port}", "--node-rank=0"]
    run.main([*meeting, *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
