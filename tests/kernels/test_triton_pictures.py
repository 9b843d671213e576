"""Resampling and patches of pictures as Triton kernels against the plain versions, which are proved against Pillow."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices  # isort: skip - before any kernel

import numpy as np
import pytest
import torch
from PIL import Image

from kestrel.images.crops import cut_patches, make_crops, normalise_and_patchify
from kestrel.images.picture import TilingParams, plan_tiling
from kestrel.images.resize import lanczos_taps, resize_by_taps
from kestrel.kernels.ops import PLAIN
from kestrel.kernels.triton.vision import join_crops, patchify, resample
from kestrel.kernels.vision import join_crops as plain_join_crops
from kestrel.kernels.vision import patchify as plain_patchify
from kestrel.kernels.vision import resample as plain_resample
from tests.exhaustive import sweep
from tests.images.pictures import MOONDREAM, pattern

SIZES = [((20, 30), (31, 17)), ((90, 40), (12, 40)), ((5, 7), (60, 61)), ((33, 21), (33, 50)), ((100, 20), (30, 19))]


@pytest.mark.parametrize(("before", "after"), SIZES)
def test_two_passes_of_the_plain_version_give_the_bytes_of_pillow(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    picture = pattern(*before, 1)
    expected = Image.fromarray(picture).resize((after[1], after[0]), Image.Resampling.LANCZOS)
    got = resize_by_taps(torch.from_numpy(picture), *after, plain_resample)
    assert np.array_equal(got.numpy(), np.asarray(expected))


@devices
@pytest.mark.parametrize(("before", "after"), SIZES)
def test_a_pass_gives_the_bytes_of_the_plain_version(
    before: tuple[int, int], after: tuple[int, int], device: str
) -> None:
    image = torch.from_numpy(pattern(*before, 2)).to(device)
    taps = lanczos_taps(before[1], after[1] + 1, image.device)
    assert torch.equal(resample(image, *taps), plain_resample(image, *taps))


@devices
def test_no_pixels_give_no_pixels(device: str) -> None:
    taps = lanczos_taps(4, 6, torch.device(device))
    empty = torch.zeros(0, 4, 3, dtype=torch.uint8, device=device)
    assert resample(empty, *taps).shape == (0, 6, 3)


@devices
@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("windows", [((1, 1), 9, 12, 4), ((2, 3), 5, 9, 3), ((3, 1), 7, 7, 7)])
def test_patches_are_those_of_the_plain_version(
    windows: tuple[tuple[int, int], int, int, int], is_half: bool, device: str
) -> None:
    grid_hw, step, window, _ = windows
    dtype = HALF[device] if is_half else torch.float32
    height, width = ((count - 1) * step + window for count in grid_hw)
    picture = torch.from_numpy(pattern(height, width, 3))
    got = patchify(picture.to(device), *windows, dtype)
    assert torch.equal(got.cpu(), plain_patchify(picture, *windows, dtype))


@pytest.mark.parametrize("size", [(557, 800), (100, 120), (1000, 200)])
def test_few_operations_cut_what_many_cut(size: tuple[int, int]) -> None:
    picture, plan = torch.from_numpy(pattern(*size, 1)), plan_tiling(*size, MOONDREAM)
    expected = normalise_and_patchify(make_crops(picture, plan), MOONDREAM.patch_size, torch.bfloat16)
    patches = cut_patches(picture, plan, torch.bfloat16, PLAIN)
    assert torch.equal(patches[..., : expected.shape[-1]], expected)
    assert patches.shape[-1] == 592
    assert not patches[..., expected.shape[-1] :].any()


@devices
def test_kernels_cut_what_plain_operations_cut(device: str) -> None:
    from kestrel.kernels.triton.ops import TRITON  # noqa: PLC0415 - after the interpreter was chosen

    params = TilingParams(crop_size=28, patch_size=7, overlap_margin=1, max_crops=4)
    picture, plan = torch.from_numpy(pattern(50, 61, 1)), plan_tiling(50, 61, params)
    got = cut_patches(picture.to(device), plan, torch.float32, TRITON)
    torch.testing.assert_close(got.cpu(), cut_patches(picture, plan, torch.float32, PLAIN), rtol=0, atol=1e-6)


@devices
@pytest.mark.parametrize("tiles_hw", [(1, 1), (1, 3), (3, 2)])
@sweep(("grid", "margin", "dim"), [(5, 1, 3), (3, 1, 520), (4, 0, 8), (27, 4, 24)], always=[(5, 1, 3), (3, 1, 520)])
def test_crops_are_joined_as_by_the_plain_version(
    tiles_hw: tuple[int, int], grid: int, margin: int, dim: int, device: str
) -> None:
    draw, num_tiles = Draw(device), tiles_hw[0] * tiles_hw[1]
    for num_crops in (1, 2) if num_tiles == 1 else (1 + num_tiles,):
        features = draw(num_crops, grid * grid, dim)
        torch.testing.assert_close(
            join_crops(features, tiles_hw, margin), plain_join_crops(features, tiles_hw, margin), rtol=1e-6, atol=1e-6
        )
        half = features.to(HALF[device])
        rounded = plain_join_crops(half.float(), tiles_hw, margin).to(half.dtype)
        torch.testing.assert_close(join_crops(half, tiles_hw, margin), rounded, rtol=2.0**-7, atol=1e-6)


@devices
def test_a_missing_tile_is_refused(device: str) -> None:
    with pytest.raises(AssertionError, match="every tile"):
        join_crops(torch.zeros(4, 25, 3, device=device), (2, 2), 1)
