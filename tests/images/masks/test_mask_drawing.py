"""Reading SVG paths and filling them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import RequestError
from kestrel.images.masks import rasterise_path

from .shapes import WHOLE, disc, draw, iou

GOLDENS = Path(__file__).parents[2] / "goldens" / "segment"


def test_a_square_covers_exactly_its_pixels_inside_the_box() -> None:
    box = {"x_min": 0.2, "y_min": 0.1, "x_max": 0.6, "y_max": 0.5}
    mask = rasterise_path("M 0 0 L 1 0 L 1 1 L 0 1 Z", box, 100, 50)
    expected = np.zeros((100, 50), np.bool_)
    expected[10:50, 10:30] = True
    assert np.array_equal(mask, expected)


@pytest.mark.parametrize(
    "path",
    [
        "M0.2 0.2H0.8V0.8H0.2Z",
        "m.2.2h.6v.6h-.6z",
        "M0.2,0.2 0.8,0.2 0.8,0.8 0.2,0.8",
        "m 0.2 0.2 0.6 0 0 0.6 -0.6 0 z",
        "M2e-1 .2L.8 .2l0 .6L+.2 8E-1z",
        "M.2 .2C.4 .2 .6 .2 .8 .2L.8 .4S.8 .6 .8 .8Q.5 .8 .2 .8L.2 .6T.2 .2Z",
        "M.2 .2 c.2 0 .4 0 .6 0 v.2 s0 .2 0 .4 q-.3 0 -.6 0 v-.2 t0 -.4z",
        "M.2 .2 A0 1 0 0 0 .8 .2 L.8 .8 L.2 .8 Z",
    ],
)
def test_every_spelling_of_the_same_square_gives_the_same_mask(path: str) -> None:
    assert np.array_equal(draw(path), draw("M.2 .2H.8V.8H.2Z"))


@pytest.mark.parametrize(
    "path",
    [
        "M.1 .5A.4 .4 0 1 1 .9 .5A.4 .4 0 1 1 .1 .5Z",
        "M.1 .5a.4.4 0 11.8 0a.4.4 0 11-.8 0z",
        "M.1 .5A.1 .1 0 0 0 .9 .5A.1 .1 0 0 0 .1 .5",
        "M.5 .1A.4 .4 0 0 1 .9 .5A.4 .4 0 1 1 .5 .1Z",
        "M.1 .5C.1 .27909 .27909 .1 .5 .1S.9 .27909 .9 .5 .72091 .9 .5 .9 .1 .72091 .1 .5",
    ],
)
def test_arcs_and_curves_draw_the_circle(path: str) -> None:
    assert iou(draw(path), disc(100, 40)) > 0.995


def test_a_turned_ellipse_arc_follows_its_axis() -> None:
    mask = draw("M.2 .2A.4243 .1 45 0 0 .8 .8A.4243 .1 45 0 0 .2 .2Z", 200)
    columns, rows = np.meshgrid((np.arange(200) + 0.5) / 200 - 0.5, (np.arange(200) + 0.5) / 200 - 0.5)
    along, across = (columns + rows) / math.sqrt(2), (columns - rows) / math.sqrt(2)
    assert iou(mask, (along / 0.4243) ** 2 + (across / 0.1) ** 2 < 1) > 0.98


def test_smooth_quadratics_reflect_the_last_control_point() -> None:
    spelled = "M0 .5Q.25 0 .5 .5Q.75 1 1 .5L1 1L0 1Z"
    assert np.array_equal(draw("M0 .5Q.25 0 .5 .5T1 .5L1 1L0 1Z"), draw(spelled))
    assert np.array_equal(draw("M0 .5q.25-.5.5 0t.5 0V1H0z"), draw(spelled))


def test_overlapping_outlines_follow_the_nonzero_rule() -> None:
    outer, inner_same, inner_against = "M0 0H1V1H0Z", "M.3 .3H.7V.7H.3Z", "M.3 .3V.7H.7V.3Z"
    assert draw(outer + inner_same).all()
    assert not draw(outer + inner_against)[30:70, 30:70].any()
    pentagram = "M.5 0L.8 1L0 .38H1L.2 1Z"
    assert draw(pentagram)[50, 50]


def test_an_open_outline_is_closed_and_a_new_one_starts_after_z() -> None:
    assert np.array_equal(draw("M0 0H.5V.5H0M.5 .5H1V1H.5"), draw("M0 0H.5V.5H0Zm.5 .5h.5v.5h-.5z"))
    assert np.array_equal(draw("M.5 .5H1V1Z H0V0Z"), draw("M.5 .5H1V1ZM.5 .5H0V0Z"))


def test_a_malformed_path_counts_up_to_the_mistake() -> None:
    square = "M.2 .2H.8V.8H.2Z"
    for tail in ("L", "L .5", "C 1 1 1", "X 3 3", "M 1 1 L # 0", "A .1 .1 0 2 0 1 1", "L 1e400 1", "- 1"):
        assert np.array_equal(draw(f"{square} {tail}"), draw(square)), tail
    for nothing in ("", "  ", "L 1 1 L 0 1 Z", "0.5 0.5", "M", "M 0 0", "M 0 0 H V z"):
        assert not draw(nothing).any(), nothing


def test_coordinates_outside_the_box_are_cut_at_the_picture() -> None:
    box = {"x_min": 0.4, "y_min": 0.4, "x_max": 0.6, "y_max": 0.6}
    assert rasterise_path("M-5 -5H9V9H-5Z", box, 40, 60).all()
    assert np.array_equal(rasterise_path("M-9 0H1V1H-9Z", box, 50, 50), rasterise_path("M-2 0H1V1H-2Z", box, 50, 50))


def test_half_a_pixel_decides() -> None:
    for edge, expected in ((0.44, 4), (0.46, 5), (0.54, 5), (0.56, 6)):
        assert draw(f"M0 0H{edge}V1H0Z", 10).sum() == 10 * expected
        assert draw(f"M0 0H1V{edge}H0Z", 10).sum() == 10 * expected


def test_golden_paths_can_be_drawn() -> None:
    paths = [case["path"] for case in json.loads((GOLDENS / "svg_cases.json").read_text())["svg"] if "path" in case]
    covered = [float(draw(path).mean()) for path in paths]
    assert covered[0] == pytest.approx(0.5, abs=0.01)
    assert covered[1] == pytest.approx(0.0, abs=0.01)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="MmLlHhVvCcSsQqTtAaZz 0123456789.,-+eE", max_size=80), st.integers(1, 40), st.integers(1, 40))
def test_no_text_breaks_the_reader(text: str, height: int, width: int) -> None:
    mask = rasterise_path("M" + text, WHOLE, height, width)
    assert mask.shape == (height, width)
    assert mask.dtype == np.bool_


@pytest.mark.parametrize(
    "box",
    [
        {"x_min": 0.1},
        {**WHOLE, "x_max": 1.5},
        {**WHOLE, "y_min": math.nan},
        {**WHOLE, "y_max": math.inf},
        {**WHOLE, "x_min": None},
        {**WHOLE, "x_min": "left"},
        {"x_min": 0.6, "y_min": 0.0, "x_max": 0.5, "y_max": 1.0},
    ],
)
def test_a_wrong_box_is_named(box: dict[str, float]) -> None:
    with pytest.raises(RequestError) as caught:
        rasterise_path("M0 0H1V1Z", box, 10, 10)
    assert caught.value.field == "bbox"


def test_an_empty_picture_size_is_refused() -> None:
    with pytest.raises(RequestError, match="height"):
        rasterise_path("M0 0H1V1Z", WHOLE, 0, 10)
