"""The one decoded form of a picture: RGB bytes in a fixed layout, with a digest that names their content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class RgbImage:
    """A decoded picture. Two are equal when their digests are; the pixels cannot be written to."""

    pixels: np.ndarray = field(compare=False, repr=False)
    """[height, width, 3] uint8, C-contiguous, read-only."""
    digest: str
    """Hex SHA-256 over the shape and the pixel bytes."""

    @classmethod
    def from_pixels(cls, pixels: np.ndarray, *, copy: bool = True) -> RgbImage:
        """Take [height, width, 3] uint8 pixels. `copy=False` hands the array over: the caller must not write to it."""
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
            raise ValueError(f"pixels must be non-empty [height, width, 3] uint8 (got {pixels.shape} {pixels.dtype})")
        owned = np.array(pixels, order="C") if copy else np.ascontiguousarray(pixels)
        owned.flags.writeable = False
        return cls(pixels=owned, digest=_digest(owned))

    @property
    def height(self) -> int:
        return self.pixels.shape[0]

    @property
    def width(self) -> int:
        return self.pixels.shape[1]


def _digest(pixels: np.ndarray) -> str:
    hasher = hashlib.sha256(f"rgb8:{pixels.shape[0]}x{pixels.shape[1]}:".encode())
    hasher.update(pixels.reshape(-1).data)
    return hasher.hexdigest()
