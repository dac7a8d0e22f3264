"""Why ranks were lost: errors of a GPU as torch reports them, which rank is to blame when ranks lost each
other (one that ended, that hangs, or that is behind), and ranks whose process is stopped. No torch."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from forge.core.errors import Exit, ForgeError
from forge.core.files import read_object_or_empty
from forge.core.process import Process, hostname
from forge.launch.heartbeat import LastCollectives
from forge.launch.rank_records import LaunchSpec, RankRecord, mark_stopped, pid_file
from forge.slurm import slurm

# Causes in rank records. After an error or a fault of a GPU, ranks are launched again; after a fault
# without the node.
GPU_FAULT = "GPU fault"
GPU_ERROR = "GPU error"
OUT_OF_MEMORY = "out of memory"
PEER_LOST = "peer lost"  # ranks are launched again, and the job is requeued
# The cause where a rank did not arrive and was not seen to end: its node is checked before it is used
# again.
HANG = "hang"
# No record of a rank: Slurm has started none, and the job is requeued.
NOT_STARTED = "not started by Slurm"
# Another launch may not have these.
RESTARTED_CAUSES = (PEER_LOST, HANG, GPU_FAULT, GPU_ERROR, NOT_STARTED)

# Words of cudaGetErrorString (CUDA Runtime API, "Error Handling") for what only hardware or driver cause.
_OF_HARDWARE = re.compile(
    r"ECC|NVLink|hardware stack|fallen off the bus|busy or unavailable|no CUDA-capable device"
    r"|not yet initialized|initialization error|unknown error|driver shutting down|GPU is lost"
)
# What a bad kernel and a bad GPU cause alike. Another GPU tells them apart.
_OF_EITHER = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|unspecified launch failure"
    r"|invalid program counter|launch timed out|EXECUTION_FAILED|INTERNAL_ERROR"
)
_OF_GPU = re.compile(r"CUDA error: |(CUDNN|CUBLAS|CUSOLVER)_STATUS_")


def cause_of_gpu_error(error: BaseException) -> str:
    """GPU_FAULT, GPU_ERROR or OUT_OF_MEMORY for such an error of a GPU; "" for any other, a device-side
    assert among them: an index out of range fails on every GPU."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, for a GPU
        return OUT_OF_MEMORY
    if not isinstance(error, RuntimeError) or not _OF_GPU.search(text):
        return ""
    if _OF_HARDWARE.search(text):
        return GPU_FAULT
    return GPU_ERROR if _OF_EITHER.search(text) else ""


def note_gpu_error(error: BaseException, rank: int, spec: LaunchSpec) -> None:
    """Write why this rank fails, if its GPU does, before a save is drained: meanwhile NCCL's watchdog may
    end the process."""
    if record := of_gpu_error(error, rank):
        with suppress(OSError, ForgeError):
            record.write_provisional(spec)


def of_gpu_error(error: BaseException, rank: int = 0) -> RankRecord | None:
    """The record of a rank on this host whose GPU failed; None for any other error."""
    cause = cause_of_gpu_error(error)
    if cause not in (GPU_FAULT, GPU_ERROR):
        return None
    message = f"{cause} on {hostname()} (rank {rank}): {first_line(error)}"
    return RankRecord("failed", rank, Exit.UNFIT, cause=cause, message=message, host=hostname())


def first_line(error: BaseException) -> str:
    """First line of an error's message, without torch's advice on debugging."""
    return str(error).strip().partition("\n")[0]


