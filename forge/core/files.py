"""Atomic writes, canonical JSON, digests, disk errors as messages, and names of files from elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import blake3
from pydantic import AfterValidator

from forge.core.errors import DataError, DiskFull, ForgeError, UnfitError
from forge.core.process import boot_id, user_name

# blake3 is as fast as the disk: 7 GB/s on a core, sha256 1.9.
DIGEST = "blake3"
# Files are read, not memory-mapped: as fast, and a disk error raises OSError instead of SIGBUS.
READ_BYTES = 2**20
KERNEL = ("/proc/", "/sys/")  # where no directory can be made: there is "No such file or directory"
# A sparse file of terabytes costs nothing to hand out, and JSON takes 20 times its size in memory. The
# first limit is for lists of files and tensors, the second for everything else.
MAX_JSON_BYTES, MAX_SMALL_JSON_BYTES = 2**30, 2**26
# File systems whose clients all see the server's inode numbers and times.
SHARED = frozenset({"beegfs", "ceph", "gpfs", "lustre", "nfs", "nfs4", "panfs", "wekafs"})
MAX_NAME_BYTES = 255  # on Linux (man 7 path_resolution)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def plain_name(name: str) -> str:
    """The name, which a file from elsewhere gives to a file of a known directory. Raises ValueError for
    one that could lead out of that directory, or that would write into a terminal."""
    is_plain = name not in ("", ".", "..") and "/" not in name and not _CONTROL.search(name)
    if not is_plain or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise ValueError(f"{name!r:.100} is not the plain name of a file")
    return name


def relative_path(path: str) -> str:
    """The path, which a file from elsewhere gives to a file below a known directory: plain names with a
    slash between them. Raises ValueError for any other."""
    for name in path.split("/"):
        try:
            plain_name(name)
        except ValueError:
            raise ValueError(f"{path!r:.100} is not a path below the directory") from None
    return path


# Types of names in manifests, seals and lists.
PlainName = Annotated[str, AfterValidator(plain_name)]
RelativePath = Annotated[str, AfterValidator(relative_path)]


def is_file_below(path: Path, folder: Path) -> bool:
    """Return whether this is a regular file below the directory once links are followed: a link in a
    directory from elsewhere may lead anywhere."""
    real, below = os.path.realpath(path), os.path.realpath(folder)
    return real.startswith(below + os.sep) and Path(real).is_file()


def open_regular(path: Path, most: int | None = None) -> IO[bytes]:
    """A file of a directory from elsewhere, for reading. most: bytes that the reader has memory for.

    Raises DataError for a larger one, and for a pipe or a device, of which a reader sees no end; OSError.
    """
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        what = "is a pipe, a socket or a device, not a regular file"
    elif most is not None and status.st_size > most:
        what = f"has {status.st_size} bytes, at most {most} are read"
    else:
        return open(path, "rb")
    raise DataError(f"{path} {what}", cause="Forge did not write it", fix="remove it")


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


def identity_of(paths: Iterable[Path]) -> str:
    """Names these files as they are now: two processes get the same text only where they read the same
    files, also on two hosts, and not where each has a copy on a disk of its own.

    A file system that is not known to be shared is that of this host alone.
    """
    shared, here, hasher = _shared_file_systems(), boot_id(), blake3.blake3()
    for path in paths:
        stat = path.stat()
        storage = shared.get(stat.st_dev, f"{here} {stat.st_dev}")
        facts = (storage, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        hasher.update(canonical(facts))
    return str(hasher.hexdigest())


def _shared_file_systems() -> dict[int, str]:
    """Type and source of each mounted network file system by its device (man 5 proc, mountinfo)."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        kind, source = line.partition(" - ")[2].split()[:2]
        if kind in SHARED:
            major, minor = line.split()[2].split(":")
            found[os.makedev(int(major), int(minor))] = f"{kind} {source}"
    return found


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
            errno.ELOOP: "a symbolic link is there, or links lead back to themselves: remove the link",
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
        if str(err.filename or path).startswith(KERNEL):
            fixes[errno.ENOENT] = "these files are the kernel's: choose another directory"
        if err.errno not in fixes:
            raise
        is_full = err.errno in (errno.ENOSPC, errno.EDQUOT)
        is_denied = err.errno in (errno.EACCES, errno.EPERM)
        raise (DiskFull if is_full else UnfitError)(
            f"cannot {action} {err.filename or path}: {err.strerror}",
            cause=_whose(Path(err.filename or path)) if is_denied else "",
            fix=fixes[err.errno],
        ) from err


