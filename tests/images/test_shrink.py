"""Pictures reduced on the host, a part at a time: the bits of the model's own resizing, whatever they came as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from kestrel.images import picture as picture_module
from kestrel.images.crops import cut_crops, make_crops, shrunk_tensors
from kestrel.images.decode import decode_image, decode_opened, find_or_open
from kestrel.images.picture import Canvas, PictureForm, RgbImage, ShrunkImage, plan_tiling
from tests.exhaustive import sweep

from .pictures import MOONDREAM, ROOMY, encode, pattern

FORM = PictureForm(MOONDREAM)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that pictures of a test are cut into dozens."""
    monkeypatch.setattr(picture_module, "PART_BYTES", 2**14)


def shrunk(source: Any, form: PictureForm = FORM) -> ShrunkImage:
    opened = find_or_open(source, ROOMY)
    assert not isinstance(opened, (RgbImage, ShrunkImage))
    picture = decode_opened(opened, form=form)
    assert isinstance(picture, ShrunkImage)
    return picture


def require_same_crops(source: Any) -> None:
    image = decode_image(source, ROOMY)
    plan = plan_tiling(image.height, image.width, MOONDREAM)
    reduced = shrunk(source)
    assert (reduced.digest, reduced.height, reduced.width) == (image.digest, image.height, image.width)
    assert torch.equal(cut_crops(*shrunk_tensors(reduced), plan), make_crops(image, plan))


@sweep(
    ("height", "width"),
    [(378, 378), (100, 60), (300, 1500), (1500, 300), (900, 700), (1300, 400), (420, 3000), (3000, 420), (379, 378)],
    always=[(378, 378), (100, 60), (1500, 300), (900, 700), (379, 378)],
)
@pytest.mark.usefixtures("small_parts")
def test_crops_are_those_of_the_whole_picture(height: int, width: int) -> None:
    require_same_crops(pattern(height, width, 1))


def test_pictures_of_one_part_are_resized_alike() -> None:
    require_same_crops(pattern(700, 500, 2))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "La", "P", "RGBA", "RGBa", "CMYK", "I;16"])
@pytest.mark.usefixtures("small_parts")
def test_parts_are_converted_as_the_whole(mode: str) -> None:
    image = Image.fromarray(pattern(500, 700, 3))
    by_way_of = {"I;16": ["L", "I", "I;16"], "La": ["LA", "La"], "RGBa": ["RGBA", "RGBa"]}
    for step in by_way_of.get(mode, [mode]):
        image = image.convert(step)
    require_same_crops(image)
    if mode not in ("La", "RGBa"):  # no format keeps these two
        require_same_crops(encode(image, "TIFF" if mode == "CMYK" else "PNG"))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "I;16"])
@pytest.mark.usefixtures("small_parts")
def test_grey_pictures_are_resized_as_one_channel(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: set[str] = set()
    resize = Image.Image.resize

    def noted(image: Image.Image, *how: Any) -> Image.Image:
        modes.add(image.mode)
        return resize(image, *how)

    monkeypatch.setattr(Image.Image, "resize", noted)
    image = Image.new(mode, (700, 500))
    opened = find_or_open(encode(image, "PNG"), ROOMY)
    assert not isinstance(opened, (RgbImage, ShrunkImage))
    assert isinstance(decode_opened(opened, form=FORM), ShrunkImage)
    assert modes == {"L"}


@pytest.mark.usefixtures("small_parts")
def test_a_thread_may_rest_before_every_part() -> None:
    opened = find_or_open(pattern(500, 700, 8), ROOMY)
    assert not isinstance(opened, (RgbImage, ShrunkImage))
    rests: list[None] = []
    decode_opened(opened, form=FORM, rest=lambda: rests.append(None))
    assert len(rests) >= 500 * 700 / (picture_module.PART_BYTES / 4)


@pytest.mark.parametrize("orientation", range(1, 9))
@sweep("image_format", ["JPEG", "PNG"], always=["JPEG"])
@pytest.mark.usefixtures("small_parts")
def test_parts_of_turned_pictures_are_upright(orientation: int, image_format: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    require_same_crops(encode(pattern(450, 620, 4), image_format, exif=exif))


@pytest.mark.usefixtures("small_parts")
def test_pixels_have_the_digest_of_the_array() -> None:
    pixels = pattern(300, 200, 5)
    assert Canvas(pixels[::-1]).digest() == RgbImage.from_pixels(pixels[::-1]).digest


@pytest.mark.parametrize(("height", "width"), [(700, 300), (300, 700), (90, 60)])
@pytest.mark.usefixtures("small_parts")
def test_outlines_are_refined_on_the_picture_that_pillow_would_make(height: int, width: int) -> None:
    pixels = pattern(height, width, 6)
    outline = shrunk(pixels, PictureForm(MOONDREAM, outline_side=256)).outline
    assert outline is not None
    scale = min(1.0, 256 / max(height, width))
    size = (round(width * scale), round(height * scale))
    expected = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(outline.pixels, np.asarray(expected))


def test_what_is_kept_of_the_largest_pictures_is_small() -> None:
    largest = 0
    for height, width in ((10_000, 10_000), (65_535, 400), (400, 65_535), (65_535, 1520), (20_000, 5_000)):
        plan = plan_tiling(height, width, MOONDREAM)
        largest = max(largest, 3 * (378 * 378 + plan.resized_height * plan.resized_width))
    assert largest < 13_000_000


def test_a_device_gets_the_pixels_of_what_it_resizes_itself() -> None:
    form = PictureForm(MOONDREAM, max_device_pixels=200 * 300)
    small, large = (find_or_open(pattern(200, width, 7), ROOMY) for width in (300, 301))
    assert not isinstance(small, (RgbImage, ShrunkImage))
    assert not isinstance(large, (RgbImage, ShrunkImage))
    assert isinstance(decode_opened(small, form=form), RgbImage)
    assert isinstance(decode_opened(large, form=form), ShrunkImage)
