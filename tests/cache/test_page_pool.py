"""The page pool on its own."""

from __future__ import annotations

import pytest

from kestrel.cache.radix import CacheMisuse, PagePool
from kestrel.errors import ConfigError, OutOfPages


def test_allocate_hands_out_distinct_pages_until_none_is_left() -> None:
    pool = PagePool(5)
    pages = pool.allocate(2) + pool.allocate(3)
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0


def test_allocate_of_nothing_takes_nothing() -> None:
    pool = PagePool(3)
    assert pool.allocate(0) == []
    assert pool.num_free == 3


def test_a_failed_allocation_changes_nothing() -> None:
    pool = PagePool(4)
    held = pool.allocate(2)
    with pytest.raises(OutOfPages, match="3 pages are wanted, 2 of 4 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity(dict.fromkeys(held, 1))


def test_a_page_is_free_again_only_when_its_last_holder_releases_it() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.num_free == 0
    assert pool.refcount(pages[0]) == 1
    pool.release(pages)
    assert pool.num_free == 1
    assert pool.allocate(1) == pages


def test_double_release_is_an_error() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(CacheMisuse, match="released but nobody holds it"):
        pool.release(pages)
    assert pool.num_free == 2


def test_a_free_page_cannot_be_retained() -> None:
    with pytest.raises(CacheMisuse, match="retained but nobody holds it"):
        PagePool(2).retain([0])


def test_negative_allocation_is_an_error() -> None:
    with pytest.raises(CacheMisuse):
        PagePool(2).allocate(-1)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_pages"):
        PagePool(0)


def test_integrity_check_finds_a_wrong_refcount_and_a_wrong_free_list() -> None:
    pool = PagePool(3)
    page = pool.allocate(1)[0]
    with pytest.raises(AssertionError, match=f"page {page} has refcount 1"):
        pool.check_integrity({})
    pool._free.append(page)
    with pytest.raises(AssertionError, match="free list"):
        pool.check_integrity({page: 1})
