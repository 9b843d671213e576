"""The door for pictures: whatever a caller may hand over -> RgbImage, under limits."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from kestrel.errors import RequestError
from kestrel.images.arrays import pixels_from_array
from kestrel.images.limits import ImageLimits
from kestrel.images.pillow import pixels_from_encoded, pixels_from_pillow
from kestrel.images.recent import RecentPictures
from kestrel.images.rgb import RgbImage, file_digest
from kestrel.images.vips import is_vips_image, pixels_from_vips

__all__ = ["ImageLimits", "decode_image", "known_images"]

FEW_BYTES = 2**17
"""They are hashed in less time than it takes to hand them to another thread and back."""

_ACCEPTED = "encoded bytes, a path, a PIL image, a uint8 NumPy array, a pyvips image or an RgbImage"


def decode_image(source: Any, limits: ImageLimits, recent: RecentPictures | None = None) -> RgbImage:
    """Decode one picture; a file that is among the `recent` ones is taken from there.

    Bytes and paths are encoded files: `limits.honour_exif` applies to them. PIL and pyvips images and arrays are
    taken as they are. Alpha is dropped, not blended. Raises RequestError for everything that is not a picture.
    """
    if isinstance(source, RgbImage):
        limits.check_size(source.height, source.width)
        return source
    if isinstance(source, np.ndarray):
        return RgbImage.from_pixels(pixels_from_array(np.asarray(source), limits))
    if isinstance(source, Image.Image):
        return RgbImage.from_pixels(pixels_from_pillow(source, limits), copy=False)
    if isinstance(source, (bytes, bytearray, memoryview)):
        limits.check_bytes(memoryview(source).nbytes)
        return _from_file(bytes(source), limits, recent)
    if isinstance(source, (str, os.PathLike)):
        return _from_file(_read_file(source, limits), limits, recent)
    if is_vips_image(source):
        return RgbImage.from_pixels(pixels_from_vips(source, limits), copy=False)
    raise RequestError("image", f"a {type(source).__name__} is not a picture; pass {_ACCEPTED}")


def known_images(sources: Sequence[Any], limits: ImageLimits, recent: RecentPictures) -> list[RgbImage] | None:
    """Small files that are all among the `recent` ones, at once, for the event loop; None when one may not be."""
    files = [source for source in sources if isinstance(source, bytes) and len(source) <= limits.max_bytes]
    if len(files) < len(sources) or sum(map(len, files)) > FEW_BYTES:
        return None
    found: list[RgbImage] = []
    for file in files:
        picture = recent.find(_digest(file, limits))
        if picture is None:
            return None
        found.append(picture)
    return found


def _digest(data: bytes, limits: ImageLimits) -> str:
    return file_digest(data, "upright" if limits.honour_exif else "as stored")


def _from_file(data: bytes, limits: ImageLimits, recent: RecentPictures | None) -> RgbImage:
    digest = _digest(data, limits)

    def decode() -> RgbImage:
        return RgbImage.from_file(pixels_from_encoded(data, limits), digest)

    return decode() if recent is None else recent.get(digest, decode)


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
