"""Send files from this host to many nodes at once with Slurm's `sbcast`.

The settings, as measured on four nodes (bench stage):

- eight transfers at once: half the time of one on links of 1 Gbit/s, since sbcast waits for a block
  to reach every node before it sends the next one
- a fan-out of two, with blocks of 1 MiB: this host sends two copies, whatever the number of nodes,
  and the nodes forward them; more copies would share the link of this host
- sbcast's lz4 compression for programs on slow links; it does not make token ids smaller
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Self, cast

from forge.core.errors import UnfitError
from forge.core.process import stop_with_parent
from forge.hosts.nodes import END_SEC, NodeFailure, failed_on
from forge.slurm import slurm
from forge.staging.archive import PARALLEL_CHUNKS

FAN_OUT = 2
BLOCK = "1m"
START_SEC = 30.0
STEP_ID = "forge-step-id"  # printed before the id of the step
# A transfer slower than this, with seven others in parallel, counts as failed.
MIN_BYTES_PER_SEC = 4 * 2**20

# zstd for token shards and lz4 for programs save time below these speeds of the slowest node's link,
# in Mbit/s, and cost time above. A speed that the kernel does not know (0) counts as fast.
COMPRESS_SHARDS_BELOW = 8000
COMPRESS_PROGRAMS_BELOW = 4000


def is_slower(links_mbit: Iterable[int], limit: int) -> bool:
    """Return whether any link of a known speed is below the limit."""
    return any(0 < speed < limit for speed in links_mbit)


class SbcastFailed(Exception):
    """sbcast failed on these nodes."""

    def __init__(self, failures: dict[str, NodeFailure]) -> None:
        super().__init__(str(failures))
        self.failures = failures


class Broadcast:
    """A Slurm step on the nodes that get the files. A context manager.

    Without a step, sbcast would send to every node of the job. hosts: nodes that respond.
    """

    def __init__(self, job_id: str, hosts: Sequence[str], *, compress: bool = False) -> None:
        self._job_id, self._hosts, self._compress = job_id, hosts, compress
        self._name = f"sbcast-{os.getpid()}"

    def __enter__(self) -> Self:
        patience = slurm.Patience("stage")
        while trouble := self._start():
            self._end()
            if not patience.again(trouble):
                raise self._no_step(trouble)
        return self

    def _start(self) -> str:
        """Start the step, and take its id; "" or why there is none."""
        options = ("--overlap", "--gres=none", f"--job-name={self._name}")
        line = slurm.srun(self._job_id, self._hosts, options=options)
        self._step = subprocess.Popen(
            [*line, "sh", "-c", f"echo {STEP_ID} $SLURM_STEP_ID; exec cat"],
            stdin=subprocess.PIPE,  # closing it ends the step, also when this process is killed
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=slurm.environment(),
            start_new_session=True,
            preexec_fn=stop_with_parent,  # noqa: PLW1509  no threads run yet
        )
        try:
            self._step_id, trouble = self._read_step_id()
            if self._step_id or slurm.is_slurms_own(trouble):
                return trouble
            # An srun that waits for the controller says nothing.
            return slurm.controller_trouble() or trouble or "no step"
        except BaseException:
            self._end()
            raise

    def _no_step(self, trouble: str) -> UnfitError:
        if slurm.is_slurms_own(trouble):
            return slurm.silent(trouble)
        failure = NodeFailure(trouble)
        return failed_on(dict.fromkeys(self._hosts, failure), "starting sbcast")

    def __exit__(self, *_: object) -> None:
        self._end()

    def send(self, files: Sequence[Path], folder: str) -> Iterator[str]:
        """Yield the name of each file once it is in `folder` on all nodes. Raises SbcastFailed
        and SlurmSilent."""
        with ThreadPoolExecutor(PARALLEL_CHUNKS) as pool:
            transfers = {pool.submit(self._send, file, folder): file.name for file in files}
            try:
                for future in as_completed(transfers):
                    future.result()
                    yield transfers[future]
            finally:
                pool.shutdown(cancel_futures=True)

    def _send(self, file: Path, folder: str) -> None:
        limit = START_SEC + file.stat().st_size * PARALLEL_CHUNKS / MIN_BYTES_PER_SEC
        command = [
            *("sbcast", "--force", f"--fanout={FAN_OUT}", f"--size={BLOCK}"),
            *["--compress=lz4"] * self._compress,
            f"--jobid={self._job_id}.{self._step_id}",
            *(str(file), f"{folder}/{file.name}"),
        ]
        _, trouble = slurm.run_step(command, timeout_sec=limit)
        if slurm.is_slurms_own(trouble):
            raise slurm.silent(trouble)
        if trouble:
            raise SbcastFailed(blame(trouble, self._hosts))

    def _read_step_id(self) -> tuple[str, str]:
        """The id of the step and "", or "" and what was printed instead of it. Before it there may be
        warnings of srun, and what a site's task prolog prints."""
        output = cast("IO[bytes]", self._step.stdout).fileno()
        printed, end = b"", time.monotonic() + START_SEC
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while selector.select(max(0, end - time.monotonic())) and (
                data := os.read(output, 4096)
            ):
                printed += data
                if found := re.search(rf"{STEP_ID} (\d+)\n", printed.decode(errors="replace")):
                    return found[1], ""
        return "", printed.decode(errors="replace").strip()

    def _end(self) -> None:
        pipes = [cast("IO[bytes]", pipe) for pipe in (self._step.stdin, self._step.stdout)]
        for pipe in pipes:
            pipe.close()
        try:
            self._step.wait(END_SEC)
        except subprocess.TimeoutExpired:
            slurm.cancel_step(self._job_id, self._name)
            self._step.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits in the kernel
                self._step.wait(END_SEC)


def blame(stderr: str, hosts: Sequence[str]) -> dict[str, NodeFailure]:
    """The nodes on which sbcast failed: those that its output names, else all of them.

    For a full disk it prints `sbcast: error: REQUEST_FILE_BCAST(node03): Unspecified error`.
    """
    messages = re.findall(r"REQUEST_FILE_BCAST\(([^)]+)\): (.+)", stderr)
    blamed = {host: why for names, why in messages for host in slurm.expand(names) if host in hosts}
    if blamed:
        return {host: NodeFailure(f"sbcast: {why}") for host, why in blamed.items()}
    return dict.fromkeys(hosts, NodeFailure(stderr.strip()))
