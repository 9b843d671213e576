"""Who is evicted, who is not, and what happens when nobody is left."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from kestrel.cache import CacheManager
from kestrel.errors import OutOfPages
from kestrel.tokens import TextToken

from .builders import BASE, all_nodes, cached_positions, image, open_lease, remember, text


def snapshot(manager: CacheManager) -> tuple:
    refcounts = [manager._pool.refcount(page) for page in range(manager.num_pages)]
    order = [(node.start, node.end, tuple(node.pages)) for node in manager._prefixes._unlocked]  # pyright: ignore
    nodes = [(node.start, node.end, node.locks, tuple(node.pages)) for node in all_nodes(manager)]
    return refcounts, order, nodes, manager.stats()


def test_the_least_recently_used_goes_first() -> None:
    manager = CacheManager(num_pages=3, page_size=2)
    for first in (10, 20, 30, 40, 50):
        remember(manager, text(first, first + 1))
        assert manager.num_free_pages == max(0, 3 - first // 10)
    assert [cached_positions(manager, text(first, first + 1)) for first in (10, 20, 30, 40, 50)] == [0, 0, 2, 2, 2]
    assert manager.stats().evicted_pages == 2


def test_a_match_makes_its_path_recent() -> None:
    manager = CacheManager(num_pages=4, page_size=1)
    remember(manager, text(10))
    remember(manager, text(20))
    open_lease(manager, text(10, 11)).release()
    remember(manager, text(30, 31, 32))
    assert cached_positions(manager, text(10)) == 1
    assert cached_positions(manager, text(20)) == 0


def test_publishing_known_items_makes_their_path_recent() -> None:
    manager = CacheManager(num_pages=4, page_size=1)
    remember(manager, text(10))
    remember(manager, text(20))
    remember(manager, text(10))
    remember(manager, text(30, 31, 32))
    assert cached_positions(manager, text(10)) == 1
    assert cached_positions(manager, text(20)) == 0


def test_an_unmatched_remainder_does_not_become_recent() -> None:
    manager = CacheManager(num_pages=5, page_size=1)
    remember(manager, text(10, 11))
    remember(manager, text(20))
    open_lease(manager, text(10, 99)).release()
    remember(manager, text(30, 31, 32))
    assert cached_positions(manager, text(10, 11)) == 1
    assert cached_positions(manager, text(20)) == 1


def test_leaves_go_before_their_parents_and_parents_can_follow() -> None:
    manager = CacheManager(num_pages=6, page_size=1)
    lease = open_lease(manager, text(1, 2, 3, 4))
    for length in (1, 2, 3, 4):
        lease.publish(text(1, 2, 3, 4)[:length])
    lease.release()
    probe = open_lease(manager, text(9, 9, 9))
    assert cached_positions(manager, text(1, 2, 3, 4)) == 3
    probe.extend_to(5)
    manager.check_integrity()
    assert cached_positions(manager, text(1, 2, 3, 4)) == 1
    assert manager.stats().evicted_pages == 3


def test_recency_follows_a_reference_over_many_sequences() -> None:
    rng = random.Random(5)
    manager = CacheManager(num_pages=10, page_size=1)
    recent: list[int] = []
    for _ in range(2000):
        token = rng.randrange(16)
        remember(manager, text(token))
        if len(recent) == manager.num_pages:
            recent.pop(0)
        if token in recent:
            recent.remove(token)
        recent.append(token)
        assert {token for token in range(16) if cached_positions(manager, text(token))} == set(recent)


def test_a_locked_path_is_not_evicted() -> None:
    manager = CacheManager(num_pages=6, page_size=2)
    remember(manager, text(1, 2, 3, 4))
    holder = open_lease(manager, text(1, 2, 3, 4, 5))
    with pytest.raises(OutOfPages):
        manager.acquire(BASE, text(*range(10, 18)))
    assert cached_positions(manager, text(1, 2, 3, 4)) == 4
    holder.release()
    open_lease(manager, text(*range(10, 20)))
    assert cached_positions(manager, text(1, 2, 3, 4)) == 0
    manager.check_integrity()


def test_a_node_below_the_match_can_be_evicted_while_the_match_is_held() -> None:
    manager = CacheManager(num_pages=6, page_size=1)
    remember(manager, text(1, 2, 3, 4))
    holder = open_lease(manager, text(1, 2, 9))
    assert holder.num_cached == 2
    assert manager.num_evictable_pages == 2
    holder.extend_to(5)
    assert cached_positions(manager, text(1, 2, 3, 4)) == 2
    manager.check_integrity()


def test_acquire_does_not_evict_the_match_it_just_made() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    old = remember(manager, text(1, 2, 3, 4))
    remember(manager, text(11, 12, 13, 14))
    lease = open_lease(manager, text(1, 2, 3, 4, *range(20, 28)))
    assert lease.num_cached == 4
    assert lease.pages[:2] == old
    assert len(set(lease.pages)) == 6
    manager.check_integrity()


def test_out_of_pages_leaves_everything_as_it_was() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    remember(manager, text(1, 2, 3, 4, 5))
    remember(manager, text(7, 8))
    open_lease(manager, text(1, 2, 9))
    before = snapshot(manager)
    with pytest.raises(OutOfPages, match="kv_cache_pages: 16 positions need 8 pages"):
        manager.acquire(BASE, text(1, 2, 3, *range(20, 33)))
    assert snapshot(manager) == before
    manager.check_integrity()


def test_a_context_larger_than_the_pool_is_out_of_pages_and_evicts_nothing() -> None:
    manager = CacheManager(num_pages=4, page_size=2)
    remember(manager, text(1, 2, 3))
    before = snapshot(manager)
    with pytest.raises(OutOfPages):
        manager.acquire(BASE, text(*range(9)))
    assert snapshot(manager) == before


def test_a_match_that_blocks_its_own_context_is_shortened_to_whole_pages() -> None:
    """5 pages: the match needs 2 + a copy's source, the rest 3. Without the partly filled page it fits."""
    manager = CacheManager(num_pages=5, page_size=4)
    pages = remember(manager, text(*range(10)))
    lease = manager.acquire(BASE, text(*range(20)))
    assert lease.num_cached == 8
    assert lease.copies == []
    assert lease.pages[:2] == pages[:2]
    assert len(set(lease.pages)) == 5
    manager.check_integrity()


