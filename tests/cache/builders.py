"""Short ways to say contexts and to run whole sequences in tests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kestrel.cache import CacheManager, PageLease
from kestrel.cache.radix import RadixNode, RadixPrefixCache, context_keys
from kestrel.request import CacheNamespace
from kestrel.tokens import ContextItem, ImageSpan, Text

BASE = CacheNamespace()


def text(*ids: int) -> list[ContextItem]:
    return [*Text(ids)]


def image(digest: str, num_positions: int) -> list[ContextItem]:
    return [ImageSpan(digest, num_positions)]


def open_lease(manager: CacheManager, items: Sequence[ContextItem], namespace: Hashable = BASE) -> PageLease:
    """A lease whose copies were made."""
    lease = manager.acquire(namespace, items)
    lease.take_copies()
    return lease


def remember(manager: CacheManager, items: Sequence[ContextItem], namespace: Hashable = BASE) -> list[int]:
    """Runs a sequence to its end, leaving all of it cached; returns the pages it had."""
    lease = open_lease(manager, items, namespace)
    lease.publish(items)
    lease.release()
    manager.check_integrity()
    return lease.pages


def cached_positions(manager: CacheManager, items: Sequence[ContextItem], namespace: Hashable = BASE) -> int:
    """How much of `items` is cached, up to all of it. Changes nothing, not even recency."""
    return next(iter(manager._prefixes.matches(namespace, context_keys(items)))).num_positions


def all_nodes(manager: CacheManager, namespace: Hashable = BASE) -> list[RadixNode]:
    """Every cached node of a namespace but its root."""
    assert isinstance(manager._prefixes, RadixPrefixCache)
    root = manager._prefixes._roots.get(namespace)
    nodes: list[RadixNode] = [] if root is None else list(root.children.values())
    for node in nodes:
        nodes += node.children.values()
    return nodes


def nodes_by_span(manager: CacheManager, namespace: Hashable = BASE) -> dict[tuple[int, int], RadixNode]:
    """Nodes by start and end position, for trees where these differ."""
    nodes = all_nodes(manager, namespace)
    found = {(node.start, node.end): node for node in nodes}
    assert len(found) == len(nodes)
    return found
