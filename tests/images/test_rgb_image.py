"""RgbImage: layout, ownership and digest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kestrel.images.picture import RgbImage

from .pictures import pattern


def test_pixels_are_contiguous_bytes_with_their_size():
    image = RgbImage.from_pixels(pattern(7, 5, 0)[:, ::-1])
    assert (image.height, image.width) == (7, 5)
    assert image.pixels.flags.c_contiguous
    assert image.pixels.dtype == np.uint8
    np.testing.assert_array_equal(image.pixels, pattern(7, 5, 0)[:, ::-1])


def test_writing_to_the_source_later_does_not_reach_the_image():
    source = pattern(6, 6, 1)
    image = RgbImage.from_pixels(source)
    source[:] = 0
    np.testing.assert_array_equal(image.pixels, pattern(6, 6, 1))


def test_the_pixels_cannot_be_written_to():
    image = RgbImage.from_pixels(pattern(6, 6, 1))
    with pytest.raises(ValueError, match="read-only"):
        image.pixels[0, 0, 0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        image.digest = ""  # pyright: ignore[reportAttributeAccessIssue]


def test_digest_depends_on_content_only():
    pixels = pattern(9, 4, 2)
    assert RgbImage.from_pixels(pixels) == RgbImage.from_pixels(np.asfortranarray(pixels))
    assert len(bytes.fromhex(RgbImage.from_pixels(pixels).digest)) >= 16


def test_digest_tells_one_changed_bit_apart():
    pixels = pattern(9, 4, 2)
    changed = pixels.copy()
    changed[8, 3, 2] ^= 1
    assert RgbImage.from_pixels(pixels).digest != RgbImage.from_pixels(changed).digest


def test_digest_tells_shapes_with_equal_bytes_apart():
    pixels = np.zeros((4, 6, 3), np.uint8)
    assert RgbImage.from_pixels(pixels) != RgbImage.from_pixels(pixels.reshape(6, 4, 3))


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 4), (0, 4, 3)])
def test_other_layouts_are_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="height, width, 3"):
        RgbImage.from_pixels(np.zeros(shape, np.uint8))
