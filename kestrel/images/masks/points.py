"""Points as complex numbers x + iy, so that turning and measuring are plain arithmetic."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.complex128]
Weights = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


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
