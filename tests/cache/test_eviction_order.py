"""The eviction order on its own."""

from __future__ import annotations

from kestrel.cache.radix import EvictionOrder


def test_the_oldest_is_the_one_added_first() -> None:
    order: EvictionOrder[str] = EvictionOrder()
    for name in ("a", "b", "c"):
        order.add(name, 1)
    assert order.oldest() == "a"
    order.remove("a")
    assert order.oldest() == "b"
    order.add("a", 1)
    assert list(order) == ["b", "c", "a"]


def test_resizing_keeps_the_place_and_the_sum_follows() -> None:
    order: EvictionOrder[str] = EvictionOrder()
    order.add("a", 5)
    order.add("b", 2)
    order.resize("a", 3)
    assert order.num_pages == 5
    assert order.oldest() == "a"
    order.remove("a")
    assert order.num_pages == 2
    assert len(order) == 1
