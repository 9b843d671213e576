"""Decoded pixels as a decoder left them, handed out as RGB: whole, or a part at a time to save memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from kestrel.errors import RequestError

PART_PIXELS = 2**22
"""Converted at a time: 16 MB of RGB. In smaller parts, working out the weights of long lines takes longer."""


@dataclass(frozen=True)
class Turn:
    """How stored pixels become upright: rows and columns are swapped first, then flipped."""

    swap: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        if self.swap:
            pixels = pixels.swapaxes(0, 1)
        return pixels[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]


UPRIGHT = Turn()


@dataclass(frozen=True)
class Canvas:
    stored: Image.Image | np.ndarray
    """A Pillow image of any mode whose pixels are loaded, or [height, width, 3] uint8."""
    turn: Turn = UPRIGHT

    @property
    def height(self) -> int:
        return self._stored_size[1 if self.turn.swap else 0]

    @property
    def width(self) -> int:
        return self._stored_size[0 if self.turn.swap else 1]

    @property
    def _stored_size(self) -> tuple[int, int]:
        stored = self.stored
        return (stored.shape[0], stored.shape[1]) if isinstance(stored, np.ndarray) else (stored.height, stored.width)

    def pixels(self) -> np.ndarray:
        """[height, width, 3] uint8, perhaps a view."""
        stored = self.stored
        return self.turn(stored if isinstance(stored, np.ndarray) else np.asarray(rgb_image(stored)))

    def rows(self, top: int, bottom: int) -> Image.Image:
        return self._part(top, bottom, 0, self.width)

    def columns(self, left: int, right: int) -> Image.Image:
        return self._part(0, self.height, left, right)

    def _part(self, top: int, bottom: int, left: int, right: int) -> Image.Image:
        """RGB; not to be written to."""
        is_whole = (bottom - top, right - left) == (self.height, self.width)
        if self.turn.flip_rows:
            top, bottom = self.height - bottom, self.height - top
        if self.turn.flip_columns:
            left, right = self.width - right, self.width - left
        if self.turn.swap:
            top, bottom, left, right = left, right, top, bottom
        stored = self.stored
        if isinstance(stored, np.ndarray):
            return Image.fromarray(np.ascontiguousarray(self.turn(stored[top:bottom, left:right])))
        part = rgb_image(stored if is_whole else stored.crop((left, top, right, bottom)))
        return part if self.turn == UPRIGHT else Image.fromarray(np.ascontiguousarray(self.turn(np.asarray(part))))

    def digest(self) -> str:
        """Of the shape and the RGB bytes."""
        hasher = hashlib.blake2b(f"rgb8:{self.height}x{self.width}:".encode(), digest_size=32)
        for top, bottom in spans(self.height, self.width):
            hasher.update(self.rows(top, bottom).tobytes())
        return hasher.hexdigest()


def spans(length: int, breadth: int) -> Iterator[tuple[int, int]]:
    """Cuts `length` lines of `breadth` pixels into parts of about `PART_PIXELS`."""
    step = max(1, PART_PIXELS // breadth)
    for start in range(0, length, step):
        yield start, min(length, start + step)


def rgb_image(image: Image.Image) -> Image.Image:
    """A Pillow image as 8-bit RGB. Alpha is dropped, not blended."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "32-bit integer" if image.mode == "I" else "floating point"
        raise RequestError("image", f"{kind} pixels have no fixed range; convert the picture to 8-bit RGB first")
    if image.mode in ("RGBa", "La"):
        image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
    return image.convert("RGB")
