"""Boxes, points and outlines in pixels, within the picture."""

from __future__ import annotations

import numpy as np

from kestrel.images.masks.drawing import path_outlines
from kestrel.images.masks.geometry import Points
from kestrel.labelling.records import Box, Point, Row

DECIMALS = 2

Polygon = list[tuple[float, float]]


def pixel_box(row: Row, box: Box) -> Box | None:
    """None for one that has no area once it is clipped and rounded."""
    left, top = pixel_point(row, (box[0], box[1]))
    right, bottom = pixel_point(row, (box[2], box[3]))
    return (left, top, right, bottom) if left < right and top < bottom else None


def pixel_point(row: Row, point: Point) -> Point:
    x, y = (min(max(share, 0.0), 1.0) for share in point)
    return round(x * row.width, DECIMALS), round(y * row.height, DECIMALS)


def polygons(row: Row, box: Box, path: str) -> list[Polygon]:
    """The parts of an outline, curves flattened. Holes are left out: what lies in them counts as inside."""
    left, top, right, bottom = box[0] * row.width, box[1] * row.height, box[2] * row.width, box[3] * row.height
    strokes = path_outlines(path, complex(left, top), right - left, bottom - top)
    loops = sorted((_tidy(row, np.concatenate(stroke)) for stroke in strokes), key=lambda loop: -abs(_area(loop)))
    kept: list[Points] = []
    for loop in loops:
        is_hole = any(_area(loop) * _area(other) < 0 and _inside(complex(loop[0]), other) for other in kept)
        if _area(loop) and not is_hole:
            kept.append(loop)
    return [[(float(point.real), float(point.imag)) for point in loop] for loop in kept]


def corners(box: Box) -> Polygon:
    left, top, right, bottom = box
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def polygon_area(polygon: Polygon) -> float:
    return abs(_area(np.array([complex(x, y) for x, y in polygon])))


def _tidy(row: Row, loop: Points) -> Points:
    x = np.round(np.clip(loop.real, 0, row.width), DECIMALS)
    y = np.round(np.clip(loop.imag, 0, row.height), DECIMALS)
    loop = x + 1j * y
    return loop[loop != np.roll(loop, 1)] if len(loop) else loop


def _area(loop: Points) -> float:
    return float((np.conj(loop) * np.roll(loop, -1)).imag.sum() / 2)


def _inside(point: complex, loop: Points) -> bool:
    """Whether a ray to the right of the point crosses the loop an odd number of times."""
    start, end = loop, np.roll(loop, -1)
    spans = (start.imag > point.imag) != (end.imag > point.imag)
    start, end = start[spans], end[spans]
    x = start.real + (point.imag - start.imag) * (end.real - start.real) / (end.imag - start.imag)
    return bool((x > point.real).sum() % 2)
