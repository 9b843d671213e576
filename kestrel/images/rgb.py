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
    """Hex BLAKE2b-256 of what the pixels follow from: the encoded file, or their shape and bytes."""

    @classmethod
    def from_pixels(cls, pixels: np.ndarray, *, copy: bool = True) -> RgbImage:
        """Take [height, width, 3] uint8 pixels. `copy=False` hands the array over: the caller must not write to it."""
        owned = _owned(pixels, copy)
        return cls(pixels=owned, digest=_digest(f"rgb8:{owned.shape[0]}x{owned.shape[1]}:", owned.reshape(-1).data))

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
    return _digest(f"file:{how}:", data)


def _owned(pixels: np.ndarray, copy: bool) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise ValueError(f"pixels must be non-empty [height, width, 3] uint8 (got {pixels.shape} {pixels.dtype})")
    owned = np.array(pixels, order="C") if copy else np.ascontiguousarray(pixels)
    owned.flags.writeable = False
    return owned


def _digest(kind: str, data: bytes | memoryview) -> str:
    hasher = hashlib.blake2b(kind.encode(), digest_size=32)  # three times as fast as SHA-256 without its instructions
    hasher.update(data)
    return hasher.hexdigest()
