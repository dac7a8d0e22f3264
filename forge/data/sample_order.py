"""Sample order: which window each sample is, of a single corpus or of several sources.

The order is a function of the sample's number. A single corpus is permuted anew in each epoch. With
several sources, the samples of a stage are divided into blocks of one
batch, or more; at the end of a block each source has its share of the stage's samples so far, rounded to
a whole number. Within a block the sources are shuffled by a keyed hash. The windows of a source come in
the order of its permutation, each once in an epoch of that source, whatever the weights are and when
they change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from forge.core.errors import ConfigError
from forge.core.files import digest_bytes
from forge.core.mix import MixStage

# Rounds of the permutation. Four are pseudo-random (Luby and Rackoff 1988) for large halves; eight,
# because a corpus may have as few as ten windows.
ROUNDS = 8


def spread_evenly(size: int, count: int) -> np.ndarray:
    """Numbers of `count` windows, spread evenly over `size`, int64; all where there are fewer."""
    count = min(count, size)
    return np.arange(count) * size // max(1, count)


def permute(numbers: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:
    """A pseudo-random permutation of [0, size), applied to each number; size >= 1.

    numbers: uint64, any shape. A Feistel network over a rectangle of at least `size` cells, repeated
    until the result is below `size` (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains"). The same on every machine and version.
    """
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
    places = _scramble(numbers.astype(np.uint64), width, height, keys)
    # The rectangle exceeds size by less than one column, so this is rare.
    while (outside := places >= size).any():
        places[outside] = _scramble(places[outside], width, height, keys)
    return places


def _scramble(cells: np.ndarray, width: int, height: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of [0, width * height): rounds shift one coordinate by a hash of the other."""
    left, right = np.divmod(cells, np.uint64(height))
    for round_number, key in enumerate(keys):
        if round_number % 2 == 0:
            left = (left + splitmix64(right ^ key) % np.uint64(width)) % np.uint64(width)
        else:
            right = (right + splitmix64(left ^ key) % np.uint64(height)) % np.uint64(height)
    return left * np.uint64(height) + right


def splitmix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def in_epochs(draws: np.ndarray, *, size: int, seed: int) -> np.ndarray:
    """The window of each draw from `size` windows, int64, of the same shape. draws: from 0 on, uint64.

    Draw g is window permute(g mod size) of epoch g div size.
    """
    epochs, places = np.divmod(draws, np.uint64(size))
    windows = np.empty(draws.shape, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        windows[here] = permute(places[here], size=size, seed=seed, epoch=int(epoch))
    return windows


@dataclass(frozen=True)
class _Span:
    """The samples of a stage, from number `start` on; others count from there, too.

    limits: the share of the sources up to each one is limits / total. before: samples of each source
    before the stage. key: of the shuffles.
    """

    start: int
    limits: list[int]
    total: int
    block: int
    before: np.ndarray
    key: np.uint64

    @classmethod
    def of(
        cls,
        stage: MixStage,
        names: Sequence[str],
        *,
        start: int,
        block: int,
        before: np.ndarray,
        key: np.uint64,
    ) -> _Span:
        """names: of all sources, which the stage need not have. block: samples of a batch."""
        if stage.trouble:
            raise ConfigError(
                stage.trouble,
                cause="without train.mix, each source is drawn in proportion to its tokens",
                fix="set train.mix, with 0 for a source that is not to be drawn",
            )
        shares = {name: stage.shares.get(name, 0) for name in names}
        total = math.lcm(*(share.denominator for share in shares.values()))
        parts = [int(share * total) for share in shares.values()]
        # Rounded at both ends, the count of a block may be less than its share by almost 2.
        while block * min(part for part in parts if part) < 2 * total:
            block *= 2
        return cls(start, list(accumulate(parts)), total, block, before, key)

    def rounded(self, samples: int) -> list[int]:
        """Number of samples of each source among the first so many samples, at the end of a block. It
        differs from the share by less than 1, in exact arithmetic of any size."""
        ends = [samples * limit // self.total for limit in self.limits]
        return [after - before for before, after in pairwise([0, *ends])]

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Locate samples, as `MixedOrder.locate`, by their numbers in this stage, int64 [n]."""
        blocks, slots = np.divmod(numbers, self.block)
        wanted, rows = np.unique(blocks, return_inverse=True)
        sources, draws = self._fill(wanted)
        return sources[rows, slots], draws[rows, slots]

    def _fill(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Locate all samples of these blocks, as `locate`, int64 [len(blocks), block]."""
        shape = len(blocks), self.block
        first = np.array([self.rounded(int(b) * self.block) for b in blocks], np.int64)
        counts = (
            np.array([self.rounded((int(b) + 1) * self.block) for b in blocks], np.int64) - first
        )
        ordered = np.repeat(np.tile(np.arange(counts.shape[1]), len(blocks)), counts.ravel())
        slots = np.arange(self.block)
        numbers = (self.start + blocks[:, None] * self.block + slots).astype(np.uint64)
        shuffle = np.argsort(splitmix64(numbers ^ self.key), axis=1, kind="stable")
        sources, draws = np.empty(shape, np.int64), np.empty(shape, np.int64)
        np.put_along_axis(sources, shuffle, ordered.reshape(shape), axis=1)
        # In the order of sources, and of samples within a source, draws count on by one.
        begin = self.before + first - (np.cumsum(counts, axis=1) - counts)
        in_order = np.repeat(begin.ravel(), counts.ravel()).reshape(shape) + slots
        by_source = np.argsort(sources.astype(np.uint16), axis=1, kind="stable")
        np.put_along_axis(draws, by_source, in_order, axis=1)
        return sources, draws

    def drawn(self, samples: int) -> np.ndarray:
        """Samples of each source before the stage and in its first `samples`, int64 [sources]."""
        blocks, rest = divmod(samples, self.block)
        total = self.before + np.array(self.rounded(blocks * self.block), np.int64)
        if rest:
            sources, _ = self._fill(np.array([blocks]))
            total = total + np.bincount(sources[0, :rest], minlength=len(total))
        return total


class MixedOrder:
    """The window of each sample of a run. Windows are numbered through all sources, as `sizes` has them.

    stages: the first one begins where the run does. sizes: number of windows by source, sorted by name.
    drawn_before: samples of each source before the first stage. Raises ConfigError for a share that is
    too small. The same on every rank, machine and version.
    """

    def __init__(
        self,
        stages: Sequence[MixStage],
        sizes: Mapping[str, int],
        *,
        drawn_before: Mapping[str, int],
        seed: int,
        batch_size: int,
    ) -> None:
        self.names, self.sizes = list(sizes), list(sizes.values())
        self._first_window = np.cumsum([0, *self.sizes])
        self._seeds = [seed + (_key_of(name) << 32) for name in self.names]
        key = np.random.SeedSequence([seed, _key_of("")]).generate_state(1, np.uint64)[0]
        drawn = np.array([drawn_before.get(name, 0) for name in self.names], np.int64)
        self._spans: list[_Span] = []
        for stage in stages:
            start = stage.step * batch_size
            if self._spans:
                drawn = self._spans[-1].drawn(start - self._spans[-1].start)
            span = _Span.of(stage, self.names, start=start, block=batch_size, before=drawn, key=key)
            self._spans.append(span)
        self.largest_block = max(span.block for span in self._spans)

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        """The window of each sample number, int64, of the same shape. numbers: uint64, none before the
        first stage."""
        sources, draws = self.locate(numbers.astype(np.int64))
        found = np.empty(numbers.shape, np.int64)
        for source in np.unique(sources):
            here = sources == source
            windows = in_epochs(
                draws[here].astype(np.uint64), size=self.sizes[source], seed=self._seeds[source]
            )
            found[here] = self._first_window[source] + windows
        return found

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The number of the source of each sample, and the number of samples of this source before it,
        int64, of the same shape as numbers."""
        sources, draws = np.empty(numbers.shape, np.int64), np.empty(numbers.shape, np.int64)
        starts = np.array([span.start for span in self._spans])
        of_span = starts.searchsorted(numbers, side="right") - 1
        assert of_span.min() >= 0, f"sample {numbers.min()} is before the first stage, {starts[0]}"
        for place in np.unique(of_span):
            here, span = of_span == place, self._spans[place]
            sources[here], draws[here] = span.locate(numbers[here] - span.start)
        return sources, draws

    def drawn(self, number: int) -> dict[str, int]:
        """Numbers of samples that each source has among those before this sample."""
        span = next(span for span in reversed(self._spans) if span.start <= number)
        return dict(zip(self.names, span.drawn(number - span.start).tolist(), strict=True))


def _key_of(name: str) -> int:
    """64 bits for a source: its order does not depend on the other sources."""
    return int(digest_bytes(name.encode())[:16], 16)
