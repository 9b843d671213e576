"""Fill an SVG path into a mask."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import RequestError
from kestrel.images.masks.bbox import box_values
from kestrel.images.masks.mask import Mask
from kestrel.images.masks.points import Points
from kestrel.images.masks.svg_path import path_outlines

SCANLINES_PER_ROW = 4


def rasterise_path(svg_path: str, bbox: Mapping[str, float], height: int, width: int, supersample: int = 2) -> Mask:
    """The picture-sized mask a path covers (nonzero rule), at least half of each pixel.

    Path coordinates are relative to the box. As SVG demands, a malformed path counts up to its first mistake.
    """
    for name, value in (("height", height), ("width", width), ("supersample", supersample)):
        if value < 1:
            raise RequestError(name, f"must be at least 1 (got {value})")
    x_min, y_min, x_max, y_max = box_values(bbox)
    origin = complex(x_min * width, y_min * height)
    outlines = path_outlines(svg_path, origin, (x_max - x_min) * width, (y_max - y_min) * height)
    return _coverage(outlines, height, width, supersample * SCANLINES_PER_ROW) >= 0.5


def _coverage(outlines: list[list[Points]], height: int, width: int, scanlines: int) -> NDArray[np.float32]:
    """Share of every pixel inside the outlines: exact along a scanline, `scanlines` of them per pixel row."""
    cover = np.zeros((height, width + 2), np.float32)
    rows, crossings, winding_steps = _scanline_crossings(outlines, height * scanlines, scanlines)
    order = np.lexsort((crossings, rows))
    rows, crossings, winding_steps = rows[order], crossings[order], winding_steps[order]
    winding = np.cumsum(winding_steps)
    enters = (winding != 0) & (winding == winding_steps)
    leaves = (winding == 0) & (winding_steps != 0)
    for edge, sign in ((enters, 1.0), (leaves, -1.0)):
        x = np.clip(crossings[edge], 0, width)
        column = x.astype(np.int64)
        share = x - column
        np.add.at(cover, (rows[edge] // scanlines, column), sign * (1 - share))
        np.add.at(cover, (rows[edge] // scanlines, column + 1), sign * share)
    np.cumsum(cover, axis=1, out=cover)
    cover /= scanlines
    return cover[:, :width]


def _scanline_crossings(
    outlines: list[list[Points]], num_lines: int, scanlines: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """(scanline, x, +1 downwards or -1 upwards) of every crossing of an outline with the middle of a scanline."""
    loops = [np.concatenate(outline) for outline in outlines]
    start = np.concatenate([np.empty(0, np.complex128), *loops])
    end = np.concatenate([np.empty(0, np.complex128), *(np.roll(loop, -1) for loop in loops)])
    y_start, y_end = start.imag * scanlines - 0.5, end.imag * scanlines - 0.5
    first = np.ceil(np.clip(np.minimum(y_start, y_end), 0, num_lines)).astype(np.int64)
    last = np.ceil(np.clip(np.maximum(y_start, y_end), 0, num_lines)).astype(np.int64)
    counts = last - first
    edge = np.repeat(np.arange(len(start)), counts)
    rows = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    slope = (end.real - start.real)[edge] / (y_end - y_start)[edge]
    crossings = start.real[edge] + (rows - y_start[edge]) * slope
    return rows, crossings, np.where(y_end > y_start, 1, -1)[edge]