def test_a_match_that_blocks_and_cannot_be_shortened_is_given_up() -> None:
    manager = CacheManager(num_pages=5, page_size=4)
    remember(manager, image("a", 10) + text(1))
    lease = manager.acquire(BASE, image("a", 10) + text(*range(10)))
    assert lease.num_cached == 0
    assert len(set(lease.pages)) == 5
    manager.check_integrity()


def test_a_blocking_match_falls_back_to_an_earlier_node() -> None:
    manager = CacheManager(num_pages=5, page_size=4)
    lease = open_lease(manager, image("a", 8) + image("b", 3))
    lease.publish(image("a", 8))
    lease.publish(image("a", 8) + image("b", 3))
    lease.release()
    lease = manager.acquire(BASE, image("a", 8) + image("b", 3) + text(*range(9)))
    assert lease.num_cached == 8
    manager.check_integrity()


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_context_that_fits_an_empty_pool_is_always_admitted_when_no_lease_is_held(page_size: int) -> None:
    rng = random.Random(page_size)
    manager = CacheManager(num_pages=7, page_size=page_size)
    for _ in range(1500):
        num_positions = rng.randint(1, 7 * page_size)
        items = [TextToken(rng.choice((0, 0, 0, 0, 0, 0, 0, 1))) for _ in range(num_positions)]
        lease = open_lease(manager, items)
        for end in sorted(rng.sample(range(num_positions + 1), k=min(3, num_positions))):
            lease.publish(items[:end])
        lease.release()
        manager.check_integrity()
    assert manager.stats().hits > 100


def test_clear_drops_unlocked_nodes_only() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    remember(manager, text(1, 2, 3, 4))
    remember(manager, text(7, 8))
    holder = open_lease(manager, text(1, 2, 9))
    manager.clear()
    assert cached_positions(manager, text(1, 2, 3, 4)) == 2
    assert cached_positions(manager, text(7, 8)) == 0
    assert manager.stats().evicted_pages == 0
    manager.check_integrity()
    holder.release()
    manager.clear()
    assert manager.num_free_pages == 8


@pytest.mark.exhaustive
def test_memory_stays_flat_over_many_sequences() -> None:
    manager = CacheManager(num_pages=64, page_size=4)

    def run(first: int, count: int) -> None:
        for token in range(first, first + count):
            items = text(token % 7, token, token + 1, token + 2, token + 3)
            lease = open_lease(manager, items)
            lease.publish(items)
            lease.release()

    text(*range(10_010))  # tokens of the same id are one object, kept for longer than a lease
    run(0, 2000)
    tracemalloc.start()
    run(2000, 2000)
    settled = tracemalloc.get_traced_memory()[0]
    run(4000, 6000)
    grown = tracemalloc.get_traced_memory()[0] - settled
    tracemalloc.stop()
    manager.check_integrity()
    assert grown < 20_000
