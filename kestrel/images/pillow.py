"""Encoded pictures and Pillow images -> RGB pixels. Header first, limits next, pixels last."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile

from kestrel.errors import RequestError
from kestrel.images.arrays import repeat_grey
from kestrel.images.formats import identify
from kestrel.images.jpeg import jpeg_pixels
from kestrel.images.limits import ImageLimits
from kestrel.images.quiet import PILLOW_QUIET

# EXIF orientation -> (swap rows and columns first, then flip rows, flip columns).
_UPRIGHT: dict[object, tuple[bool, bool, bool]] = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


_LOADING = threading.Lock()


def pixels_from_encoded(data: bytes, limits: ImageLimits) -> np.ndarray:
    """Decode the first frame of a file. Its orientation tag is followed when `limits.honour_exif` says so.

    The orientation of a TIFF is part of that format and is always followed.
    """
    limits.check_bytes(len(data))
    image_format = identify(data)
    early_size = image_format.early_size(data)
    if early_size is not None:
        limits.check_size(*early_size)
    with _reading(f"{image_format.name} file"):
        image = image_format.open(io.BytesIO(data))
        limits.check_size(image.height, image.width)
        pixels = jpeg_pixels(data) if image_format.name == "JPEG" and image.mode == "RGB" else None
        if pixels is None:
            pixels = _rgb_pixels(image)
        if limits.honour_exif and image_format.name != "TIFF":
            pixels = _turn_upright(pixels, _orientation(image))
    return pixels


def pixels_from_pillow(image: Image.Image, limits: ImageLimits) -> np.ndarray:
    """The pixels of a Pillow image as they are: an orientation tag it may carry is the caller's business."""
    limits.check_size(image.height, image.width)
    with _reading("Pillow image"):
        with _LOADING:  # a picture opened lazily reads its file here, and two threads may have got the same one
            image.load()
        return _rgb_pixels(image)


def _rgb_pixels(image: Image.Image) -> np.ndarray:
    if image.mode == "RGB":
        return np.asarray(image)
    if image.mode.startswith("I;16"):
        return repeat_grey((np.asarray(image) >> 8).astype(np.uint8))
    # Some Pillow versions open a 16-bit grey PNG as 32-bit integers.
    if image.mode == "I" and image.format == "PNG":
        return repeat_grey((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "32-bit integer" if image.mode == "I" else "floating point"
        raise RequestError("image", f"{kind} pixels have no fixed range; convert the picture to 8-bit RGB first")
    if image.mode in ("RGBa", "La"):
        image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
    return np.asarray(image.convert("RGB"))


def _orientation(image: ImageFile) -> object:
    """The EXIF orientation; 1 (upright) when the tag is absent or the EXIF block cannot be read."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        return 1


def _turn_upright(pixels: np.ndarray, orientation: object) -> np.ndarray:
    swap, flip_rows, flip_columns = _UPRIGHT.get(orientation, (False, False, False))
    if swap:
        pixels = pixels.swapaxes(0, 1)
    return pixels[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1]


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Damaged input makes Pillow raise almost any exception; each becomes one RequestError."""
    try:
        with PILLOW_QUIET:
            yield
    except (RequestError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise RequestError(
            "image", f"this {what} is larger than Pillow allows ({error}); raise PIL.Image.MAX_IMAGE_PIXELS"
        ) from error
    except Exception as error:
        raise RequestError("image", f"this {what} is damaged or cut short ({error}); send the complete file") from error
