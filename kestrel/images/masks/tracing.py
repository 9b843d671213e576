"""Trace a mask back to an SVG path: the boundary between pixels, its corners, and curves between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kestrel.images.masks.geometry import (
    Mask,
    Points,
    Weights,
    axis_share,
    check_mask,
    cubic_weights,
    distance_to_line,
    weighted,
)

SPECK_AREA_PX = 2
TINY_LOOP_LENGTH = 12
TOLERANCE_PX = (0.42, 0.65)
TOLERANCE_PER_THICKNESS = 0.01
DECIMALS = 3
ROUNDING = 0.5 * 10**-DECIMALS
"""Share of the box that writing a coordinate may move it by."""


def trace_mask(mask: Mask) -> tuple[str, dict[str, float]] | None:
    """Outline of a mask as (path, box of its pixels).

    None when there is no outline to give: nothing larger than a speck, or fine noise beyond MAX_SIDES or MAX_STEPS.
    Holes run against their outer outline, so both fill rules agree. Letters used: M L C Z.
    """
    check_mask(mask)
    if not mask.any():
        return None
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
    try:
        items = _trace_outlines(mask[top:bottom, left:right])
    except _TooIntricate:
        return None
    if not items:
        return None
    height, width = mask.shape
    box = {"x_min": left / width, "y_min": top / height, "x_max": right / width, "y_max": bottom / height}
    return " ".join(items), box


def _trace_outlines(mask: Mask) -> list[str]:
    """Path items of every outline larger than a speck, relative to the mask's size."""
    height, width = mask.shape
    sides = _boundary_sides(mask)
    if len(sides.starts) > MAX_SIDES:
        raise _TooIntricate
    budget = _TracingBudget()
    items: list[str] = []
    for loop in _boundary_loops(sides):
        if abs(_signed_area(loop)) <= SPECK_AREA_PX:
            budget.spend(SPECK_STEPS)
        else:
            budget.spend(OUTLINE_STEPS)
            items += _path_items(_outline_pieces(loop, ROUNDING * min(width, height), budget), (width, height))
    return items


def _outline_pieces(loop: Points, rounding_px: float, budget: _TracingBudget) -> list[Points]:
    """A closed chain of lines (2 points) and cubic curves (4 points) along a loop of pixel corners.

    The chain follows the middles of the pixel sides: staying within half a pixel of them keeps every pixel's side.
    """
    if len(loop) <= TINY_LOOP_LENGTH:
        turns = loop[np.roll(loop, -1) - loop != loop - np.roll(loop, 1)]
        return [np.array(pair) for pair in zip(turns, np.roll(turns, -1), strict=True)]
    middles = (loop + np.roll(loop, -1)) / 2
    tolerance = _tolerance(loop, rounding_px)
    fitter = _CurveFitter(tolerance, budget)
    corners = _find_corners(middles, loop, tolerance, budget)
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
    thickness = 2 * abs(_signed_area(loop)) / len(loop)
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


# ---------------------------------------------------------------------- boundary


@dataclass(frozen=True, eq=False)
class _BoundarySides:
    """The sides between set and unset pixels, set pixels on the right hand."""

    starts: NDArray[np.int64]
    """Pixel corners, counted row by row."""
    directions: NDArray[np.int64]
    """0 right, 1 down, 2 left, 3 up."""
    stride: int
    """Corners per row."""


def _boundary_sides(mask: Mask) -> _BoundarySides:
    stride = mask.shape[1] + 1
    unset = ~np.pad(mask, 1)
    neighbours = (unset[:-2, 1:-1], unset[1:-1, 2:], unset[2:, 1:-1], unset[1:-1, :-2])
    corners = ((0, 0), (0, 1), (1, 1), (1, 0))
    starts, directions = [], []
    for direction, (neighbour, (down, right)) in enumerate(zip(neighbours, corners, strict=True)):
        rows, columns = np.nonzero(mask & neighbour)
        starts.append((rows + down) * stride + columns + right)
        directions.append(np.full(len(rows), direction))
    return _BoundarySides(np.concatenate(starts), np.concatenate(directions), stride)


