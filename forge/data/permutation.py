"""Keyed pseudo-random permutations of numbers, computed at any place without those before it."""

from __future__ import annotations

import math

import numpy as np

# Rounds of the permutation. Four are pseudo-random (Luby and Rackoff 1988) for large halves; eight,
# because a corpus may have as few as ten windows.
ROUNDS = 8


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
    found = np.empty(draws.shape, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = permute(places[here], size=size, seed=seed, epoch=int(epoch))
    return found
