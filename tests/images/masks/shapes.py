"""Masks to draw, clean and trace, and ways to compare them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
from PIL import Image, ImageDraw

from kestrel.images.masks import Mask, rasterise_path

WHOLE = {"x_min": 0.0, "y_min": 0.0, "x_max": 1.0, "y_max": 1.0}


def draw(path: str, side: int = 100) -> Mask:
    return rasterise_path(path, WHOLE, side, side)


def iou(a: Mask, b: Mask) -> float:
    return float((a & b).sum() / (a | b).sum())


def disc(side: int, radius: float, centre: tuple[float, float] | None = None) -> Mask:
    x, y = centre or (side / 2, side / 2)
    columns, rows = np.meshgrid(np.arange(side) + 0.5, np.arange(side) + 0.5)
    return (columns - x) ** 2 + (rows - y) ** 2 < radius**2


def supersampled(side: int, paint: list[tuple[str, list[tuple[float, float]], int]]) -> Mask:
    """Polygons and ellipses in unit coordinates, drawn at 8x and averaged."""
    big = Image.new("L", (side * 8, side * 8))
    pen = ImageDraw.Draw(big)
    for kind, points, fill in paint:
        scaled = [(x * side * 8, y * side * 8) for x, y in points]
        (pen.polygon if kind == "polygon" else pen.ellipse)(scaled, fill=fill)
    return np.asarray(big, np.float64).reshape(side, 8, side, 8).mean(axis=(1, 3)) > 127


def star(side: int) -> Mask:
    radii = [0.48, 0.2] * 5
    angles = [0.1 + index * math.pi / 5 for index in range(10)]
    tips = [(0.5 + r * math.sin(a), 0.5 - r * math.cos(a)) for r, a in zip(radii, angles, strict=True)]
    return supersampled(side, [("polygon", tips, 255)])


def ring(side: int) -> Mask:
    outer, inner = [(0.05, 0.05), (0.95, 0.95)], [(0.3, 0.3), (0.7, 0.7)]
    return supersampled(side, [("ellipse", outer, 255), ("ellipse", inner, 0)])


def letters(side: int) -> Mask:
    """F beside o: bars, notches, a hole, two separate parts."""
    bars = [(0.1, 0.1, 0.25, 0.9), (0.1, 0.1, 0.6, 0.25), (0.1, 0.42, 0.5, 0.57)]
    paint = [("polygon", [(a, b), (c, b), (c, d), (a, d)], 255) for a, b, c, d in bars]
    round_letter = [("ellipse", [(0.55, 0.5), (0.95, 0.9)], 255), ("ellipse", [(0.66, 0.61), (0.84, 0.79)], 0)]
    return supersampled(side, [*paint, *round_letter])


def flood_regions(mask: Mask) -> Iterator[list[tuple[int, int]]]:
    """8-connected regions, found pixel by pixel."""
    waiting = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}
    while waiting:
        region = [waiting.pop()]
        for y, x in region:
            near = {(y + dy, x + dx) for dy, dx in product((-1, 0, 1), repeat=2)} & waiting
            waiting -= near
            region.extend(near)
        yield region