def _boundary_loops(sides: _BoundarySides) -> Iterator[Points]:
    """Pixel corners along every boundary; diagonal neighbours stay joined."""
    stride = sides.stride
    keys = np.sort(sides.starts * 4 + sides.directions)
    starts, directions = keys // 4, keys % 4
    ends = starts + np.array([1, stride, -1, -stride])[directions]
    following = np.zeros(len(keys), np.int64)
    for turn in (1, 0, -1):
        wanted = ends * 4 + (directions + turn) % 4
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        following = np.where(keys[place] == wanted, place, following)
    corners = starts % stride + 1j * (starts // stride)
    successor, seen = following.tolist(), bytearray(len(keys))
    for first in range(len(successor)):
        loop: list[int] = []
        edge = first
        while not seen[edge]:
            seen[edge] = 1
            loop.append(edge)
            edge = successor[edge]
        if loop:
            yield corners[loop]


def _signed_area(loop: Points) -> float:
    return float((np.conj(loop) * np.roll(loop, -1)).imag.sum() / 2)


# ---------------------------------------------------------------------- corners

CORNER_TURN = math.radians(40)
CORNER_REACH_PX = 1.0
CORNER_GAP = 2
SQUARE_RUN = 3
ARM_LENGTHS = (32, 16, 8, 5, 3)


def _find_corners(middles: Points, loop: Points, tolerance: float, budget: _TracingBudget) -> list[tuple[int, complex]]:
    """(index of the side, place) of every corner of a loop of pixel corners, in order."""
    square = _square_corners(loop)
    corners = [(int(index), complex(loop[index])) for index in square]
    taken = np.zeros(len(loop), np.bool_)
    taken[(square[:, None] + np.arange(-CORNER_GAP, CORNER_GAP + 1)) % len(loop)] = True
    indices = _coarse_polygon(middles, tolerance, budget)
    indices = indices[~taken[indices]]
    return sorted(corners + _bent_corners(indices, middles, loop, tolerance), key=lambda corner: corner[0])


def _square_corners(loop: Points) -> NDArray[np.int64]:
    """Indices where two straight runs of pixel sides meet, each too long to be a step of a slanted line."""
    steps = np.roll(loop, -1) - loop
    turns = np.flatnonzero(steps != np.roll(steps, 1))
    runs = np.diff(turns, append=turns[0] + len(loop))
    return turns[np.minimum(runs, np.roll(runs, 1)) >= SQUARE_RUN]


def _bent_corners(
    indices: NDArray[np.int64], middles: Points, loop: Points, tolerance: float
) -> list[tuple[int, complex]]:
    """Those candidate sides at which smooth arms on both sides point in different directions."""
    if not len(indices):
        return []
    reach = min(ARM_LENGTHS[0], len(middles) // 2)
    around = middles[(indices[:, None] + np.arange(-reach, reach + 1)) % len(middles)]
    back, towards_back, back_length = _arms(around[:, :reach][:, ::-1], tolerance)
    front, towards_front, front_length = _arms(around[:, reach + 1 :], tolerance)
    turns = np.pi - np.abs(np.angle(towards_front * np.conj(towards_back)))
    sharp = turns > CORNER_TURN * (1 + 4 / np.minimum(back_length, front_length))
    corners: list[tuple[int, complex]] = []
    last_turn = 0.0
    for row in np.flatnonzero(sharp):
        index = int(indices[row])
        if corners and index - corners[-1][0] <= CORNER_GAP:
            if turns[row] <= last_turn:
                continue
            corners.pop()
        place = _crossing(back[row], towards_back[row], front[row], towards_front[row])
        if place is None or abs(place - middles[index]) > CORNER_REACH_PX:
            ends, spots = around[row, [0, -1]], loop[[index, (index + 1) % len(loop)]]
            place = complex(max(spots, key=lambda spot: np.abs(spot - ends).sum()))
        corners.append((index, place))
        last_turn = float(turns[row])
    return corners


def _arms(points: Points, tolerance: float) -> tuple[Points, Points, NDArray[np.int64]]:
    """Per row: place and unit direction at its start, and the number of leading points one parabola describes."""
    steps = np.cumsum(np.abs(np.diff(points, axis=1, prepend=points[:, :1])), axis=1)
    places, directions = np.empty((2, len(points)), np.complex128)
    lengths = np.empty(len(points), np.int64)
    rows = np.arange(len(points))
    for length in (length for length in ARM_LENGTHS if length <= points.shape[1]):
        window, t = points[rows, :length], steps[rows, :length] / length
        basis = np.stack([np.ones_like(t), t, t * t], axis=2)
        turned = basis.transpose(0, 2, 1)
        fit = np.linalg.solve(turned @ basis, turned @ window[:, :, None])
        places[rows], directions[rows], lengths[rows] = fit[:, 0, 0], fit[:, 1, 0], length
        rows = rows[np.abs(basis @ fit - window[:, :, None]).max(axis=(1, 2)) > tolerance]
        if not len(rows):
            break
    return places, directions / np.maximum(np.abs(directions), 1e-12), lengths


def _crossing(a: complex, along_a: complex, b: complex, along_b: complex) -> complex | None:
    denominator = (along_a.conjugate() * along_b).imag
    if abs(denominator) < 0.2:
        return None
    return a + along_a * ((b - a).conjugate() * along_b).imag / denominator


def _coarse_polygon(middles: Points, tolerance: float, budget: _TracingBudget) -> NDArray[np.int64]:
    """Sorted indices of a polygon that stays within the tolerance (Douglas-Peucker on the closed loop)."""
    start = int(np.abs(middles - middles.mean()).argmax())
    ring = np.append(np.roll(middles, -start), middles[start])
    far = int(np.abs(ring - ring[0]).argmax())
    kept, spans = {0, far}, [(0, far), (far, len(middles))]
    while spans:
        low, high = spans.pop()
        if high - low < 2:
            continue
        distance = distance_to_line(ring[low : high + 1])
        peak = int(distance.argmax())
        if distance[peak] > tolerance:
            budget.spend(POLYGON_CORNER_STEPS)
            kept.add(low + peak)
            spans += [(low, low + peak), (low + peak, high)]
    return np.sort((np.array(list(kept)) + start) % len(middles))


# ---------------------------------------------------------------------- curves

JOINT_REACH = 128
MAX_FIT_ROUNDS = 3
HOPELESS_ERROR = 4.0


class _CurveFitter:
    """Collects the pieces of one closed outline: lines (2 points) and cubic curves (4 points)."""

    def __init__(self, tolerance: float, budget: _TracingBudget) -> None:
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


# ---------------------------------------------------------------------- how much work one mask is worth

MAX_SIDES = 60_000
"""Longest total boundary, in pixel sides: what may be walked at all."""
MAX_STEPS = 12_000
"""Work per mask. A step takes 30 to 70 microseconds, so the dearest accepted mask stays below a second."""

SPECK_STEPS = 1
OUTLINE_STEPS = 12
POLYGON_CORNER_STEPS = 1
CURVE_STEPS = 12


class _TooIntricate(Exception):
    """The mask is noise rather than an outline."""


class _TracingBudget:
    """Counts the work spent on one mask; the step counts above are in proportion to the measured time."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _TooIntricate
