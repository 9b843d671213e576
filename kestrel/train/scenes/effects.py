"""What happens to pictures [B, H, W, 3] after drawing: brightness and contrast, blur, noise, JPEG artefacts.

Every effect touches only the scenes that ask for it, and each scene's result is its own: no number of one scene
depends on another. Noise is a hash of (seed, pixel), so it is the same on every device.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kestrel.train.scenes.random_numbers import SceneRandom
from kestrel.train.scenes.sampling import MAX_BLUR_PX
from kestrel.train.scenes.textures import upload

NOISE_SALT = 0x9015E
BLUR_REACH_PX = math.ceil(2.5 * MAX_BLUR_PX)
_FIRST_FACTOR = 0x7FEB352D
_SECOND_FACTOR = 0x846CA68B - 2**32
_BITS_PER_CHANNEL = 10


def change_light(pictures: torch.Tensor, brightness: NDArray[np.float32], contrast: NDArray[np.float32]) -> None:
    """In place: brightness as a factor, then contrast around middle grey."""
    factor = upload(brightness * contrast, pictures.device)
    shift = upload(0.5 - 0.5 * contrast, pictures.device)
    pictures.mul_(factor[:, None, None, None]).add_(shift[:, None, None, None]).clamp_(0, 1)


def blur(pictures: torch.Tensor, sigma: NDArray[np.float32]) -> torch.Tensor:
    """Gaussian blur of each picture by its own sigma > 0 in pixels; edges are repeated outwards."""
    reach = torch.arange(-BLUR_REACH_PX, BLUR_REACH_PX + 1, device=pictures.device)
    widths = upload(sigma, pictures.device)[:, None]
    weights = torch.exp(-0.5 * (reach / widths.clamp(min=1e-3)) ** 2)
    weights = weights / weights.sum(1, keepdim=True)
    return _weighted_shifts(_weighted_shifts(pictures, weights, 1), weights, 2)


def add_noise(pictures: torch.Tensor, seeds: NDArray[np.int64], strength: NDArray[np.float32]) -> torch.Tensor:
    """Even noise of the given standard deviation, different in every channel."""
    num_pictures, height, width, channels = pictures.shape
    start = (SceneRandom(seeds, NOISE_SALT).uniform() * 2**32).astype(np.int64) - 2**31
    starts = upload(start.astype(np.int32), pictures.device)[:, None]
    pixel = torch.arange(height * width, dtype=torch.int32, device=pictures.device)
    bits = _mixed(_mixed(pixel)[None] ^ starts).view(num_pictures, height, width)
    amplitude = upload(strength * np.float32(math.sqrt(12)), pictures.device)[:, None, None]
    mask = 2**_BITS_PER_CHANNEL - 1
    for channel in range(channels):
        share = ((bits >> (channel * _BITS_PER_CHANNEL)) & mask).float() * (1 / mask) - 0.5
        pictures[..., channel] += share * amplitude
    return pictures.clamp_(0, 1)


def _weighted_shifts(pictures: torch.Tensor, weights: torch.Tensor, axis: int) -> torch.Tensor:
    """Sum of the pictures shifted along an axis, weights [B, shifts]"""
    channels_first = pictures.permute(0, 3, 1, 2)
    padding = (0, 0, BLUR_REACH_PX, BLUR_REACH_PX) if axis == 1 else (BLUR_REACH_PX, BLUR_REACH_PX, 0, 0)
    padded = functional.pad(channels_first, padding, mode="replicate").permute(0, 2, 3, 1)
    total = torch.zeros_like(pictures)
    for shift, weight in enumerate(weights.unbind(1)):
        total.addcmul_(padded.narrow(axis, shift, pictures.shape[axis]), weight[:, None, None, None])
    return total


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """A 32-bit hash; shifts of int32 keep the sign, so their upper bits are cut off."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _FIRST_FACTOR
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _SECOND_FACTOR
    return bits ^ ((bits >> 16) & 0xFFFF)


# ---------------------------------------------------------------------- JPEG artefacts
# The lossy half of a JPEG encoder, 8x8 cosine transform and quantisation, without the packing. Chrominance keeps its
# full resolution (4:4:4).

BLOCK = 8

# Quantisation tables of the JPEG standard, annex K.
LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *(((99,) * 8,) * 4),
)
TO_YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


def jpeg_artefacts(pictures: torch.Tensor, quality: NDArray[np.int16]) -> torch.Tensor:
    """[B, H, W, 3] pictures from 0 to 1 as they look after JPEG of each one's quality from 1 to 100."""
    _, height, width, _ = pictures.shape
    padded = functional.pad(pictures.permute(0, 3, 1, 2), (0, -width % BLOCK, 0, -height % BLOCK), mode="replicate")
    ycc = _recoloured(padded * 255, np.array(TO_YCC))
    ycc[:, 0] -= 128
    tables = upload(quantisation_tables(quality), pictures.device)
    transform = upload(_cosine_transform(), pictures.device)
    blocks = _to_blocks(ycc) @ transform.T
    blocks = torch.round(blocks / tables[:, :, None]) * tables[:, :, None]
    ycc = _from_blocks(blocks @ transform, padded.shape)
    ycc[:, 0] += 128
    rgb = _recoloured(ycc, np.linalg.inv(TO_YCC)) / 255
    return rgb[:, :, :height, :width].permute(0, 2, 3, 1).clamp(0, 1)


def quantisation_tables(quality: NDArray[np.int16]) -> NDArray[np.float32]:
    """[B, 3, 64] steps for Y, Cb and Cr, scaled by quality as libjpeg does"""
    wide = quality.astype(np.int64)
    scale = np.where(wide < 50, 5000 // np.maximum(wide, 1), 200 - 2 * wide)[:, None, None]
    base = np.array([LUMINANCE, CHROMINANCE, CHROMINANCE]).reshape(3, BLOCK * BLOCK)
    return np.clip((base * scale + 50) // 100, 1, 255).astype(np.float32)


def _recoloured(planes: torch.Tensor, matrix: NDArray[np.floating]) -> torch.Tensor:
    """Every output plane a weighted sum of the input planes of [B, 3, H, W]"""
    a, b, c = planes.unbind(1)
    return torch.stack([a * row[0] + b * row[1] + c * row[2] for row in matrix.tolist()], dim=1)


def _cosine_transform() -> NDArray[np.float32]:
    """[64, 64] the two-dimensional cosine transform of a block laid out in a row; its transpose undoes it"""
    frequency, place = np.arange(BLOCK)[:, None], np.arange(BLOCK)[None, :]
    line = np.sqrt(2 / BLOCK) * np.cos((2 * place + 1) * frequency * np.pi / (2 * BLOCK))
    line[0] /= np.sqrt(2)
    return np.kron(line, line).astype(np.float32)


def _to_blocks(planes: torch.Tensor) -> torch.Tensor:
    """[B, 3, blocks, 64]"""
    num_pictures, channels, height, width = planes.shape
    tiled = planes.reshape(num_pictures, channels, height // BLOCK, BLOCK, width // BLOCK, BLOCK)
    return tiled.transpose(3, 4).reshape(num_pictures, channels, -1, BLOCK * BLOCK)


def _from_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    num_pictures, channels, height, width = shape
    tiled = blocks.reshape(num_pictures, channels, height // BLOCK, width // BLOCK, BLOCK, BLOCK)
    return tiled.transpose(3, 4).reshape(shape)
