"""What happens to pictures [B, H, W, 3] after drawing: brightness and contrast, blur, noise.

Every effect touches only the scenes that ask for it, and each scene's result is its own: no number of one scene
depends on another. Noise is a hash of (seed, pixel), so it is the same on every device.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kestrel.train.scenes.damage import MAX_BLUR_PX
from kestrel.train.scenes.random_numbers import SceneRandom
from kestrel.train.scenes.upload import upload

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
