"""Worker processes, forked from this one, that each read a part of the input files at a time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from forge.core.errors import UnfitError
from forge.core.process import stop_with_parent
from forge.core.terminal import progress
from forge.data.input_bytes import Consumed

Part = TypeVar("Part")
# Number and files of a part, and what takes the numbers of bytes that were read -> result, pickled.
Make = Callable[[int, Any, Consumed], Any]


def made_by_workers(
    title: str,
    groups: Sequence[Any],
    num_bytes: int,
    workers: int,
    *,
    make: Make,
    receive: Callable[[Any], Part],
) -> list[Part]:
    """Results for the groups, in their order: of `make`, called in a worker for each group, and then of
    `receive`, called here for each result. num_bytes: of all groups, for the progress bar.

    The workers have what this process has in memory. Raises what `make` and `receive` raise, and
    UnfitError where a worker was killed.
    """
    # A new interpreter for each worker would import for 0.6 s what is in memory here. A fork is safe:
    # no other thread of this process is at work, see the order below.
    context = multiprocessing.get_context("fork")
    # Each number is written by one worker: no lock, which a killed worker could keep.
    read_bytes = context.RawArray("q", len(groups))
    pool = ProcessPoolExecutor(
        max(1, min(workers, len(groups))),
        context,
        initializer=_start_worker,
        initargs=(os.getpid(), make, groups, read_bytes),
    )
    others = set(multiprocessing.active_children())
    finished: dict[int, Part] = {}
    running: dict[Future[Any], int] = {}
    waiting = iter(range(len(groups)))

    def submit(at_most: int) -> None:
        """Not all at once: a large corpus has 100,000 parts."""
        running.update((pool.submit(_make_part, n), n) for n in islice(waiting, at_most))

    try:
        gc.freeze()  # or the workers would look through all these objects, and so copy their pages
        submit(4 * workers)  # starts all workers, before the bar of `progress` has a thread
        with progress(title, num_bytes / 2**20, "MiB") as update:
            while running:
                done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    finished[running.pop(future)] = receive(future.result())
                submit(len(done))
                update(sum(read_bytes) / 2**20, f"{len(finished)}/{len(groups)} parts")
    except BaseException as err:
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()  # none may continue after an error or Ctrl-C
        if not isinstance(err, BrokenProcessPool):
            raise
        raise UnfitError(
            f"a worker process was killed after {len(finished)} of {len(groups)} parts",
            cause="most likely out of memory: a worker holds its largest document",
            fix="use more memory or fewer workers, and run it again; forge tokenize keeps finished parts",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()
    return [finished[number] for number in range(len(groups))]


# --- in a worker --------------------------------------------------------------------------------

_make: Make
_groups: Sequence[Any]
_read_bytes: Any


def _start_worker(parent: int, *job: Any) -> None:
    global _make, _groups, _read_bytes  # an initializer of a pool cannot return anything
    _make, _groups, _read_bytes = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from the parent, or as it dies
    stop_with_parent()
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def _make_part(number: int) -> Any:
    def consumed(length: int) -> None:
        _read_bytes[number] += length

    return _make(number, _groups[number], consumed)
