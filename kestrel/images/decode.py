"""The door for pictures: whatever a caller may hand over -> RgbImage, under limits."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from kestrel.errors import RequestError
from kestrel.images.arrays import pixels_from_array
from kestrel.images.canvas import Canvas
from kestrel.images.limits import ImageLimits
from kestrel.images.pillow import EncodedPicture, canvas_from_pillow, reading
from kestrel.images.recent import Picture, RecentPictures
from kestrel.images.rgb import RgbImage, file_digest
from kestrel.images.shrink import PictureForm
from kestrel.images.vips import is_vips_image, pixels_from_vips

__all__ = ["ImageLimits", "OpenedImage", "decode_image", "decode_opened", "find_or_open", "known_images"]

FEW_BYTES = 2**17
"""They are hashed in less time than it takes to hand them to another thread and back."""

PILLOW_BYTES_PER_PIXEL, VIPS_BYTES_PER_PIXEL = 5, 8
"""That reading them takes: a Pillow image may be opened and not read yet."""
RGB_BYTES_PER_PIXEL = 10
"""Beside what was decoded, while it becomes an RGB array."""
LARGE_PIXELS = 2**24
"""A model's device gets the pixels of smaller pictures. Of larger ones only parts become RGB at a time."""

_ACCEPTED = "encoded bytes, a path, a PIL image, a uint8 NumPy array, a pyvips image or an RgbImage"


@dataclass(frozen=True)
class OpenedImage:
    """A picture whose size is known and within limits, and whose pixels are not decoded."""

    height: int
    width: int
    work_bytes: int
    """The most that decoding takes, and reducing it to what a model needs."""
    load: Callable[[], Canvas]
    digest: str | None = None
    """Of a file; that of pixels is computed from them."""
    given: RgbImage | None = None
    """Decoded already by the caller."""

    @property
    def is_large(self) -> bool:
        return self.height * self.width > LARGE_PIXELS


def decode_image(source: Any, limits: ImageLimits, recent: RecentPictures | None = None) -> RgbImage:
    """Decode one picture; a file that is among the `recent` ones is taken from there.

    Bytes and paths are encoded files: `limits.honour_exif` applies to them. PIL and pyvips images and arrays are
    taken as they are. Alpha is dropped, not blended. Raises RequestError for everything that is not a picture.
    """
    found = find_or_open(source, limits, recent)
    picture = decode_opened(found, recent) if isinstance(found, OpenedImage) else found
    assert isinstance(picture, RgbImage)
    return picture


def find_or_open(source: Any, limits: ImageLimits, recent: RecentPictures | None = None) -> Picture | OpenedImage:
    """A file that is among the `recent` ones, or what is to be decoded."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        limits.check_bytes(memoryview(source).nbytes)
        return _find_or_open_file(bytes(source), limits, recent)
    if isinstance(source, (str, os.PathLike)):
        return _find_or_open_file(_read_file(source, limits), limits, recent)
    if isinstance(source, np.ndarray):
        canvas = Canvas(pixels_from_array(np.asarray(source), limits))
        return _opened(canvas, 3, lambda: canvas)
    if not isinstance(source, (RgbImage, Image.Image)) and not is_vips_image(source):
        raise RequestError("image", f"a {type(source).__name__} is not a picture; pass {_ACCEPTED}")
    limits.check_size(source.height, source.width)
    if isinstance(source, RgbImage):
        return _opened(source, 0, lambda: Canvas(source.pixels), source.digest, given=source)
    if isinstance(source, Image.Image):
        return _opened(source, PILLOW_BYTES_PER_PIXEL, lambda: canvas_from_pillow(source))
    return _opened(source, VIPS_BYTES_PER_PIXEL, lambda: Canvas(pixels_from_vips(source, limits)))


def decode_opened(
    opened: OpenedImage, recent: RecentPictures | None = None, form: PictureForm | None = None
) -> Picture:
    """The pixels, or, of a picture that a model does not take as it is, what the model needs of them."""

    def decode() -> Picture:
        with reading("picture"):
            canvas = opened.load()
            if form is not None and not form.takes_as_it_is(opened.height, opened.width):
                return form.shrink(canvas, opened.digest or canvas.digest())
            if opened.given is not None:
                return opened.given
            if opened.digest is not None:
                return RgbImage.from_file(canvas.pixels(), opened.digest)
            return RgbImage.from_pixels(canvas.pixels(), copy=isinstance(canvas.stored, np.ndarray))

    if recent is None or opened.digest is None or opened.given is not None:
        return decode()
    return recent.get(opened.digest, decode)


def _opened(
    sized: Any,
    bytes_per_pixel: int,
    load: Callable[[], Canvas],
    digest: str | None = None,
    given: RgbImage | None = None,
) -> OpenedImage:
    """`bytes_per_pixel`: the most that `load` takes, and what is kept of it while it is reduced."""
    num_pixels = sized.height * sized.width
    work_bytes = num_pixels * bytes_per_pixel + min(num_pixels, LARGE_PIXELS) * RGB_BYTES_PER_PIXEL
    return OpenedImage(sized.height, sized.width, work_bytes, load, digest, given)


def known_images(sources: Sequence[Any], limits: ImageLimits, recent: RecentPictures) -> list[Picture] | None:
    """Small files that are all among the `recent` ones, at once, for the event loop; None when one may not be."""
    files = [source for source in sources if isinstance(source, bytes) and len(source) <= limits.max_bytes]
    if len(files) < len(sources) or sum(map(len, files)) > FEW_BYTES:
        return None
    found: list[Picture] = []
    for file in files:
        picture = recent.find(_digest(file, limits))
        if picture is None:
            return None
        found.append(picture)
    return found


def _digest(data: bytes, limits: ImageLimits) -> str:
    return file_digest(data, "upright" if limits.honour_exif else "as stored")


def _find_or_open_file(data: bytes, limits: ImageLimits, recent: RecentPictures | None) -> Picture | OpenedImage:
    digest = _digest(data, limits)
    found = None if recent is None else recent.find(digest)
    if found is not None:
        return found
    file = EncodedPicture(data, limits)
    return _opened(file, file.format.bytes_per_pixel, file.load, digest)


def _read_file(source: str | os.PathLike[Any], limits: ImageLimits) -> bytes:
    path = os.path.expanduser(os.fsdecode(source))
    shown = path if len(path) <= 200 else f"{path[:200]}..."
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise RequestError("image", f"{shown!r} is {kind}; give the path of one picture")
        limits.check_bytes(status.st_size)
        with open(path, "rb") as file:
            return file.read(limits.max_bytes + 1)
    except RequestError:
        raise
    except FileNotFoundError as error:
        raise RequestError(
            "image", f"no file at {shown!r}; a str is a path here, pass encoded data as bytes"
        ) from error
    except OSError as error:
        raise RequestError("image", f"cannot read {shown!r} ({error.strerror}); give a readable file") from error
    except ValueError as error:
        raise RequestError("image", f"{shown!r} is not a path ({error}); pass encoded data as bytes") from error
