"""What the start of a run says of threads, whose number decides the last bits of sums."""

from __future__ import annotations

import pytest

from forge.trainer import start

FEWER = "threads a rank: 1 of 4 cores, as in the checkpoint, for equal bits"
WARNING = "warning: threads a rank: {}: {}. With another number"
OTHER_CORES = "nodes have other numbers of cores"


@pytest.mark.parametrize(
    ("now", "then", "exported", "expected"),
    [
        ([4], None, None, ""),
        ([4], 4, None, ""),
        ([1], 1, None, FEWER),
        ([1], 1, "1", ""),
        ([2], None, "2", ""),
        ([4], 8, None, WARNING.format("4, the checkpoint was made with 8", OTHER_CORES)),
        ([2], 4, "2", WARNING.format("2, the checkpoint was made with 4", "OMP_NUM_THREADS is 2")),
        ([2, 4], None, None, WARNING.format("2 to 4", OTHER_CORES)),
        ([2, 3, 4], 4, None, WARNING.format("2 to 4, the checkpoint was made with 4", OTHER_CORES)),
    ],
)
def test_start_tells_threads_by_which_bits_may_differ(now, then, exported, expected):
    text = start.threads_text(now, then, 4, exported)
    assert text.startswith(expected)
    assert bool(text) == bool(expected)
