"""Filling holes, dropping islands, closing gaps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kestrel.errors import RequestError
from kestrel.images.masks import Mask, clean_mask
from tests.cpu_time import least_cpu_s

from .shapes import disc, flood_regions, iou


def clean_by_flooding(mask: Mask, min_area_fraction: float, keep_largest: bool) -> Mask:
    cleaned = mask.copy()
    for value in (False, True):
        regions = list(flood_regions(cleaned == value))
        largest = max(map(len, regions), default=0)
        for region in regions:
            spared = value and keep_largest and len(region) == largest
            if len(region) < min_area_fraction * mask.size and not spared:
                cleaned[tuple(zip(*region, strict=True))] = not value
    grown = np.pad(cleaned, 1)
    grown = np.array([[grown[y : y + 3, x : x + 3].any() for x in range(mask.shape[1])] for y in range(mask.shape[0])])
    shrunk = np.pad(grown, 1, constant_values=True)
    return np.array([[shrunk[y : y + 3, x : x + 3].all() for x in range(mask.shape[1])] for y in range(mask.shape[0])])


@pytest.mark.parametrize("density", [0.1, 0.35, 0.5, 0.65, 0.9])
@pytest.mark.parametrize("shape", [(1, 1), (1, 17), (23, 1), (19, 31), (40, 26)])
def test_cleaning_equals_flooding_pixel_by_pixel(shape: tuple[int, int], density: float) -> None:
    rng = np.random.default_rng(int(density * 100) + shape[0])
    for fraction, keep_largest in product((0.0015, 0.01, 0.1), (False, True)):
        mask = rng.random(shape) < density
        expected = clean_by_flooding(mask, fraction, keep_largest)
        assert np.array_equal(clean_mask(mask, fraction, keep_largest), expected)


def test_small_holes_and_islands_go_and_large_ones_stay() -> None:
    mask = disc(400, 120)
    expected = mask & ~disc(400, 30)
    damaged = expected.copy()
    damaged[90:100, 200:210] = False
    damaged[10:20, 10:20] = True
    assert np.array_equal(clean_mask(damaged), clean_mask(expected))
    assert iou(clean_mask(damaged), expected) > 0.999


def test_the_largest_island_can_be_kept_however_small() -> None:
    small = disc(400, 6, (100, 200))
    damaged = small | disc(400, 2, (300, 50))
    assert not clean_mask(damaged).any()
    assert np.array_equal(clean_mask(damaged, keep_largest=True), small)


def test_keeping_the_largest_island_changes_nothing_where_it_is_large_enough() -> None:
    mask = disc(400, 60, (100, 100)) | disc(400, 40, (300, 300)) | disc(400, 3, (300, 100))
    assert np.array_equal(clean_mask(mask, keep_largest=True), clean_mask(mask))
    assert clean_mask(mask, keep_largest=True)[300, 300]
    assert not clean_mask(mask, keep_largest=True)[100, 300]


def test_diagonal_neighbours_belong_together() -> None:
    mask = np.eye(60, dtype=np.bool_)
    assert clean_mask(mask, 59 / 3600)[30, 30]
    assert not clean_mask(mask, 61 / 3600).any()


def test_full_and_empty_masks_stay_as_they_are() -> None:
    assert clean_mask(np.ones((50, 70), np.bool_)).all()
    assert not clean_mask(np.zeros((50, 70), np.bool_)).any()
    assert not clean_mask(np.zeros((50, 70), np.bool_), keep_largest=True).any()


def test_a_noisy_megapixel_costs_as_much_as_few_discs() -> None:
    mask, plain = np.random.default_rng(0).random((1000, 1000)) < 0.5, disc(1000, 300)
    assert least_cpu_s(lambda: clean_mask(mask)) < 40 * least_cpu_s(lambda: clean_mask(plain))


@pytest.mark.parametrize("mask", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 1), np.bool_)])
def test_only_flat_boolean_masks_are_cleaned(mask: Mask) -> None:
    with pytest.raises(RequestError, match="mask"):
        clean_mask(mask)