def judged(records: Sequence[RankRecord]) -> RankRecord:
    """One `lost` record for all ranks, which names those to blame, the first of them with its host.

    records: by rank; some are lost, or failed because of a lost peer, and no other has failed.
    """
    lost = [r for r in records if r.status == "lost" and not _waits_on_device(r)]
    waiting = [r for r in records if r.status == "failed" or _waits_on_device(r)]
    suspects = _noticed(records, waiting) or _suspects(lost, waiting)
    absent = [] if suspects else _absent(waiting)
    suspects = suspects or absent
    witness = _witness([record for record in waiting if record not in suspects])
    missed = witness.activity.phase if witness and _is_stalled(witness) and witness.activity else ""
    first, hangs = (suspects or waiting)[0], False
    if absent:
        hangs, what = True, _of_an_absence(absent, waiting, len(records))
    elif not suspects:
        what = "ranks lost each other"
    elif first.activity or first.stopped or missed:
        hangs, what = True, _of_a_hang(suspects, len(records), missed)
    else:
        on = f" on {first.host}" if first.host else ""
        what = f"rank {_numbers(suspects)} of {len(records)} exited without a record{on}"
    seen = f"; rank {witness.rank} saw: {witness.message}" if witness else ""
    return RankRecord(
        "lost",
        rank=first.rank,
        code=Exit.UNFIT,
        cause=HANG if hangs else PEER_LOST,
        message=f"{what}{seen}",
        lost=tuple(record.rank for record in lost),
        host=first.host if suspects else "",
        connected=tuple(dict.fromkeys(r.host for r in records if _reaches_slurm(r) is True)),
    )


def on_nodes(
    record: RankRecord, silent: Sequence[str], head: str, connected: Sequence[str] = ()
) -> tuple[RankRecord, list[str]]:
    """A loss with the nodes to blame in place of a rank of another one, and those that are lost.

    silent: nodes that start no process for head, the launcher's one. A rank of a lost node does not reach
    Slurm either; where it does, or did at an earlier loss (connected), only the link between the two is
    broken, or one of them is at fault.
    """
    lost = [host for host in silent if host not in (*record.connected, *connected)]
    if record.host in lost:
        return replace(record, cause=PEER_LOST), lost  # there is nothing to check on this node
    if not silent:
        return record, lost
    names = ", ".join(lost or silent)
    what = f"{head} and {names} do not reach each other, and both reach Slurm"
    if lost:
        what = f"{names} starts no process, so it is down or cut off"
    message, host = f"{what}; the ranks say: {record.message}", (lost or silent)[0]
    return replace(record, cause=PEER_LOST, message=message, host=host), lost


