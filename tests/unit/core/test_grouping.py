"""Against an item that is lost, moved or put into a group that is too large."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forge.core.files import grouped


@given(st.lists(st.integers(0, 9)), st.integers(1, 20))
def test_groups_keep_all_items_in_order_within_the_limit(sizes, limit):
    groups = list(grouped(sizes, int, limit))
    assert [size for group in groups for size in group] == sizes
    assert all(group and (sum(group) <= limit or len(group) == 1) for group in groups)
    assert all(sum(one) + other[0] > limit for one, other in pairwise(groups))
