"""What a lease gives, what it shares, what it copies, and its end."""

from __future__ import annotations

import pytest

from kestrel.cache import CacheManager, CacheMisuse
from kestrel.errors import ConfigError, OutOfPages
from kestrel.tokens import CoordToken, SizeToken

from .builders import BASE, cached_positions, image, nodes_by_span, open_lease, remember, text
from .device_model import Device


def test_a_first_lease_has_fresh_pages_for_all_positions() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    lease = manager.acquire(BASE, image("a", 7) + text(1, 2))
    assert lease.num_cached == 0
    assert lease.copies == []
    assert len(set(lease.pages)) == 3
    assert manager.num_free_pages == 5
    assert manager.num_leases == 1
    manager.check_integrity()


def test_nothing_is_shared_before_it_is_published() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    open_lease(manager, text(1, 2, 3, 4, 5))
    assert manager.acquire(BASE, text(1, 2, 3, 4, 5)).num_cached == 0


def test_the_last_item_is_always_computed() -> None:
    manager = CacheManager(num_pages=8, page_size=1)
    remember(manager, text(1, 2, 3))
    assert manager.acquire(BASE, text(1, 2, 3)).num_cached == 2
    assert manager.acquire(BASE, text(1)).num_cached == 0
    assert manager.acquire(BASE, text(1, 2, 3, 4)).num_cached == 3


def test_a_last_image_span_is_computed_whole() -> None:
    manager = CacheManager(num_pages=40, page_size=1)
    remember(manager, text(1) + image("a", 6))
    assert manager.acquire(BASE, text(1) + image("a", 6)).num_cached == 1


def test_full_pages_of_a_match_are_shared() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    pages = remember(manager, text(1, 2, 3, 4))
    lease = manager.acquire(BASE, text(1, 2, 3, 4, 5))
    assert lease.num_cached == 4
    assert lease.num_shared_pages == 2
    assert lease.pages[:2] == pages
    assert lease.pages[2] not in pages
    assert lease.copies == []


def test_a_partly_filled_page_of_a_match_is_copied_not_shared() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    pages = remember(manager, text(1, 2, 3, 4, 5, 6))
    lease = manager.acquire(BASE, text(1, 2, 3, 4, 5, 6, 7))
    assert lease.num_cached == 6
    assert lease.pages[0] == pages[0]
    assert lease.pages[1] != pages[1]
    assert lease.copies == [(pages[1], lease.pages[1])]


def test_a_match_shorter_than_a_page_is_copied() -> None:
    manager = CacheManager(num_pages=8, page_size=64)
    pages = remember(manager, text(1, 2, 3))
    lease = manager.acquire(BASE, text(1, 2, 9))
    assert lease.num_cached == 2
    assert lease.copies == [(pages[0], lease.pages[0])]


def test_two_continuations_of_a_partly_filled_page_do_not_disturb_each_other() -> None:
    device = Device(CacheManager(num_pages=12, page_size=4))
    first = device.start(BASE, text(1, 2, 3, 4, 5))
    first.write_items(5)
    first.publish(5)
    left = device.start(BASE, text(1, 2, 3, 4, 5, 6, 7))
    right = device.start(BASE, text(1, 2, 3, 4, 5, 8, 9))
    assert left.lease.num_cached == right.lease.num_cached == 5
    first.grow(text(6, 6, 6))
    for sequence in (left, first, right):
        sequence.write_items(3)
        device.verify()
    for sequence in (left, right, first):
        sequence.publish(9)
        device.manager.check_integrity()
        device.verify()


def test_take_copies_hands_them_over_once() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    remember(manager, text(1, 2, 3))
    lease = manager.acquire(BASE, text(1, 2, 3, 4))
    assert len(lease.take_copies()) == 1
    assert lease.copies == []
    assert lease.take_copies() == []


def test_publishing_before_the_copies_were_taken_is_an_error() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    remember(manager, text(1, 2, 3))
    lease = manager.acquire(BASE, text(1, 2, 3, 4))
    with pytest.raises(CacheMisuse, match="before the copies"):
        lease.publish(text(1, 2, 3, 4))


def test_publishing_more_than_the_lease_has_pages_for_is_an_error() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    lease = open_lease(manager, text(1, 2))
    with pytest.raises(CacheMisuse, match="3 positions with 1 pages"):
        lease.publish(text(1, 2, 3))
    assert manager.stats().cached_pages == 0
    manager.check_integrity()


def test_publishing_another_context_than_before_is_an_error() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    lease = open_lease(manager, text(1, 2, 3, 4))
    lease.publish(text(1, 2))
    with pytest.raises(CacheMisuse, match="was before"):
        lease.publish(text(1, 5, 3))


def test_publishing_step_by_step_equals_publishing_at_once() -> None:
    items = image("a", 5) + text(1, 2, 3, 4)
    stepwise, at_once = CacheManager(8, 4), CacheManager(8, 4)
    lease = open_lease(stepwise, items)
    for num_items in (1, 3, 3, 2, 5):
        lease.publish(items[:num_items])
        stepwise.check_integrity()
    lease.release()
    remember(at_once, items)
    for manager in (stepwise, at_once):
        assert cached_positions(manager, items) == 9
        assert manager.stats().cached_pages == 3
        assert manager.num_free_pages == 5
    assert sorted(nodes_by_span(stepwise)) == [(0, 5), (5, 7), (7, 9)]


