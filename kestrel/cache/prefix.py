"""What the manager asks of a prefix cache, and the one that remembers nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from kestrel.cache.integrity import PrefixRecount
from kestrel.cache.keys import Keys
from kestrel.cache.nodes import EMPTY_MATCH, PrefixMatch, RadixNode


class PrefixCache(Protocol):
    """Remembers which pages hold which context prefixes. An *anchor* is where a lease's lock ends; None is nowhere."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether what is inserted can ever be matched."""
        ...

    @property
    def num_cached_pages(self) -> int: ...

    @property
    def num_evictable_pages(self) -> int: ...

    def matches(self, namespace: Hashable, keys: Keys) -> Iterator[PrefixMatch]:
        """The longest cached prefix of `keys`, then ever shorter ones, the empty one last."""
        ...

    def lock(self, match: PrefixMatch) -> RadixNode | None:
        """Protects a match from eviction until its anchor is unlocked."""
        ...

    def page_table(self, anchor: RadixNode | None) -> list[int]:
        """The pages of all positions up to the anchor."""
        ...

    def insert(
        self, namespace: Hashable, anchor: RadixNode | None, keys: Keys, table: Sequence[int]
    ) -> RadixNode | None:
        """Remembers that `keys` follow the anchor, with pages from `table` where new; returns the new anchor."""
        ...

    def unlock(self, anchor: RadixNode | None) -> None: ...

    def evict(self, num_free_pages: int) -> None:
        """Forgets unlocked prefixes until the pool has so many free pages or nothing is left to forget."""
        ...

    def clear(self) -> None:
        """Forgets every unlocked prefix."""
        ...

    def check_integrity(self, anchors: Iterable[RadixNode | None]) -> PrefixRecount: ...


class NoPrefixCache:
    """Finds nothing and keeps nothing: every context is computed afresh."""

    shares_prefixes = False
    num_cached_pages = 0
    num_evictable_pages = 0

    def matches(self, namespace: Hashable, keys: Keys) -> Iterator[PrefixMatch]:
        yield EMPTY_MATCH

    def lock(self, match: PrefixMatch) -> RadixNode | None:
        return None

    def page_table(self, anchor: RadixNode | None) -> list[int]:
        return []

    def insert(
        self, namespace: Hashable, anchor: RadixNode | None, keys: Keys, table: Sequence[int]
    ) -> RadixNode | None:
        return None

    def unlock(self, anchor: RadixNode | None) -> None:
        return None

    def evict(self, num_free_pages: int) -> None:
        return None

    def clear(self) -> None:
        return None

    def check_integrity(self, anchors: Iterable[RadixNode | None]) -> PrefixRecount:
        assert all(anchor is None for anchor in anchors), "a lease is anchored though nothing is cached"
        return PrefixRecount()
