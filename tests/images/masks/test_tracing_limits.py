"""Noise is given up instead of traced for half a minute, and what is traced takes less than a second, counted in discs,
of which one takes 0.025 s on two slow cores."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from kestrel.images.masks import Mask, rasterise_path, trace_mask
from tests.exhaustive import sweep

from .shapes import disc, iou

MEGAPIXEL = (1000, 1000)
MAX_DISCS = 40.0


def noise() -> Mask:
    return np.random.default_rng(0).random(MEGAPIXEL) < 0.5


def blobs() -> Mask:
    """Smooth islands a few pixels wide."""
    rows, columns = np.fft.fftfreq(1000)[:, None], np.fft.rfftfreq(1000)
    blur = np.exp(-2 * (3 * np.pi) ** 2 * (rows**2 + columns**2))
    return np.fft.irfft2(np.fft.rfft2(np.random.default_rng(0).standard_normal(MEGAPIXEL)) * blur, s=MEGAPIXEL) > 0


def squares() -> Mask:
    inside = np.arange(1000) % 8 < 4
    return inside[:, None] & inside


def blocks() -> Mask:
    """Straight lines and square corners only."""
    return np.kron(np.random.default_rng(0).random((250, 250)) < 0.5, np.ones((4, 4))) > 0


def rings() -> Mask:
    rows, columns = np.indices(MEGAPIXEL)
    return np.hypot(rows - 500, columns - 500) % 16 < 8


def patch(mask: Mask, side: int) -> Mask:
    """A mask of the same size with only the upper left part of this one."""
    cut = np.zeros_like(mask)
    cut[:side, :side] = mask[:side, :side]
    return cut


def timed(mask: Mask) -> tuple[float, tuple[str, dict[str, float]] | None]:
    start = time.process_time()
    traced = trace_mask(mask)
    return time.process_time() - start, traced


def trace_within(max_discs: float, mask: Mask) -> tuple[str, dict[str, float]] | None:
    """Traced; one run of three must keep to the processor time, measured in that of a disc beside it."""
    plain, discs = disc(MEGAPIXEL[0], 300), []
    while True:
        unit_s = min(timed(plain)[0] for _ in range(3))
        seconds, traced = timed(mask)
        discs.append(seconds / unit_s)
        if discs[-1] < max_discs:
            return traced
        assert len(discs) < 3, f"took as long as {discs} discs"


@sweep(
    ("make", "accepted_side", "refused_side"),
    [(noise, 58, 90), (blobs, 160, 210), (squares, 200, 260), (blocks, 310, 400)],
    always=[],
)
def test_the_dearest_accepted_masks_take_less_than_40_discs(
    make: Callable[[], Mask], accepted_side: int, refused_side: int
) -> None:
    mask = make()
    assert trace_within(MAX_DISCS, patch(mask, accepted_side)) is not None
    assert trace_within(MAX_DISCS, patch(mask, refused_side)) is None


@pytest.mark.parametrize("make", [noise, blobs, squares, blocks, rings])
def test_a_megapixel_of_fine_detail_is_no_outline_and_soon_given_up(make: Callable[[], Mask]) -> None:
    assert trace_within(MAX_DISCS / 2, make()) is None


def test_specks_beyond_number_are_given_up_although_the_object_is_plain() -> None:
    mask = np.zeros(MEGAPIXEL, np.bool_)
    mask[100:900, 100:900] = True
    assert trace_mask(mask) is not None
    mask[950::2, ::2] = True
    assert trace_mask(mask) is None


def test_a_large_shape_with_few_details_is_within_the_limits() -> None:
    side = 3000
    angles = np.linspace(0, 2 * np.pi, 2000, endpoint=False)
    points = 0.5 + (0.35 + 0.1 * np.sin(9 * angles)) * np.stack([np.cos(angles), np.sin(angles)])
    path = "M " + " L ".join(f"{x:.5f} {y:.5f}" for x, y in points.T) + " Z"
    mask = rasterise_path(path, {"x_min": 0.0, "y_min": 0.0, "x_max": 1.0, "y_max": 1.0}, side, side)
    traced = trace_mask(mask & ~disc(side, 300))
    assert traced is not None
    assert iou(rasterise_path(*traced, side, side), mask & ~disc(side, 300)) > 0.99
