"""Scores on cases small enough to work out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel.evals.metrics import (
    CharacterErrors,
    Matches,
    PrecisionRecall,
    RankedHit,
    average_precision,
    box_iou,
    edit_distance,
    match_boxes,
    match_points,
)


def test_iou_of_half_overlapping_squares_is_a_third() -> None:
    assert box_iou((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert box_iou((0, 0, 1, 1), (1, 1, 2, 2)) == 0.0
    assert box_iou((0, 0, 1, 1), (0, 0, 1, 1)) == 1.0
    assert box_iou((0, 0, 0, 0), (0, 0, 0, 0)) == 0.0


def test_two_points_in_one_box_count_once() -> None:
    assert match_points([(0.5, 0.5), (0.6, 0.6)], [(0, 0, 1, 1)]) == Matches(1, 2, 1)


def test_points_are_paired_as_well_as_possible() -> None:
    """The first point fits both boxes, the second only the first box: both can be matched."""
    boxes = [(0, 0, 1, 1), (0.4, 0.4, 2, 2)]
    assert match_points([(0.5, 0.5), (0.1, 0.1)], boxes).num_matched == 2


def test_precision_recall_and_f1() -> None:
    score = PrecisionRecall()
    score.add(Matches(1, 2, 4))
    score.add(Matches(2, 2, 2))
    assert (score.precision, score.recall) == (3 / 4, 1 / 2)
    assert score.f1 == pytest.approx(0.6)
    assert PrecisionRecall().f1 == 1.0


def test_a_true_box_is_found_once() -> None:
    true = [(0, 0, 1, 1)]
    assert match_boxes([(0, 0, 1, 0.9), (0, 0, 1, 1)], true) == [pytest.approx(0.9), 0.0]
    assert match_boxes([], true) == []
    assert match_boxes([(0, 0, 1, 1)], []) == [0.0]


def test_average_precision_by_hand() -> None:
    hits = [RankedHit(0, True), RankedHit(1, False), RankedHit(2, True)]
    assert average_precision(hits, num_true=2) == pytest.approx(0.5 * 1.0 + 0.5 * 2 / 3)
    assert average_precision(hits, num_true=4) == pytest.approx(0.25 * 1.0 + 0.25 * 2 / 3)
    assert average_precision([], num_true=3) == 0.0
    assert math.isnan(average_precision([], num_true=0))


@pytest.mark.parametrize(("a", "b", "distance"), [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "abc", 0)])
def test_edit_distance(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == distance


@given(st.text(max_size=12), st.text(max_size=12))
def test_edit_distance_is_bounded(a: str, b: str) -> None:
    assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


def test_character_error_rate() -> None:
    errors = CharacterErrors()
    errors.add("cat", "cart")
    errors.add("12", "12")
    assert errors.rate == pytest.approx(1 / 6)
