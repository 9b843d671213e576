"""Corners of an outline: where it arrives and leaves in different directions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kestrel.images.masks.budget import POLYGON_CORNER_STEPS, TracingBudget
from kestrel.images.masks.points import Points, distance_to_line

CORNER_TURN = math.radians(40)
CORNER_REACH_PX = 1.0
CORNER_GAP = 2
SQUARE_RUN = 3
ARM_LENGTHS = (32, 16, 8, 5, 3)


def find_corners(middles: Points, loop: Points, tolerance: float, budget: TracingBudget) -> list[tuple[int, complex]]:
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


def _coarse_polygon(middles: Points, tolerance: float, budget: TracingBudget) -> NDArray[np.int64]:
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
