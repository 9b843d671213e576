"""The prefix tree seen through leases: spans, splits, page tables, namespaces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.cache import CacheManager
from kestrel.request import CacheNamespace
from kestrel.tokens import ContextItem, ImageSpan, TextToken, num_positions

from .builders import BASE, all_nodes, cached_positions, image, nodes_by_span, open_lease, remember, text
from .device_model import Device


def test_an_image_span_is_matched_whole_or_not_at_all() -> None:
    manager = CacheManager(num_pages=64, page_size=1)
    remember(manager, text(1) + image("a", 9) + text(2))
    assert cached_positions(manager, text(1) + image("a", 9) + text(3)) == 10
    assert cached_positions(manager, text(1) + image("b", 9)) == 1
    assert cached_positions(manager, text(1) + image("a", 5)) == 1
    assert cached_positions(manager, [*text(1), ImageSpan("a", 9, bos_id=0)]) == 1


def test_a_span_is_never_cut_though_its_page_is_shared_with_text() -> None:
    manager = CacheManager(num_pages=64, page_size=4)
    remember(manager, text(1) + image("a", 6) + text(2, 3))
    remember(manager, text(1) + image("b", 6) + text(2, 3))
    assert sorted((node.start, node.end) for node in all_nodes(manager)) == [(0, 1), (1, 9), (1, 9)]


def test_a_split_inside_a_page_leaves_the_page_to_both_halves() -> None:
    manager = CacheManager(num_pages=16, page_size=4)
    pages = remember(manager, text(1, 2, 3, 4, 5, 6, 7))
    lease = manager.acquire(BASE, text(1, 2, 3, 4, 5, 9))
    nodes = nodes_by_span(manager)
    assert nodes[0, 5].pages == pages
    assert nodes[5, 7].pages == pages[1:]
    assert manager._pool.refcount(pages[1]) == 2
    assert manager.stats().cached_pages == 2
    lease.release()
    manager.check_integrity()


def test_a_split_at_a_page_boundary_divides_the_pages() -> None:
    manager = CacheManager(num_pages=16, page_size=4)
    pages = remember(manager, text(1, 2, 3, 4, 5, 6, 7))
    manager.acquire(BASE, text(1, 2, 3, 4, 9)).release()
    nodes = nodes_by_span(manager)
    assert nodes[0, 4].pages == pages[:1]
    assert nodes[4, 7].pages == pages[1:]
    manager.check_integrity()


def test_a_lease_anchored_in_a_split_node_keeps_both_halves() -> None:
    manager = CacheManager(num_pages=16, page_size=1)
    remember(manager, text(1, 2, 3, 4))
    holder = open_lease(manager, text(1, 2, 3, 4, 5))
    manager.acquire(BASE, text(1, 2, 9)).release()
    nodes = nodes_by_span(manager)
    assert nodes[0, 2].locks == nodes[2, 4].locks == 1
    holder.publish(text(1, 2, 3, 4, 5))
    manager.check_integrity()
    assert cached_positions(manager, text(1, 2, 3, 4, 5)) == 5


def test_the_deepest_node_wins_in_a_page_table() -> None:
    manager = CacheManager(num_pages=16, page_size=4)
    short = remember(manager, text(1, 2, 3))
    long = remember(manager, text(1, 2, 3, 4, 5))
    assert short[0] != long[0]
    lease = manager.acquire(BASE, text(1, 2, 3, 4, 5, 6))
    assert nodes_by_span(manager)[0, 3].pages == short
    assert lease.pages[0] == long[0]
    assert lease.copies == [(long[1], lease.pages[1])]


def test_a_page_under_another_page_of_its_index_is_counted_once() -> None:
    """The first and the third node hold one page, the second a copy of it: two pages in all."""
    manager = CacheManager(num_pages=16, page_size=8)
    writer = open_lease(manager, text(1, 2, 3, 4))
    writer.publish(text(1, 2))
    copier = open_lease(manager, text(1, 2, 3, 9))
    copier.publish(text(1, 2, 3))
    writer.publish(text(1, 2, 3, 4))
    nodes = nodes_by_span(manager)
    assert nodes[0, 2].pages == nodes[3, 4].pages != nodes[2, 3].pages
    assert manager.stats().cached_pages == 2
    manager.check_integrity()
    writer.release()
    assert manager.num_evictable_pages == 0
    copier.release()
    assert manager.num_evictable_pages == 2
    manager.check_integrity()


def test_namespaces_share_nothing() -> None:
    manager = CacheManager(num_pages=16, page_size=2)
    items = text(1, 2, 3, 4)
    remember(manager, items, CacheNamespace(adapter="one"))
    assert cached_positions(manager, items, CacheNamespace(adapter="one")) == 4
    assert cached_positions(manager, items, CacheNamespace(adapter="one", tenant="x")) == 0
    assert cached_positions(manager, items, CacheNamespace()) == 0
    remember(manager, items, CacheNamespace())
    assert manager.stats().cached_pages == 4


def test_an_emptied_namespace_disappears() -> None:
    manager = CacheManager(num_pages=4, page_size=2)
    remember(manager, text(1, 2), "first")
    remember(manager, text(1, 2, 3), "second")
    remember(manager, text(1, 2, 3), "third")
    assert list(manager._prefixes._roots) == ["second", "third"]  # pyright: ignore[reportAttributeAccessIssue]
    manager.clear()
    assert not manager._prefixes._roots  # pyright: ignore[reportAttributeAccessIssue]
    assert manager.num_free_pages == 4
    manager.check_integrity()


def test_a_lease_may_publish_into_a_namespace_that_disappeared_meanwhile() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    lease = open_lease(manager, text(5, 6))
    remember(manager, text(1, 2))
    manager.clear()
    lease.publish(text(5, 6))
    manager.check_integrity()
    assert cached_positions(manager, text(5, 6)) == 2


some_item: st.SearchStrategy[ContextItem] = st.one_of(
    st.builds(TextToken, st.integers(0, 1)), st.builds(ImageSpan, st.just("a"), st.sampled_from([2, 5]))
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 3, 16]), st.lists(st.lists(some_item, min_size=1, max_size=8), min_size=1, max_size=12))
def test_a_match_is_the_longest_prefix_ever_published(page_size: int, contexts: list[list[ContextItem]]) -> None:
    device = Device(CacheManager(num_pages=1000, page_size=page_size))
    published: list[list[ContextItem]] = []
    for items in contexts:
        sequence = device.start(BASE, items)
        assert sequence.lease.num_cached == max((_common(items[:-1], other) for other in published), default=0)
        sequence.write_items(len(items))
        sequence.publish(len(items))
        sequence.release()
        published.append(items)
        device.manager.check_integrity()
    device.verify()


def _common(items: list[ContextItem], other: list[ContextItem]) -> int:
    length = 0
    while length < min(len(items), len(other)) and items[length] == other[length]:
        length += 1
    return num_positions(items[:length])
