"""The directory that stands for a run's on a node that does not see it (`stage.results`): calls.

Ranks of the node read and write there, under the names that files have in the run's directory. The
launcher says what it has of them and gets what has changed since, so that an answer that is lost on its
way loses nothing. No torch.
"""

from __future__ import annotations

import base64
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.core.files import disk_trouble, private_root, relative_path
from forge.core.paths import RunPaths
from forge.core.process import node_local_folder

CHECKPOINTS = "checkpoints/"
GROWING = (".log", ".jsonl")  # of files that are only appended to
PIECE_BYTES = 2**20  # of a file in one response, so that no response is long on its way
WHOLE_BYTES = 8 * 2**20  # a larger file outside of checkpoints stays on the node

Sign = tuple[int, int, int]  # inode, time of last change and size of a file


@dataclass(frozen=True)
class MirrorNews:
    """Changes since the launcher was told last. Contents in base64."""

    whole: dict[str, tuple[Sign, str]] = field(default_factory=dict)
    grown: dict[str, str] = field(default_factory=dict)  # at most PIECE_BYTES of each file
    parts: dict[str, Sign] = field(default_factory=dict)  # of checkpoints, to be read in pieces
    gone: list[str] = field(default_factory=list)
    given: dict[str, Sign] = field(default_factory=dict)  # as written by this call


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decoded(text: str) -> bytes:
    """Raises ValueError for text that was cut, or is no base64."""
    return base64.b64decode(text, validate=True)


def mirror_folder(base: str | None, job: str, name: str) -> Path:
    """The directory that stands for a run's. base: stage.folder. name: of the run, for its files."""
    folder = private_root(Path(base or node_local_folder())) / f"job-{job}"
    with disk_trouble(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"run-{name}"


def link_mirror(base: str | None, job: str, name: str, run: Path) -> Path:
    """The same path on the node that sees the run's directory, as a link to it: all ranks are started
    with one path."""
    link = mirror_folder(base, job, name)
    with disk_trouble(link):
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.symlink_to(run.absolute())
    return link


def begin_mirror(*, base: str | None, job: str, name: str, checkpoint: str) -> str:
    """Make the directory anew; its path. checkpoint: to resume from, on this disk, which is moved there,
    and `latest` points to it; "" for none."""
    folder = mirror_folder(base, job, name)
    with disk_trouble(folder):
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        paths = RunPaths(folder)
        for needed in (paths.checkpoints, paths.logs, paths.heartbeats, paths.monitor):
            needed.mkdir(parents=True)
        if checkpoint:
            Path(checkpoint).rename(paths.checkpoints / Path(checkpoint).name)
            paths.latest.symlink_to(Path(checkpoint).name)
    return str(folder)


def mirror_round(
    *,
    folder: str,
    launch: str,
    have: dict[str, Sign],
    sizes: dict[str, int],
    given: dict[str, str],
    drop: list[str],
    beats: list[str],
) -> MirrorNews:
    """Write what the launcher gives, and say what has changed.

    have: files as the launcher has them. sizes: its bytes of files that grow. given: contents in base64,
    by name. drop: what of checkpoints is not needed here any more. beats: heartbeats with names of the
    user's.
    """
    root = Path(folder)
    with disk_trouble(root):
        for name in drop:
            _remove(root / CHECKPOINTS / relative_path(name))
        written = {name: _write(root / relative_path(name), text) for name, text in given.items()}
    small = dict(_files(root, launch)) | {n: s for n in beats if (s := sign_of(root / n))}
    # Before parts of checkpoints are listed: where a rank says that it has saved, its part is among them.
    whole = {
        name: (sign, encoded(data))
        for name, sign in small.items()
        if not name.endswith(GROWING) and (have | written).get(name) != sign
        if sign[2] <= WHOLE_BYTES and (data := _content(root / name, 0, WHOLE_BYTES)) is not None
    }
    grown = {
        name: encoded(data)
        for name, sign in small.items()
        if name.endswith(GROWING) and sign[2] > sizes.get(name, 0)
        if (data := _content(root / name, sizes.get(name, 0), PIECE_BYTES))
    }
    parts = {name: sign for name, sign in _parts(root) if have.get(name) != sign}
    gone = [name for name in have if not os.path.lexists(root / name)]
    return MirrorNews(whole, grown, parts, gone, written)


def mirror_piece(*, folder: str, name: str, sign: Sign, offset: int) -> str:
    """At most PIECE_BYTES of a file from the offset on, in base64; "" where it is not the one that was
    listed any more."""
    path = Path(folder) / relative_path(name)
    data = _content(path, offset, PIECE_BYTES)
    return encoded(data) if data is not None and sign_of(path) == sign else ""


def _write(path: Path, text: str) -> Sign:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.given")
    temporary.write_bytes(decoded(text))
    temporary.replace(path)  # a rank that reads it meanwhile finds one or the other
    sign = sign_of(path)
    assert sign
    return sign


def _files(root: Path, launch: str) -> Iterator[tuple[str, Sign]]:
    """Files of this launch outside of checkpoints."""
    paths = RunPaths(root)
    folders = (paths.launches / launch, paths.heartbeats, paths.logs, paths.monitor)
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if not path.name.endswith(".given") and (sign := sign_of(path)):
                yield str(path.relative_to(root)), sign


def _parts(root: Path) -> Iterator[tuple[str, Sign]]:
    """Files in checkpoints, but for the one that the launcher has sent."""
    paths = RunPaths(root)
    sent = paths.latest.readlink().name if paths.latest.is_symlink() else None
    for top, folders, files in os.walk(paths.checkpoints):
        if Path(top) == paths.checkpoints and sent in folders:
            folders.remove(sent)
        for name in files:
            path = Path(top, name)
            if path != paths.checkpoints / (sent or "") and (sign := sign_of(path)):
                yield str(path.relative_to(root)), sign


def sign_of(path: Path) -> Sign | None:
    """The sign of a file; None for what is no regular file, such as a link, or is gone."""
    try:
        status = path.lstat()
        str(path).encode()  # a name that is no text cannot be told
    except (OSError, UnicodeEncodeError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _content(path: Path, offset: int, most: int) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # removed meanwhile
        return None
    try:
        return os.pread(fd, most, offset)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


CALLS: tuple[Callable[..., Any], ...] = (begin_mirror, mirror_round, mirror_piece)
