from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from kestrel.train.scenes.draw import (
    CHROMINANCE,
    LUMINANCE,
    add_noise,
    blur,
    change_light,
    jpeg_artefacts,
    quantisation_tables,
)


def soft_pictures(num_pictures: int, height: int, width: int) -> torch.Tensor:
    """Coloured waves with some hard edges, from 0 to 1."""
    y, x = torch.meshgrid(torch.arange(height) / 9.0, torch.arange(width) / 7.0, indexing="ij")
    waves = torch.stack([torch.sin(x + y * step) * 0.4 + 0.5 for step in (0.2, 1.1, -0.7)], dim=-1)
    waves[height // 3 : height // 2, width // 4 : width // 2] = torch.tensor([0.9, 0.2, 0.1])
    return waves.expand(num_pictures, -1, -1, -1).clone()


@pytest.mark.parametrize("quality", [10, 35, 50, 75, 95])
@pytest.mark.parametrize("size", [(64, 64), (45, 83)])
def test_jpeg_artefacts_are_those_of_a_real_encoder(quality: int, size: tuple[int, int]):
    pixels = (soft_pictures(1, *size)[0] * 255).round()
    file = io.BytesIO()
    Image.fromarray(pixels.numpy().astype(np.uint8)).save(file, "JPEG", quality=quality, subsampling=0)
    real = np.asarray(Image.open(file)).astype(float)
    ours = (jpeg_artefacts(pixels[None] / 255, np.array([quality], np.int16))[0] * 255).numpy()
    assert np.abs(ours - real).mean() < 1.3
    related = np.corrcoef((ours - pixels.numpy()).ravel(), (real - pixels.numpy()).ravel())[0, 1]
    assert related > (0.9 if quality <= 50 else 0.6)


def test_quantisation_is_the_standards_at_fifty_and_finer_above():
    tables = quantisation_tables(np.array([50, 90, 100, 5], np.int16))
    np.testing.assert_array_equal(tables[0], np.array([LUMINANCE, CHROMINANCE, CHROMINANCE]).reshape(3, 64))
    assert (tables[1] < tables[0]).all()
    assert (tables[2] == 1).all()
    assert tables[3].max() == 255


def test_blur_is_gaussian_and_keeps_the_light():
    point = torch.zeros(3, 41, 41, 3)
    point[:, 20, 20] = 1.0
    sigmas = np.array([0.6, 1.0, 1.8], np.float32)
    for spread, sigma in zip(blur(point, sigmas)[..., 0], sigmas, strict=True):
        assert spread.sum() == pytest.approx(1, abs=1e-4)
        offsets = torch.arange(41) - 20.0
        variance = (spread.sum(0) * offsets**2).sum()
        assert variance == pytest.approx(float(sigma) ** 2, rel=0.06)
    flat = torch.full((1, 12, 9, 3), 0.3)
    torch.testing.assert_close(blur(flat, np.array([1.5], np.float32)), flat)


def test_noise_has_its_strength_and_no_pattern():
    grey = torch.full((2, 200, 200, 3), 0.5)
    noise = add_noise(grey, np.array([1, 2]), np.array([0.05, 0.02], np.float32)) - 0.5
    for own, strength in zip(noise, (0.05, 0.02), strict=True):
        assert own.std() == pytest.approx(strength, rel=0.02)
        assert own.mean().abs() < 0.001
        signals = torch.stack([own[1:, 1:, 0], own[1:, 1:, 1], own[:-1, 1:, 0], own[1:, :-1, 0]]).flatten(1)
        assert (torch.corrcoef(signals) - torch.eye(4)).abs().max() < 0.03
    related = torch.corrcoef(noise.flatten(1))
    assert related[0, 1].abs() < 0.03


def test_noise_belongs_to_the_seed_not_the_place_in_the_batch():
    seeds = np.array([11, 12, 13])
    strength = np.full(3, 0.05, np.float32)
    together = add_noise(torch.full((3, 20, 30, 3), 0.5), seeds, strength)
    alone = add_noise(torch.full((1, 20, 30, 3), 0.5), seeds[2:], strength[2:])
    assert torch.equal(together[2], alone[0])


def test_light_changes_around_black_and_middle_grey():
    pictures = torch.tensor([0.2, 0.5, 0.8]).expand(3, 2, 2, 3).clone()
    change_light(pictures, np.array([1, 1.2, 1], np.float32), np.array([1, 1, 0.5], np.float32))
    torch.testing.assert_close(pictures[:, 0, 0], torch.tensor([[0.2, 0.5, 0.8], [0.24, 0.6, 0.96], [0.35, 0.5, 0.65]]))
