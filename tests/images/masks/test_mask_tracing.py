"""Masks back to SVG paths."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import RequestError
from kestrel.images.masks import Mask, rasterise_path, trace_mask
from tests.exhaustive import sweep

from .shapes import WHOLE, disc, draw, flood_regions, iou, letters, ring, star


@sweep("side", [32, 50, 64, 100, 300, 1000], always=[32, 50, 300])
@pytest.mark.parametrize("shape", ["disc", "star", "ring", "letters"])
def test_a_traced_mask_draws_itself_again(shape: str, side: int) -> None:
    shapes = {"disc": lambda n: disc(n, 0.4 * n), "star": star, "ring": ring, "letters": letters}
    mask = shapes[shape](side)
    traced = trace_mask(mask)
    assert traced is not None
    assert iou(rasterise_path(*traced, side, side), mask) >= 0.98


def test_round_shapes_need_few_curves_and_polygons_few_lines() -> None:
    circle, square = trace_mask(disc(300, 120)), trace_mask(draw("M.2 .3H.7V.9H.2Z", 300))
    assert circle is not None
    assert square is not None
    assert circle[0].count("C") <= 12
    assert circle[0].count("L") == 0
    assert square == ("M 0 0 L 1 0 L 1 1 L 0 1 Z", {"x_min": 0.2, "y_min": 0.3, "x_max": 0.7, "y_max": 0.9})


def test_a_large_box_is_traced_no_finer_than_its_coordinates() -> None:
    side = 3000
    mask = disc(side, 1400)
    traced = trace_mask(mask)
    assert traced is not None
    assert traced[0].count("C") + traced[0].count("L") <= 12
    assert iou(rasterise_path(*traced, side, side), mask) > 0.998


def test_a_small_part_of_a_large_box_keeps_its_shape() -> None:
    side, small = 3000, disc(3000, 20, (2900, 2900))
    traced = trace_mask(disc(side, 1300, (1400, 1400)) | small)
    assert traced is not None
    corner = np.s_[2850:, 2850:]
    assert iou(rasterise_path(*traced, side, side)[corner], small[corner]) > 0.9


def test_the_box_holds_whole_pixels() -> None:
    mask = np.zeros((20, 40), np.bool_)
    mask[3:8, 10:30] = True
    traced = trace_mask(mask)
    assert traced is not None
    assert traced[1] == {"x_min": 0.25, "y_min": 0.15, "x_max": 0.75, "y_max": 0.4}


def test_paths_use_four_letters_and_at_most_three_decimals() -> None:
    traced = trace_mask(letters(137))
    assert traced is not None
    assert re.fullmatch(r"[MLCZ](?: (?:[MLCZ]|-?\d+(?:\.\d{1,3})?))*", traced[0])
    assert "-0 " not in traced[0]
    assert traced[0].count("M") == traced[0].count("Z") == 3


def test_specks_are_left_out() -> None:
    mask = np.zeros((30, 30), np.bool_)
    mask[3, 3:5] = True
    assert trace_mask(mask) is None
    mask[10:12, 10:12] = True
    traced = trace_mask(mask)
    assert traced is not None
    assert traced[0].count("M") == 1


def test_an_empty_mask_has_no_outline() -> None:
    assert trace_mask(np.zeros((5, 5), np.bool_)) is None


def test_masks_that_fill_the_picture_are_traced() -> None:
    assert trace_mask(np.ones((7, 9), np.bool_)) == ("M 0 0 L 1 0 L 1 1 L 0 1 Z", WHOLE)
    tall = trace_mask(np.ones((50, 1), np.bool_))
    assert tall is not None
    assert rasterise_path(*tall, 50, 1).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40), st.floats(0.1, 0.9))
def test_any_mask_can_be_traced(seed: int, height: int, width: int, density: float) -> None:
    mask = np.random.default_rng(seed).random((height, width)) < density
    traced = trace_mask(mask)
    if traced is None:
        assert all(len(region) <= 2 for region in flood_regions(mask))
    else:
        assert rasterise_path(*traced, height, width).shape == mask.shape


@pytest.mark.parametrize("mask", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 1), np.bool_)])
def test_only_flat_boolean_masks_are_traced(mask: Mask) -> None:
    with pytest.raises(RequestError, match="mask"):
        trace_mask(mask)
