"""The stamp of a copy on a node's disk: the state of its files before their digests were verified.

Files that have not changed since, in the same boot of the node, need not be digested again: the kernel
sets ctime at every change. `forge stage` leaves one, and so do the ranks of a Slurm job: theirs names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from forge.core.files import (
    MAX_JSON_BYTES,
    is_file_below,
    is_private,
    read_object_or_empty,
    write_json,
)
from forge.core.paths import MANIFEST
from forge.core.process import boot_id, slurm_start
from forge.data.shards import FileSet


@dataclass(frozen=True)
class CopyStamp:
    """The state of the files now, and the Slurm job whose ranks verify them; "" where none does."""

    path: Path
    state: dict[str, Any]
    job: str

    @classmethod
    def of(cls, files: FileSet, job: str = "") -> Self:
        paths = {member.name: member.path for member in files.members}
        stats = {n: p.stat() for n, p in {**paths, MANIFEST: files.folder / MANIFEST}.items()}
        state = {
            "digest": files.digest,
            # After a power failure a file may have its size, but zeros as content.
            "boot": boot_id(),
            "files": {
                n: [s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns] for n, s in stats.items()
            },
        }
        return cls(files.folder / ".stamp.json", state, job)

    @classmethod
    def of_job(cls, files: FileSet, shared: Path) -> Self | None:
        """The stamp that ranks leave; None of files in the shared directory, of files that somebody else
        could change or that are elsewhere, and outside of a Slurm job."""
        job, folder = slurm_start()[0], files.folder
        if not job or folder.resolve() == shared.resolve() or not is_private(folder):
            return None
        paths = [folder / MANIFEST, *(member.path for member in files.members)]
        return cls.of(files, job) if all(is_file_below(p, folder) for p in paths) else None

    @property
    def is_there(self) -> bool:
        """Return whether the files have this state since they were verified: by ranks of this job, by
        anybody where none is named."""
        found = read_object_or_empty(self.path, MAX_JSON_BYTES)
        verified_by = found.pop("job", "")
        return found == self.state and self.job in ("", verified_by)

    def write(self) -> None:
        """Record that all digests are valid. Raises UnfitError."""
        write_json(self.path, {**self.state, "job": self.job} if self.job else self.state)
