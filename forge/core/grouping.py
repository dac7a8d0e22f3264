"""Groups of consecutive items of a limited size: files of a part, texts of a batch, tensors of a read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def num_bytes(text: str) -> int:
    """The length of a text in UTF-8. Most texts are ASCII: no copy is made of them."""
    return len(text) if text.isascii() else len(text.encode())


def grouped(items: Iterable[T], size: Callable[[T], int], limit: float) -> Iterator[list[T]]:
    """The items in their order, in groups of at most `limit`; a larger item is a group of its own."""
    group: list[T] = []
    total = 0
    for item in items:
        item_size = size(item)
        if group and total + item_size > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += item_size
    if group:
        yield group