def _whose(path: Path) -> str:
    """Owner and mode of what denies access to a path: itself, or the nearest directory that exists; ""
    where this user may not see even that."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            status = place.stat()
            if os.access(place, os.R_OK | os.W_OK) and place != path:
                return ""  # another reason, such as a policy of the kernel
            owner, mode = user_name(status.st_uid), stat.filemode(status.st_mode)
            return f"{place} belongs to user {owner} ({mode}), and you are {user_name(os.getuid())}"
    return ""


@contextmanager
def atomic_open(
    path: Path,
    mode: str = "wb",
    *,
    sync: bool = True,
    sync_folder: bool = True,
    private: bool = False,
) -> Iterator[IO[Any]]:
    """A file that appears under its name only when it is complete and on disk.

    Written under a temporary name in the same directory, fsynced, renamed, the directory fsynced.
    sync: False where the file need not survive a power failure. sync_folder: False where the caller
    fsyncs the directory once for many files. private: only its owner may read it. Raises UnfitError on a
    full or read-only disk; the old file is then unchanged.
    """
    encoding = None if "b" in mode else "utf-8"
    with disk_trouble(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not by tempfile: its mode 0600 would exclude the group, `open` gives the mode of any new file.
        temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
        try:
            opener = open_private if private else None
            with open(temporary, mode.replace("w", "x"), encoding=encoding, opener=opener) as file:
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


def open_private(path: str, flags: int) -> int:
    """An opener of `open` for a new file that its owner alone may read: it may hold a password."""
    return os.open(path, flags, 0o600)


def private_folder(path: Path, fix: str) -> Path:
    """The directory `path`, which only this user can read and change; made with mode 0700 where it is
    missing, below directories that exist. UnfitError, with this fix, for anything else that is there."""
    with disk_trouble(path):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        wrong = _why_not_private(path)
    if wrong:
        cause = "another user of this host made it, or it was changed by hand"
        raise UnfitError(f"{path} {wrong}", cause=cause, fix=fix)
    return path


def _why_not_private(path: Path) -> str:
    """Why others could read or change what is in a directory; "" where they cannot. Raises OSError."""
    status = os.lstat(path)  # not stat, which would follow a planted link
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder (a planted link?)"
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    return f"has mode {mode:o}, which lets others in" if mode & 0o077 else ""


def is_private(folder: Path) -> bool:
    """Return whether the directory is in a `private_root` of this user, on a disk of this host, and
    neither it nor one between them can be changed by others."""
    above = [folder, *folder.parents]
    names = [path.name for path in above]
    if (root := _private_name()) not in names:
        return False
    wrong = [_why_not_private(path) for path in above[: names.index(root) + 1]]
    return not any(wrong) and folder.stat().st_dev not in _shared_file_systems()


def _private_name() -> str:
    return f"forge-{os.getuid()}"


def private_root(base: Path) -> Path:
    """The user's private directory (mode 0700) in `base`. UnfitError where another user made it."""
    with disk_trouble(base):
        base.mkdir(parents=True, exist_ok=True)
    return private_folder(
        base / _private_name(),
        fix="remove it, or choose another directory: stage.folder in machine.yaml or TMPDIR on nodes,"
        " `data` for archives",
    )


def fsync_folder(path: Path) -> None:
    """Make renames in the directory `path` survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write `value` as sorted, indented JSON, atomically. Raises ValueError for NaN and infinity.

    private: as for `atomic_open`.
    """
    text = json_text(value)
    with atomic_open(path, "w", private=private) as file:
        file.write(text)


def json_text(value: Any) -> str:
    """Sorted, indented JSON in ASCII, as `write_json` writes it. Raises ValueError as that does."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def read_object(path: Path, *keys: str, most: int = MAX_SMALL_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file. DataError where it is missing, no object, lacks one of the keys, or has
    more than `most` bytes."""
    return as_object(read_json(path, most), path, *keys)


def as_object(value: Any, path: Path, *keys: str) -> dict[str, Any]:
    """The value of a JSON file as the object that it must be. DataError as `read_object`."""
    missing = [key for key in keys if key not in value] if isinstance(value, dict) else None
    if missing or not isinstance(value, dict):
        raise DataError(
            f"{path} has no {', '.join(missing)}" if missing else f"{path} is not a JSON object",
            cause="cut short by a full disk or edited by hand",
            fix="restore it; if a step of Forge writes it, remove it and run that step again",
        )
    return value


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file; DataError where it is missing, no JSON, or has more than `most` bytes."""
    try:
        with disk_trouble(path, "read"), open_regular(path, most) as file:
            data = file.read()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist", fix="run the step that writes it first") from None
    return parse_json(data, path)


def parse_json(data: bytes, path: Path) -> Any:
    """The value in the bytes of a JSON file. path: of the file, for DataError where they are no JSON."""
    try:
        return json.loads(data.decode())
    # ValueError: JSONDecodeError, UnicodeDecodeError, and integers of more than 4300 digits.
    except (ValueError, RecursionError) as err:
        raise DataError(
            f"{path} is not JSON: {err}",
            cause="cut short by a full disk or edited by hand",
            fix="restore it; if a step of Forge writes it, remove it and run that step again",
        ) from None


def read_object_or_empty(path: Path, most: int = MAX_SMALL_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file; {} where it is missing, being replaced, unreadable, or has more than
    `most` bytes. For output that must not fail because of one file."""
    try:
        value = read_json(path, most)
    except (ForgeError, OSError):
        return {}
    return value if isinstance(value, dict) else {}


def inodes_in(folder: Path) -> dict[str, int]:
    """The inode of each file in a directory, by name; {} for a directory that cannot be read now.

    One read of the directory, whatever the number of files. A file has another inode than the one that
    it has replaced.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}
    return {}


T = TypeVar("T")


def utf8_bytes(text: str) -> int:
    """The length of a text in UTF-8. Most texts are ASCII: no copy is made of them."""
    return len(text) if text.isascii() else len(text.encode())


def grouped(items: Iterable[T], size: Callable[[T], int], limit: float) -> Iterator[list[T]]:
    """The items in their order, in groups of at most `limit`; a larger item is a group of its own."""
    group: list[T] = []
    total = 0
    for item in items:
        item_size = size(item)
        if group and total + item_size > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += item_size
    if group:
        yield group
