"""Points, boxes and outlines of training data as target tokens, in the order and form that the base was taught.

Several objects come in reading order. A box is its centre and its size. An outline is the box around it and a path of
straight lines inside that box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kestrel.errors import shown
from kestrel.skills.segment import UNITS
from kestrel.tokens import CoordToken, SizeToken
from kestrel.train.adapter.mistakes import Mistake
from kestrel.train.tasks.example import Apart, Piece
from kestrel.train.tasks.outlines import path_pieces
from kestrel.train.tasks.view import reading_place

Point = tuple[float, float]
Box = tuple[float, float, float, float]
MIN_CORNERS = 3
_ROUNDING = 1e-6
_PIXELS_HINT = 'divide by the width and height of the picture, or add "units": "pixels"'


@dataclass(frozen=True)
class Scale:
    """From a row's numbers to shares of the picture."""

    width: float = 1.0
    height: float = 1.0

    @property
    def is_relative(self) -> bool:
        return (self.width, self.height) == (1.0, 1.0)


def read_points(field: str, raw: object, scale: Scale) -> list[Point]:
    return [_point(f"{field}[{index}]", each, scale) for index, each in enumerate(_listed(field, raw, "[x, y]"))]


def read_boxes(field: str, raw: object, scale: Scale) -> list[Box]:
    boxes: list[Box] = []
    for index, each in enumerate(_listed(field, raw, "[x_min, y_min, x_max, y_max]")):
        place = f"{field}[{index}]"
        x_min, y_min, x_max, y_max = _numbers(place, each, ("x_min", "y_min", "x_max", "y_max"))
        box = (*_inside(place, (x_min, y_min), scale), *_inside(place, (x_max, y_max), scale))
        if box[0] >= box[2] or box[1] >= box[3]:
            raise Mistake(
                place, f"{shown(each)} has no area; write the lower corner first: [x_min, y_min, x_max, y_max]"
            )
        boxes.append(box)
    return boxes


def read_polygon(field: str, raw: object, scale: Scale) -> list[Point]:
    """Corners of one outline; none for an object that is not there."""
    corners = read_points(field, raw, scale)
    if not corners:
        return []
    if len(corners) < MIN_CORNERS:
        raise Mistake(field, f"has {len(corners)} corners; give at least {MIN_CORNERS}, or [] for what is not there")
    x_min, y_min, x_max, y_max = bounds(corners)
    if x_min >= x_max or y_min >= y_max:
        raise Mistake(field, "has no area; give corners that go around the object")
    return corners


def bounds(corners: Sequence[Point]) -> Box:
    xs, ys = zip(*corners, strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def point_pieces(points: Sequence[Point]) -> tuple[Piece, ...]:
    ordered = sorted(points, key=lambda point: reading_place(*point))
    return tuple(CoordToken(value) for point in ordered for value in point)


def box_pieces(boxes: Sequence[Box]) -> tuple[Piece, ...]:
    ordered = sorted(boxes, key=lambda box: reading_place(*_centre(box)))
    return tuple(piece for box in ordered for piece in _box_tokens(box))


def outline_pieces(corners: Sequence[Point]) -> tuple[Piece, ...]:
    if not corners:
        return ()
    box = x_min, y_min, x_max, y_max = bounds(corners)
    path: list[str | int] = []
    for index, (x, y) in enumerate(corners):
        units = round((x - x_min) / (x_max - x_min) * UNITS), round((y - y_min) / (y_max - y_min) * UNITS)
        path += ["L" if index else "M", *units]
    return (*_box_tokens(box), Apart(tuple(path_pieces([*path, "Z"]))))


def _box_tokens(box: Box) -> tuple[Piece, ...]:
    x, y = _centre(box)
    return CoordToken(x), CoordToken(y), SizeToken(box[2] - box[0], box[3] - box[1])


def _centre(box: Box) -> Point:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def _listed(field: str, raw: object, form: str) -> list[object]:
    if not isinstance(raw, list):
        raise Mistake(field, f"must be a list of {form}, [] for none (got {shown(raw)})")
    return raw


def _point(place: str, raw: object, scale: Scale) -> Point:
    x, y = _numbers(place, raw, ("x", "y"))
    return _inside(place, (x, y), scale)


def _numbers(place: str, raw: object, names: tuple[str, ...]) -> list[float]:
    values = raw if isinstance(raw, list) else []
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
    if len(numbers) != len(names) or len(values) != len(names):
        raise Mistake(place, f"must be {len(names)} numbers, [{', '.join(names)}] (got {shown(raw)})")
    return numbers


def _inside(place: str, point: Point, scale: Scale) -> Point:
    x, y = point[0] / scale.width, point[1] / scale.height
    if not (-_ROUNDING <= x <= 1.0 + _ROUNDING and -_ROUNDING <= y <= 1.0 + _ROUNDING):
        if scale.is_relative:
            raise Mistake(place, f"({point[0]:g}, {point[1]:g}) lies outside 0 to 1; {_PIXELS_HINT}")
        size = f"{scale.width:g} x {scale.height:g} pixels"
        raise Mistake(place, f"({point[0]:g}, {point[1]:g}) lies outside the picture of {size}; correct it")
    return min(max(x, 0.0), 1.0), min(max(y, 0.0), 1.0)
