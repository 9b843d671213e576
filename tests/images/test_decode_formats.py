"""Every encoded format and pixel layout gives the RGB pixels it stands for."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from kestrel.errors import RequestError
from kestrel.images.decode import decode_image

from .pictures import FORMATS, ROOMY, encode, pattern

PICTURE = pattern(45, 61, 3)


@pytest.mark.parametrize("image_format", ["PNG", "BMP", "TIFF"])
def test_lossless_formats_keep_every_pixel(image_format: str):
    np.testing.assert_array_equal(decode_image(encode(PICTURE, image_format), ROOMY).pixels, PICTURE)


def test_lossless_webp_keeps_every_pixel():
    np.testing.assert_array_equal(decode_image(encode(PICTURE, "WebP", lossless=True), ROOMY).pixels, PICTURE)


@pytest.mark.parametrize("image_format", FORMATS)
def test_pixels_equal_those_of_pillow(image_format: str):
    data = encode(PICTURE, image_format)
    with Image.open(io.BytesIO(data)) as reference:
        np.testing.assert_array_equal(decode_image(data, ROOMY).pixels, np.asarray(reference.convert("RGB")))


@pytest.mark.parametrize("options", [{"progressive": True}, {"subsampling": 0}, {"subsampling": 2, "quality": 30}])
def test_jpeg_variants_equal_pillow(options: dict[str, object]):
    data = encode(PICTURE, "JPEG", **options)
    with Image.open(io.BytesIO(data)) as reference:
        np.testing.assert_array_equal(decode_image(data, ROOMY).pixels, np.asarray(reference))


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits"])
def test_compressed_tiff(compression: str):
    data = encode(PICTURE, "TIFF", compression=compression)
    np.testing.assert_array_equal(decode_image(data, ROOMY).pixels, PICTURE)


@pytest.mark.parametrize("image_format", ["GIF", "WebP", "TIFF", "PNG"])
def test_the_first_frame_of_several_is_taken(image_format: str):
    first, second = (Image.new("RGB", (20, 10), colour) for colour in ((200, 10, 10), (10, 10, 200)))
    options = {"lossless": True} if image_format == "WebP" else {}
    data = encode(first, image_format, save_all=True, append_images=[second], **options)
    assert (decode_image(data, ROOMY).pixels == (200, 10, 10)).all()


def test_grey_is_repeated():
    grey = PICTURE[:, :, 2]
    pixels = decode_image(encode(grey, "PNG"), ROOMY).pixels
    for channel in range(3):
        np.testing.assert_array_equal(pixels[:, :, channel], grey)


def test_alpha_is_dropped_and_not_blended():
    alpha = np.zeros((45, 61, 1), np.uint8)
    data = encode(np.concatenate([PICTURE, alpha], axis=2), "PNG")
    np.testing.assert_array_equal(decode_image(data, ROOMY).pixels, PICTURE)


def test_grey_with_alpha():
    grey = PICTURE[:, :, 0]
    image = Image.merge("LA", [Image.fromarray(grey), Image.new("L", (61, 45), 3)])
    np.testing.assert_array_equal(decode_image(encode(image, "PNG"), ROOMY).pixels[:, :, 1], grey)


@pytest.mark.parametrize("transparency", [1, bytes([0, 255, 7])])
def test_transparent_palette_png_gives_the_palette_colours(transparency: int | bytes):
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    data = encode(image, "PNG", transparency=transparency)
    assert decode_image(data, ROOMY).pixels.tolist() == [[[255, 0, 0], [0, 255, 0], [0, 0, 255]]]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_png_with_a_transparent_colour_keeps_that_colour(mode: str):
    image = Image.new(mode, (4, 3), 70 if mode == "L" else (70, 70, 70))
    data = encode(image, "PNG", transparency=70 if mode == "L" else (70, 70, 70))
    assert (decode_image(data, ROOMY).pixels == 70).all()


def test_sixteen_bit_grey_png_keeps_the_high_byte():
    grey = np.array([[0, 255, 256, 0x1234, 65535]], np.uint16)
    pixels = decode_image(encode(grey, "PNG"), ROOMY).pixels
    assert pixels[0, :, 0].tolist() == [0, 0, 1, 0x12, 255]
    assert (pixels[:, :, 0] == pixels[:, :, 2]).all()


def test_sixteen_bit_grey_tiff_keeps_the_high_byte():
    grey = np.array([[0, 256, 0x1234, 65535]], np.uint16)
    assert decode_image(encode(grey, "TIFF"), ROOMY).pixels[0, :, 1].tolist() == [0, 1, 0x12, 255]


def test_one_bit_picture_is_black_and_white():
    image = Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8)).convert("1")
    for image_format in ("PNG", "BMP", "TIFF"):
        assert decode_image(encode(image, image_format), ROOMY).pixels[:, :, 0].tolist() == [[0, 255], [255, 0]]


def test_cmyk_jpeg_comes_out_in_its_true_colours():
    blocks = np.zeros((32, 32, 3), np.uint8)
    blocks[:, :16], blocks[:, 16:] = (220, 30, 40), (20, 200, 60)
    data = encode(Image.fromarray(blocks).convert("CMYK"), "JPEG", quality=95)
    pixels = decode_image(data, ROOMY).pixels.astype(int)
    assert np.abs(pixels - blocks).max() <= 12


def test_floating_point_tiff_is_refused_with_a_remedy():
    data = encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(RequestError, match=r"floating point.*convert"):
        decode_image(data, ROOMY)


def test_thirty_two_bit_integer_tiff_is_refused_with_a_remedy():
    data = encode(Image.fromarray(np.ones((4, 4), np.int32)), "TIFF")
    with pytest.raises(RequestError, match=r"32-bit integer.*convert"):
        decode_image(data, ROOMY)


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1)])
def test_slivers_decode(size: tuple[int, int]):
    picture = pattern(*size, 0)
    np.testing.assert_array_equal(decode_image(encode(picture, "PNG"), ROOMY).pixels, picture)
