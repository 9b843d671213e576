"""Which encoded format some bytes hold, by signature, and how each supported format is opened without decoding."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin
from PIL.ImageFile import ImageFile

from kestrel.errors import RequestError

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
