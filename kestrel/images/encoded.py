"""Encoded pictures: base64 in texts to bytes, and bytes to pixels.

Of a text each call gets a slice, because a call holds the GIL; there are rests between slices, so that text of more
than one slice (`SLICE_DIGITS`) is for a thread of its own. Of a file: header first, limits next, pixels last.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import io
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import pybase64
import simplejpeg
from PIL import (
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL.ImageFile import ImageFile

from kestrel.errors import RequestError
from kestrel.images.picture import UPRIGHT, Canvas, Turn
from kestrel.threads import Pace

# ---------------------------------------------------------------------- texts

_DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,100}){0,8}),", re.IGNORECASE)
_BLANKS = bytes(code for code in range(128) if chr(code).isspace())
MAX_LAST_DIGITS = 64
SLICE_DIGITS = 2**20
"""Digits of one call; a multiple of four, which are three bytes."""


def base64_start(value: str, field: str) -> int:
    """Where the base64 in a text begins. The media type of a data URL is not used: the bytes say what they are."""
    if value[:5].lower() != "data:":
        return 0
    head = _DATA_URL.match(value)
    if head is None:
        raise RequestError(field, "is not a data URL; write data:image/png;base64, and then the data")
    if "base64" not in head.group(2).lower().split(";"):
        raise RequestError(field, "is a data URL without base64; write data:image/png;base64, and then the data")
    return head.end()


def require_decodable(text: str, max_bytes: int, field: str, start: int = 0) -> None:
    """Refuse, before it is decoded, what would be larger than `max_bytes`."""
    if _num_bytes(len(text) - start) > max_bytes + 2 and _num_bytes(_num_digits(text, field, start)) > max_bytes + 2:
        raise RequestError(field, f"the picture exceeds {max_bytes} bytes (max_image_bytes); send a smaller one")


def decode_base64(text: str, field: str, start: int = 0) -> bytes:
    """Strict: every character counts, and so does the padding; blanks and line breaks between them do not."""
    try:
        data = _decode_digits(text, start, len(text))
    except (binascii.Error, ValueError):
        data = _decode_leniently(text, field, start)
    if not data:
        raise RequestError(field, "holds no data; send a picture")
    return data


def _num_bytes(num_digits: int) -> int:
    return num_digits // 4 * 3


def _decode_digits(digits: str | memoryview, start: int, end: int) -> bytes:
    """Raises ValueError for anything but digits, and padding at the end."""
    slices: list[bytes] = []
    pace = Pace()
    for at in range(start, end, SLICE_DIGITS):
        until = min(at + SLICE_DIGITS, end)
        decoded = pybase64.b64decode(digits[at:until], validate=True)
        if until < end and len(decoded) != _num_bytes(SLICE_DIGITS):
            raise ValueError("padding in the middle")
        slices.append(decoded)
        if until < end:
            pace.rest()
    return b"".join(slices)


def _decode_leniently(text: str, field: str, start: int) -> bytes:
    """With blanks, and with more padding than is needed, of which the slow decoder sees the last digits alone."""
    digits = b"".join(_without_blanks(text, field, start))
    last = digits[-MAX_LAST_DIGITS - 4 :]
    at = max((len(digits) - len(last) + len(last.rstrip(b"="))) // 4 * 4 - 4, 0)
    try:
        if len(digits) - at > MAX_LAST_DIGITS:
            raise ValueError("no end of padding")
        body = _decode_digits(memoryview(digits), 0, at)
        if len(body) != _num_bytes(at):
            raise ValueError("padding in the middle")
        return b"".join([body, base64.b64decode(digits[at:], validate=True)])
    except (binascii.Error, ValueError):
        raise _not_base64(field) from None


def _num_digits(text: str, field: str, start: int) -> int:
    return sum(map(len, _without_blanks(text, field, start)))


def _without_blanks(text: str, field: str, start: int) -> Iterator[bytes]:
    pace = Pace()
    for at in range(start, len(text), SLICE_DIGITS):
        if at > start:
            pace.rest()
        try:
            yield text[at : at + SLICE_DIGITS].encode("ascii").translate(None, _BLANKS)
        except UnicodeEncodeError:
            raise _not_base64(field) from None


def _not_base64(field: str) -> RequestError:
    return RequestError(field, "is not base64, or is cut off; encode the whole picture file")


# ---------------------------------------------------------------------- files

MAX_SIDE_PX = 65_535
"""Longest side of any picture: what JPEG can hold, and a bound for the memory that resizing a sliver needs."""


@dataclass(frozen=True)
class ImageLimits:
    """What the decoder accepts. Sizes are checked before any pixel is decoded."""

    max_pixels: int
    """Largest height times width."""
    max_bytes: int
    """Largest encoded picture."""
    honour_exif: bool = True
    """Turn encoded pictures upright by their EXIF orientation tag."""
    max_crops: int | None = None
    """Most local crops that a model makes of it; None: as many as it makes by itself."""

    def check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise RequestError(
                "image",
                f"the encoded picture has {num_bytes} bytes, the limit is {self.max_bytes}; "
                "send a smaller file or raise max_image_bytes",
            )

    def check_size(self, height: int, width: int) -> None:
        if height < 1 or width < 1:
            raise RequestError("image", f"the picture is empty ({width}x{height} pixels); send at least one pixel")
        if max(height, width) > MAX_SIDE_PX:
            raise RequestError(
                "image", f"the picture has {width}x{height} pixels, no side may exceed {MAX_SIDE_PX}; cut it into parts"
            )
        if height * width > self.max_pixels:
            raise RequestError(
                "image",
                f"the picture has {width}x{height} = {height * width} pixels, the limit is {self.max_pixels}; "
                "send a smaller picture or raise max_image_pixels",
            )


# ---------------------------------------------------------------------- formats

Size = tuple[int, int]
"""(height, width)"""


@dataclass(frozen=True)
class ImageFormat:
    """One encoded format. `open` reads the header only; `early_size` serves readers that allocate while opening."""

    name: str
    signatures: tuple[bytes, ...]
    open: Callable[[io.BytesIO], ImageFile]
    bytes_per_pixel: int
    """The most that decoding takes, with the decoder's own buffers."""
    marker: bytes = b""
    """Bytes at offset 8 that must match as well."""
    early_size: Callable[[bytes], Size | None] = lambda data: None

    def matches(self, data: bytes) -> bool:
        return data.startswith(self.signatures) and data.startswith(self.marker, 8)


