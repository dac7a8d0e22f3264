"""What can go wrong at a named point of forge/core/failpoints.py, and the hook that makes it go wrong."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STRIKES = "strikes.jsonl"  # in the run's folder: each fault as it struck, and what was there then


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong on one rank, the `at`-th time it comes by a point."""

    kind: str  # a key of KINDS
    point: str
    at: int = 1
    step: int | None = None  # count only what concerns the checkpoint of this step
    rank: int = 0
    target: str = ""  # the file to damage, where the point does not name one
    after_sec: float = 0.0  # for signals: they come so much later

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Injector:
    """The hook of one rank: lets its faults strike, once each."""

    def __init__(self, faults: list[Fault], rank: int, run: Path) -> None:
        self._waiting = [fault for fault in faults if fault.rank == rank]
        self._passed = dict.fromkeys(self._waiting, 0)
        self._run = run
        self._lock = threading.Lock()  # a save has threads of its own, and each file has one

    def __call__(self, point: str, path: Path | None) -> None:
        for fault in self._due(point, path):
            self._note(fault)
            KINDS[fault.kind](fault, Path(fault.target) if fault.target else path)

    def _due(self, point: str, path: Path | None) -> list[Fault]:
        due = []
        with self._lock:
            for fault in list(self._waiting):
                if fault.point == point and (fault.step is None or _concerns(path, fault.step)):
                    self._passed[fault] += 1
                    if self._passed[fault] == fault.at:
                        self._waiting.remove(fault)
                        due.append(fault)
        return due

    def _note(self, fault: Fault) -> None:
        facts = {**fault.to_json(), "newest": newest_step(self._run / "checkpoints")}
        with open(self._run / STRIKES, "a") as file:
            file.write(json.dumps(facts) + "\n")


def _concerns(path: Path | None, step: int) -> bool:
    return path is not None and any(part.endswith(f"step-{step:08d}") for part in path.parts[-2:])


def newest_step(checkpoints: Path) -> int:
    """The newest step that has its final name and its manifest: committed. 0 for none."""
    found = checkpoints.glob("step-*/checkpoint.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)


# --- the faults -----------------------------------------------------------------------------------


def _kill(_fault: Fault, _path: Path | None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _cut_power(_fault: Fault, _path: Path | None) -> None:
    """All ranks and the command that started them, which are one process group here."""
    os.killpg(0, signal.SIGKILL)


def _send(number: signal.Signals) -> Callable[[Fault, Path | None], None]:
    def strike(fault: Fault, _path: Path | None) -> None:
        if fault.after_sec:
            later = threading.Timer(fault.after_sec, os.kill, (os.getpid(), number))
            later.daemon = True
            later.start()
        else:
            os.kill(os.getpid(), number)

    return strike


def _hang(_fault: Fault, _path: Path | None) -> None:
    """A read that never returns. The process lives, and answers signals."""
    threading.Event().wait()


def _terminate_all(_fault: Fault, _path: Path | None) -> None:
    """SIGTERM to every rank and to the command that started them."""
    os.killpg(0, signal.SIGTERM)


def _fail(number: int) -> Callable[[Fault, Path | None], None]:
    def strike(_fault: Fault, path: Path | None) -> None:
        raise OSError(number, os.strerror(number), str(path))

    return strike


def _fail_gpu(what: str) -> Callable[[Fault, Path | None], None]:
    """The error that torch raises at the call after a kernel has failed."""

    def strike(_fault: Fault, _path: Path | None) -> None:
        raise RuntimeError(
            f"CUDA error: {what}\nCUDA kernel errors might be asynchronously reported at some other"
            " API call, so the stacktrace below might be incorrect."
        )

    return strike


def _truncate(_fault: Fault, path: Path | None) -> None:
    target = _file(path)
    os.truncate(target, target.stat().st_size // 2)


def _empty(_fault: Fault, path: Path | None) -> None:
    os.truncate(_file(path), 0)


def _flip(_fault: Fault, path: Path | None) -> None:
    """Change one bit in the middle."""
    target = _file(path)
    with open(target, "r+b") as file:
        file.seek(target.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def _mix(_fault: Fault, path: Path | None) -> None:
    """A file of tensors of another step in the place of this one's."""
    target = _file(path)
    others = target.parent.parent.glob(f"step-*/{target.name}")
    other = next(file for file in sorted(others) if file.parent != target.parent)
    shutil.copyfile(other, target)


def _fill_disk(_fault: Fault, path: Path | None) -> None:
    """Leave no byte on the file system of `path`, a new file."""
    assert path
    with open(path, "wb", buffering=0) as file:
        for size in (2**16, 1):  # and the last page
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def _file(path: Path | None) -> Path:
    """The file to damage: the one of the point, or a file of tensors in its folder."""
    assert path
    return next(iter(sorted(path.glob("*.distcp")))) if path.is_dir() else path


KINDS: dict[str, Callable[[Fault, Path | None], None]] = {
    "kill": _kill,
    "power": _cut_power,
    "term": _send(signal.SIGTERM),
    "term-all": _terminate_all,
    "stop": _send(signal.SIGSTOP),
    "hang": _hang,
    "enospc": _fail(errno.ENOSPC),
    "eio": _fail(errno.EIO),
    "ecc": _fail_gpu("uncorrectable ECC error encountered"),
    "illegal": _fail_gpu("an illegal memory access was encountered"),
    "assert": _fail_gpu("device-side assert triggered"),
    "truncate": _truncate,
    "empty": _empty,
    "flip": _flip,
    "mix": _mix,
    "fill": _fill_disk,
}
