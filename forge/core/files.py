"""Small files that others rely on: canonical JSON, digests, atomic writes, disk errors."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import blake3

from forge.core.errors import DataError, UnfitError

# blake3 keeps up with the disk (7 GB/s a core against 1.9 of sha256).
DIGEST = "blake3"
# Read, not memory-mapped: as fast, and a disk error is an OSError instead of the signal SIGBUS.
READ_BYTES = 2**20


def digest_bytes(data: bytes) -> str:
    """blake3 of the bytes as 64 hex digits."""
    return blake3.blake3(data).hexdigest()


def digest_file(path: Path, *, threads: int = 1) -> str:
    """blake3 of a file as 64 hex digits, on `threads` cores. Raises OSError."""
    hasher = blake3.blake3(max_threads=threads)
    buffer = memoryview(bytearray(READ_BYTES * threads))
    with open(path, "rb", buffering=0) as file:
        while length := file.readinto(buffer):
            hasher.update(buffer[:length])
    return hasher.hexdigest()


def canonical(value: Any) -> bytes:
    """The one JSON text of a value (sorted keys, no blanks, no NaN): equal values, equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def short_id(value: Any) -> str:
    """The first 12 hex digits of the digest of `value`: names an artefact folder."""
    return digest_bytes(canonical(value))[:12]


@contextmanager
def disk_trouble(path: Path, action: str = "write") -> Iterator[None]:
    """Turn a full, read-only, failing or forbidden disk, or a file in the way, into an UnfitError.

    action: `write`, `read` or `read or write`, whatever may be what failed.
    """
    try:
        yield
    except OSError as err:
        import errno

        fixes = {
            errno.ENOSPC: "free space there, or point `results`, `data` or the stage folder elsewhere",
            errno.EDQUOT: "your quota is used up there: free space or ask for more",
            errno.EROFS: "the file system is read-only: choose another folder",
            **dict.fromkeys(
                (errno.EACCES, errno.EPERM),
                f"you may not {action} there: check owner and mode, or choose another folder",
            ),
            errno.EISDIR: "a directory is where a file is expected: move it away",
            errno.ENAMETOOLONG: "one name in a path has at most 255 bytes: choose shorter ones",
            errno.ELOOP: "symbolic links lead back to themselves: remove the link",
            errno.ENOTDIR: "a file is in the way of a folder: choose another folder",
            errno.EEXIST: "a file is in the way of a folder: choose another folder",
            errno.EFBIG: "it is larger than this file system allows: choose another folder",
            **dict.fromkeys(
                (
                    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ESHUTDOWN),
                    *(errno.ETIMEDOUT, errno.ENOTCONN, errno.ENOLCK),
                ),
                "the disk or the network file system reports an error: use another one",
            ),
        }
        if err.errno not in fixes:
            raise
        raise UnfitError(
            f"cannot {action} {err.filename or path}: {err.strerror}", fix=fixes[err.errno]
        ) from err


@contextmanager
def atomic_open(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file that appears under its name only when it is whole and on disk.

    Written under a temporary name in the same folder, fsynced, renamed, the folder fsynced.
    Raises UnfitError on a full or read-only disk; the old file is then untouched.
    """
    with disk_trouble(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(fd, mode, encoding=None if "b" in mode else "utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o666 & ~_umask())  # mkstemp's 0600 would hide it from the group
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


def _umask() -> int:
    """Of this process. Read (man 5 proc), since os.umask can only be asked by changing it, which other
    threads would see."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("\nUmask:")[2].split()[0], 8)


def fsync_folder(path: Path) -> None:
    """Make renames in `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as sorted, indented JSON, atomically. No NaN or infinity."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with atomic_open(path, "w") as file:
        file.write(text)


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """As read_json, for a file that must hold an object with these keys. Raises DataError."""
    value = read_json(path)
    missing = [key for key in keys if key not in value] if isinstance(value, dict) else None
    if missing or not isinstance(value, dict):
        raise DataError(
            f"{path} has no {', '.join(missing)}" if missing else f"{path} is no JSON object",
            cause="cut short by a full disk or edited by hand",
            fix="remove it and run the step that writes it again",
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
            fix="remove it and run the step that writes it again",
        ) from None


def read_object_or_empty(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where it is missing, being replaced, or unreadable: a page for
    people must not fail because of it."""
    try:
        value = read_json(path)
    except (DataError, OSError):
        return {}
    return value if isinstance(value, dict) else {}