def _gif_size(data: bytes) -> Size | None:
    """The logical screen, which the first frame is drawn on."""
    if len(data) < 10:
        return None
    return int.from_bytes(data[8:10], "little"), int.from_bytes(data[6:8], "little")


def _webp_size(data: bytes) -> Size | None:
    """The canvas, from whichever of the three kinds of first chunk the file has."""
    if len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1
    if kind == b"VP8L":
        packed = int.from_bytes(data[21:25], "little")
        return (packed >> 14 & 0x3FFF) + 1, (packed & 0x3FFF) + 1
    if kind == b"VP8 ":
        return int.from_bytes(data[28:30], "little") & 0x3FFF, int.from_bytes(data[26:28], "little") & 0x3FFF
    return None


# The classes are called directly because PIL.Image.open would add its own size warning and error.
FORMATS = (
    ImageFormat("JPEG", (b"\xff\xd8\xff",), JpegImagePlugin.JpegImageFile, 10),
    ImageFormat("PNG", (b"\x89PNG\r\n\x1a\n",), PngImagePlugin.PngImageFile, 5),
    ImageFormat("WebP", (b"RIFF",), WebPImagePlugin.WebPImageFile, 19, marker=b"WEBP", early_size=_webp_size),
    ImageFormat("GIF", (b"GIF87a", b"GIF89a"), GifImagePlugin.GifImageFile, 5, early_size=_gif_size),
    ImageFormat("BMP", (b"BM",), BmpImagePlugin.BmpImageFile, 5),
    ImageFormat("TIFF", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), TiffImagePlugin.TiffImageFile, 12),
)
SUPPORTED = ", ".join(image_format.name for image_format in FORMATS)

