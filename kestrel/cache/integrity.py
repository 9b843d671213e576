"""Recounts a prefix tree from nothing and complains about the first thing that does not add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kestrel.cache.radix import RadixNode, RadixRoot, count_positions, pages_for


@dataclass(slots=True)
class PrefixRecount:
    """What the nodes hold: references per page, those of unlocked nodes among them, and distinct pages."""

    page_refs: Counter[int] = field(default_factory=Counter)
    unlocked_page_refs: Counter[int] = field(default_factory=Counter)
    num_own_pages: int = 0
    num_unlocked_own_pages: int = 0


def recount_tree(
    roots: Mapping[Hashable, RadixRoot],
    eviction_order: Sequence[RadixNode],
    anchors: Iterable[RadixNode | None],
    page_size: int,
) -> PrefixRecount:
    nodes = _collect_nodes(roots)
    _check_locks(nodes, anchors)
    _check_eviction_order(nodes, eviction_order)
    recount = PrefixRecount()
    topmost_holder: dict[int, tuple[RadixNode, int]] = {}
    for node in nodes:
        _check_shape(node, page_size)
        num_own_pages = _count_own_pages(node, topmost_holder, page_size)
        assert num_own_pages == node.num_own_pages, f"{num_own_pages} own pages, {node.num_own_pages} noted"
        recount.page_refs.update(node.pages)
        recount.num_own_pages += num_own_pages
        if node.locks == 0:
            recount.unlocked_page_refs.update(node.pages)
            recount.num_unlocked_own_pages += num_own_pages
    return recount


def _collect_nodes(roots: Mapping[Hashable, RadixRoot]) -> list[RadixNode]:
    """All nodes but the roots, each after its ancestors."""
    nodes: list[RadixNode] = []
    pending: list[RadixNode] = []
    for namespace, root in roots.items():
        assert root.namespace == namespace, f"the root of {root.namespace} is kept under {namespace}"
        assert root.children, f"the root of {namespace} is empty and should be gone"
        assert root.parent is None, f"the root of {namespace} has a parent"
        is_blank = not root.keys and root.start == root.end == 0 and not root.pages and not root.locks
        assert is_blank, f"the root of {namespace} is not an empty prefix"
        pending.append(root)
    while pending:
        node = pending.pop()
        for key, child in node.children.items():
            assert child.keys, "a node has no keys"
            assert key is child.keys[0] or key == child.keys[0], f"{child.keys[0]} is kept under {key}"
            assert child.parent is node, "a child points to another parent"
            nodes.append(child)
            pending.append(child)
    return nodes


def _check_locks(nodes: Iterable[RadixNode], anchors: Iterable[RadixNode | None]) -> None:
    expected: Counter[RadixNode] = Counter()
    for anchor in anchors:
        node = anchor
        while node is not None and node.parent is not None:
            expected[node] += 1
            node = node.parent
    for node in nodes:
        locks = expected.pop(node, 0)
        assert node.locks == locks, f"{locks} leases go through a node with {node.locks} locks"
    assert not expected, "a lease is anchored at a node that has left the tree"


def _check_eviction_order(nodes: Iterable[RadixNode], eviction_order: Sequence[RadixNode]) -> None:
    place = {node: index for index, node in enumerate(eviction_order)}
    num_unlocked = 0
    for node in nodes:
        assert (node in place) == (node.locks == 0), f"a node with {node.locks} locks and the eviction order disagree"
        if node.locks == 0:
            num_unlocked += 1
            if node.parent in place:
                assert place[node] < place[node.parent], "a node would be evicted before its child"
    assert num_unlocked == len(place), "the eviction order names a node that has left the tree"


def _check_shape(node: RadixNode, page_size: int) -> None:
    parent = node.parent
    assert parent is not None
    assert node.start == parent.end, f"a node starts at {node.start}, its parent ends at {parent.end}"
    end = node.start + count_positions(node.keys)
    assert node.end == end, f"a node says it ends at {node.end}, its keys end at {end}"
    num_pages = pages_for(node.end, page_size) - node.start // page_size
    assert len(node.pages) == num_pages, f"a node of {num_pages} pages holds {node.pages}"


def _count_own_pages(node: RadixNode, topmost_holder: dict[int, tuple[RadixNode, int]], page_size: int) -> int:
    """Pages not held above. A page belongs to one index of one path, so other holders must be ancestors."""
    num_own_pages = 0
    for index, page in enumerate(node.pages, node.start // page_size):
        if page not in topmost_holder:
            topmost_holder[page] = (node, index)
            num_own_pages += 1
            continue
        holder, holder_index = topmost_holder[page]
        assert index == holder_index, f"page {page} is cached at index {holder_index} and at index {index}"
        assert _is_above(holder, node), f"page {page} is cached in two nodes that do not share a path"
    return num_own_pages


def _is_above(ancestor: RadixNode, node: RadixNode) -> bool:
    step = node.parent
    while step is not None and step is not ancestor:
        step = step.parent
    return step is ancestor
