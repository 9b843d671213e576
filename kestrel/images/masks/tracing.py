"""Trace a mask back to an SVG path."""

from __future__ import annotations

import numpy as np

from kestrel.images.masks.boundary import boundary_loops, boundary_sides, signed_area
from kestrel.images.masks.budget import MAX_SIDES, OUTLINE_STEPS, SPECK_STEPS, TooIntricate, TracingBudget
from kestrel.images.masks.corners import find_corners
from kestrel.images.masks.curves import CurveFitter
from kestrel.images.masks.mask import Mask, check_mask
from kestrel.images.masks.points import Points

SPECK_AREA_PX = 2
TINY_LOOP_LENGTH = 12
TOLERANCE_PX = (0.42, 0.65)
TOLERANCE_PER_THICKNESS = 0.01
DECIMALS = 3
ROUNDING = 0.5 * 10**-DECIMALS
"""Share of the box that writing a coordinate may move it by."""


def trace_mask(mask: Mask) -> tuple[str, dict[str, float]] | None:
    """Outline of a mask as (path, box of its pixels).

    None when there is no outline to give: nothing larger than a speck, or fine noise beyond the limits of `budget.py`.
    Holes run against their outer outline, so both fill rules agree. Letters used: M L C Z.
    """
    check_mask(mask)
    if not mask.any():
        return None
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
    try:
        items = _trace_outlines(mask[top:bottom, left:right])
    except TooIntricate:
        return None
    if not items:
        return None
    height, width = mask.shape
    box = {"x_min": left / width, "y_min": top / height, "x_max": right / width, "y_max": bottom / height}
    return " ".join(items), box


def _trace_outlines(mask: Mask) -> list[str]:
    """Path items of every outline larger than a speck, relative to the mask's size."""
    height, width = mask.shape
    sides = boundary_sides(mask)
    if len(sides.starts) > MAX_SIDES:
        raise TooIntricate
    budget = TracingBudget()
    items: list[str] = []
    for loop in boundary_loops(sides):
        if abs(signed_area(loop)) <= SPECK_AREA_PX:
            budget.spend(SPECK_STEPS)
        else:
            budget.spend(OUTLINE_STEPS)
            items += _path_items(_outline_pieces(loop, ROUNDING * min(width, height), budget), (width, height))
    return items


def _outline_pieces(loop: Points, rounding_px: float, budget: TracingBudget) -> list[Points]:
    """A closed chain of lines (2 points) and cubic curves (4 points) along a loop of pixel corners.

    The chain follows the middles of the pixel sides: staying within half a pixel of them keeps every pixel's side.
    """
    if len(loop) <= TINY_LOOP_LENGTH:
        turns = loop[np.roll(loop, -1) - loop != loop - np.roll(loop, 1)]
        return [np.array(pair) for pair in zip(turns, np.roll(turns, -1), strict=True)]
    middles = (loop + np.roll(loop, -1)) / 2
    tolerance = _tolerance(loop, rounding_px)
    fitter = CurveFitter(tolerance, budget)
    corners = find_corners(middles, loop, tolerance, budget)
    if not corners:
        fitter.add_smooth_loop(middles)
    for (index, place), (next_index, next_place) in zip(corners, corners[1:] + corners[:1], strict=True):
        count = (next_index - index - 1) % len(middles)
        between = middles[(index + 1 + np.arange(count)) % len(middles)]
        fitter.add_span(np.concatenate([[place], between, [next_place]]))
    return fitter.pieces


def _tolerance(loop: Points, rounding_px: float) -> float:
    """Pixels an outline may stray from the middles of the pixel sides: less where the shape is thin.

    In a large box the written coordinates are coarser than pixels, and the outline need not be finer than they are.
    """
    thickness = 2 * abs(signed_area(loop)) / len(loop)
    tightest, loosest = TOLERANCE_PX
    return min(max(loosest, rounding_px), tightest + TOLERANCE_PER_THICKNESS * thickness)


def _path_items(pieces: list[Points], scale: tuple[int, int]) -> list[str]:
    items = ["M", *_coordinates(pieces[0][:1], scale)]
    # Z itself draws a last straight line.
    for piece in pieces if len(pieces[-1]) > 2 else pieces[:-1]:
        items += ["L" if len(piece) == 2 else "C", *_coordinates(piece[1:], scale)]
    return [*items, "Z"]


def _coordinates(points: Points, scale: tuple[int, int]) -> list[str]:
    return [
        f"{round(float(value), DECIMALS) + 0.0:.{DECIMALS}f}".rstrip("0").rstrip(".")
        for point in points
        for value in (point.real / scale[0], point.imag / scale[1])
    ]
