"""Clean a mask: fill small holes, drop small islands, close narrow gaps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel.images.masks.geometry import Mask, check_mask


def clean_mask(mask: Mask, min_area_fraction: float = 0.0015, keep_largest: bool = False) -> Mask:
    """Fill holes, drop islands smaller than a share of the picture (8-connected), then close 3x3 gaps.

    Any small background region counts as a hole, at the border too. With `keep_largest` the largest island stays
    however small it is, with any of equal size.
    """
    check_mask(mask)
    min_area = min_area_fraction * mask.size
    filled = mask | _small_regions(~mask, min_area)
    return _close(filled & ~_small_regions(filled, min_area, keep_largest))


def _small_regions(mask: Mask, min_area: float, spare_largest: bool = False) -> Mask:
    """Pixels of the 8-connected regions with fewer pixels than `min_area`."""
    rows, starts, ends = _runs(mask)
    labels = _label_runs(rows, starts, ends, mask.shape[1] + 2)
    areas = np.bincount(labels, weights=ends - starts, minlength=len(labels))
    if spare_largest:
        min_area = min(min_area, areas.max(initial=0))
    small = areas[labels] < min_area
    steps = np.zeros((mask.shape[0], mask.shape[1] + 1), np.int8)
    steps[rows[small], starts[small]] = 1
    steps[rows[small], ends[small]] = -1
    return np.cumsum(steps, axis=1, dtype=np.int8)[:, :-1].astype(np.bool_)


def _runs(mask: Mask) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(row, first column, column after the last) of every horizontal run of set pixels, in reading order."""
    steps = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(steps == 1)
    return rows, starts, np.nonzero(steps == -1)[1]


def _label_runs(
    rows: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], stride: int
) -> NDArray[np.int64]:
    """For every run the lowest run index of its 8-connected region."""
    above = (rows - 1) * stride
    first = np.searchsorted(rows * stride + ends, above + starts)
    counts = np.maximum(np.searchsorted(rows * stride + starts, above + ends, side="right") - first, 0)
    lower = np.repeat(np.arange(len(rows)), counts)
    upper = np.arange(len(lower)) - np.repeat(np.cumsum(counts) - counts, counts) + first[lower]
    labels = np.arange(len(rows))
    while True:
        low, high = np.minimum(labels[lower], labels[upper]), np.maximum(labels[lower], labels[upper])
        if np.array_equal(low, high):
            return labels
        np.minimum.at(labels, high, low)
        while not np.array_equal(labels, labels[labels]):
            labels = labels[labels]


def _close(mask: Mask) -> Mask:
    """3x3 dilation, then 3x3 erosion; what lies beyond the border never counts against a pixel."""
    return ~_dilate(~_dilate(mask))


def _dilate(mask: Mask) -> Mask:
    wide = np.pad(mask, 1)
    tall = wide[:, :-2] | wide[:, 1:-1] | wide[:, 2:]
    return tall[:-2] | tall[1:-1] | tall[2:]
