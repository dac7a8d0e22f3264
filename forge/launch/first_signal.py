"""`python -m forge.launch.first_signal COMMAND …`: run torchrun as the task of a node, and pass a stop
on to its ranks, once.

torchrun itself ignores stop signals: at a second one its agent gives up the wait for the ranks, which are
then killed in the middle of their final save. Slurm may signal a step twice, or all of its processes at
once: on a preemption, at the time limit, and when the task of another node has exited.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

import psutil

from forge.core.process import PR_SET_PDEATHSIG, stop_with_parent

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
POLL_SEC, AGAIN_SEC = 0.1, 1.0


def main(command: list[str]) -> int:
    """The exit status of the command, as a shell has it: 128 + N after signal N."""
    received: list[int] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    stop_with_parent()
    # torchrun's option --node-rank: srun starts the same words on all nodes.
    os.environ["PET_NODE_RANK"] = os.environ.get("SLURM_NODEID", "0")
    for number in SIGNALS:
        signal.signal(number, receive)
    child = subprocess.Popen(command, preexec_fn=_before_exec)  # noqa: PLW1509  no threads run
    passed_on = 0.0
    while True:
        with suppress(subprocess.TimeoutExpired):
            status = child.wait(POLL_SEC)
            return 128 - status if status < 0 else status
        # Again and again, since a rank that has no handler yet misses it; later ones are ignored.
        if received and time.monotonic() - passed_on > AGAIN_SEC:
            passed_on = time.monotonic()
            _tell_ranks(child.pid, received[0])


def _before_exec() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # torchrun ignores SIGTERM; its ranks then get theirs, and save.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _tell_ranks(torchrun: int, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        for rank in psutil.Process(torchrun).children():
            rank.send_signal(number)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
