"""Write into the directory of a run what a node sends that does not see it (`stage.results`).

What a node sends is data: only names that ranks of this node may write count, no link is followed, and a
file of a checkpoint that somebody else has written is not replaced.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forge.core.errors import DataError
from forge.core.files import disk_trouble, relative_path
from forge.plugins.mirror.mirror_on_node import CHECKPOINTS

Kind = Literal["grows", "whole", "part", ""]


@dataclass(frozen=True)
class RankFiles:
    """The files in the directory of a run that the ranks of one node may write."""

    launch: str  # id
    log_prefix: str
    ranks: Collection[int]
    parts: str  # regular expression of a file's path in checkpoints/; "" for none
    begun: bool = (
        False  # whether rank 0 makes the directory of a checkpoint before others write there
    )
    beats: Collection[str] = ()  # heartbeats with names of the user's

    def kind(self, name: str) -> Kind:
        """Return how a file of this name arrives: by what was appended, whole, or in pieces; "" for a
        name that no rank of the node has."""
        try:
            relative_path(name)
        except ValueError:
            return ""
        if name.startswith(CHECKPOINTS):
            inside = name.removeprefix(CHECKPOINTS)
            return "part" if self.parts and re.fullmatch(self.parts, inside) else ""
        rank = f"({'|'.join(map(str, self.ranks))})"
        prefix, launch = re.escape(self.log_prefix), re.escape(self.launch)
        host = r"[A-Za-z0-9][A-Za-z0-9._-]*"
        if re.fullmatch(rf"logs/{prefix}\.{host}\.{rank}\.log|monitor/{host}\.jsonl", name):
            return "grows"
        whole = (
            rf"logs/{prefix}\.flight-recorder\.{rank}"
            rf"|\.launch/{launch}/rank-{rank}(\.json|\.reserve|\.provisional|\.pid|\.program\.pid)"
            rf"|\.launch/{launch}/stop"
            rf"|\.launch/heartbeats/({rank}(\.running|\.saved)?|output)"
        )
        return "whole" if name in self.beats or re.fullmatch(whole, name) else ""


@dataclass
class Arrivals:
    """The files of one node in the directory `root` of a run. draft: a file beside the launch's own, into
    which whole files are written before they get their names."""

    root: Path
    files: RankFiles
    draft: Path
    _ours: set[str] = field(default_factory=set)  # parts that came from this node

    def append(self, name: str, data: bytes) -> None:
        """Append to a file. DataError for a name of no such file, and for a link."""
        self._require(name, "grows")
        path = self._place(name)
        if path.is_symlink():
            raise DataError(f"{path} is a link: what a node sends is not written there")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with disk_trouble(path), os.fdopen(os.open(path, flags, 0o666), "ab") as file:
            file.write(data)

    def replace(self, name: str, data: bytes) -> None:
        """Write a whole file. Raises as `append`."""
        self._require(name, "whole")
        self._put(name, [data], sync=False)

    def part(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write a file of a checkpoint, durably. Raises as `append`; DataError where a rank of another
        node has written a file of this name, and where its checkpoint is gone."""
        self._require(name, "part")
        if name not in self._ours and os.path.lexists(self.root / name):
            raise DataError(f"{self.root / name} is there already, from another rank")
        if self.files.begun and not (self.root / name).parent.is_dir():
            raise DataError(f"{(self.root / name).parent} is gone: it was committed, or given up")
        self._put(name, pieces, sync=True)
        self._ours.add(name)

    def remove(self, name: str) -> None:
        """Remove a file that this node has written and has removed."""
        if self.files.kind(name) == "whole" or name in self._ours:
            self._place(name).unlink(missing_ok=True)

    def forgotten(self) -> list[str]:
        """The checkpoints, by name, of which the node has sent parts and that are not there any more:
        committed under another name, or pruned."""
        tops = {name.split("/")[1] for name in self._ours}
        gone = {top for top in tops if not os.path.lexists(self.root / CHECKPOINTS / top)}
        self._ours -= {name for name in self._ours if name.split("/")[1] in gone}
        return sorted(gone)

    def _require(self, name: str, kind: Kind) -> None:
        if self.files.kind(name) != kind:
            raise DataError(f"{name!r:.100} is not a file that ranks of this node write")

    def _put(self, name: str, pieces: Iterable[bytes], *, sync: bool) -> None:
        target = self._place(name)
        with disk_trouble(target):
            with open(self.draft, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            self.draft.replace(target)

    def _place(self, name: str) -> Path:
        """The path of a file, whose directory is made. DataError where a directory on its way is a link,
        but for logs, which `FORGE_LOG_DIR` may have put elsewhere."""
        path = self.root
        for folder in name.split("/")[:-1]:
            path = path / folder
            with disk_trouble(path):
                path.mkdir(exist_ok=True)
                if path != self.root / "logs" and not stat.S_ISDIR(path.lstat().st_mode):
                    raise DataError(f"{path} is a link: what a node sends is not written there")
        return self.root / name
