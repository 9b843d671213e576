"""Masks, boxes relative to the picture, and points.

Points are complex numbers x + iy, so that turning and measuring are plain arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import RequestError

Mask = NDArray[np.bool_]
Points = NDArray[np.complex128]
Weights = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
BOX_FIELDS = ("x_min", "y_min", "x_max", "y_max")


def check_mask(mask: Mask) -> None:
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise RequestError("mask", f"must be [height, width] bool (got {mask.shape} {mask.dtype})")


def box_values(bbox: Mapping[str, float]) -> tuple[float, float, float, float]:
    """(x_min, y_min, x_max, y_max), checked."""
    missing = [name for name in BOX_FIELDS if name not in bbox]
    if missing:
        raise RequestError("bbox", f"lacks {', '.join(missing)}; give {', '.join(BOX_FIELDS)}")
    try:
        x_min, y_min, x_max, y_max = (float(bbox[name]) for name in BOX_FIELDS)
    except (TypeError, ValueError) as error:
        raise RequestError("bbox", f"needs numbers (got {dict(bbox)})") from error
    if not (0 <= x_min <= x_max <= 1 and 0 <= y_min <= y_max <= 1):
        raise RequestError("bbox", f"needs numbers from 0 to 1 with min <= max (got {dict(bbox)})")
    return x_min, y_min, x_max, y_max


def distance_to_line(points: Points) -> NDArray[np.float64]:
    """Distance of every point to the line from the first to the last."""
    along = points[-1] - points[0]
    if along == 0:
        return np.abs(points - points[0])
    return np.abs(((points - points[0]) * np.conj(along)).imag) / abs(along) / axis_share(along)


def axis_share(direction: Points) -> NDArray[np.float64]:
    """1 along an axis down to 0.71 on a diagonal, where a pixel changes sides sooner."""
    larger = np.maximum(np.abs(direction.real), np.abs(direction.imag))
    return np.maximum(larger / np.maximum(np.abs(direction), 1e-12), math.sqrt(0.5))


def cubic_at(bezier: Points, t: NDArray[np.float64]) -> Points:
    return weighted(bezier, cubic_weights(t))


def weighted(bezier: Points, weights: Weights) -> Points:
    a, b, c, d = weights
    return bezier[0] * a + bezier[1] * b + bezier[2] * c + bezier[3] * d


def cubic_weights(t: NDArray[np.float64]) -> Weights:
    """How much of each of the four points is in the place at t."""
    s = 1 - t
    return s * s * s, 3 * t * s * s, 3 * t * t * s, t * t * t