# Known formats that are refused by name: (offset, signature, name).
_UNSUPPORTED = (
    (4, b"ftypavif", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftyp", "a video or HEIF"),
    (4, b"jP  ", "JPEG 2000"),
    (4, b"JXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\1\0", "an icon (ICO)"),
    (0, b"8BPS", "Photoshop (PSD)"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"<svg", "SVG"),
    (0, b"<?xml", "XML or SVG"),
)


def identify(data: bytes) -> ImageFormat:
    """The format of an encoded picture; a RequestError when there is none or it is not supported."""
    if not data:
        raise RequestError("image", f"the picture holds no bytes; send a {SUPPORTED} file")
    for image_format in FORMATS:
        if image_format.matches(data):
            return image_format
    for offset, signature, name in _UNSUPPORTED:
        if data.startswith(signature, offset):
            raise RequestError("image", f"the bytes are {name}, which is not supported; convert to one of: {SUPPORTED}")
    raise RequestError(
        "image", f"{len(data)} bytes that are not a picture (first: {data[:8]!r}); send one of: {SUPPORTED}"
    )


# ---------------------------------------------------------------------- decoding

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
            raise RequestError("image", f"this file is cut into more than {MAX_READS} pieces; save it again")
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

    @property
    def upright_size(self) -> Size:
        """As `load` gives it, known without decoding."""
        image = self._open() if self._image is None else self._image
        is_turned = self._limits.honour_exif and self.format.name != "TIFF" and _orientation(image) in (5, 6, 7, 8)
        return (self.width, self.height) if is_turned else (self.height, self.width)

    def load(self) -> Canvas:
        """Decode the first frame. Its orientation tag is followed when `limits.honour_exif` says so; that of a TIFF is
        part of the format and is always followed."""
        image = self._open() if self._image is None else self._image
        with reading(f"{self.format.name} file"):
            pixels = None
            if self.format.name == "JPEG":
                _require_few_scans(self._data)
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


MAX_SCANS = 256
"""Each pass of a progressive file goes over the whole picture and may take forty bytes; usual are about ten."""


def _require_few_scans(data: bytes) -> None:
    num_scans = data.count(b"\xff\xda")
    if num_scans > MAX_SCANS:
        raise RequestError(
            "image", f"this JPEG file has {num_scans} scans, at most {MAX_SCANS} are read; save it again with fewer"
        )


def jpeg_pixels(data: bytes) -> np.ndarray | None:
    """[height, width, 3] RGB of a JPEG in the usual colours; None for what is better left to Pillow.

    libjpeg-turbo gives the bytes that Pillow gives, in two thirds of its time. What is left to Pillow includes damaged
    files, about which it has more to say.
    """
    try:
        _, _, colour_space, _ = simplejpeg.decode_jpeg_header(data)
        if colour_space != "YCbCr":
            return None
        return simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False)
    except ValueError:
        return None


# ---------------------------------------------------------------------- what Pillow says

_PILLOW_MODULES = r"PIL\."
_PILLOW_LOGGER = logging.getLogger("PIL")
_NOWHERE = logging.NullHandler()


class PillowQuiet:
    """Keeps what Pillow says about odd files from the caller and the log. Whoever sends a damaged file could otherwise
    fill a log: a decoder may have a line to say about every row.

    Many threads may hold it at the same time: the filter stays until the last one leaves.

    `warnings.catch_warnings` swaps the filters of the whole process and is not safe between threads; one filter
    that only matches Pillow's modules is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders = 0
        self._entry: Any = None
        self._propagated = True

    def __enter__(self) -> None:
        with self._lock:
            if self._entry is None or self._entry not in warnings.filters:
                warnings.filterwarnings("ignore", module=_PILLOW_MODULES)
                self._entry = warnings.filters[0]
            if self._num_holders == 0:
                self._propagated = _PILLOW_LOGGER.propagate
                _PILLOW_LOGGER.addHandler(_NOWHERE)
                _PILLOW_LOGGER.propagate = False
            self._num_holders += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                _PILLOW_LOGGER.removeHandler(_NOWHERE)
                _PILLOW_LOGGER.propagate = self._propagated
            filters = cast("list[Any]", warnings.filters)
            if self._num_holders == 0 and self._entry in filters:
                filters.remove(self._entry)


PILLOW_QUIET = PillowQuiet()


@cache
def silence_libtiff() -> None:
    """Once, for the process: libtiff writes straight to standard error. That a file is damaged is said anyway.

    The functions are looked up in the library that Pillow has loaded; where they cannot be, it goes on writing.
    """
    try:
        library = ctypes.CDLL(Image.core.__file__)
        setters = [getattr(library, name) for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler")]
    except (OSError, AttributeError):
        return
    for setter in setters:
        setter.argtypes, setter.restype = [ctypes.c_void_p], ctypes.c_void_p
        setter(None)
