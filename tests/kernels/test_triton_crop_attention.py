"""Attention inside crops as a Triton kernel against the plain version."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

import pytest
import torch

from kestrel.kernels.triton.vision import CropTuning, attend_crops, split_head
from kestrel.kernels.vision import attend_crops as plain

SMALL = CropTuning(block_queries=32, block_keys=32)
CASES = {
    "one position": (1, 1, 1, 72),
    "full blocks": (2, 64, 2, 64),
    "Moondream's heads, an odd grid": (2, 81, 2, 72),
    "a head below a tile": (3, 5, 2, 8),
    "a head of several rests": (1, 33, 1, 104),
    "no crops": (0, 4, 2, 16),
}


@devices
@pytest.mark.parametrize("case", CASES)
def test_positions_attend_inside_their_crop_as_in_the_plain_version(case: str, device: str) -> None:
    num_crops, num_rows, heads, head_dim = CASES[case]
    qkv = Draw(device)(num_crops, num_rows, 3 * heads * head_dim)
    got = attend_crops(qkv, heads, SMALL)
    torch.testing.assert_close(got.double(), plain(qkv.double(), heads), rtol=2e-6, atol=2e-6)


@devices
def test_the_blocks_meant_for_full_crops(device: str) -> None:
    """217 positions leave the same rests as 729: 89 of a block of 128, 25 of a block of 64."""
    qkv = Draw(device)(1, 217, 3 * 72)
    torch.testing.assert_close(attend_crops(qkv, 1).double(), plain(qkv.double(), 1), rtol=2e-6, atol=2e-6)


@devices
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(device: str) -> None:
    qkv = Draw(device, HALF[device])(2, 81, 3 * 2 * 72)
    exact = plain(qkv.double(), 2)
    assert distance(attend_crops(qkv, 2, SMALL), exact) <= 1.05 * distance(plain(qkv, 2), exact)


@devices
def test_numbers_of_another_crop_and_head_are_not_read(device: str) -> None:
    qkv = Draw(device)(2, 33, 3 * 2 * 72)
    expected = attend_crops(qkv, 2, SMALL)
    others = 3.0 * qkv + 1.0
    others.view(2, 33, 3, 2, 72)[0, :, :, 0] = qkv.view(2, 33, 3, 2, 72)[0, :, :, 0]
    got = attend_crops(others, 2, SMALL)
    assert torch.equal(got[0, :, :72], expected[0, :, :72])


@pytest.mark.parametrize(
    ("head_dim", "tiles"), [(72, (64, 16)), (64, (64, 0)), (96, (64, 32)), (8, (16, 0)), (80, (64, 16)), (17, (16, 16))]
)
def test_a_head_is_split_into_tiles_that_hold_it(head_dim: int, tiles: tuple[int, int]) -> None:
    assert split_head(head_dim) == tiles
