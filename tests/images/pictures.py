"""Deterministic pictures, their encodings, and the golden files of this room."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kestrel.images.decode import ImageLimits
from kestrel.images.picture import TilingParams

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
MOONDREAM = TilingParams(crop_size=378, patch_size=14, overlap_margin=4, max_crops=12)
ROOMY = ImageLimits(max_pixels=10**8, max_bytes=10**8)
FORMATS = ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF")


def pattern(height: int, width: int, k: int) -> np.ndarray:
    """The golden test picture: two ramps, a checkerboard and a disc, in integer arithmetic."""
    y, x = np.mgrid[0:height, 0:width]
    checker = 64 * ((x // 17 + y // 23) % 2)
    red = (x * 255 // max(1, width - 1) + checker) % 256
    green = (y * 255 // max(1, height - 1) + checker) % 256
    blue = ((7 * x + 13 * y + 29 * k) // 3) % 256
    picture = np.stack([red, green, blue], axis=2).astype(np.uint8)
    radius = max(4, min(height, width) // 5)
    picture[(y - height // 2) ** 2 + (x - width // 3) ** 2 < radius**2] = (250, 40, 10)
    return picture


def encode(image: Image.Image | np.ndarray, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    picture.save(buffer, image_format, **options)
    return buffer.getvalue()


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
