"""Atomic writes, canonical JSON, digests, and disk errors as messages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import blake3

from forge.core.errors import DataError, DiskFull, UnfitError

# blake3 is as fast as the disk: 7 GB/s on a core, sha256 1.9.
DIGEST = "blake3"
# Files are read, not memory-mapped: as fast, and a disk error raises OSError instead of SIGBUS.
READ_BYTES = 2**20


def digest_bytes(data: bytes) -> str:
    """blake3 of the bytes as 64 hex digits."""
    return blake3.blake3(data).hexdigest()


def digest_file(path: Path, *, threads: int = 1) -> str:
    """blake3 of a file as 64 hex digits, on `threads` cores. Raises OSError."""
    hasher = blake3.blake3(max_threads=threads)
    update_from_file(hasher, path, threads)
    return hasher.hexdigest()


def update_from_file(hasher: blake3.blake3, path: Path, threads: int = 1) -> None:
    """Update a hasher with all bytes of a file. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        # Clearing a larger buffer would take longer than reading a small file.
        size = min(READ_BYTES * threads, os.fstat(file.fileno()).st_size + 1)
        buffer = memoryview(bytearray(size))
        while length := file.readinto(buffer):
            hasher.update(buffer[:length])


def canonical(value: Any) -> bytes:
    """Canonical JSON (sorted keys, no blanks, no NaN): equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def short_id(value: Any) -> str:
    """The first 12 hex digits of the digest of `value`, as in the directory names of artifacts."""
    return digest_bytes(canonical(value))[:12]


@contextmanager
def disk_trouble(path: Path, action: str = "write") -> Iterator[None]:
    """Turn an OSError of a disk (full, read-only, failing, no permission, …) into an UnfitError.

    action: `write`, `read` or `read or write`, for the message.
    """
    try:
        yield
    except OSError as err:
        import errno

        fixes = {
            errno.ENOSPC: "free space there, or set `results`, `data` or stage.folder to another disk",
            errno.EDQUOT: "your quota there is used up: free space or ask for more",
            errno.EROFS: "the file system is read-only: choose another directory",
            **dict.fromkeys(
                (errno.EACCES, errno.EPERM),
                f"you may not {action} there: check owner and mode, or choose another directory",
            ),
            errno.EISDIR: "a directory is where a file is expected: move it away",
            errno.ENAMETOOLONG: "a file name has at most 255 bytes: choose a shorter one",
            errno.ELOOP: "symbolic links lead back to themselves: remove the link",
            **dict.fromkeys(
                (errno.ENOTDIR, errno.EEXIST),
                "a file is where a directory is expected: choose another directory",
            ),
            errno.EFBIG: "this file system does not allow a file of this size: choose another directory",
            **dict.fromkeys(
                (
                    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ESHUTDOWN),
                    *(errno.ETIMEDOUT, errno.ENOTCONN, errno.ENOLCK),
                ),
                "the disk or network file system reports an error: use another one",
            ),
        }
        if err.errno not in fixes:
            raise
        is_full = err.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (DiskFull if is_full else UnfitError)(
            f"cannot {action} {err.filename or path}: {err.strerror}", fix=fixes[err.errno]
        ) from err


@contextmanager
def atomic_open(
    path: Path, mode: str = "wb", *, sync: bool = True, sync_folder: bool = True
) -> Iterator[IO[Any]]:
    """A file that appears under its name only when it is complete and on disk.

    Written under a temporary name in the same directory, fsynced, renamed, the directory fsynced.
    sync: False where the file need not survive a power failure. sync_folder: False where the caller
    fsyncs the directory once for many files. Raises UnfitError on a full or read-only disk; the old
    file is then unchanged.
    """
    encoding = None if "b" in mode else "utf-8"
    with disk_trouble(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not by tempfile: its mode 0600 would exclude the group, `open` gives the mode of any new file.
        temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
        try:
            with open(temporary, mode.replace("w", "x"), encoding=encoding) as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if sync and sync_folder:
            fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Make renames in the directory `path` survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as sorted, indented JSON, atomically. Raises ValueError for NaN and infinity."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with atomic_open(path, "w") as file:
        file.write(text)


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """The object in a JSON file. DataError where it is missing, no object, or lacks one of the keys."""
    value = read_json(path)
    missing = [key for key in keys if key not in value] if isinstance(value, dict) else None
    if missing or not isinstance(value, dict):
        raise DataError(
            f"{path} has no {', '.join(missing)}" if missing else f"{path} is not a JSON object",
            cause="cut short by a full disk or edited by hand",
            fix="restore it; if a step of Forge writes it, remove it and run that step again",
        )
    return value


def read_json(path: Path) -> Any:
    """The value in a JSON file; DataError where it is missing or not JSON."""
    try:
        with disk_trouble(path, "read"):
            return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist", fix="run the step that writes it first") from None
    # ValueError: JSONDecodeError, UnicodeDecodeError, and integers of more than 4300 digits.
    except (ValueError, RecursionError) as err:
        raise DataError(
            f"{path} is not JSON: {err}",
            cause="cut short by a full disk or edited by hand",
            fix="restore it; if a step of Forge writes it, remove it and run that step again",
        ) from None


def read_object_or_empty(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where it is missing, being replaced, or unreadable. For output that
    must not fail because of one file."""
    try:
        value = read_json(path)
    except (DataError, OSError):
        return {}
    return value if isinstance(value, dict) else {}
