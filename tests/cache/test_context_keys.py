"""Keys and position arithmetic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel.cache.manager import CacheMisuse
from kestrel.cache.radix import common_length, context_keys, count_positions, page_aligned_cut, pages_for
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, TextToken, num_positions

coordinate = st.sampled_from([0.0, 0.5, 1.0])
context_item: st.SearchStrategy[ContextItem] = st.one_of(
    st.builds(TextToken, st.integers(0, 3)),
    st.builds(CoordToken, coordinate),
    st.builds(SizeToken, coordinate, coordinate),
    st.builds(ImageSpan, st.sampled_from(["a", "b"]), st.integers(1, 9), st.sampled_from([None, 0, 1])),
)


@given(context_item, context_item)
def test_keys_are_equal_exactly_when_items_are(left: ContextItem, right: ContextItem) -> None:
    assert (context_keys([left]) == context_keys([right])) == (left == right)


@given(st.lists(context_item))
def test_positions_agree_with_those_of_the_items(items: list[ContextItem]) -> None:
    assert count_positions(context_keys(items)) == num_positions(items)


@given(st.integers(0, 500), st.integers(1, 70))
def test_pages_for_is_the_least_number_of_pages_that_holds_the_positions(positions: int, page_size: int) -> None:
    num_pages = pages_for(positions, page_size)
    assert num_pages * page_size >= positions
    assert (num_pages - 1) * page_size < positions


@given(st.lists(context_item), st.lists(context_item), st.lists(context_item))
def test_common_length_counts_equal_leading_items(before: list[ContextItem], edge: list[ContextItem], rest) -> None:
    keys = context_keys([*before, *rest])
    expected = 0
    while expected < min(len(edge), len(rest)) and edge[expected] == rest[expected]:
        expected += 1
    assert common_length(context_keys(edge), keys, len(before)) == expected


def test_one_nan_coordinate_agrees_with_itself() -> None:
    nan = CoordToken(math.nan)
    assert common_length((nan, 1), (nan, 2), 0) == 1


def test_page_aligned_cut_steps_back_to_an_item_that_starts_a_page() -> None:
    keys = context_keys([TextToken(1), ImageSpan("a", 7), TextToken(2), TextToken(3)])
    assert page_aligned_cut(keys, 4, 10, 4) == (2, 8)
    assert page_aligned_cut(keys, 4, 10, 9) == (3, 9)
    assert page_aligned_cut(keys, 2, 8, 3) == (0, 0)


def test_a_span_without_positions_is_refused() -> None:
    with pytest.raises(CacheMisuse, match="without positions"):
        count_positions((ImageSpan("a", 0),))
