"""Choosing what happens to a picture after it is drawn: brightness, contrast, blur, noise, JPEG artefacts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kestrel.train.scenes.difficulty import SceneDifficulty
from kestrel.train.scenes.random_numbers import SceneRandom

BRIGHTNESS_SPREAD = 0.15
CONTRAST_SPREAD = 0.2
NOISE_SHARE = 0.5
MAX_NOISE = 0.06
BLUR_SHARE = 0.35
MIN_BLUR_PX, MAX_BLUR_PX = 0.3, 1.8
BLUR_PER_HEIGHT = 0.04
"""The smallest thing stays recognisable: blur is at most this share of its height."""
JPEG_SHARE = 0.5
MIN_QUALITY, MAX_QUALITY = 35, 95


@dataclass(frozen=True, eq=False)
class Damage:
    noise: NDArray[np.float32]  # [B]
    blur: NDArray[np.float32]  # [B]
    brightness: NDArray[np.float32]  # [B]
    contrast: NDArray[np.float32]  # [B]
    jpeg_quality: NDArray[np.int16]  # [B]


def choose_damage(random: SceneRandom, difficulty: SceneDifficulty, heights_px: NDArray[np.floating]) -> Damage:
    """Damage to B pictures of things [B, MAX_OBJECTS] high, 0 where there is nothing."""
    strength = difficulty.augmentation
    smallest = np.where(heights_px > 0, heights_px, np.inf).min(axis=1)
    most_blur = np.minimum(MAX_BLUR_PX * strength, BLUR_PER_HEIGHT * smallest)
    blur = MIN_BLUR_PX + random.uniform() * (most_blur - MIN_BLUR_PX)
    blur *= random.chance(BLUR_SHARE * strength) & (most_blur > MIN_BLUR_PX)
    noise = random.uniform() * MAX_NOISE * strength * random.chance(NOISE_SHARE * strength)
    worst_quality = MAX_QUALITY - (MAX_QUALITY - MIN_QUALITY) * strength
    quality = worst_quality + (MAX_QUALITY - worst_quality) * random.uniform()
    return Damage(
        noise=noise.astype(np.float32),
        blur=blur.astype(np.float32),
        brightness=(1 + random.between(-1, 1) * BRIGHTNESS_SPREAD * strength).astype(np.float32),
        contrast=(1 + random.between(-1, 1) * CONTRAST_SPREAD * strength).astype(np.float32),
        jpeg_quality=np.where(random.chance(JPEG_SHARE * strength), quality, 0).astype(np.int16),
    )
