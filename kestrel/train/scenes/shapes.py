"""Drawn shapes as formulas: which points of the square from -1 to 1 (y down) belong to a shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Coordinates = NDArray[np.float64]
Inside = Callable[[Coordinates, Coordinates], NDArray[np.bool_]]

SUPERSAMPLING = 8
RING_HOLE = 0.58
CROSS_ARM = 0.34
STAR_INNER = 0.42


def _circle(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return x * x + y * y <= 1


def _square(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return np.maximum(np.abs(x), np.abs(y)) <= 1


def _triangle(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return (np.abs(x) * 2 <= y + 1) & (y <= 1)


def _star(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    """Five points, the first one up: a point is inside when it lies before the edge of its tenth of the circle."""
    tenth = np.pi / 5
    angle = np.abs((np.arctan2(x, -y) + tenth) % (2 * tenth) - tenth)
    radius = np.hypot(x, y)
    across, along = radius * np.sin(angle), radius * np.cos(angle)
    inner_across, inner_along = STAR_INNER * np.sin(tenth), STAR_INNER * np.cos(tenth)
    return (1 - along) * inner_across >= across * (1 - inner_along)


def _heart(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    u, v = x * 1.15, 0.12 - y * 1.15
    return (u * u + v * v - 1) ** 3 <= u * u * v**3


def _diamond(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return np.abs(x) / 0.72 + np.abs(y) <= 1


def _cross(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    return np.minimum(np.abs(x), np.abs(y)) <= CROSS_ARM


def _ring(x: Coordinates, y: Coordinates) -> NDArray[np.bool_]:
    square = x * x + y * y
    return (square <= 1) & (square >= RING_HOLE**2)


SHAPES: dict[str, Inside] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "diamond": _diamond,
    "cross": _cross,
    "ring": _ring,
}


SHAPE_OUTLINES = {
    "circle": "M 480 0 C 745 0 960 215 960 480 C 960 745 745 960 480 960 C 215 960 0 745 0 480 C 0 215 215 0 480 0 Z",
    "square": "M 0 0 L 960 0 L 960 960 L 0 960 Z",
    "triangle": "M 480 0 L 960 960 L 0 960 Z",
    "star": "M 480 0 L 605 350 L 960 367 L 682 600 L 777 960 L 480 754 L 183 960 L 278 600 L 0 367 L 355 350 Z",
    "heart": "M 480 139 C 454 64 605 0 695 0 C 867 0 960 152 960 281 C 960 609 704 790 480 960 "
    "C 256 790 0 609 0 281 C 0 152 93 0 265 0 C 355 0 506 64 480 139 Z",
    "diamond": "M 480 0 L 960 480 L 480 960 L 0 480 Z",
    "cross": "M 317 0 L 643 0 L 643 317 L 960 317 L 960 643 L 643 643 L 643 960 L 317 960 L 317 643 L 0 643 "
    "L 0 317 L 317 317 Z",
    "ring": "M 480 0 C 745 0 960 215 960 480 C 960 745 745 960 480 960 C 215 960 0 745 0 480 C 0 215 215 0 480 0 Z "
    "M 480 202 C 326 202 202 326 202 480 C 202 634 326 758 480 758 C 634 758 758 634 758 480 "
    "C 758 326 634 202 480 202 Z",
}
"""Relative to the tight box of each shape, in the units of `outlines.py`."""


def shape_alpha(name: str, side: int) -> NDArray[np.uint8]:
    """[side, side] share of every pixel that the shape covers, from 0 to 255"""
    fine = side * SUPERSAMPLING
    places = (np.arange(fine) + 0.5) / fine * 2 - 1
    inside = SHAPES[name](places[None, :], places[:, None])
    share = inside.reshape(side, SUPERSAMPLING, side, SUPERSAMPLING).mean((1, 3))
    return np.round(share * 255).astype(np.uint8)
