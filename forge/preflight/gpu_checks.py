"""Checks of a node's GPUs before they train, by what NVML shows: memory, clocks, links, other users."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import psutil

from forge.core.errors import UnfitError
from forge.core.records import Check
from forge.hosts.gpus import SLOWDOWNS, WARM, Gpu, GpuLost, visible_gpus
from forge.slurm import slurm

# Clocks and memory change within a moment: a trouble is what all readings have.
READINGS, PAUSE_SEC = 3, 0.3
# A program that computes has a CUDA context, of some hundred MiB; services of a site have less.
IN_USE_MIB = 256
# About the node, whether or not all nodes have it (`compare_nodes.OWN`).
ABOUT_THE_NODE = ("gpu memory", "gpu clocks", "gpu in use")


def gpu_checks() -> Iterator[Check]:
    """The checks of the GPUs that this process may use; none without GPUs, or without NVML."""
    try:
        with visible_gpus() as gpus:
            if gpus:
                yield from _checks(gpus)
    except UnfitError as err:
        yield Check("gpu memory", "warn", err.what, err.fix)
    except GpuLost as err:
        fix = "leave this node out, or have it rebooted"
        cause = "it has fallen off the bus, or needs a reset (see dmesg for Xid)"
        yield Check("gpu memory", "fail", str(err), fix, cause)


def _checks(gpus: Sequence[Gpu]) -> Iterator[Check]:
    before = {gpu: gpu.uncorrected_errors or 0 for gpu in gpus}
    lasting = _lasting(gpus)
    yield _memory(before)
    yield _clocks({gpu: reasons for gpu, (reasons, _) in lasting.items()})
    yield _links(gpus)
    yield _in_use({gpu: used for gpu, (_, used) in lasting.items()})


def _lasting(gpus: Sequence[Gpu]) -> dict[Gpu, tuple[int, int]]:
    """Values that all readings of each GPU share: bits of why its clocks are low, and MiB in use."""
    lasting = {gpu: (gpu.clock_reasons, gpu.used_mib or 0) for gpu in gpus}
    for _ in range(READINGS - 1):
        time.sleep(PAUSE_SEC)
        for gpu, (reasons, used) in lasting.items():
            lasting[gpu] = (reasons & gpu.clock_reasons, min(used, gpu.used_mib or 0))
    return lasting


def _memory(before: Mapping[Gpu, int]) -> Check:
    """Errors since the driver was loaded are no trouble by themselves: since A100, ECC takes the row out
    of use. before: how many there were a moment ago."""
    troubles, past = [], []
    for gpu, old in before.items():
        waits, failed = gpu.remapping
        errors = gpu.uncorrected_errors or 0
        said = f"GPU {gpu.number} has {errors} uncorrected ECC errors"
        troubles += [f"{said}, {errors - old} of them now"] if errors > old else []
        troubles += [f"GPU {gpu.number} could not remap a row"] if failed else []
        troubles += [f"GPU {gpu.number} has rows to remap"] if waits else []
        past += [said] if errors else []
    if not troubles and not past:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in before))
        return Check("gpu memory", "ok", f"no uncorrected error on {len(before)} GPUs ({names})")
    return Check(
        "gpu memory",
        "fail" if troubles else "warn",
        "; ".join(troubles or past),
        "leave this node out; an administrator resets the GPU (nvidia-smi -r), or has it replaced",
        cause="memory cells have failed: a job there may end with a CUDA error at any time",
    )


def _clocks(reasons: Mapping[Gpu, int]) -> Check:
    """Not the power limit: a GPU that works reaches it, and one that is idle does not."""
    slow, warm = _named_reasons(reasons, SLOWDOWNS), _named_reasons(reasons, WARM)
    if not slow and not warm:
        return Check("gpu clocks", "ok", f"no slowdown of {len(reasons)} GPUs")
    return Check(
        "gpu clocks",
        "fail" if slow else "warn",
        "; ".join(slow or warm),
        "leave this node out; see nvidia-smi -q -d PERFORMANCE,TEMPERATURE there",
        cause="its cooling or power supply has failed: all ranks would wait for this GPU",
    )


def _named_reasons(reasons: Mapping[Gpu, int], names: Mapping[int, str]) -> list[str]:
    """The GPUs with one of these reasons; of several the last, which says most."""
    known = {
        gpu: [name for bit, name in names.items() if bits & bit] for gpu, bits in reasons.items()
    }
    return [f"GPU {gpu.number}: {of_gpu[-1]}" for gpu, of_gpu in known.items() if of_gpu]


def _links(gpus: Sequence[Gpu]) -> Check:
    """Only the width. Idle links fall to a lower generation to save power (man nvidia-smi, "PCIe
    Generation"), and so may their width on some: the copy that ranks measure tells more."""
    widths = {gpu.number: gpu.link_width for gpu in gpus}
    narrow = [
        f"GPU {n}: {width[0]} of {width[1]} lanes"
        for n, width in widths.items()
        if width and width[0] < width[1]
    ]
    if not narrow:
        return Check("gpu links", "ok", f"PCIe links of {len(gpus)} GPUs have all lanes")
    fix = "see `host copy` among the checks of the ranks; leave this node out where it is low"
    cause = "a bad contact or riser; some GPUs also save power so while they are idle"
    return Check("gpu links", "warn", "; ".join(narrow), fix, cause)


def _in_use(used_mib: Mapping[Gpu, int]) -> Check:
    busy = [
        f"GPU {gpu.number}: {used:,} MiB in use{_by(gpu.pids)}"
        for gpu, used in used_mib.items()
        if used > IN_USE_MIB
    ]
    if not busy:
        return Check("gpu in use", "ok", f"{len(used_mib)} GPUs are free")
    return Check(
        "gpu in use",
        "fail" if slurm.this_job_id() else "warn",  # on one's own machine it may well be so
        "; ".join(busy),
        "end these processes, or leave this node out",
        cause="left over from another job, or of another user: it takes memory and time from training",
    )


def _by(pids: Sequence[int]) -> str:
    """` by pid 17 (python3 of anna)`; "" where NVML shows no process, as in containers."""
    return f" by {', '.join(map(_named, pids))}" if pids else ""


def _named(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"pid {pid} ({process.name()} of {process.username()})"
    except (psutil.Error, KeyError):  # of another container, or it has just ended
        return f"pid {pid}"
