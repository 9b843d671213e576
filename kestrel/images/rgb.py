"""Decoded pictures: RGB bytes with a digest that names their content, and pixels as a decoder left them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from kestrel.errors import RequestError


@dataclass(frozen=True)
class RgbImage:
    """A decoded picture. Two are equal when their digests are; the pixels cannot be written to."""

    pixels: np.ndarray = field(compare=False, repr=False)
    """[height, width, 3] uint8, C-contiguous, read-only."""
    digest: str
    """Hex BLAKE2b-256 of what the pixels follow from: the encoded file, or their shape and bytes."""

    @classmethod
    def from_pixels(cls, pixels: np.ndarray, *, copy: bool = True) -> RgbImage:
        """Take [height, width, 3] uint8 pixels. `copy=False` hands the array over: the caller must not write to it."""
        owned = _owned(pixels, copy)
        return cls(pixels=owned, digest=_digest(f"rgb8:{owned.shape[0]}x{owned.shape[1]}:", [owned.reshape(-1).data]))

    @classmethod
    def from_file(cls, pixels: np.ndarray, digest: str) -> RgbImage:
        """The pixels of an encoded file with this `file_digest`, handed over."""
        return cls(pixels=_owned(pixels, copy=False), digest=digest)

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes

    @property
    def outline(self) -> RgbImage:
        """What outlines are refined on."""
        return self

    @property
    def height(self) -> int:
        return self.pixels.shape[0]

    @property
    def width(self) -> int:
        return self.pixels.shape[1]


def file_digest(data: bytes, how: str) -> str:
    """Of an encoded file; `how` names the settings that decoding depends on.

    The file is named and not its pixels, which are ten times as many bytes: on the way to the first token every
    millisecond counts, and a file that was decoded before is known before it is decoded again.
    """
    return _digest(f"file:{how}:", [data])


def _owned(pixels: np.ndarray, copy: bool) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise ValueError(f"pixels must be non-empty [height, width, 3] uint8 (got {pixels.shape} {pixels.dtype})")
    owned = np.array(pixels, order="C") if copy else np.ascontiguousarray(pixels)
    owned.flags.writeable = False
    return owned


def _digest(kind: str, parts: Iterable[bytes | memoryview]) -> str:
    hasher = hashlib.blake2b(kind.encode(), digest_size=32)  # three times as fast as SHA-256 without its instructions
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


# ---------------------------------------------------------------------- as a decoder left them

PART_BYTES = 2**24
"""Converted at a time. In smaller parts, working out the weights of long lines takes longer."""
GREY_MODES = ("1", "L", "LA", "La")
"""Of Pillow, beside those of 16 bits. One channel is resized instead of three equal ones."""


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
    """Decoded pixels, handed out as RGB: whole, or a part at a time to save memory."""

    stored: Image.Image | np.ndarray
    """A Pillow image of any mode whose pixels are loaded, or [height, width, 3] uint8."""
    turn: Turn = UPRIGHT
    rest: Callable[[], object] = field(default=lambda: None, compare=False, repr=False)
    """Called before each part is made, so that a thread can leave the processor to others for a while."""

    @property
    def mode(self) -> str:
        """Of parts: "L" for grey pictures, "RGB" for others."""
        stored = self.stored
        is_grey = not isinstance(stored, np.ndarray) and (stored.mode in GREY_MODES or stored.mode.startswith("I;16"))
        return "L" if is_grey else "RGB"

    @property
    def part_pixels(self) -> int:
        return PART_BYTES if self.mode == "L" else PART_BYTES // 4

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
        """Of `mode`; not to be written to."""
        self.rest()
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
        part = stored if is_whole else stored.crop((left, top, right, bottom))
        part = grey_image(part) if self.mode == "L" else rgb_image(part)
        return part if self.turn == UPRIGHT else Image.fromarray(np.ascontiguousarray(self.turn(np.asarray(part))))

    def digest(self) -> str:
        """Of the shape and the RGB bytes."""
        parts = (rgb_image(self.rows(*span)).tobytes() for span in self.spans(self.height, self.width))
        return _digest(f"rgb8:{self.height}x{self.width}:", parts)

    def spans(self, length: int, breadth: int) -> Iterator[tuple[int, int]]:
        """Cuts `length` lines of `breadth` pixels into parts of about `part_pixels`."""
        step = max(1, self.part_pixels // breadth)
        for start in range(0, length, step):
            yield start, min(length, start + step)


def rgb_image(image: Image.Image) -> Image.Image:
    """A Pillow image as 8-bit RGB. Alpha is dropped, not blended."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        return grey_image(image).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "32-bit integer" if image.mode == "I" else "floating point"
        raise RequestError("image", f"{kind} pixels have no fixed range; convert the picture to 8-bit RGB first")
    if image.mode in ("RGBa", "La"):
        image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
    return image.convert("RGB")


def grey_image(image: Image.Image) -> Image.Image:
    """A Pillow image of one of `GREY_MODES`, or of 16 bits, as the channel that its RGB form has three times."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return (image.convert("LA") if image.mode == "La" else image).convert("L")
