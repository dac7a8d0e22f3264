"""`python -m forge.launch.container_guard COMMAND …`: run a command in a container, and kill it when its
client is gone.

A container of podman is no child of its client, the task that Slurm and the launcher know: it would live
on after a kill -9 of the client, and write after its job has ended. So a second process watches the
client from inside, by its pid: the container has the pids of the host.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import psutil

from forge.core.process import Process

CLIENT = "FORGE_CONTAINER_CLIENT"  # its pid: that of the shell around `podman run`
POLL_SEC = 0.2


def main(command: list[str]) -> None:
    """Become the command. It stays the main process of the container, which gets the signals."""
    pid = os.environ.pop(CLIENT, "")
    if pid:
        try:
            client = Process.of(int(pid))
        except ProcessLookupError:
            sys.exit(128 + signal.SIGKILL)  # killed before this process had started
        main_pid = os.getpid()
        if os.fork() == 0:
            _watch(client, main_pid)
            os._exit(0)
    os.execvp(command[0], command)


def _watch(client: Process, main_pid: int) -> None:
    """Until the main process ends: kill it, with all that it has started, once the client is gone."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # for the main process
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # else output would not end with the main process
        os.dup2(nothing, stream)
    while os.getppid() == main_pid:
        if client.life() == "gone":
            _kill_family(main_pid)
            return
        time.sleep(POLL_SEC)


def _kill_family(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        below = [child for child in first.children(recursive=True) if child.pid != os.getpid()]
        for process in (first, *below):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
