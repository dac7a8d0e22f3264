"""Which samples a step trains on, and a hash chain over them: equal chains mean equal histories."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

SAMPLES_PER_RANK = 4  # of one step
START = "0" * 16


def samples_of(position: int, rank: int) -> list[int]:
    """The samples of one rank, where `position` samples were trained on before by all ranks."""
    first = position + rank * SAMPLES_PER_RANK
    return list(range(first, first + SAMPLES_PER_RANK))


def link(chain: str, step: int, samples: Iterable[int]) -> str:
    """The chain after a step (counted from 1) on the samples of all ranks, in their order."""
    text = f"{chain} {step} {','.join(map(str, samples))}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def undisturbed(num_ranks: int) -> Iterator[str]:
    """The chain after step 1, 2, … of a run that nothing has disturbed, without end."""
    chain, step, position = START, 0, 0
    while True:
        step += 1
        samples = [n for rank in range(num_ranks) for n in samples_of(position, rank)]
        chain = link(chain, step, samples)
        position += num_ranks * SAMPLES_PER_RANK
        yield chain
