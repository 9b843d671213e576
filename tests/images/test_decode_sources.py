"""Every kind of source is accepted as promised, and everything else is refused by name."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kestrel.errors import RequestError
from kestrel.images.decode import ImageLimits, decode_image
from kestrel.images.picture import RgbImage

from .pictures import ROOMY, encode, pattern

PICTURE = pattern(20, 30, 1)
PNG = encode(PICTURE, "PNG")


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_byte_buffers(wrap: type):
    np.testing.assert_array_equal(decode_image(wrap(PNG), ROOMY).pixels, PICTURE)


def test_paths_as_str_and_pathlike(tmp_path: Path):
    path = tmp_path / "picture.bin"
    path.write_bytes(PNG)
    for source in (str(path), path):
        np.testing.assert_array_equal(decode_image(source, ROOMY).pixels, PICTURE)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "picture.png").write_bytes(PNG)
    monkeypatch.setenv("HOME", str(tmp_path))
    np.testing.assert_array_equal(decode_image("~/picture.png", ROOMY).pixels, PICTURE)


def test_missing_path_names_it_and_the_remedy(tmp_path: Path):
    with pytest.raises(RequestError, match=r"image: no file at .*nowhere\.png.*pass encoded data as bytes"):
        decode_image(tmp_path / "nowhere.png", ROOMY)


def test_folder_is_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="is a folder"):
        decode_image(tmp_path, ROOMY)


def test_pipe_is_refused_instead_of_waiting_for_it(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match="not a regular file"):
        decode_image(tmp_path / "pipe", ROOMY)


@pytest.mark.parametrize("source", ["", "a\0b", "x" * 5000])
def test_impossible_paths_are_request_errors(source: str):
    with pytest.raises(RequestError, match="image: ") as caught:
        decode_image(source, ROOMY)
    assert len(str(caught.value)) < 400


def test_large_file_is_refused_before_it_is_read(tmp_path: Path):
    path = tmp_path / "sparse.png"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(RequestError, match=rf"{2**40} bytes, the limit is 1000;.*max_image_bytes"):
        decode_image(path, ImageLimits(max_pixels=10**6, max_bytes=1000))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "RGBa", "L", "LA", "La", "1", "P", "CMYK", "YCbCr", "HSV"])
def test_pillow_images_of_every_mode(mode: str):
    # Pillow has no direct way to some modes.
    via = {"RGBa": "RGBA", "La": "LA"}.get(mode)
    image = Image.fromarray(PICTURE)
    image = image.convert(via).convert(mode) if via else image.convert(mode)
    reference = image.convert(via).convert("RGB") if via else image.convert("RGB")
    np.testing.assert_array_equal(decode_image(image, ROOMY).pixels, np.asarray(reference))


def test_pillow_image_that_is_not_loaded_yet():
    with Image.open(io.BytesIO(PNG)) as image:
        np.testing.assert_array_equal(decode_image(image, ROOMY).pixels, PICTURE)


def test_pillow_image_of_a_cut_file_is_a_request_error():
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    with (
        Image.open(io.BytesIO(encode(noise, "PNG")[:-300])) as image,
        pytest.raises(RequestError, match="damaged or cut short"),
    ):
        decode_image(image, ROOMY)


def test_pillow_image_is_not_changed_and_not_shared():
    image = Image.fromarray(PICTURE)
    decoded = decode_image(image, ROOMY)
    image.paste((1, 2, 3), (0, 0, 30, 20))
    np.testing.assert_array_equal(decoded.pixels, PICTURE)


def test_empty_pillow_image_is_refused():
    with pytest.raises(RequestError, match="is empty"):
        decode_image(Image.new("RGB", (0, 4)), ROOMY)


def test_rgb_array_and_its_views():
    np.testing.assert_array_equal(decode_image(PICTURE, ROOMY).pixels, PICTURE)
    np.testing.assert_array_equal(decode_image(PICTURE[::-2, ::3], ROOMY).pixels, PICTURE[::-2, ::3])


def test_array_is_copied():
    source = PICTURE.copy()
    decoded = decode_image(source, ROOMY)
    source[:] = 0
    np.testing.assert_array_equal(decoded.pixels, PICTURE)


@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 1)])
def test_grey_arrays_are_repeated(shape: tuple[int, ...]):
    grey = PICTURE[:, :, 0].reshape(shape)
    expected = np.stack([PICTURE[:, :, 0]] * 3, axis=2)
    np.testing.assert_array_equal(decode_image(grey, ROOMY).pixels, expected)


def test_alpha_of_an_array_is_dropped():
    with_alpha = np.concatenate([PICTURE, np.zeros((20, 30, 1), np.uint8)], axis=2)
    np.testing.assert_array_equal(decode_image(with_alpha, ROOMY).pixels, PICTURE)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint16", "int8", "bool", "int64"])
def test_other_array_types_are_refused_by_name(dtype: str):
    with pytest.raises(RequestError, match=f"array of {dtype} .*pass uint8"):
        decode_image(np.zeros((4, 4, 3), dtype), ROOMY)


@pytest.mark.parametrize("shape", [(), (5,), (4, 4, 2), (4, 4, 5), (3, 40, 40), (1, 4, 4, 3)])
def test_other_array_shapes_are_refused_by_name(shape: tuple[int, ...]):
    with pytest.raises(RequestError, match=r"shape .*pass uint8"):
        decode_image(np.zeros(shape, np.uint8), ROOMY)


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0), (0, 0, 1)])
def test_empty_arrays_are_refused(shape: tuple[int, ...]):
    with pytest.raises(RequestError, match="is empty"):
        decode_image(np.zeros(shape, np.uint8), ROOMY)


def test_rgb_image_is_passed_through():
    image = RgbImage.from_pixels(PICTURE)
    assert decode_image(image, ROOMY) is image


def test_pixel_limit_holds_for_every_kind_of_source():
    small = ImageLimits(max_pixels=599, max_bytes=10**6)
    for source in (PNG, PICTURE, Image.fromarray(PICTURE), RgbImage.from_pixels(PICTURE)):
        with pytest.raises(RequestError, match=r"30x20 = 600 pixels, the limit is 599;.*max_image_pixels"):
            decode_image(source, small)
        assert decode_image(source, ImageLimits(max_pixels=600, max_bytes=10**6)).height == 20


@pytest.mark.parametrize("source", [None, 3, object(), io.BytesIO(PNG), [[1, 2, 3]], {"image": PNG}])
def test_anything_else_is_refused_by_type_name(source: object):
    with pytest.raises(RequestError, match=f"a {type(source).__name__} is not a picture; pass encoded bytes"):
        decode_image(source, ROOMY)


def test_pixels_give_one_digest_wherever_they_come_from(tmp_path: Path):
    digests = {decode_image(source, ROOMY).digest for source in (PICTURE, PICTURE.copy(), Image.fromarray(PICTURE))}
    assert len(digests) == 1


def test_a_file_gives_one_digest_and_another_file_another(tmp_path: Path):
    path = tmp_path / "picture.png"
    path.write_bytes(PNG)
    digests = {decode_image(source, ROOMY).digest for source in (PNG, bytearray(PNG), path, str(path))}
    assert len(digests) == 1
    changed = PICTURE.copy()
    changed[0, 0, 0] ^= 1
    assert decode_image(encode(changed, "PNG"), ROOMY).digest not in digests


def test_decoding_loads_neither_torch_nor_pyvips():
    program = (
        "import sys, kestrel.images.decode as d, numpy as np;"
        "d.decode_image(np.zeros((2, 2, 3), np.uint8), d.ImageLimits(10, 10));"
        "assert 'pyvips' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).resolve().parents[2])