def with_hosts(
    records: Sequence[RankRecord], hosts: Sequence[str], ranks_per_node: int
) -> list[RankRecord]:
    """The records, by rank, with the host of each as the placement names it. A rank without a record has
    reported no host."""
    return [
        record if record.host in hosts else replace(record, host=hosts[rank // ranks_per_node])
        for rank, record in enumerate(records)
    ]


def _noticed(records: Sequence[RankRecord], waiting: list[RankRecord]) -> list[RankRecord]:
    """The ranks that were seen to be stopped, else those whose node is cut off, while others waited."""
    if not any(map(_is_stalled, waiting)):
        return []
    cut_off = [record for record in records if _reaches_slurm(record) is False]
    if not any(map(_reaches_slurm, records)):
        cut_off = []  # Slurm's controller is away
    return [record for record in records if record.stopped] or cut_off


def _reaches_slurm(record: RankRecord) -> bool | None:
    return record.activity.reaches_slurm if record.activity else None


def _suspects(lost: list[RankRecord], waiting: list[RankRecord]) -> list[RankRecord]:
    """The ranks to blame, all of one kind; [] where nothing tells which."""
    silent = [record for record in lost if record.activity is None]
    hanging = [record for record in lost if record.activity]
    if silent and not any(map(_is_stalled, waiting)):
        return silent  # their peers noticed at once: they ended
    return hanging or silent or _late(waiting)


def _late(waiting: list[RankRecord]) -> list[RankRecord]:
    """Ranks that came to a collective when the others had given it up, or that are at an earlier step."""
    known = [record for record in waiting if record.activity]
    late = [record for record in known if not _is_stalled(record)]
    if late and len(late) < len(known):
        return late
    newest = max((record.activity.step for record in known if record.activity), default=0)
    return [record for record in known if record.activity and record.activity.step < newest]


def _waits_on_device(record: RankRecord) -> bool:
    """Return whether the rank's device is in a collective, whatever the host does meanwhile: on a GPU
    that runs ahead, until the device takes no more work from it."""
    return any(numbers.started >= 0 and numbers.in_progress for numbers in _collectives(record))


def _absent(waiting: list[RankRecord]) -> list[RankRecord]:
    """Ranks that are in no collective while others are, and have come less far in a group of these. On a
    GPU all hosts wait alike, for the results of a step."""
    known = [record for record in waiting if record.activity and record.activity.collectives]
    absent = [record for record in known if not any(c.in_progress for c in _collectives(record))]
    others = [record for record in known if record not in absent]
    return [record for record in absent if _missed(record, others)]


def _missed(record: RankRecord, others: list[RankRecord]) -> tuple[str, int, int] | None:
    """A group in which others wait for this rank, its last collective there, and theirs."""
    own = {numbers.group: numbers.begun for numbers in _collectives(record)}
    for other in others:
        for numbers in _collectives(other):
            if numbers.in_progress and own.get(numbers.group, numbers.begun) < numbers.begun:
                return numbers.group, own[numbers.group], numbers.begun
    return None


def _collectives(record: RankRecord) -> tuple[LastCollectives, ...]:
    return record.activity.collectives if record.activity else ()


def _witness(others: list[RankRecord]) -> RankRecord | None:
    """The rank that tells what it waited for; one that waited long, if any."""
    return next((record for record in others if _is_stalled(record)), others[0] if others else None)


def _is_stalled(record: RankRecord) -> bool:
    return record.activity is not None and record.activity.stalled


def _of_a_hang(suspects: list[RankRecord], world_size: int, missed: str) -> str:
    first = suspects[0]
    who = f"rank {_numbers(suspects)} of {world_size} on {first.host}"
    absent = f"{who} did not arrive at the {missed}" if missed else who
    if first.stopped:
        pids = ", ".join(str(record.stopped) for record in suspects)
        return f"{absent}: stopped by SIGSTOP (pid {pids}, state T)"
    if _reaches_slurm(first) is False:
        return f"{absent}: its node is cut off, and does not reach Slurm either"
    if first.status == "failed" and not _is_stalled(first):
        return f"{who} arrived too late at the {missed}"  # it was stopped, and then continued
    where = f"was {first.activity.where}" if first.activity else "does not respond"
    return f"{absent} and {where}" if missed else f"{who} {where}"


def _of_an_absence(absent: list[RankRecord], waiting: list[RankRecord], world_size: int) -> str:
    first = absent[0]
    missed = _missed(first, [record for record in waiting if record not in absent])
    assert missed
    group, own, theirs = missed
    return (
        f"rank {_numbers(absent)} of {world_size} on {first.host} has not started collective {theirs} of"
        f" the process group {group}, in which others wait (its last one is {own})"
    )


def _numbers(records: list[RankRecord]) -> str:
    return ", ".join(str(record.rank) for record in records)


# --- stopped processes ----------------------------------------------------------------------------

ASK_SEC = 20.0


class StoppedRanks:
    """Asks the nodes of ranks that others wait for whether a process is stopped (SIGSTOP), once in each
    stall, in a thread.

    Such a rank can tell nothing itself. Slurm continues it as soon as another rank has given up, so that
    by then it looks like one that only waited.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._waiting, self._is_asked = 0, False  # ranks at the last look; in this stall

    def look(self, stalled: list[RankRecord]) -> None:
        """Ask, if a rank has been waiting for longer than its limit. The launcher calls it often.
        stalled: records of the ranks that are stalled now."""
        # An error of a GPU, which is recorded before a save is drained, waits for nobody.
        waiting = sum(r.status == "failed" and r.activity is not None for r in stalled)
        self._is_asked = self._is_asked and waiting > 0
        # Once no more of them come: the nodes of the others alone are asked.
        if 0 < waiting == self._waiting and not self._is_asked:
            self._is_asked = True
            self._ask(stalled)
        self._waiting = waiting

    def _ask(self, records: list[RankRecord]) -> None:
        silent = set(range(self._spec.layout.world_size)) - {record.rank for record in records}
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
