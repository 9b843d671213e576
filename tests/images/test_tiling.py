"""The grid of local crops for every picture size."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import ConfigError
from kestrel.images.picture import TilingParams, plan_tiling, select_tiling

from .pictures import GOLDENS, MOONDREAM

GOLDEN = json.loads((GOLDENS / "tiler" / "tiler_pil.json").read_text())
sides = st.integers(1, 20000)


def test_golden_table():
    margins = 2 * MOONDREAM.margin_px
    for height, width, rows, cols in GOLDEN["select_tiling_table_h_w_th_tw"]:
        assert select_tiling(height + margins, width + margins, MOONDREAM) == (rows, cols), (height, width)


def test_plan_of_a_large_picture():
    plan = plan_tiling(420, 640, MOONDREAM)
    assert (plan.rows, plan.cols) == (2, 4)
    assert (plan.resized_height, plan.resized_width) == (644, 1176)
    assert plan.has_distinct_locals
    assert plan.num_crops == 9
    assert plan.local_crop_indices == tuple(range(1, 9))
    assert plan.local_origins[:5] == ((0, 0), (0, 266), (0, 532), (0, 798), (266, 0))


def test_plan_of_a_small_picture_has_one_crop_for_both_views():
    plan = plan_tiling(378, 5000, MOONDREAM)
    assert (plan.rows, plan.cols) == (1, 1)
    assert (plan.resized_height, plan.resized_width) == (378, 378)
    assert not plan.has_distinct_locals
    assert plan.num_crops == 1
    assert plan.local_crop_indices == (0,)


@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (1000, 1), (112, 112), (111, 9000)])
def test_slivers_get_one_crop(size: tuple[int, int]):
    assert select_tiling(*size, MOONDREAM) == (1, 1)


@settings(deadline=None)
@given(height=sides, width=sides)
def test_turning_the_picture_turns_the_grid_unless_a_tie_is_broken(height: int, width: int):
    rows, cols = select_tiling(height, width, MOONDREAM)
    turned = select_tiling(width, height, MOONDREAM)
    assert turned == (cols, rows) or rows == cols or turned[0] == turned[1] or height == width


@settings(deadline=None)
@given(height=sides, width=sides)
def test_local_crops_cover_the_resized_picture_exactly(height: int, width: int):
    plan = plan_tiling(height, width, MOONDREAM)
    bottom, right = plan.local_origins[-1]
    assert (bottom + 378, right + 378) == (plan.resized_height, plan.resized_width)
    assert len(plan.local_origins) == len(plan.local_crop_indices) == plan.rows * plan.cols


@settings(deadline=None)
@given(height=sides, width=sides, max_crops=st.integers(1, 12))
def test_a_bound_of_a_request_holds_for_every_shape(height: int, width: int, max_crops: int):
    plan = plan_tiling(height, width, MOONDREAM, max_crops)
    assert 1 <= plan.rows * plan.cols <= max_crops
    assert max_crops > 1 or plan.num_crops == 1


@settings(deadline=None)
@given(height=st.integers(1, 4000), width=st.integers(1, 4000))
def test_ordinary_shapes_stay_within_max_crops(height: int, width: int):
    rows, cols = select_tiling(height, width, MOONDREAM)
    assert rows * cols <= MOONDREAM.max_crops


def test_geometry_in_pixels_and_patches():
    assert (MOONDREAM.margin_px, MOONDREAM.window_px, MOONDREAM.grid) == (56, 266, 27)


@pytest.mark.parametrize(
    ("params", "field"),
    [((378, 13, 4, 12), "crop_size"), ((378, 14, 14, 12), "overlap_margin"), ((378, 14, 4, 0), "max_crops")],
)
def test_impossible_geometry_is_refused(params: tuple[int, int, int, int], field: str):
    with pytest.raises(ConfigError, match=field):
        TilingParams(*params)
