"""The pool of KV pages: which are free, and how many holders each of the others has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kestrel.errors import ConfigError, OutOfPages


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
        pages = [self._free.pop() for _ in range(num_pages)]
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
