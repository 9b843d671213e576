"""Encoded pictures and Pillow images -> their pixels. Header first, limits next, pixels last."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile

from kestrel.errors import RequestError
from kestrel.images.canvas import UPRIGHT, Canvas, Turn
from kestrel.images.formats import ImageFormat, identify
from kestrel.images.jpeg import jpeg_pixels, require_few_scans
from kestrel.images.limits import ImageLimits
from kestrel.images.quiet import PILLOW_QUIET, silence_libtiff

# By EXIF orientation.
_TURNS: dict[object, Turn] = {
    2: Turn(False, False, True),
    3: Turn(False, True, True),
    4: Turn(False, True, False),
    5: Turn(True, False, False),
    6: Turn(True, False, True),
    7: Turn(True, True, True),
    8: Turn(True, True, False),
}


_LOADING = threading.Lock()
MAX_READS = 2**19
"""Of a file, by Pillow's own parsers: each takes microseconds, and a file can be cut into millions of pieces."""


class _CountedFile(io.BytesIO):
    num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_reads += 1
        if self.num_reads > MAX_READS:
            raise RequestError("image", f"this file is cut into more than {MAX_READS} pieces; save it anew")
        return super().read(size)


class EncodedPicture:
    """A file whose header has been read and checked, and whose pixels have not been decoded."""

    def __init__(self, data: bytes, limits: ImageLimits) -> None:
        limits.check_bytes(len(data))
        self._data = data
        self._limits = limits
        self.format: ImageFormat = identify(data)
        size = self.format.early_size(data)
        self._image: ImageFile | None = None
        if size is not None:
            limits.check_size(*size)
        else:
            self._image = self._open()
            size = self._image.height, self._image.width
        self.height, self.width = size

    def _open(self) -> ImageFile:
        with reading(f"{self.format.name} file"):
            image = self.format.open(_CountedFile(self._data))
            self._limits.check_size(image.height, image.width)
            return image

    def load(self) -> Canvas:
        """Decode the first frame. Its orientation tag is followed when `limits.honour_exif` says so; that of a TIFF is
        part of the format and is always followed."""
        image = self._open() if self._image is None else self._image
        with reading(f"{self.format.name} file"):
            pixels = None
            if self.format.name == "JPEG":
                require_few_scans(self._data)
                pixels = jpeg_pixels(self._data) if image.mode == "RGB" else None
            stored = _loaded(image) if pixels is None else pixels
            honour_exif = self._limits.honour_exif and self.format.name != "TIFF"
            return Canvas(stored, _TURNS.get(_orientation(image), UPRIGHT) if honour_exif else UPRIGHT)


def canvas_from_pillow(image: Image.Image) -> Canvas:
    """A Pillow image as it is: an orientation tag it may carry is the caller's business."""
    with reading("Pillow image"), _LOADING:  # one opened lazily reads its file here, and two threads may have got it
        return Canvas(_loaded(image))


def _loaded(image: Image.Image) -> Image.Image:
    image.load()
    # Some Pillow versions open a 16-bit grey PNG as 32-bit integers.
    if image.mode == "I" and image.format == "PNG":
        return Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    return image


def _orientation(image: ImageFile) -> object:
    """The EXIF orientation; 1 (upright) when the tag is absent or the EXIF block cannot be read."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        return 1


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Damaged input makes Pillow raise almost any exception; each becomes one RequestError."""
    try:
        silence_libtiff()
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
