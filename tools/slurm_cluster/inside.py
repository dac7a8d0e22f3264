"""A command in a machine of the test cluster: which process it is, and how signals reach it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

# What a login shell on the cluster would not have. FORGE_TESTS marks what tests of ranks kill.
FOREIGN = re.compile(r"SLURM|SBATCH|SRUN|SQUEUE|PMI_|PYTEST|TMPDIR|FORGE_TESTS|OMP_NUM_THREADS")


def login_environment() -> dict[str, str]:
    """This process's environment as on a login node: in no Slurm job, no pytest; the programs of
    the project's Python first on PATH."""
    kept = {key: value for key, value in os.environ.items() if not FOREIGN.match(key)}
    return {**kept, "PATH": f"{Path(sys.prefix, 'bin')}:{os.environ.get('PATH', os.defpath)}"}


class Inside(subprocess.Popen[str]):
    """nsenter and the command behind it. Signals reach the command; so do kill(), terminate()."""

    def main_process(self) -> psutil.Process | None:
        """The command itself, with the host's pid; None when it has ended."""
        end = time.monotonic() + 5
        while self.poll() is None and time.monotonic() < end:
            with contextlib.suppress(psutil.NoSuchProcess):
                if children := psutil.Process(self.pid).children():
                    return children[0]
            time.sleep(0.01)  # nsenter has not forked yet
        return None

    def send_signal(self, sig: int) -> None:
        """A signal to the command alone, not to its children."""
        if sig == signal.SIGCONT:
            super().send_signal(sig)  # nsenter stops itself when its command is stopped
        if process := self.main_process():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(sig)

    def press_ctrl_c(self) -> None:
        """SIGINT to every process of the command's group, as a terminal does."""
        psutil.process_iter.cache_clear()  # a pid may be another process than at the last call
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) == self.pid != process.pid:
                    process.send_signal(signal.SIGINT)

    def kill_group(self) -> None:
        """SIGKILL to the command and to its children, except those that made their own session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
