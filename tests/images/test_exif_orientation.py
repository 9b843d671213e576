"""EXIF orientation: followed for encoded files when asked for, never for decoded objects."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from kestrel.images.decode import ImageLimits, decode_image

from .pictures import ROOMY, encode, pattern

PICTURE = pattern(24, 40, 5)
AS_STORED = ImageLimits(max_pixels=10**8, max_bytes=10**8, honour_exif=False)


def _tagged(orientation: int, image_format: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if image_format == "WebP" else {}
    return encode(PICTURE, image_format, exif=exif, **options)


@pytest.mark.parametrize("orientation", range(0, 10))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WebP"])
def test_pictures_are_turned_upright_as_pillow_turns_them(image_format: str, orientation: int):
    data = _tagged(orientation, image_format)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(decode_image(data, ROOMY).pixels, expected)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WebP"])
def test_the_tag_is_ignored_when_switched_off(image_format: str):
    data = _tagged(6, image_format)
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(decode_image(data, AS_STORED).pixels, np.asarray(image.convert("RGB")))


def test_a_quarter_turn_swaps_height_and_width():
    data = _tagged(6, "PNG")
    assert decode_image(data, ROOMY).pixels.shape == (40, 24, 3)
    np.testing.assert_array_equal(decode_image(data, ROOMY).pixels, np.rot90(PICTURE, -1))
    assert decode_image(data, ROOMY).digest != decode_image(data, AS_STORED).digest


@pytest.mark.parametrize("limits", [ROOMY, AS_STORED])
def test_the_orientation_of_a_tiff_is_followed_once_whatever_the_switch(limits: ImageLimits):
    data = encode(PICTURE, "TIFF", tiffinfo={274: 6})
    np.testing.assert_array_equal(decode_image(data, limits).pixels, np.rot90(PICTURE, -1))


def test_pillow_images_are_taken_as_they_are():
    with Image.open(io.BytesIO(_tagged(6, "PNG"))) as image:
        np.testing.assert_array_equal(decode_image(image, ROOMY).pixels, PICTURE)


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0garbage!", b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12" * 40])
def test_unreadable_exif_does_not_spoil_the_picture(exif: bytes):
    plain = decode_image(encode(PICTURE, "JPEG"), ROOMY)
    np.testing.assert_array_equal(decode_image(encode(PICTURE, "JPEG", exif=exif), ROOMY).pixels, plain.pixels)
