"""Drawing, cleaning and tracing of masks."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from kestrel.errors import RequestError
from kestrel.images.masks import Mask, clean_mask, rasterise_path, trace_mask

WHOLE = {"x_min": 0.0, "y_min": 0.0, "x_max": 1.0, "y_max": 1.0}
GOLDENS = Path(__file__).parents[1] / "goldens" / "segment"


def draw(path: str, side: int = 100) -> Mask:
    return rasterise_path(path, WHOLE, side, side)


def iou(a: Mask, b: Mask) -> float:
    return float((a & b).sum() / (a | b).sum())


def disc(side: int, radius: float, centre: tuple[float, float] | None = None) -> Mask:
    x, y = centre or (side / 2, side / 2)
    columns, rows = np.meshgrid(np.arange(side) + 0.5, np.arange(side) + 0.5)
    return (columns - x) ** 2 + (rows - y) ** 2 < radius**2


def supersampled(side: int, paint: list[tuple[str, list[tuple[float, float]], int]]) -> Mask:
    """Polygons and ellipses in unit coordinates, drawn at 8x and averaged."""
    big = Image.new("L", (side * 8, side * 8))
    pen = ImageDraw.Draw(big)
    for kind, points, fill in paint:
        scaled = [(x * side * 8, y * side * 8) for x, y in points]
        (pen.polygon if kind == "polygon" else pen.ellipse)(scaled, fill=fill)
    return np.asarray(big, np.float64).reshape(side, 8, side, 8).mean(axis=(1, 3)) > 127


def star(side: int) -> Mask:
    radii = [0.48, 0.2] * 5
    angles = [0.1 + index * math.pi / 5 for index in range(10)]
    tips = [(0.5 + r * math.sin(a), 0.5 - r * math.cos(a)) for r, a in zip(radii, angles, strict=True)]
    return supersampled(side, [("polygon", tips, 255)])


def ring(side: int) -> Mask:
    outer, inner = [(0.05, 0.05), (0.95, 0.95)], [(0.3, 0.3), (0.7, 0.7)]
    return supersampled(side, [("ellipse", outer, 255), ("ellipse", inner, 0)])


def letters(side: int) -> Mask:
    """F beside o: bars, notches, a hole, two separate parts."""
    bars = [(0.1, 0.1, 0.25, 0.9), (0.1, 0.1, 0.6, 0.25), (0.1, 0.42, 0.5, 0.57)]
    paint = [("polygon", [(a, b), (c, b), (c, d), (a, d)], 255) for a, b, c, d in bars]
    round_letter = [("ellipse", [(0.55, 0.5), (0.95, 0.9)], 255), ("ellipse", [(0.66, 0.61), (0.84, 0.79)], 0)]
    return supersampled(side, [*paint, *round_letter])


# Drawing


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


# Cleaning


def flood_regions(mask: Mask) -> Iterator[list[tuple[int, int]]]:
    """8-connected regions, found pixel by pixel."""
    waiting = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}
    while waiting:
        region = [waiting.pop()]
        for y, x in region:
            near = {(y + dy, x + dx) for dy, dx in product((-1, 0, 1), repeat=2)} & waiting
            waiting -= near
            region.extend(near)
        yield region


def clean_by_flooding(mask: Mask, min_area_fraction: float) -> Mask:
    cleaned = mask.copy()
    for value in (False, True):
        for region in list(flood_regions(cleaned == value)):
            if len(region) < min_area_fraction * mask.size:
                cleaned[tuple(zip(*region, strict=True))] = not value
    grown = np.pad(cleaned, 1)
    grown = np.array([[grown[y : y + 3, x : x + 3].any() for x in range(mask.shape[1])] for y in range(mask.shape[0])])
    shrunk = np.pad(grown, 1, constant_values=True)
    return np.array([[shrunk[y : y + 3, x : x + 3].all() for x in range(mask.shape[1])] for y in range(mask.shape[0])])


@pytest.mark.parametrize("density", [0.1, 0.35, 0.5, 0.65, 0.9])
@pytest.mark.parametrize("shape", [(1, 1), (1, 17), (23, 1), (19, 31), (40, 26)])
def test_cleaning_equals_flooding_pixel_by_pixel(shape: tuple[int, int], density: float) -> None:
    rng = np.random.default_rng(int(density * 100) + shape[0])
    for fraction in (0.0015, 0.01, 0.1):
        mask = rng.random(shape) < density
        assert np.array_equal(clean_mask(mask, fraction), clean_by_flooding(mask, fraction))


def test_small_holes_and_islands_go_and_large_ones_stay() -> None:
    mask = disc(400, 120)
    expected = mask & ~disc(400, 30)
    damaged = expected.copy()
    damaged[90:100, 200:210] = False
    damaged[10:20, 10:20] = True
    assert np.array_equal(clean_mask(damaged), clean_mask(expected))
    assert iou(clean_mask(damaged), expected) > 0.999


def test_diagonal_neighbours_belong_together() -> None:
    mask = np.eye(60, dtype=np.bool_)
    assert clean_mask(mask, 59 / 3600)[30, 30]
    assert not clean_mask(mask, 61 / 3600).any()


def test_full_and_empty_masks_stay_as_they_are() -> None:
    assert clean_mask(np.ones((50, 70), np.bool_)).all()
    assert not clean_mask(np.zeros((50, 70), np.bool_)).any()


def test_a_noisy_megapixel_is_cleaned_in_time() -> None:
    mask = np.random.default_rng(0).random((1000, 1000)) < 0.5
    seconds = []
    for _ in range(2):
        start = time.process_time()
        clean_mask(mask)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.0


@pytest.mark.parametrize("mask", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 1), np.bool_)])
def test_only_flat_boolean_masks_are_taken(mask: Mask) -> None:
    with pytest.raises(RequestError, match="mask"):
        clean_mask(mask)
    with pytest.raises(RequestError, match="mask"):
        trace_mask(mask)


# Tracing


@pytest.mark.parametrize("side", [32, 50, 64, 100, 300, 1000])
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
