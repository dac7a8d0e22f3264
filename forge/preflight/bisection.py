"""Find the node, or the pair of nodes, with which ranks fail, by bisection over groups of nodes.

For faults that no single node can detect, such as large packets that are lost between two nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Group = tuple[str, ...]
Works = Callable[[Sequence[Group]], Sequence[bool]]

# Points against a node of a failing pair from which on it is at fault itself. A failure with a node
# that works with others is 2 points, with any other node 1, and 1 more if its partner works with others.
ENOUGH = 3


class NoTimeLeft(Exception):
    """Raised by `works` when there is no time for another trial."""


@dataclass
class SearchResult:
    """Result of a search."""

    nodes: list[str] = field(default_factory=list)
    """Nodes at fault themselves: they fail alone, or with several others."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """Pairs that fail together, while each node works with another node."""
    unclear: list[tuple[str, str]] = field(default_factory=list)
    """Pairs that fail together, without a third node to tell which of the two is at fault."""
    among: Group = ()
    """The nodes among which the fault is, or was, where time ran out or the failure did not repeat."""
    probes: int = 0
    """Number of groups tried."""


def find_broken(nodes: Sequence[str], works: Works) -> SearchResult:
    """Find the bad nodes and pairs among nodes that fail together. Never raises NoTimeLeft.

    works: whether each of some disjoint groups works; they may be tried at the same time. A group
    that contains a failing group fails, and is not tried. For each fault at most 4 log2(n) + 10
    groups are tried, at most two in a row for each halving.
    """
    search = _Search(tuple(nodes), works)
    try:
        search.run()
    except NoTimeLeft:
        search.broken.among = search.narrowest
    return search.broken


class _Search:
    def __init__(self, nodes: Group, works: Works) -> None:
        self._nodes, self._works = nodes, works
        self._good: list[frozenset[str]] = []
        self._bad = [frozenset(nodes)]
        self.broken = SearchResult()
        self.narrowest = nodes  # the smallest group that is known to hold a fault

    def run(self) -> None:
        """Find one fault at a time and leave its nodes out, until the rest works."""
        rest = self._nodes
        while rest and not self._ask(rest)[0]:
            fault = self._smallest_fault(rest)
            if not fault:
                self.broken.among = rest
                return
            gone = self._judge(*fault) if len(fault) == 2 else self._blame(*fault)
            rest = tuple(node for node in rest if node not in gone)

    def _ask(self, *groups: Group) -> list[bool]:
        """Return whether each of these disjoint groups works. Tries those whose answer is not known."""
        unknown = [group for group in groups if self._known(group) is None]
        if unknown:
            answers = self._works(unknown)
            self.broken.probes += len(unknown)
            for group, good in zip(unknown, answers, strict=True):
                (self._good if good else self._bad).append(frozenset(group))
        return [bool(self._known(group)) for group in groups]

    def _known(self, group: Group) -> bool | None:
        wanted = frozenset(group)
        if any(bad <= wanted for bad in self._bad):
            return False
        return True if any(wanted <= good for good in self._good) else None

    def _smallest_fault(self, group: Group) -> Group:
        """One node or two that fail; () where the failure does not repeat."""
        self.narrowest = group
        if len(group) == 1:
            return group
        left, right = _halves(group)
        left_works, right_works = self._ask(left, right)
        if not left_works:
            return self._smallest_fault(left)
        if not right_works:
            return self._smallest_fault(right)
        return self._pair_across(left, right)

    def _pair_across(self, left: Group, right: Group) -> Group:
        """Two nodes, one of each side, that fail together although each side works."""
        self.narrowest = (*left, *right)
        if len(left) == len(right) == 1:
            # Inferred, not tried so far: an intermittent failure is not the fault of these two nodes.
            return () if self._ask(self.narrowest)[0] else self.narrowest
        (a, b), (c, d) = _halves(left), _halves(right)
        # Two combinations at once, then the other two.
        for combinations in (((a, c), (b, d)), ((a, d), (b, c))):
            whole = [(one, other) for one, other in combinations if one and other]
            answers = self._ask(*((*one, *other) for one, other in whole))
            for (one, other), good in zip(whole, answers, strict=True):
                if not good:
                    return self._pair_across(one, other)
        return ()

    def _judge(self, one: str, other: str) -> list[str]:
        """Decide which of two nodes that fail together is at fault; the nodes to leave out."""
        pair = {one: other, other: one}
        against = dict.fromkeys(pair, 0)
        tried: dict[str, set[str]] = {one: {other}, other: {one}}
        while thirds := self._thirds(pair, against, tried):
            answers = self._ask(*((node, third) for node, third in thirds.items()))
            for (node, third), good in zip(thirds.items(), answers, strict=True):
                tried[node].add(third)
                against[node] += 0 if good else 1 + self._is_cleared(third)
        guilty = [node for node in pair if not self._is_cleared(node) and against[node]]
        if guilty:
            return self._blame(*guilty)
        clear = all(self._is_cleared(node) for node in pair)
        (self.broken.pairs if clear else self.broken.unclear).append((one, other))
        return [other]

    def _blame(self, *nodes: str) -> list[str]:
        self.broken.nodes += nodes
        return list(nodes)

    def _thirds(
        self, pair: dict[str, str], against: dict[str, int], tried: dict[str, set[str]]
    ) -> dict[str, str]:
        """For each node of the pair that is still in doubt, a third node to try it with; all distinct."""
        thirds: dict[str, str] = {}
        for node, partner in pair.items():
            if self._is_cleared(node) or against[node] + self._is_cleared(partner) >= ENOUGH:
                continue
            taken = {*pair, *self.broken.nodes, *tried[node], *thirds.values()}
            left = [third for third in self._nodes if third not in taken]
            if left:
                thirds[node] = max(left, key=self._is_cleared)
        return thirds

    def _is_cleared(self, node: str) -> bool:
        """Return whether the node is known to work with another node."""
        return any(node in good and len(good) > 1 for good in self._good)


def _halves(group: Group) -> tuple[Group, Group]:
    middle = (len(group) + 1) // 2
    return group[:middle], group[middle:]
