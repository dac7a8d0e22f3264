"""Exchange of files with one node that does not see the directory of its run (`stage.results`): what is
here of the node's files, what the node has of those here, and what is to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from forge.core.errors import DataError, ForgeError
from forge.core.terminal import say
from forge.hosts.nodes import NodeFailure, NodePool, failed_on
from forge.plugins.mirror.arrivals import Arrivals
from forge.plugins.mirror.mirror_on_node import (
    MirrorNews,
    Sign,
    decoded,
    encoded,
    mirror_piece,
    mirror_round,
    sign_of,
)

# An agent without an answer for so long counts as lost. It is asked for little, but ranks may keep all
# cores of its node busy.
SILENT_SEC = 60.0
HEARTBEATS = ".launch/heartbeats/"


class NodeGone(Exception):
    """The connection to a node has ended."""


class _Changed(Exception):
    """A file has changed while it was read: the next round tells of it again."""


@dataclass
class MirroredNode:
    """One node: what it has told, what it was given, and what is to come. For one thread."""

    host: str
    folder: str  # there
    pool: NodePool
    arrivals: Arrivals
    _have: dict[str, Sign] = field(default_factory=dict)  # of its files, as they are here
    _sizes: dict[str, int] = field(default_factory=dict)  # bytes that are here of files that grow
    _seen: dict[str, Sign] = field(default_factory=dict)  # of files here, as the node has them
    _warned: set[str] = field(default_factory=set)

    def begin(self, files: dict[str, bytes]) -> None:
        """Give the node its first files. Raises UnfitError."""
        try:
            self.round(files)
        except NodeGone as err:
            raise failed_on({self.host: NodeFailure(str(err))}, "beginning a launch") from None

    def changed(self, candidates: list[Path]) -> dict[str, bytes]:
        """Contents of those of these files here that exist and that the node does not have."""
        given = {}
        for path in candidates:
            with suppress(OSError):
                name, sign = str(path.relative_to(self.arrivals.root)), sign_of(path)
                if sign and self._seen.get(name) != sign:
                    given[name] = path.read_bytes()
                    self._seen[name] = sign
        return given

    def round(self, given: dict[str, bytes]) -> bool:
        """One exchange with the node; whether anything has come. Raises NodeGone."""
        news = self._ask(given)
        self._have |= news.given
        is_held = False
        for name, sign in news.parts.items():
            if self._is_settled(name, partial(self._take_part, name, sign)):
                self._have[name] = sign
            else:
                is_held = True
        for name, text in news.grown.items():
            data = decoded(text)
            if self._is_settled(name, partial(self.arrivals.append, name, data)):
                self._sizes[name] = self._sizes.get(name, 0) + len(data)
        for name, (sign, text) in news.whole.items():
            if is_held and name.startswith(HEARTBEATS):
                continue  # a rank must not say that it has saved before its part is here
            if self._is_settled(name, partial(self._replace, name, decoded(text))):
                self._have[name] = sign
        for name in news.gone:
            self.arrivals.remove(name)
            self._have.pop(name, None)
        return not is_held and bool(news.parts or news.grown or news.whole)

    def _take_part(self, name: str, sign: Sign) -> None:
        self.arrivals.part(name, self._pieces(name, sign))

    def _replace(self, name: str, data: bytes) -> None:
        self.arrivals.replace(name, data)
        if sign := sign_of(self.arrivals.root / name):
            self._seen[name] = sign  # the node has it as it is here now

    def _is_settled(self, name: str, write: Callable[[], None]) -> bool:
        """Write what came of a file; whether it needs no other try, because it was written or is refused.
        Prints once of each file why it was not written."""
        try:
            write()
        except _Changed:
            return False
        except ForgeError as err:
            if name not in self._warned:
                self._warned.add(name)
                say(f"warning: {self.host} sends {name!r:.100}, which is not written: {err.what}")
            return isinstance(err, DataError)
        return True

    def _pieces(self, name: str, sign: Sign) -> Iterator[bytes]:
        """The content of a file of the node. Raises _Changed, NodeGone."""
        offset = 0
        while offset < sign[2]:
            piece = self.pool.ask(
                mirror_piece,
                timeout_sec=SILENT_SEC,
                again=False,
                hosts=[self.host],
                folder=self.folder,
                name=name,
                sign=sign,
                offset=offset,
            )[self.host]
            if isinstance(piece, NodeFailure):
                raise NodeGone(piece.message)
            data = decoded(piece)
            if not data:
                raise _Changed
            yield data
            offset += len(data)

    def _ask(self, given: dict[str, bytes]) -> MirrorNews:
        answer = self.pool.ask(
            mirror_round,
            timeout_sec=SILENT_SEC,
            again=False,
            hosts=[self.host],
            folder=self.folder,
            launch=self.arrivals.files.launch,
            have=self._have,
            sizes=self._sizes,
            given={name: encoded(data) for name, data in given.items()},
            drop=self.arrivals.forgotten(),
            beats=list(self.arrivals.files.beats),
        )[self.host]
        if isinstance(answer, NodeFailure):
            raise NodeGone(answer.message)
        return answer
