"""JPEG files: the pixels are Pillow's own, whichever library decodes them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel.errors import RequestError
from kestrel.images.decode import decode_image
from kestrel.images.encoded import jpeg_pixels
from tests.images.pictures import ROOMY, encode, pattern

WRITTEN: dict[str, dict[str, Any]] = {
    "usual": {},
    "every colour sample": {"subsampling": 0},
    "half the colour samples": {"subsampling": 1},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_rows": 1},
    "coarse": {"quality": 5},
}


@pytest.mark.parametrize("options", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("size", [(1, 1), (17, 33), (200, 301)])
def test_pixels_are_those_of_pillow(options: dict[str, Any], size: tuple[int, int]) -> None:
    data = encode(pattern(*size, 1), "JPEG", **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    direct = jpeg_pixels(data)
    assert direct is not None
    assert np.array_equal(direct, expected)
    assert np.array_equal(decode_image(data, ROOMY).pixels, expected)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_colours_are_left_to_pillow(mode: str) -> None:
    data = encode(Image.fromarray(pattern(40, 50, 1)).convert(mode), "JPEG")
    assert jpeg_pixels(data) is None
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decode_image(data, ROOMY).pixels, expected)


def test_a_file_cut_short_is_refused() -> None:
    data = encode(pattern(200, 301, 1), "JPEG")
    assert jpeg_pixels(data[: len(data) // 2]) is None
    with pytest.raises(RequestError, match="cut short"):
        decode_image(data[: len(data) // 2], ROOMY)


def test_a_file_of_hundreds_of_scans_is_refused():
    with pytest.raises(RequestError, match="has 301 scans, at most 256 are read"):
        decode_image(encode(pattern(20, 30, 0), "JPEG") + b"\xff\xda" * 300, ROOMY)
