"""The pool of KV pages, and the prefix cache: a radix tree that remembers which pages hold which context prefixes.

The tree has one root per namespace, shared prefixes once, and pages on the edges. Node boundaries need not be
page-aligned. A page that straddles a boundary is held by the nodes on both sides; or the deeper node holds another page
there, which has a copy of what comes before. Either way the page of the deepest node is complete up to that node's end,
so in a page table the deepest node wins.

A key stands for one context item and equals another key exactly when their items are equal. Text tokens become their
bare ids, because most of a long context is text and whole runs of integers compare in one go.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from kestrel.errors import ConfigError, OutOfPages
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, TextToken, has_pictures, ids_if_text

# ---------------------------------------------------------------------- pages


class CacheMisuse(AssertionError):
    """A caller broke a rule of the cache: a bug in the program, never a user's mistake."""


class PagePool:
    """Hands out page ids 0 to `num_pages - 1`. A page is free again when its last holder releases it."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError("kv_cache_pages", f"must be at least 1 (got {num_pages})")
        self._refcounts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the end is handed out first

    @property
    def num_pages(self) -> int:
        return len(self._refcounts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Takes free pages; the caller is their first holder."""
        if num_pages < 0:
            raise CacheMisuse(f"cannot allocate {num_pages} pages")
        if num_pages > len(self._free):
            raise OutOfPages(f"{num_pages} pages are wanted, {len(self._free)} of {self.num_pages} are free")
        first = len(self._free) - num_pages
        pages = self._free[first:][::-1]
        del self._free[first:]
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds one holder to each page."""
        refcounts = self._refcounts
        for page in pages:
            refcount = refcounts[page]
            if refcount < 1:
                raise CacheMisuse(f"page {page} is retained but nobody holds it")
            refcounts[page] = refcount + 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes one holder from each page."""
        refcounts = self._refcounts
        for page in pages:
            refcount = refcounts[page]
            if refcount < 1:
                raise CacheMisuse(f"page {page} is released but nobody holds it")
            refcounts[page] = refcount - 1
            if refcount == 1:
                self._free.append(page)

    def check_integrity(self, expected_refcounts: Mapping[int, int]) -> None:
        """Compares every page with a recount made by the holders; pages not named are expected to be free."""
        for page, refcount in enumerate(self._refcounts):
            expected = expected_refcounts.get(page, 0)
            assert refcount == expected, f"page {page} has refcount {refcount}, its holders are {expected}"
        unheld = [page for page, refcount in enumerate(self._refcounts) if refcount == 0]
        assert sorted(self._free) == unheld, f"the free list is {sorted(self._free)}, unheld pages are {unheld}"


# ---------------------------------------------------------------------- nodes


Key: TypeAlias = int | CoordToken | SizeToken | ImageSpan
Keys: TypeAlias = tuple[Key, ...]


def context_keys(items: Sequence[ContextItem]) -> Keys:
    ids = ids_if_text(items)
    return tuple([item.id if isinstance(item, TextToken) else item for item in items] if ids is None else ids)


def count_positions(keys: Sequence[Key | ContextItem]) -> int:
    """Of keys or of their items: where these are a `Text`, nothing is looked through."""
    if not has_pictures(keys):
        return len(keys)
    extra_positions = [key.num_positions - 1 for key in keys if isinstance(key, ImageSpan)]
    if min(extra_positions) < 0:
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


# ---------------------------------------------------------------------- the tree


NodeT = TypeVar("NodeT", bound=Hashable)


class EvictionOrder(Generic[NodeT]):
    """Unlocked nodes, least recently used first, each with the pages its eviction gives back; `num_pages` is their sum.

    A node joins at the recent end when its last lock goes, deepest node of a path first, and leaves when it is locked
    again. So a node always stands after its descendants, and the oldest one is always a leaf: no search, no stale
    entries.
    """

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


