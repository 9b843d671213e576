"""Crops and patches against the golden files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from kestrel.images.crops import image_tensor, make_crops, normalise_and_patchify
from kestrel.images.decode import decode_image
from kestrel.images.picture import RgbImage, TilingParams, plan_tiling

from .pictures import GOLDENS, MOONDREAM, ROOMY, pattern, sha256

TILER = json.loads((GOLDENS / "tiler" / "tiler_pil.json").read_text())
MD2 = json.loads((GOLDENS / "md2" / "cases.json").read_text())["images"]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _global_and_locals(image: RgbImage) -> np.ndarray:
    """All crops as the goldens count them: with a 1x1 grid the same crop twice."""
    plan = plan_tiling(image.height, image.width, MOONDREAM)
    return make_crops(image, plan)[[0, *plan.local_crop_indices]].numpy()


@pytest.mark.parametrize("case", TILER["cases"], ids=lambda case: f"{case['height']}x{case['width']}")
def test_crops_of_every_golden_size(case: dict[str, Any]):
    picture = pattern(case["height"], case["width"], case["k"])
    assert sha256(picture) == case["image_sha256"]
    plan = plan_tiling(case["height"], case["width"], MOONDREAM)
    assert [plan.rows, plan.cols] == case["tiling"]
    crops = _global_and_locals(RgbImage.from_pixels(picture))
    assert list(crops.shape) == case["crops_shape"]
    samples = load_file(GOLDENS / "tiler" / "samples_pil.safetensors")[f"{case['height']}x{case['width']}"]
    np.testing.assert_array_equal(crops[:, 20::84, 20::84, :], samples)
    assert [sha256(crop) for crop in crops] == case["crop_sha256"]
    assert sha256(crops) == case["crops_sha256"]


@pytest.mark.parametrize(("name", "k"), [("small", 1), ("multi", 2)])
def test_golden_png_files(name: str, k: int):
    golden = MD2[name]
    image = decode_image(GOLDENS / f"image_{name}.png", ROOMY)
    np.testing.assert_array_equal(image.pixels, pattern(golden["height"], golden["width"], k))
    assert sha256(image.pixels) == golden["sha256_rgb_hwc_uint8"]
    assert sha256(_global_and_locals(image)) == golden["crops_uint8_nhwc_sha256"]


def test_a_single_tile_is_made_once():
    image = RgbImage.from_pixels(pattern(150, 200, 1))
    assert make_crops(image, plan_tiling(150, 200, MOONDREAM)).shape == (1, 378, 378, 3)


def test_tensor_and_rgb_image_give_the_same_crops():
    image = RgbImage.from_pixels(pattern(400, 500, 3))
    plan = plan_tiling(400, 500, MOONDREAM)
    assert torch.equal(make_crops(image, plan), make_crops(image_tensor(image), plan))


def test_a_plan_for_another_size_is_refused():
    with pytest.raises(ValueError, match="plan is for 400x500"):
        make_crops(RgbImage.from_pixels(pattern(500, 400, 0)), plan_tiling(400, 500, MOONDREAM))


def test_image_tensor_does_not_share_memory_with_the_image():
    image = RgbImage.from_pixels(pattern(5, 6, 0))
    image_tensor(image).zero_()
    np.testing.assert_array_equal(image.pixels, pattern(5, 6, 0))


@pytest.mark.parametrize("name", ["small", "multi"])
def test_normalised_values_equal_the_goldens_bit_for_bit(name: str):
    vision = load_file(GOLDENS / "md2" / "vision.safetensors")
    crops = torch.from_numpy(_global_and_locals(decode_image(GOLDENS / f"image_{name}.png", ROOMY)))
    patches = normalise_and_patchify(crops, 14, torch.float32)
    assert patches.shape == (len(crops), 729, 588)
    pixels = patches.view(-1, 27, 27, 3, 14, 14).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 378, 378)
    np.testing.assert_array_equal(pixels[:, :, ::54, ::54].numpy(), vision[f"{name}.crops_norm_fp32_sample"])


def test_patches_equal_the_goldens_bit_for_bit():
    vision = load_file(GOLDENS / "md2" / "vision.safetensors")
    crops = torch.from_numpy(_global_and_locals(decode_image(GOLDENS / "image_small.png", ROOMY)))
    patches = normalise_and_patchify(crops, 14, torch.float32)
    np.testing.assert_array_equal(patches[1, ::243].numpy(), vision["small.patches_crop1_sample"])


def test_order_inside_a_patch_is_channel_row_column():
    crops = torch.arange(8 * 8 * 3, dtype=torch.uint8).view(1, 8, 8, 3)
    patches = normalise_and_patchify(crops, 4, torch.float32)
    for channel, row, column in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (2, 3, 1)):
        value = crops[0, 4 + row, column, channel].item()
        assert patches[0, 2, channel * 16 + row * 4 + column].item() == pytest.approx(value / 127.5 - 1, abs=1e-6)


def test_the_cast_comes_after_float32_arithmetic():
    crops = torch.arange(256, dtype=torch.uint8)[:, None, None, None].expand(256, 2, 2, 3).contiguous()
    exact = normalise_and_patchify(crops, 2, torch.float32)
    assert torch.equal(normalise_and_patchify(crops, 2, torch.bfloat16), exact.bfloat16())
    assert (exact.min().item(), exact.max().item()) == (-1.0, 1.0)


def test_other_crop_geometry():
    params = TilingParams(crop_size=32, patch_size=8, overlap_margin=1, max_crops=4)
    picture = pattern(40, 60, 0)
    plan = plan_tiling(40, 60, params)
    crops = make_crops(RgbImage.from_pixels(picture), plan)
    assert crops.shape == (1 + plan.rows * plan.cols, 32, 32, 3)
    overlap = params.crop_size - params.window_px
    assert torch.equal(crops[1][:, params.window_px :], crops[2][:, :overlap])


@pytest.mark.gpu
def test_crops_on_the_gpu_equal_those_of_the_cpu():
    image = RgbImage.from_pixels(pattern(720, 1280, 8))
    plan = plan_tiling(720, 1280, MOONDREAM)
    on_gpu = make_crops(image_tensor(image, "cuda"), plan)
    assert on_gpu.device.type == "cuda"
    assert torch.equal(on_gpu.cpu(), make_crops(image, plan))
