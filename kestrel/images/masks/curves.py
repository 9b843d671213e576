"""Lines and cubic curves along the points of an outline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel.images.masks.budget import CURVE_STEPS, TracingBudget
from kestrel.images.masks.points import Points, Weights, axis_share, cubic_weights, distance_to_line, weighted

JOINT_REACH = 128
MAX_FIT_ROUNDS = 3
HOPELESS_ERROR = 4.0


class CurveFitter:
    """Collects the pieces of one closed outline: lines (2 points) and cubic curves (4 points)."""

    def __init__(self, tolerance: float, budget: TracingBudget) -> None:
        self.pieces: list[Points] = []
        self._tolerance = tolerance
        self._budget = budget

    def add_smooth_loop(self, points: Points) -> None:
        """Curves along a whole loop without corners."""
        half = len(points) // 2
        place, along = _joint(np.roll(points, half), half, self._tolerance)
        self._add_curves(np.concatenate([[place], points[1:], [place]]), along, -along)

    def add_span(self, points: Points) -> None:
        """A line or curves from corner to corner."""
        if len(points) <= 2 or distance_to_line(points).max() <= self._tolerance:
            self.pieces.append(points[[0, -1]])
        else:
            _, leave = _joint(points, 0, self._tolerance)
            _, arrive = _joint(points, len(points) - 1, self._tolerance)
            self._add_curves(points, leave, -arrive)

    def _add_curves(self, points: Points, tangent: complex, end_tangent: complex) -> None:
        """Cubic curves through points, smoothly joined; where one misses by too much, two take its place."""
        todo = [(points, tangent, end_tangent)]
        while todo:
            span, leave, arrive = todo.pop()
            if len(span) <= 4:
                self.pieces += [span[index : index + 2] for index in range(len(span) - 1)]
                continue
            self._budget.spend(CURVE_STEPS)
            bezier, errors = _fit_cubic(span, leave, arrive, self._tolerance)
            if errors.max() <= self._tolerance:
                self.pieces.append(bezier)
                continue
            margin = max(1, len(span) // 4)
            split = int(errors[margin:-margin].argmax()) + margin
            place, along = _joint(span, split, self._tolerance)
            left, right = span[: split + 1].copy(), span[split:].copy()
            left[-1] = right[0] = place
            todo += [(right, along, arrive), (left, leave, -along)]


def _joint(points: Points, index: int, tolerance: float) -> tuple[complex, complex]:
    """Place and unit direction of the outline at a point, from as many points around as one parabola describes."""
    steps = _lengths(points)
    reach = min(len(points), JOINT_REACH)
    while True:
        low, high = max(0, index - reach), min(len(points), index + reach + 1)
        window = points[low:high]
        t = (steps[low:high] - steps[index]) / reach
        basis = np.stack([np.ones_like(t), t, t * t][: min(3, len(window))], axis=1)
        coefficients = np.linalg.lstsq(basis, window, rcond=None)[0]
        if reach <= 2 or np.abs(basis @ coefficients - window).max() <= tolerance:
            place, direction = coefficients[:2]
            return complex(place), complex(direction) / max(abs(direction), 1e-12)
        reach //= 2


def _fit_cubic(points: Points, leave: complex, arrive: complex, tolerance: float) -> tuple[Points, NDArray[np.float64]]:
    """Least-squares cubic with given end directions, and its distance from every point."""
    lengths = _lengths(points)
    t = lengths / lengths[-1]
    weights = cubic_weights(t)
    bezier = _solve_cubic(points, weights, leave, arrive, lengths[-1])
    for _ in range(MAX_FIT_ROUNDS):
        t, weights, errors = _closest(bezier, points, t, weights)
        if errors.max() > HOPELESS_ERROR * tolerance:
            return bezier, errors
        bezier = _solve_cubic(points, weights, leave, arrive, lengths[-1])
    return bezier, _closest(bezier, points, t, weights)[2]


def _lengths(points: Points) -> NDArray[np.float64]:
    """The way along the points from the first to each."""
    lengths = np.zeros(len(points))
    np.cumsum(np.abs(points[1:] - points[:-1]), out=lengths[1:])
    return lengths


def _solve_cubic(points: Points, weights: Weights, leave: complex, arrive: complex, length: float) -> Points:
    first, last = points[0], points[-1]
    start_weight, near, far, end_weight = weights
    rest = points - first * (start_weight + near) - last * (far + end_weight)
    a, b, c = near @ near, (near @ far) * (leave.conjugate() * arrive).real, far @ far
    u, v = near @ (leave.conjugate() * rest).real, far @ (arrive.conjugate() * rest).real
    near_handle = far_handle = abs(last - first) / 3
    determinant = a * c - b * b
    if determinant > 1e-9:
        solved = (u * c - v * b) / determinant, (v * a - u * b) / determinant
        if min(solved) > 0 and max(solved) < length:
            near_handle, far_handle = solved
    return np.array([first, first + leave * near_handle, last + arrive * far_handle, last])


def _closest(
    bezier: Points, points: Points, t: NDArray[np.float64], weights: Weights
) -> tuple[NDArray[np.float64], Weights, NDArray[np.float64]]:
    """One Newton step towards the nearest place on the curve for every point, and the distance there.

    Weights are those of t, the given one and the new one.
    """
    s = 1 - t
    first, second, third = 3 * (bezier[1:] - bezier[:-1])
    offset = weighted(bezier, weights) - points
    velocity = first * (s * s) + second * (2 * s * t) + third * (t * t)
    bend = 2 * ((second - first) * s + (third - second) * t)
    curvature = (np.conj(velocity) * velocity + np.conj(offset) * bend).real
    step = np.where(curvature > 1e-9, (np.conj(offset) * velocity).real / np.maximum(curvature, 1e-9), 0.0)
    t = np.minimum(np.maximum(t - step, 0.0), 1.0)
    weights = cubic_weights(t)
    return t, weights, np.abs(weighted(bezier, weights) - points) / axis_share(velocity)
