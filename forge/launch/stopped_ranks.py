"""Ranks whose process is stopped (SIGSTOP), as their nodes see it while other ranks wait for them.

Such a rank can tell nothing itself. Slurm continues it as soon as another rank has given up, so that by
then it looks like one that only waited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from forge.cluster import slurm
from forge.core.errors import DataError
from forge.core.files import read_object_or_empty
from forge.core.process import Process
from forge.launch.rank_records import LaunchSpec, RankRecord, mark_stopped, pid_file, stalled

LOOK_SEC = 0.25  # between two looks at the directory of the launch, which is shared
ASK_SEC = 20.0


class StoppedRanks:
    """Asks the nodes of ranks that others wait for, once in each stall, in a thread."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._looked = 0.0  # on the monotonic clock
        self._waiting, self._is_asked = 0, False  # ranks at the last look; in this stall

    def look(self) -> None:
        """Ask, if a rank has been waiting for longer than its limit. The launcher calls it often."""
        now = time.monotonic()
        if now - self._looked < LOOK_SEC:
            return
        self._looked = now
        with suppress(OSError, DataError):  # a record is withdrawn meanwhile
            records = stalled(self._spec)
            waiting = sum(record.status == "failed" for record in records)
            self._is_asked = self._is_asked and waiting > 0
            # Once no more of them come: the nodes of the others alone are asked.
            if 0 < waiting == self._waiting and not self._is_asked:
                self._is_asked = True
                self._ask(records)
            self._waiting = waiting

    def _ask(self, told: list[RankRecord]) -> None:
        silent = set(range(self._spec.layout.world_size)) - {record.rank for record in told}
        threading.Thread(target=self._mark, args=(silent,), name="stopped", daemon=True).start()

    def _mark(self, ranks: Iterable[int]) -> None:
        by_host: dict[str, dict[int, Process]] = {}
        for rank in ranks:
            with suppress(KeyError):
                process = Process.from_json(read_object_or_empty(pid_file(self._spec, rank)))
                by_host.setdefault(process.host, {})[rank] = process
        for host, processes in by_host.items():
            stats = _stats(self._spec, host, list(processes.values()))
            for rank, process in processes.items():
                mark_stopped(self._spec, rank, process.pid if process.is_stopped(stats) else None)


def _stats(spec: LaunchSpec, host: str, processes: list[Process]) -> str:
    """The lines of /proc/PID/stat of these processes of a host; "" where it cannot be asked."""
    files = [f"/proc/{process.pid}/stat" for process in processes]
    if processes[0].is_here:
        with suppress(OSError):
            return "".join(Path(file).read_text(errors="replace") for file in files)
    if not spec.job:
        return ""
    line = slurm.srun(spec.job, [host], options=("--overlap", "--gres=none"))
    return slurm.run_step([*line, "cat", *files], timeout_sec=ASK_SEC)[0]
