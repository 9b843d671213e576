"""The only door to the KV pages: a sequence asks for a lease, and the lease is the resource.

Invariants; `check_integrity` recounts all of them but I3, which is the caller's part:

I1  The refcount of a page is the number of nodes plus the number of leases that hold it.
I2  The free list is exactly the pages with refcount 0.
I3  A sequence writes only pages that its lease allocated. Pages shared from a match are never written: only full ones
    are shared, and a partly filled last page is copied to a fresh page first (`PageLease.copies`).
I4  No page allocated by one lease is allocated by another while either lives.
I5  The locks of a node are the leases whose path goes through it; a lease's path is what it matched or published.
I6  Only unlocked leaves are evicted, least recently released first. The eviction order is exactly the unlocked nodes,
    each after its descendants.
I7  A child starts where its parent ends and is kept under its first item, so siblings differ in their first item.
I8  An image span lies in one node, whole: it is one item, and nodes are cut between items.
I9  A node has the pages from the index of its start to the index of its last position. The nodes that hold a page lie
    on one path from a root and hold it at the same index.
I10 A page in a node is complete from its first slot to the end of that node. Hence the deepest node wins in a page
    table, and only a lease whose copies were made may publish.
I11 A namespace has a root exactly while it has nodes.
I12 No lease holds a page of an unlocked node. So free plus evictable pages is what an allocation can get, and whether
    one succeeds is known before anything is changed.

One thread uses a manager and its leases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kestrel.cache.radix import (
    CacheMisuse,
    NoPrefixCache,
    PagePool,
    PrefixMatch,
    RadixNode,
    RadixPrefixCache,
    context_keys,
    count_positions,
    pages_for,
)
from kestrel.errors import ConfigError, OutOfPages
from kestrel.tokens import ContextItem


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the start (queries to evicted pages) and the state right now (the rest)."""

    queries: int
    """Leases given; an acquisition that ran out of pages does not count."""
    hits: int
    """Leases that began with a cached prefix."""
    query_positions: int
    hit_positions: int
    evicted_pages: int
    num_pages: int
    free_pages: int
    cached_pages: int
    """Distinct pages in the prefix cache, locked or not."""
    evictable_pages: int
    leases: int


class PageLease:
    """The pages of one sequence, from `CacheManager.acquire` to `release`."""

    __slots__ = (
        "_anchor", "_is_open", "_manager", "_num_published_items", "_num_published_positions",
        "copies", "namespace", "num_cached", "num_shared_pages", "pages",
    )  # fmt: skip

    def __init__(
        self,
        manager: CacheManager,
        namespace: Hashable,
        match: PrefixMatch,
        anchor: RadixNode | None,
        pages: list[int],
        copies: list[tuple[int, int]],
    ) -> None:
        self.namespace = namespace
        self.num_cached = match.num_positions
        """Positions whose KV the pages already hold, once `copies` are made."""
        self.num_shared_pages = match.num_positions // manager.page_size
        """So many pages at the head of `pages` are shared and must not be written."""
        self.pages = pages
        """The page table."""
        self.copies = copies
        """(source, target) pages to copy, before anything is written to this lease's pages."""
        self._manager = manager
        self._anchor = anchor
        self._num_published_items = match.num_keys
        self._num_published_positions = match.num_positions
        self._is_open = True

    def take_copies(self) -> list[tuple[int, int]]:
        """Hands the copies over to whoever makes them. Sources stay valid until the lease is released."""
        self._require_open()
        copies, self.copies = self.copies, []
        return copies

    def extend_to(self, num_positions: int) -> int:
        """Grows the page table to hold so many positions; returns how many pages that added.

        Raises OutOfPages with nothing changed.
        """
        self._require_open()
        num_new = pages_for(num_positions, self._manager._page_size) - len(self.pages)
        if num_new <= 0:
            return 0
        self.pages += self._manager._allocate(num_new)
        return num_new

    def publish(self, items: Sequence[ContextItem]) -> None:
        """Offers the KV of `items`, which start at position 0 and are complete, to later leases.

        Each call must repeat the items of the last one and may add to them; only what was added costs time.
        """
        self._require_open()
        if self.copies:
            raise CacheMisuse(f"publish before the copies {self.copies} were taken")
        num_known = self._num_published_items
        if len(items) <= num_known:
            return
        if self._anchor is not None and self._anchor.keys[-1:] != context_keys(items[num_known - 1 : num_known]):
            raise CacheMisuse(f"{items[num_known - 1]} is published where {self._anchor.keys[-1]} was before")
        added = items[num_known:]
        end = self._num_published_positions + count_positions(added)
        if pages_for(end, self._manager._page_size) > len(self.pages):
            raise CacheMisuse(f"publish of {end} positions with {len(self.pages)} pages")
        keys, prefixes = context_keys(added), self._manager._prefixes
        self._anchor = prefixes.insert(self.namespace, self._anchor, keys, self.pages, end)
        self._num_published_items = len(items)
        self._num_published_positions = end

    def release(self) -> None:
        """Gives everything back. What was published stays cached until it is evicted. To be called exactly once."""
        self._require_open()
        self._is_open = False
        manager = self._manager
        manager._prefixes.unlock(self._anchor)
        manager._pool.release(self.pages)
        manager._leases.remove(self)

    def _require_open(self) -> None:
        if not self._is_open:
            raise CacheMisuse("the page lease was already released")


