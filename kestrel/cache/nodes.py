"""The nodes of the prefix tree, and a match found in it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kestrel.cache.keys import Key, Keys


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
