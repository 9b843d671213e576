"""Damaged, foreign and oversized files each give one RequestError, before memory is spent."""

from __future__ import annotations

import contextlib
import re
import struct
import warnings
import zlib

import numpy as np
import PIL
import pytest
from PIL import Image

from kestrel.errors import RequestError
from kestrel.images import encoded
from kestrel.images.decode import ImageLimits, decode_image

from .pictures import FORMATS, ROOMY, encode, pattern

PICTURE = pattern(40, 50, 2)


def test_empty_bytes():
    with pytest.raises(RequestError, match="image: the picture holds no bytes; send a JPEG, PNG"):
        decode_image(b"", ROOMY)


def test_bytes_that_are_no_picture():
    with pytest.raises(RequestError, match=r"11 bytes that are not a picture .*send one of: JPEG"):
        decode_image(b"hello world", ROOMY)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x20ftypavif", "AVIF"),
        (b"\0\0\0\x18ftypheic", "HEIC"),
        (b"\0\0\0\x0cjP  \r\n", "JPEG 2000"),
        (b"\xff\x0a\0\0", "JPEG XL"),
        (b"\0\0\1\0\1\0", "ICO"),
        (b"8BPS\0\1", "PSD"),
        (b"%PDF-1.7", "PDF"),
        (b"<svg xmlns=", "SVG"),
    ],
)
def test_known_foreign_formats_are_named(data: bytes, name: str):
    with pytest.raises(RequestError, match=f"{name}.*not supported; convert to one of: JPEG"):
        decode_image(data + bytes(64), ROOMY)


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_files(image_format: str, share: float):
    noise = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
    data = encode(noise, image_format)
    with pytest.raises(RequestError, match=f"this {image_format} file is damaged or cut short"):
        decode_image(data[: int(len(data) * share)], ROOMY)


@pytest.mark.parametrize("image_format", FORMATS)
def test_damaged_files_give_a_picture_or_a_request_error(image_format: str):
    generator = np.random.default_rng(7)
    original = encode(PICTURE, image_format)
    limits = ImageLimits(max_pixels=10**6, max_bytes=10**6)
    for _ in range(60):
        data = bytearray(original)
        for position in generator.integers(0, min(len(data), 400), 4):
            data[position] = generator.integers(0, 256)
        with contextlib.suppress(RequestError):
            assert decode_image(data, limits).pixels.shape[2] == 3


def _claim_png(data: bytearray, side: int) -> None:
    data[16:24] = struct.pack(">II", side, side)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))


def _claim_jpeg(data: bytearray, side: int) -> None:
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", side, side)


def _claim_gif(data: bytearray, side: int) -> None:
    data[6:10] = struct.pack("<HH", side, side)


def _claim_bmp(data: bytearray, side: int) -> None:
    data[18:26] = struct.pack("<ii", side, side)


def _claim_webp(data: bytearray, side: int) -> None:
    assert data[12:16] == b"VP8 "
    data[26:30] = struct.pack("<HH", side, side)


def _claim_webp_lossless(data: bytearray, side: int) -> None:
    assert data[12:16] == b"VP8L"
    data[21:25] = struct.pack("<I", side - 1 | (side - 1) << 14)


def _claim_webp_extended(data: bytearray, side: int) -> None:
    assert data[12:16] == b"VP8X"
    data[24:30] = (side - 1).to_bytes(3, "little") * 2


def _claim_tiff(data: bytearray, side: int) -> None:
    (directory,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, directory)
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        if struct.unpack_from("<H", data, entry)[0] in (256, 257):
            data[entry + 2 : entry + 12] = struct.pack("<HIHH", 3, 1, side, 0)


CLAIMS = {
    "PNG": (encode(PICTURE, "PNG"), _claim_png),
    "JPEG": (encode(PICTURE, "JPEG"), _claim_jpeg),
    "GIF": (encode(PICTURE, "GIF"), _claim_gif),
    "BMP": (encode(PICTURE, "BMP"), _claim_bmp),
    "WebP": (encode(PICTURE, "WebP"), _claim_webp),
    "WebP lossless": (encode(PICTURE, "WebP", lossless=True), _claim_webp_lossless),
    "WebP extended": (encode(PICTURE, "WebP", exif=Image.Exif().tobytes()), _claim_webp_extended),
    "TIFF": (encode(PICTURE, "TIFF"), _claim_tiff),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_size_is_refused_from_the_header_before_pixels_are_decoded(name: str):
    original, claim = CLAIMS[name]
    data, side = bytearray(original), 16000
    claim(data, side)
    with pytest.raises(RequestError, match=f"{side}x{side} = {side**2} pixels, the limit is 100000000"):
        decode_image(data, ROOMY)


def test_no_side_may_be_longer_than_a_jpeg_can_be():
    data = bytearray(encode(PICTURE, "PNG"))
    data[16:24] = struct.pack(">II", 70000, 1)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    with pytest.raises(RequestError, match="70000x1 pixels, no side may exceed 65535"):
        decode_image(data, ROOMY)


def test_too_many_bytes_are_refused_before_the_format_is_looked_at():
    with pytest.raises(RequestError, match=r"2000 bytes, the limit is 1999;.*raise max_image_bytes"):
        decode_image(bytes(2000), ImageLimits(max_pixels=10, max_bytes=1999))


@pytest.mark.parametrize("image_format", FORMATS)
def test_the_size_warning_of_pillow_never_reaches_the_caller(image_format: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert decode_image(encode(PICTURE, image_format), ROOMY).height == 40
    assert caught == []


@pytest.mark.skipif(PIL.__version__.startswith("10."), reason="Pillow 10 checks no size while loading")
def test_the_size_error_of_pillow_becomes_a_request_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(RequestError, match=re.escape("PIL.Image.MAX_IMAGE_PIXELS")):
        decode_image(encode(PICTURE, "TIFF"), ROOMY)


def test_a_file_in_countless_pieces_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoded, "MAX_READS", 1000)
    data = encode(PICTURE, "PNG")
    assert decode_image(data, ROOMY).height == 40
    start = data.index(b"IDAT") - 4
    empty = struct.pack(">I4sI", 0, b"IDAT", zlib.crc32(b"IDAT"))
    with pytest.raises(RequestError, match="cut into more than 1000 pieces"):
        decode_image(data[:start] + empty * 1000 + data[start:], ROOMY)
