"""The order in which unlocked nodes are given up: least recently used first.

A node joins at the recent end when its last lock goes, deepest node of a path first, and leaves when it is locked
again. So a node always stands after its descendants, and the oldest one is always a leaf: no search, no stale entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

NodeT = TypeVar("NodeT", bound=Hashable)


class EvictionOrder(Generic[NodeT]):
    """Nodes by recency, each with the number of pages its eviction gives back; `num_pages` is their sum."""

    def __init__(self) -> None:
        self._num_pages_by_node: OrderedDict[NodeT, int] = OrderedDict()
        self.num_pages = 0

    def __len__(self) -> int:
        return len(self._num_pages_by_node)

    def __iter__(self) -> Iterator[NodeT]:
        """Oldest first."""
        return iter(self._num_pages_by_node)

    def oldest(self) -> NodeT:
        return next(iter(self._num_pages_by_node))

    def add(self, node: NodeT, num_pages: int) -> None:
        """Puts a new node at the recent end."""
        self._num_pages_by_node[node] = num_pages
        self.num_pages += num_pages

    def resize(self, node: NodeT, num_pages: int) -> None:
        """Changes the page count of a node, which keeps its place."""
        self.num_pages += num_pages - self._num_pages_by_node[node]
        self._num_pages_by_node[node] = num_pages

    def remove(self, node: NodeT) -> None:
        self.num_pages -= self._num_pages_by_node.pop(node)