class RadixPrefixCache:
    """Finds, locks, grows and evicts cached prefixes. Holds one reference on every page of every node.

    An *anchor* is where a lease's lock ends; None is nowhere.
    """

    shares_prefixes = True
    """Whether what is inserted can ever be matched."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[Hashable, RadixRoot] = {}
        self._unlocked: EvictionOrder[RadixNode] = EvictionOrder()
        self._num_cached_pages = 0

    @property
    def num_cached_pages(self) -> int:
        return self._num_cached_pages

    @property
    def num_evictable_pages(self) -> int:
        return self._unlocked.num_pages

    def matches(self, namespace: Hashable, keys: Keys) -> Iterator[PrefixMatch]:
        """The longest cached prefix of `keys`, then ever shorter ones, the empty one last."""
        root = self._roots.get(namespace)
        if root is not None:
            node, cut, num_keys = self._walk(root, keys)
            while node.parent is not None:
                position = self._position_of_cut(node, cut)
                yield self._match(node, cut, num_keys, position)
                if position % self._page_size:
                    aligned, position = page_aligned_cut(node.keys, cut, position, self._page_size)
                    if aligned:
                        yield self._match(node, aligned, num_keys - cut + aligned, position)
                num_keys -= cut
                node = node.parent
                cut = len(node.keys)
        yield EMPTY_MATCH

    def lock(self, match: PrefixMatch) -> RadixNode | None:
        """Protects a match from eviction; returns the node that ends it (None for the empty match)."""
        node = match.node
        if node is None:
            return None
        if match.cut < len(node.keys):
            node = self._split(node, match.cut)
        self._lock_path(node, None)
        return node

    def unlock(self, anchor: RadixNode | None) -> None:
        """Undoes the lock that `lock` and later `insert` calls left on `anchor`."""
        node = anchor
        while node is not None and node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self._unlocked.add(node, node.num_own_pages)
            node = node.parent

    def page_table(self, anchor: RadixNode | None) -> list[int]:
        """The pages of all positions from 0 to the end of `anchor`, deepest node first choice."""
        path: list[RadixNode] = []
        node = anchor
        while node is not None:
            path.append(node)
            node = node.parent
        table: list[int] = []
        for node in reversed(path):
            del table[node.start // self._page_size :]
            table += node.pages
        return table

    def insert(
        self, namespace: Hashable, anchor: RadixNode | None, keys: Keys, table: Sequence[int], end: int
    ) -> RadixNode | None:
        """Makes sure that `keys` follow the locked `anchor`, moves its lock to their end and returns that node.

        What is missing takes its pages from `table`, a page table from position 0. `end` is the position after keys.
        """
        start = anchor if anchor is not None else self._roots.setdefault(namespace, RadixRoot(namespace))
        node, cut, num_found = self._walk(start, keys)
        if cut < len(node.keys):
            node = self._split(node, cut)
        if num_found < len(keys):
            node = self._add_child(node, keys[num_found:], table, end)
        self._lock_path(node, anchor)
        return node

    def evict(self, num_free_pages: int) -> None:
        """Gives up the least recently used unlocked leaves until the pool has so many free pages, or none is left."""
        while self._pool.num_free < num_free_pages and len(self._unlocked):
            self._remove(self._unlocked.oldest())

    def clear(self) -> None:
        """Gives up every unlocked node."""
        while len(self._unlocked):
            self._remove(self._unlocked.oldest())

    def check_integrity(self, anchors: Iterable[RadixNode | None]) -> PrefixRecount:
        """Recounts the tree, given the anchor of every lease."""
        recount = recount_tree(self._roots, list(self._unlocked), anchors, self._page_size)
        num_cached, num_unlocked = recount.num_own_pages, recount.num_unlocked_own_pages
        assert num_cached == self._num_cached_pages, f"{num_cached} pages are cached, not {self._num_cached_pages}"
        assert num_unlocked == self._unlocked.num_pages, f"{num_unlocked} own pages, not {self._unlocked.num_pages}"
        return recount

    def _walk(self, node: RadixNode, keys: Keys) -> tuple[RadixNode, int, int]:
        """Follows `keys` below `node`: the last node reached, how many of its keys agree, how many keys in all."""
        num_found = 0
        while num_found < len(keys):
            child = node.children.get(keys[num_found])
            if child is None:
                break
            cut = common_length(child.keys, keys, num_found)
            node = child
            num_found += cut
            if cut < len(child.keys):
                return node, cut, num_found
        return node, len(node.keys), num_found

    def _position_of_cut(self, node: RadixNode, cut: int) -> int:
        return node.end if cut == len(node.keys) else node.start + count_positions(node.keys[:cut])

    def _match(self, node: RadixNode, cut: int, num_keys: int, position: int) -> PrefixMatch:
        num_pinned = 0
        if node.locks == 0:
            num_pages = pages_for(position, self._page_size) - node.start // self._page_size
            num_pinned = num_pages - (len(node.pages) - node.num_own_pages)
        above = node.parent
        while above is not None and above.locks == 0:
            num_pinned += above.num_own_pages
            above = above.parent
        return PrefixMatch(node, cut, num_keys, position, num_pinned)

    def _lock_path(self, node: RadixNode, above: RadixNode | None) -> None:
        """Adds one lock to `node` and its ancestors below `above`."""
        step: RadixNode | None = node
        while step is not above and step is not None and step.parent is not None:
            if step.locks == 0:
                self._unlocked.remove(step)
            step.locks += 1
            step = step.parent

    def _split(self, node: RadixNode, cut: int) -> RadixNode:
        """Cuts `node` before its key `cut` and returns the new upper part.

        The lower part stays the same object, so that whoever is anchored at its end stays so. An unlocked upper part
        stands at the recent end of the eviction order, out of place unless it is locked next, as every caller does.
        """
        parent = node.parent
        if parent is None or not 0 < cut < len(node.keys):
            raise CacheMisuse(f"a node of {len(node.keys)} keys cannot be cut before key {cut}")
        position = self._position_of_cut(node, cut)
        first_index = node.start // self._page_size
        num_upper_pages = pages_for(position, self._page_size) - first_index
        upper = RadixNode(parent, node.keys[:cut], node.start, position, node.pages[:num_upper_pages])
        upper.num_own_pages -= len(node.pages) - node.num_own_pages
        upper.locks = node.locks
        upper.children[node.keys[cut]] = node
        parent.children[upper.keys[0]] = upper
        straddling = upper.pages[-1:] if position % self._page_size else []
        self._pool.retain(straddling)
        node.parent, node.keys, node.start = upper, node.keys[cut:], position
        node.pages = straddling + node.pages[num_upper_pages:]
        node.num_own_pages = len(node.pages) - len(straddling)
        if node.locks == 0:
            self._unlocked.resize(node, node.num_own_pages)
            self._unlocked.add(upper, upper.num_own_pages)
        return upper

    def _add_child(self, parent: RadixNode, keys: Keys, table: Sequence[int], end: int) -> RadixNode:
        start = parent.end
        first_index = start // self._page_size
        pages = list(table[first_index : pages_for(end, self._page_size)])
        node = RadixNode(parent, keys, start, end, pages)
        if self._is_held_above(parent, first_index, pages[0]):
            node.num_own_pages -= 1
        self._pool.retain(pages)
        parent.children[keys[0]] = node
        self._num_cached_pages += node.num_own_pages
        self._unlocked.add(node, node.num_own_pages)
        return node

    def _is_held_above(self, parent: RadixNode, index: int, page: int) -> bool:
        """Whether `parent` or a node above it holds `page` at `index`. Not always the nearest one that covers it."""
        node: RadixNode | None = parent
        while node is not None and node.end > index * self._page_size:
            if node.pages[index - node.start // self._page_size] == page:
                return True
            node = node.parent
        return False

    def _remove(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        if parent is None or leaf.children or leaf.locks:
            raise CacheMisuse("only an unlocked leaf can be evicted")
        self._unlocked.remove(leaf)
        del parent.children[leaf.keys[0]]
        self._num_cached_pages -= leaf.num_own_pages
        self._pool.release(leaf.pages)
        if isinstance(parent, RadixRoot) and not parent.children:
            del self._roots[parent.namespace]


class NoPrefixCache(RadixPrefixCache):
    """A tree that stays empty: every context is computed afresh."""

    shares_prefixes = False

    def matches(self, namespace: Hashable, keys: Keys) -> Iterator[PrefixMatch]:
        yield EMPTY_MATCH

    def insert(self, namespace: Hashable, anchor: RadixNode | None, keys: Keys, table: Sequence[int], end: int) -> None:
        return None


# ---------------------------------------------------------------------- integrity
# Recounts the tree from nothing and complains about the first thing that does not add up.


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
