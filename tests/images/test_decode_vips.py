"""pyvips images are accepted when pyvips is there."""

from __future__ import annotations

import numpy as np
import pytest

from kestrel.errors import RequestError
from kestrel.images.decode import ImageLimits, decode_image

from .pictures import ROOMY, encode, pattern

pyvips = pytest.importorskip("pyvips")
PICTURE = pattern(20, 30, 1)


def test_rgb():
    image = pyvips.Image.new_from_buffer(encode(PICTURE, "PNG"), "")
    np.testing.assert_array_equal(decode_image(image, ROOMY).pixels, PICTURE)


def test_image_made_from_an_array():
    np.testing.assert_array_equal(decode_image(pyvips.Image.new_from_array(PICTURE), ROOMY).pixels, PICTURE)


def test_alpha_is_dropped_and_grey_is_repeated():
    image = pyvips.Image.new_from_array(PICTURE)
    np.testing.assert_array_equal(decode_image(image.bandjoin(0), ROOMY).pixels, PICTURE)
    grey = np.stack([PICTURE[:, :, 0]] * 3, axis=2)
    np.testing.assert_array_equal(decode_image(image[0], ROOMY).pixels, grey)
    np.testing.assert_array_equal(decode_image(image[0].bandjoin(9), ROOMY).pixels, grey)


def test_sixteen_bit_becomes_eight_bit():
    wide = PICTURE.astype(np.uint16) * 256
    image = pyvips.Image.new_from_array(wide).copy(interpretation="rgb16")
    np.testing.assert_array_equal(decode_image(image, ROOMY).pixels, PICTURE)


def test_limit_comes_before_pixels():
    image = pyvips.Image.black(60000, 60000)
    with pytest.raises(RequestError, match="60000x60000"):
        decode_image(image, ROOMY)


def test_cut_file_is_a_request_error():
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    image = pyvips.Image.new_from_buffer(encode(noise, "PNG")[:-300], "", fail_on="truncated")
    with pytest.raises(RequestError, match="pyvips could not read"):
        decode_image(image, ImageLimits(max_pixels=10**6, max_bytes=1))


def test_too_many_bands_are_refused():
    with pytest.raises(RequestError, match="shape"):
        decode_image(pyvips.Image.black(4, 4, bands=6), ROOMY)
