"""The sides between set and unset pixels, and the closed loops they form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kestrel.images.masks.mask import Mask
from kestrel.images.masks.points import Points


@dataclass(frozen=True, eq=False)
class BoundarySides:
    """The sides between set and unset pixels, set pixels on the right hand."""

    starts: NDArray[np.int64]
    """Pixel corners, counted row by row."""
    directions: NDArray[np.int64]
    """0 right, 1 down, 2 left, 3 up."""
    stride: int
    """Corners per row."""


def boundary_sides(mask: Mask) -> BoundarySides:
    stride = mask.shape[1] + 1
    unset = ~np.pad(mask, 1)
    neighbours = (unset[:-2, 1:-1], unset[1:-1, 2:], unset[2:, 1:-1], unset[1:-1, :-2])
    corners = ((0, 0), (0, 1), (1, 1), (1, 0))
    starts, directions = [], []
    for direction, (neighbour, (down, right)) in enumerate(zip(neighbours, corners, strict=True)):
        rows, columns = np.nonzero(mask & neighbour)
        starts.append((rows + down) * stride + columns + right)
        directions.append(np.full(len(rows), direction))
    return BoundarySides(np.concatenate(starts), np.concatenate(directions), stride)


def boundary_loops(sides: BoundarySides) -> Iterator[Points]:
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


def signed_area(loop: Points) -> float:
    return float((np.conj(loop) * np.roll(loop, -1)).imag.sum() / 2)
