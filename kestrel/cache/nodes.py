"""What the prefix tree is made of: context items as keys, nodes over runs of keys, and a match found among them.

A key stands for one item and equals another key exactly when their items are equal. Text tokens become their bare ids,
because most of a long context is text and whole runs of integers compare in one go.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
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


class RadixNode:
    """An edge and where it leads. Compared by identity."""

    __slots__ = ("children", "end", "keys", "locks", "num_own_pages", "pages", "parent", "start")

    def __init__(self, parent: RadixNode | None, keys: Keys, start: int, end: int, pages: list[int]) -> None:
        self.parent = parent
        self.keys = keys
        self.start = start
        self.end = end
        self.pages = pages
        """Ids of the pages from index `start // page_size` to the one that holds position `end - 1`."""
        self.num_own_pages = len(pages)
        """Pages that no ancestor holds: all of them, or all but the first."""
        self.children: dict[Key, RadixNode] = {}
        self.locks = 0
        """Leases whose path goes through this node."""


class RadixRoot(RadixNode):
    """The empty prefix of one namespace. Never locked, never in the eviction order."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, (), 0, 0, [])
        self.namespace = namespace


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A cached prefix, found but not yet locked; it holds good only until the tree changes."""

    node: RadixNode | None
    cut: int
    """How many of the node's own keys belong to the match."""
    num_keys: int
    num_positions: int
    num_pinned_pages: int
    """Evictable pages that would stop being so if the match were locked."""


EMPTY_MATCH = PrefixMatch(node=None, cut=0, num_keys=0, num_positions=0, num_pinned_pages=0)