def test_publishing_what_another_lease_published_adds_nothing_and_protects_it() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    items = text(1, 2, 3, 4)
    first, second = open_lease(manager, items), open_lease(manager, items)
    first.publish(items)
    second.publish(items)
    first.release()
    assert manager.stats().cached_pages == 2
    assert manager.num_evictable_pages == 0
    assert nodes_by_span(manager)[0, 4].pages == first.pages
    second.release()
    manager.check_integrity()
    assert manager.num_free_pages == 6


def test_publishing_less_than_was_matched_changes_nothing() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    remember(manager, text(1, 2, 3, 4))
    lease = open_lease(manager, text(1, 2, 3, 4, 5))
    lease.publish(text(1, 2))
    assert sorted(nodes_by_span(manager)) == [(0, 4)]
    manager.check_integrity()


def test_extend_grows_the_table_by_whole_pages() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    lease = open_lease(manager, text(1, 2, 3))
    first_page = lease.pages[0]
    assert lease.extend_to(4) == 0
    assert lease.extend_to(5) == 1
    assert lease.extend_to(16) == 2
    assert lease.extend_to(2) == 0
    assert lease.pages[0] == first_page
    assert len(lease.pages) == 4
    manager.check_integrity()


def test_extend_that_finds_no_page_leaves_the_lease_unchanged() -> None:
    manager = CacheManager(num_pages=3, page_size=4)
    lease = open_lease(manager, text(1))
    open_lease(manager, text(2))
    before = list(lease.pages)
    with pytest.raises(OutOfPages, match="2 more pages are needed"):
        lease.extend_to(12)
    assert lease.pages == before
    assert manager.num_free_pages == 1
    manager.check_integrity()


def test_release_keeps_what_was_published_and_frees_the_rest() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    lease = open_lease(manager, text(1, 2, 3, 4, 5, 6))
    lease.publish(text(1, 2, 3))
    lease.release()
    assert manager.num_free_pages == 6
    assert manager.num_evictable_pages == 2
    assert manager.num_leases == 0
    manager.check_integrity()


@pytest.mark.parametrize("use", ["release", "take_copies", "extend_to", "publish"])
def test_a_released_lease_cannot_be_used(use: str) -> None:
    manager = CacheManager(num_pages=4, page_size=2)
    lease = open_lease(manager, text(1))
    lease.release()
    uses = {
        "release": lease.release,
        "take_copies": lease.take_copies,
        "extend_to": lambda: lease.extend_to(4),
        "publish": lambda: lease.publish(text(1)),
    }
    with pytest.raises(CacheMisuse, match="already released"):
        uses[use]()
    assert manager.num_free_pages == 4
    manager.check_integrity()


def test_coordinates_and_sizes_are_matched_by_value() -> None:
    manager = CacheManager(num_pages=16, page_size=1)
    items = [*text(1), CoordToken(0.25), SizeToken(0.5, 0.125), *text(2)]
    remember(manager, items)
    assert cached_positions(manager, [*text(1), CoordToken(0.25), SizeToken(0.5, 0.125), *text(2)]) == 4
    assert cached_positions(manager, [*text(1), CoordToken(0.25), SizeToken(0.5, 0.25)]) == 2
    assert cached_positions(manager, [*text(1), CoordToken(0.5)]) == 1


def test_a_nan_coordinate_is_published_without_harm() -> None:
    manager = CacheManager(num_pages=16, page_size=1)
    nan = CoordToken(float("nan"))
    for tail in (1, 2, 3):
        remember(manager, [*text(7), nan, *text(tail)])
    assert cached_positions(manager, text(7)) == 1


def test_an_empty_context_is_refused() -> None:
    with pytest.raises(CacheMisuse, match="at least one"):
        CacheManager(4, 4).acquire(BASE, [])


def test_a_page_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_size"):
        CacheManager(num_pages=4, page_size=0)


def test_stats_count_queries_hits_and_positions() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    remember(manager, image("a", 5) + text(1))
    lease = open_lease(manager, image("a", 5) + text(2))
    stats = manager.stats()
    assert (stats.queries, stats.hits) == (2, 1)
    assert (stats.query_positions, stats.hit_positions) == (12, 5)
    assert (stats.num_pages, stats.cached_pages, stats.leases) == (8, 3, 1)
    assert stats.free_pages == 8 - 3 - 1
    assert stats.evicted_pages == 0
    lease.release()
    assert manager.stats().leases == 0


def test_a_failed_acquisition_does_not_count_as_a_query() -> None:
    manager = CacheManager(num_pages=2, page_size=2)
    with pytest.raises(OutOfPages):
        manager.acquire(BASE, text(*range(5)))
    assert manager.stats().queries == 0
