"""resize_lanczos gives Pillow's bytes exactly."""

from __future__ import annotations

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from kestrel.images.resize import lanczos_bands, resize_lanczos

from .pictures import pattern

PILLOW_CHOOSES_THE_ORDER = int(PIL.__version__.split(".")[0]) >= 13
SIZES = [
    (557, 800, 644, 1176),
    (800, 557, 378, 378),
    (150, 200, 378, 378),
    (1, 1, 378, 378),
    (1, 500, 378, 378),
    (500, 1, 378, 378),
    (2, 3, 5, 7),
    (378, 378, 378, 378),
    (378, 100, 378, 378),
    (100, 378, 378, 378),
    (1000, 100, 378, 378),
    (3000, 40, 378, 378),
    (40, 9000, 378, 378),
    (300, 300, 1, 1),
    (64, 64, 63, 65),
]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _noise(height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _pillow(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """One axis at a time, in the order Pillow 13 takes by itself."""
    rows_lost, columns_lost = picture.shape[0] - height, picture.shape[1] - width
    first = (width, picture.shape[0])
    if rows_lost > 0 and rows_lost > 2 * columns_lost:
        first = (picture.shape[1], height)
    lanczos = Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(picture).resize(first, lanczos).resize((width, height), lanczos))


def _resized(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    return resize_lanczos(torch.from_numpy(picture), height, width).numpy()


@pytest.mark.parametrize("size", SIZES)
def test_every_byte_equals_pillow(size: tuple[int, int, int, int]):
    height, width, out_height, out_width = size
    for picture in (_noise(height, width, 1), pattern(height, width, 2), _noise(height, width, 3) // 128 * 255):
        expected = _pillow(picture, out_height, out_width)
        np.testing.assert_array_equal(_resized(picture, out_height, out_width), expected)


def test_every_byte_equals_pillow_for_random_sizes():
    generator = np.random.default_rng(11)
    for seed in range(300):
        height, width, out_height, out_width = generator.integers(1, [80, 500][seed % 5 == 0], 4).tolist()
        picture = _noise(height, width, seed)
        expected = _pillow(picture, out_height, out_width)
        np.testing.assert_array_equal(_resized(picture, out_height, out_width), expected, str(picture.shape))


@pytest.mark.skipif(not PILLOW_CHOOSES_THE_ORDER, reason="older Pillow always resizes along rows first")
@pytest.mark.parametrize("size", SIZES)
def test_the_order_of_passes_is_that_of_pillow(size: tuple[int, int, int, int]):
    height, width, out_height, out_width = size
    picture = _noise(height, width, 5)
    expected = np.asarray(Image.fromarray(picture).resize((out_width, out_height), Image.Resampling.LANCZOS))
    np.testing.assert_array_equal(_resized(picture, out_height, out_width), expected)


def test_views_are_resized_like_copies():
    picture = torch.from_numpy(_noise(60, 90, 0))
    view = picture[:, 10:70].transpose(0, 1)
    assert not view.is_contiguous()
    assert torch.equal(resize_lanczos(view, 33, 44), resize_lanczos(view.contiguous(), 33, 44))


def test_equal_size_gives_a_copy():
    picture = torch.from_numpy(_noise(8, 8, 0))
    same = resize_lanczos(picture, 8, 8)
    assert torch.equal(same, picture)
    assert same.data_ptr() != picture.data_ptr()


def test_a_large_picture_goes_through_in_chunks_without_seams():
    picture = np.tile(_noise(1, 1400, 4), (900, 1, 1))
    resized = _resized(picture, 900, 500)
    assert (resized == resized[:1]).all()


@pytest.mark.parametrize(("in_size", "out_size"), [(800, 1176), (1176, 800), (7, 378), (5000, 378), (1, 3)])
def test_weights_of_each_output_sum_to_one(in_size: int, out_size: int):
    bands = lanczos_bands(in_size, out_size, 32, torch.device("cpu"))
    assert [band.out_start for band in bands[1:]] == [band.out_end for band in bands[:-1]]
    assert (bands[0].out_start, bands[-1].out_end) == (0, out_size)
    for band in bands:
        num_taps = band.weights_IO.shape[0]
        assert 0 <= band.in_start < band.in_end <= in_size
        torch.testing.assert_close(
            band.weights_IO.sum(0),
            torch.ones(band.out_end - band.out_start, dtype=torch.float64),
            rtol=0,
            atol=num_taps * 2.0**-23,
        )


def test_weight_blocks_of_a_very_long_side_stay_small():
    bands = lanczos_bands(65535, 378, 256, torch.device("cpu"))
    assert sum(band.weights_IO.numel() for band in bands) < 2**21


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_gpu_gives_the_same_bytes_as_the_cpu(size: tuple[int, int, int, int]):
    height, width, out_height, out_width = size
    picture = torch.from_numpy(_noise(height, width, 9))
    on_gpu = resize_lanczos(picture.cuda(), out_height, out_width)
    assert on_gpu.device.type == "cuda"
    assert torch.equal(on_gpu.cpu(), resize_lanczos(picture, out_height, out_width))
