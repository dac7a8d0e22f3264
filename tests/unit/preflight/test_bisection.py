"""The search must name a fault that no single node can detect, with few trials."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.preflight.bisection import NoTimeLeft, find_broken


class Cluster:
    """Nodes of which some are broken. `works` as the search calls it."""

    def __init__(self, size, *, dead=(), deaf=(), blocked=(), answers=10**6):
        self.nodes = [f"n{number:02}" for number in range(size)]
        self.dead, self.deaf, self.blocked = set(dead), set(deaf), [set(p) for p in blocked]
        self.answers, self.tried = answers, []

    def works(self, groups):
        seen = [node for group in groups for node in group]
        assert len(seen) == len(set(seen)), "groups that are tried at once share no node"
        if len(self.tried) + len(groups) > self.answers:
            raise NoTimeLeft
        self.tried += [frozenset(group) for group in groups]
        return [self.is_good(set(group)) for group in groups]

    def is_good(self, group):
        """dead: fails alone; deaf: fails with anybody else; blocked: pairs that fail."""
        return not (
            group & self.dead
            or (len(group) > 1 and group & self.deaf)
            or any(pair <= group for pair in self.blocked)
        )

    def search(self):
        found = find_broken(self.nodes, self.works)
        assert found.probes == len(self.tried) == len(set(self.tried)), "nothing is tried twice"
        return found


def most_probes(size, faults=1):
    return faults * (4 * ceil(log2(size)) + 10)


@st.composite
def clusters(draw, num_nodes, smallest=3):
    """A size and the names of some different nodes in it, in any order."""
    size = draw(st.integers(smallest, 48))
    numbers = st.integers(0, size - 1)
    chosen = draw(st.lists(numbers, min_size=num_nodes, max_size=num_nodes, unique=True))
    return size, [f"n{number:02}" for number in chosen]


@given(clusters(1, smallest=1), st.sampled_from(["dead", "deaf"]))
def test_one_bad_node_is_found_with_logarithmically_many_trials(where, kind):
    size, bad = where
    if size < 3 and kind == "deaf":
        return  # the test below
    cluster = Cluster(size, **{kind: bad})
    found = cluster.search()
    assert (found.nodes, found.pairs, found.unclear, found.among) == (bad, [], [], ())
    assert found.probes <= most_probes(size)


@given(clusters(2))
def test_a_pair_that_cannot_talk_is_found_and_neither_is_blamed(where):
    size, pair = where
    found = Cluster(size, blocked=[pair]).search()
    assert (found.nodes, found.unclear, found.among) == ([], [], ())
    assert [set(p) for p in found.pairs] == ([set(pair)])
    assert found.probes <= most_probes(size)


@given(clusters(2, smallest=5), st.sampled_from(["dead", "deaf", "one of each"]))
def test_two_bad_nodes_are_both_found(where, kind):
    size, bad = where
    faults = {"dead": bad[:1], "deaf": bad[1:]} if kind == "one of each" else {kind: bad}
    found = Cluster(size, **faults).search()
    assert set(found.nodes) == set(bad)
    assert (found.pairs, found.unclear, found.among) == ([], [], ())
    assert found.probes <= most_probes(size, faults=2)


@given(clusters(4, smallest=8))
def test_bad_node_and_broken_pair_are_distinguished(where):
    size, (bad, one, other, _) = where
    found = Cluster(size, deaf=[bad], blocked=[(one, other)]).search()
    assert found.nodes == [bad]
    assert [set(p) for p in found.pairs] == [{one, other}]


@given(st.data())
def test_remaining_nodes_always_work(data):
    """Without the named nodes, and without one node of each named pair, the rest works."""
    size = data.draw(st.integers(2, 12))
    some = st.lists(st.integers(0, size - 1).map(lambda n: f"n{n:02}"), max_size=3)
    pairs = st.tuples(*[st.integers(0, size - 1).map(lambda n: f"n{n:02}")] * 2)
    blocked = [p for p in data.draw(st.lists(pairs, max_size=4)) if p[0] != p[1]]
    cluster = Cluster(size, dead=data.draw(some), deaf=data.draw(some), blocked=blocked)
    if cluster.is_good(set(cluster.nodes)):
        return
    found = cluster.search()
    gone = {*found.nodes, *(other for _, other in found.pairs + found.unclear)}
    assert gone and cluster.is_good(set(cluster.nodes) - gone)
    assert set(found.nodes) >= cluster.dead


def test_of_two_nodes_alone_the_faulty_one_is_unclear():
    found = Cluster(2, deaf=["n01"]).search()
    assert (found.nodes, found.pairs, found.unclear) == ([], [], [("n00", "n01")])


def test_four_nodes_take_four_rounds():
    """The two halves, the two nodes of the bad half, each of them with a third node, then the rest."""
    cluster = Cluster(4, deaf=["n02"])
    rounds = []
    found = find_broken(
        cluster.nodes, lambda groups: rounds.append(len(groups)) or cluster.works(groups)
    )
    assert found.nodes == ["n02"]
    assert rounds == [2, 2, 2, 1]


@pytest.mark.parametrize(("answers", "among"), [(0, 8), (2, 4), (4, 2)])
def test_when_time_runs_out_the_nodes_still_in_doubt_are_named(answers, among):
    found = Cluster(8, dead=["n05"], answers=answers).search()
    assert (found.nodes, len(found.among)) == ([], among)
    assert "n05" in found.among


def test_failure_that_does_not_repeat_blames_no_node():
    found = find_broken(["n00", "n01", "n02", "n03"], lambda groups: [True] * len(groups))
    assert (found.nodes, found.pairs, found.unclear) == ([], [], [])
    assert found.among == ("n00", "n01", "n02", "n03")
