"""The manager without a prefix cache: same interface, nothing remembered."""

from __future__ import annotations

import pytest

from kestrel.cache import CacheManager, CacheMisuse
from kestrel.errors import OutOfPages

from .builders import BASE, open_lease, text


def test_nothing_is_shared_or_kept() -> None:
    manager = CacheManager(num_pages=4, page_size=2, enable_prefix_cache=False)
    for _ in range(2):
        lease = manager.acquire(BASE, text(1, 2, 3))
        assert lease.num_cached == 0
        assert lease.copies == []
        lease.publish(text(1, 2))
        lease.publish(text(1, 2, 3))
        manager.check_integrity()
        lease.release()
        assert manager.num_free_pages == 4
    manager.clear()
    stats = manager.stats()
    assert (stats.queries, stats.hits, stats.cached_pages, stats.evictable_pages) == (2, 0, 0, 0)


def test_the_manager_says_whether_prefixes_are_shared() -> None:
    assert not CacheManager(num_pages=4, page_size=2, enable_prefix_cache=False).shares_prefixes
    assert CacheManager(num_pages=4, page_size=2).shares_prefixes


def test_pages_run_out_and_leases_still_end_once() -> None:
    manager = CacheManager(num_pages=2, page_size=2, enable_prefix_cache=False)
    lease = open_lease(manager, text(1, 2, 3))
    with pytest.raises(OutOfPages):
        manager.acquire(BASE, text(1))
    with pytest.raises(OutOfPages):
        lease.extend_to(5)
    lease.release()
    with pytest.raises(CacheMisuse):
        lease.release()
    manager.check_integrity()
    assert manager.num_free_pages == 2
