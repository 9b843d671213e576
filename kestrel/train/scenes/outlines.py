"""Outlines of sprites as SVG paths in whole numbers, relative to the sprite's box (0 to 960 inside it).

A sprite's mask is traced closely, thinned to a polygon of few corners (those that change the area least go first), and
the sides left are fitted to the outline they stand for, so that the polygon neither cuts nor bulges.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import ConfigError
from kestrel.images.masks import Mask, clean_mask, rasterise_path, trace_mask
from kestrel.images.masks.drawing import path_outlines
from kestrel.images.masks.geometry import Points

PATH_UNITS = 960
MAX_CORNERS = 30
FEWEST_CORNERS = 4
GOOD_IOU = 0.95
"""An outline this faithful needs no more corners."""
SPECK_SHARE = 0.003
"""Holes and islands below this share of the box are left out."""
SAMPLE_STEP_PX = 1.0
MAX_SHIFT_PX = 6.0
LEAST_TURN = 0.15
"""Sine of the angle below which two fitted sides give no reliable corner."""
WHOLE_BOX = {"x_min": 0.0, "y_min": 0.0, "x_max": 1.0, "y_max": 1.0}


def trace_outline(alpha: NDArray[np.uint8]) -> str:
    """The outline with the fewest corners that describes what is more than half opaque well, or the best there is."""
    truth = alpha > 127
    loops = _traced_loops(clean_mask(truth, SPECK_SHARE, keep_largest=True))
    best, best_iou = "", 0.0
    for polygons in reversed(list(_thinned(loops))):
        outline = _as_path([_fitted(corners, loops[index]) for index, corners in polygons.items()], truth.shape)
        iou = outline_iou(outline, truth)
        if iou > best_iou:
            best, best_iou = outline, iou
        if iou >= GOOD_IOU:
            break
    if not best:
        raise ConfigError("alpha", "has nothing more than half opaque to trace; render the sprite again")
    return best


def outline_iou(outline: str, truth: Mask) -> float:
    """Overlap of a filled outline with the mask of its box."""
    drawn = rasterise_path(unit_path(outline), WHOLE_BOX, *truth.shape)
    return float((drawn & truth).sum() / max(1, (drawn | truth).sum()))


def mirror_outline(outline: str) -> str:
    """The outline of the sprite flipped left to right."""
    items, is_x = [], True
    for item in outline.split():
        if item.isalpha():
            items.append(item)
            continue
        items.append(str(PATH_UNITS - int(item)) if is_x else item)
        is_x = not is_x
    return " ".join(items)


def unit_path(outline: str) -> str:
    """The same path with coordinates from 0 to 1 inside the box."""
    return " ".join(item if item.isalpha() else f"{int(item) / PATH_UNITS:.4f}" for item in outline.split())


def _traced_loops(mask: Mask) -> list[Points]:
    """Closed outlines in pixels, as points at even steps."""
    traced = trace_mask(mask)
    if traced is None:
        return []
    path, box = traced
    height, width = mask.shape
    origin = complex(box["x_min"] * width, box["y_min"] * height)
    size = (box["x_max"] - box["x_min"]) * width, (box["y_max"] - box["y_min"]) * height
    return [_resampled(np.concatenate(parts)) for parts in path_outlines(path, origin, *size)]


def _resampled(loop: Points) -> Points:
    closed = np.append(loop, loop[0])
    along = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(closed)))])
    amount = max(8, int(along[-1] / SAMPLE_STEP_PX))
    places = np.arange(amount) / amount * along[-1]
    return np.interp(places, along, closed.real) + 1j * np.interp(places, along, closed.imag)


def _thinned(loops: list[Points]) -> Iterator[dict[int, Points]]:
    """Corners left per loop, from MAX_CORNERS in all down to FEWEST_CORNERS by twos."""
    corners: dict[int, list[complex]] = {index: loop.tolist() for index, loop in enumerate(loops)}
    costs = {index: [_corner_area(points, at) for at in range(len(points))] for index, points in corners.items()}
    left = sum(len(points) for points in corners.values())
    while left > FEWEST_CORNERS:
        index = min(costs, key=lambda loop: min(costs[loop]))
        points, areas = corners[index], costs[index]
        if len(points) <= FEWEST_CORNERS:
            del corners[index], costs[index]
            left -= len(points)
            if not corners:
                return
        else:
            _drop_cheapest(points, areas)
            left -= 1
        if left <= MAX_CORNERS and left % 2 == 0:
            yield {loop: np.array(points) for loop, points in corners.items()}


def _drop_cheapest(points: list[complex], areas: list[float]) -> None:
    area = min(areas)
    at = areas.index(area)
    del points[at], areas[at]
    for neighbour in ((at - 1) % len(points), at % len(points)):
        areas[neighbour] = max(area, _corner_area(points, neighbour))


def _corner_area(points: list[complex], at: int) -> float:
    """Area lost or gained when this corner goes."""
    before, here, after = points[at - 1], points[at], points[(at + 1) % len(points)]
    return abs(((here - before).conjugate() * (after - before)).imag) / 2


def _fitted(corners: Points, loop: Points) -> Points:
    """Corners moved to where the lines fitted to neighbouring stretches of the loop cross."""
    indices = np.abs(loop[:, None] - corners[None, :]).argmin(axis=0)
    lines = [_fitted_line(loop, start, end) for start, end in zip(indices, np.roll(indices, -1), strict=True)]
    moved = corners.copy()
    for at, corner in enumerate(corners):
        (place, along), (next_place, next_along) = lines[at - 1], lines[at]
        turn = (along.conjugate() * next_along).imag
        if abs(turn) > LEAST_TURN:
            shift = place + along * (((next_place - place).conjugate() * next_along).imag / turn) - corner
            moved[at] = corner + shift * min(1.0, MAX_SHIFT_PX / max(abs(shift), 1e-9))
    return moved


def _fitted_line(loop: Points, start: int, end: int) -> tuple[complex, complex]:
    """Middle and unit direction of a stretch of the loop."""
    stretch = loop[(start + np.arange((end - start) % len(loop) + 1)) % len(loop)]
    middle = stretch.mean()
    return complex(middle), complex(np.exp(0.5j * np.angle(((stretch - middle) ** 2).sum())))


def _as_path(polygons: list[Points], shape: tuple[int, ...]) -> str:
    height, width = shape
    items: list[str] = []
    for polygon in polygons:
        xs = np.clip(np.round(polygon.real / width * PATH_UNITS), 0, PATH_UNITS).astype(int)
        ys = np.clip(np.round(polygon.imag / height * PATH_UNITS), 0, PATH_UNITS).astype(int)
        for letter, x, y in zip("M" + "L" * len(polygon), xs, ys, strict=False):
            items += [letter, str(x), str(y)]
        items.append("Z")
    return " ".join(items)
