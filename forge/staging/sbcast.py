"""Send files from this host to many nodes at once with Slurm's `sbcast`.

The settings, as measured on four nodes (bench stage):

- eight transfers at once: on links of 1 Gbit/s half the time of one, since sbcast waits for every
  block to reach every node before it sends the next one
- a fan-out of two, with blocks of 1 MiB: this host sends two copies, whatever the number of nodes,
  and the nodes forward them; more copies only share this host's own link
- sbcast's lz4 compression is for programs on slow links; token ids do not get smaller with it
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Self, cast

from forge.cluster import slurm
from forge.cluster.nodes import END_SEC, Trouble, named
from forge.core.process import stop_with_parent
from forge.staging.archive import PARALLEL_PARTS

FAN_OUT = 2
BLOCK = "1m"
START_SEC = 30.0
# A part that comes at less than this, with seven others beside it, is on a link that is broken.
MIN_BYTES_PER_SEC = 4 * 2**20

# zstd on token shards, and lz4 on programs, gain below these speeds of the slowest node's link, in
# Mbit/s, and cost above. A speed that the kernel does not know (0) counts as fast.
COMPRESS_SHARDS_BELOW = 8000
COMPRESS_PROGRAMS_BELOW = 4000


def is_slower(links_mbit: Iterable[int], limit: int) -> bool:
    """Whether any link of a known speed is below the limit."""
    return any(0 < speed < limit for speed in links_mbit)


class Broken(Exception):
    """sbcast did not reach these nodes."""

    def __init__(self, troubles: dict[str, Trouble]) -> None:
        super().__init__(str(troubles))
        self.troubles = troubles


class Broadcast:
    """A Slurm step that spans just the nodes which get the files. A context manager.

    Without one, sbcast would send to every node of the job. hosts: nodes that answer.
    """

    def __init__(self, job_id: str, hosts: Sequence[str], *, compress: bool = False) -> None:
        self._job_id, self._hosts, self._compress = job_id, hosts, compress
        self._name = f"sbcast-{os.getpid()}"

    def __enter__(self) -> Self:
        options = ("--overlap", "--gres=none", f"--job-name={self._name}")
        line = slurm.srun(self._job_id, self._hosts, options=options)
        self._step = subprocess.Popen(
            [*line, "sh", "-c", "echo $SLURM_STEP_ID; exec cat"],
            stdin=subprocess.PIPE,  # its end is the end of the step, also when we are killed
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=slurm.environment(),
            start_new_session=True,
            preexec_fn=stop_with_parent,  # noqa: PLW1509  no threads run yet
        )
        try:
            self._step_id = self._read_step_id()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def send(self, files: Sequence[Path], folder: str) -> Iterator[str]:
        """Names of the files, each when it is in `folder` on all nodes. Raises Broken."""
        with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
            coming = {pool.submit(self._send, file, folder): file.name for file in files}
            try:
                for future in as_completed(coming):
                    future.result()
                    yield coming[future]
            finally:
                pool.shutdown(cancel_futures=True)

    def _send(self, file: Path, folder: str) -> None:
        limit = START_SEC + file.stat().st_size * PARALLEL_PARTS / MIN_BYTES_PER_SEC
        command = [
            *("sbcast", "--force", f"--fanout={FAN_OUT}", f"--size={BLOCK}"),
            *["--compress=lz4"] * self._compress,
            f"--jobid={self._job_id}.{self._step_id}",
            *(str(file), f"{folder}/{file.name}"),
        ]
        _, trouble = slurm.run(command, timeout_sec=limit)
        if trouble:
            raise Broken(blame(trouble, self._hosts))

    def _read_step_id(self) -> str:
        output = cast("IO[bytes]", self._step.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            line = output.readline().decode().strip() if selector.select(START_SEC) else ""
        if not line.isdigit():
            raise named(dict.fromkeys(self._hosts, Trouble(line or "no step")), "starting sbcast")
        return line

    def _end(self) -> None:
        pipes = [cast("IO[bytes]", pipe) for pipe in (self._step.stdin, self._step.stdout)]
        for pipe in pipes:
            pipe.close()
        try:
            self._step.wait(END_SEC)
        except subprocess.TimeoutExpired:
            slurm.cancel_step(self._job_id, self._name)
            self._step.kill()
            self._step.wait()


def blame(stderr: str, hosts: Sequence[str]) -> dict[str, Trouble]:
    """Which nodes sbcast complains of: those that it names, else all of them.

    It says `sbcast: error: REQUEST_FILE_BCAST(node03): Unspecified error` of a full disk.
    """
    found = re.findall(r"REQUEST_FILE_BCAST\(([^)]+)\): (.+)", stderr)
    blamed = {host: why for names, why in found for host in slurm.expand(names) if host in hosts}
    if blamed:
        return {host: Trouble(f"sbcast: {why}") for host, why in blamed.items()}
    return dict.fromkeys(hosts, Trouble(stderr.strip()))