class CacheManager:
    """Gives out leases on KV pages, starting each from the longest prefix that is still cached."""

    def __init__(self, num_pages: int, page_size: int, enable_prefix_cache: bool = True) -> None:
        if page_size < 1:
            raise ConfigError("page_size", f"must be at least 1 (got {page_size})")
        self._pool = PagePool(num_pages)
        self._page_size = page_size
        self._prefixes = (RadixPrefixCache if enable_prefix_cache else NoPrefixCache)(self._pool, page_size)
        self._leases: set[PageLease] = set()
        self._num_queries = 0
        self._num_hits = 0
        self._num_query_positions = 0
        self._num_hit_positions = 0
        self._num_evicted_pages = 0

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    @property
    def num_evictable_pages(self) -> int:
        return self._prefixes.num_evictable_pages

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def shares_prefixes(self) -> bool:
        """Whether a published context can serve later leases at all."""
        return self._prefixes.shares_prefixes

    def acquire(self, namespace: Hashable, items: Sequence[ContextItem], *, reuse: bool = True) -> PageLease:
        """Leases pages for all positions of a context, the longest usable cached prefix included.

        The last item is never taken from the cache: it has to be computed to yield a token. A match that would leave
        too few pages for the rest is given up for a shorter one. Without `reuse` nothing is taken from the cache; the
        context may still be published. Raises OutOfPages with nothing changed.
        """
        keys = context_keys(items)
        if not keys:
            raise CacheMisuse("a lease needs at least one context item")
        num_positions = count_positions(items)
        num_pages = pages_for(num_positions, self._page_size)
        num_available = self._pool.num_free + self._prefixes.num_evictable_pages
        for match in self._prefixes.matches(namespace, keys[:-1] if reuse else ()):
            num_new = num_pages - match.num_positions // self._page_size
            if num_new > num_available:
                break  # a shorter match needs even more
            if num_new + match.num_pinned_pages <= num_available:
                return self._open_lease(namespace, match, num_positions)
        raise self._out_of_pages(f"{num_positions} positions need {num_pages} pages")

    def holds(self, namespace: Hashable, items: Sequence[ContextItem]) -> bool:
        """Whether all of a context is in the prefix cache now."""
        keys = context_keys(items)
        return next(self._prefixes.matches(namespace, keys)).num_positions == count_positions(keys)

    def stats(self) -> CacheStats:
        return CacheStats(
            queries=self._num_queries,
            hits=self._num_hits,
            query_positions=self._num_query_positions,
            hit_positions=self._num_hit_positions,
            evicted_pages=self._num_evicted_pages,
            num_pages=self._pool.num_pages,
            free_pages=self._pool.num_free,
            cached_pages=self._prefixes.num_cached_pages,
            evictable_pages=self._prefixes.num_evictable_pages,
            leases=len(self._leases),
        )

    def clear(self) -> None:
        """Forgets every cached prefix that no lease goes through. Not counted as eviction."""
        self._prefixes.clear()

    def check_integrity(self) -> None:
        """Recounts everything; raises AssertionError with the first difference. Slow: for idle times and tests."""
        prefix_recount = self._prefixes.check_integrity([lease._anchor for lease in self._leases])
        refcounts = Counter(prefix_recount.page_refs)
        allocated: set[int] = set()
        for lease in self._leases:
            assert lease._is_open, "a released lease is still listed"
            assert len(set(lease.pages)) == len(lease.pages), f"a lease names a page twice: {lease.pages}"
            own_pages = lease.pages[lease.num_shared_pages :]
            assert allocated.isdisjoint(own_pages), f"two leases may write one of {own_pages}"
            allocated.update(own_pages)
            for source, target in lease.copies:
                assert target in own_pages, f"the copy target {target} is not the lease's own"
                assert prefix_recount.page_refs[source], f"the copy source {source} is no longer cached"
            refcounts.update(lease.pages)
        self._pool.check_integrity(refcounts)
        unlocked = prefix_recount.unlocked_page_refs
        num_evictable = sum(refcounts[page] == num_refs for page, num_refs in unlocked.items())
        assert num_evictable == self.num_evictable_pages, f"{num_evictable} pages, not {self.num_evictable_pages}"

    def _open_lease(self, namespace: Hashable, match: PrefixMatch, num_positions: int) -> PageLease:
        anchor = self._prefixes.lock(match)
        matched_pages = self._prefixes.page_table(anchor)
        num_shared = match.num_positions // self._page_size
        shared, partly_filled = matched_pages[:num_shared], matched_pages[num_shared:]
        self._pool.retain(shared)
        fresh = self._allocate(pages_for(num_positions, self._page_size) - num_shared)
        copies = [(source, fresh[0]) for source in partly_filled]  # one at most
        lease = PageLease(self, namespace, match, anchor, shared + fresh, copies)
        self._leases.add(lease)
        self._num_queries += 1
        self._num_hits += match.num_positions > 0
        self._num_query_positions += num_positions
        self._num_hit_positions += match.num_positions
        return lease

    def _allocate(self, num_pages: int) -> list[int]:
        num_free = self._pool.num_free
        if num_pages > num_free + self._prefixes.num_evictable_pages:
            raise self._out_of_pages(f"{num_pages} more pages are needed")
        self._prefixes.evict(num_pages)
        self._num_evicted_pages += self._pool.num_free - num_free
        return self._pool.allocate(num_pages)

    def _out_of_pages(self, demand: str) -> OutOfPages:
        return OutOfPages(
            f"kv_cache_pages: {demand}; of {self._pool.num_pages} pages {self._pool.num_free} are free and "
            f"{self.num_evictable_pages} can be evicted. Retry when running sequences end, or raise kv_cache_pages"
        )
