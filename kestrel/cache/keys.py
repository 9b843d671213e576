"""Context items as keys of the prefix tree: how many positions and pages they take, and how far two sequences agree.

A key stands for one item and equals another key exactly when their items are equal. Text tokens become their bare ids,
because most of a long context is text and whole runs of integers compare in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kestrel.cache.pages import CacheMisuse
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, TextToken

Key: TypeAlias = int | CoordToken | SizeToken | ImageSpan
Keys: TypeAlias = tuple[Key, ...]


def context_keys(items: Sequence[ContextItem]) -> Keys:
    return tuple([item.id if isinstance(item, TextToken) else item for item in items])


def count_positions(keys: Keys) -> int:
    extra_positions = [key.num_positions - 1 for key in keys if isinstance(key, ImageSpan)]
    if extra_positions and min(extra_positions) < 0:
        raise CacheMisuse("an image span without positions cannot be cached")
    return len(keys) + sum(extra_positions)


def pages_for(num_positions: int, page_size: int) -> int:
    """How many pages the positions 0 to `num_positions - 1` touch."""
    return -(-num_positions // page_size)


def common_length(edge: Keys, keys: Keys, offset: int) -> int:
    """How many keys of `edge` agree with those of `keys` from `offset` on."""
    window = keys[offset : offset + len(edge)]
    if window == edge:
        return len(edge)
    for index, (ours, theirs) in enumerate(zip(edge, window, strict=False)):
        # Identity first, as dict lookup does: a NaN coordinate must not be found as a child and then differ.
        if ours is not theirs and ours != theirs:
            return index
    return len(window)


def page_aligned_cut(keys: Keys, cut: int, position: int, page_size: int) -> tuple[int, int]:
    """Moves a cut before key `cut`, at `position`, back to a key that starts a page; (0, …) when there is none."""
    while cut and position % page_size:
        cut -= 1
        position -= count_positions(keys[cut : cut + 1])
    return cut, position
