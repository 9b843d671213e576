"""Pictures that are encoded in slices are those that are encoded at once."""

from __future__ import annotations

import pytest
import torch

from kestrel.images.picture import RgbImage
from kestrel.moondream.decoder import MoondreamVision
from kestrel.runtime import pictures as pictures_module
from kestrel.runtime.contract import PictureSlice, PrefillChunk
from kestrel.runtime.pictures import MAX_PICTURES, PictureEncoder
from kestrel.tokens import ImageSpan
from tests.moondream.coarse import POSITIONS, coarse
from tests.moondream.goldens import pixels

MULTI = RgbImage.from_pixels(pixels("multi"))


def encoder() -> PictureEncoder:
    return PictureEncoder(MoondreamVision(coarse("md2").model), max_crops=64)


def slice_of(image: RgbImage, max_crops: int) -> PictureSlice:
    return PictureSlice(image.digest, image, max_crops)


def chunk(image: RgbImage, row: int = 0) -> PrefillChunk:
    return PrefillChunk(
        row, 0, [ImageSpan(image.digest, POSITIONS, 1)], POSITIONS, samples=False, images={image.digest: image}
    )


def other(index: int) -> RgbImage:
    return RgbImage.from_pixels(pixels("small")[: 40 + index])


@pytest.mark.parametrize("max_crops", [1, 2, 100])
@torch.inference_mode()
def test_slices_give_the_embedding_of_the_whole(max_crops: int) -> None:
    whole = encoder().encode([chunk(MULTI)])[0][MULTI.digest]
    pictures = encoder()
    num_crops = pictures._vision.prepare_image(MULTI).num_crops
    assert num_crops > 2
    for count in range(1, -(-num_crops // max_crops) + 1):
        assert not pictures.sliced.has_encoded(MULTI.digest)
        pictures.sliced.advance(slice_of(MULTI, max_crops))
        assert pictures.sliced.has_encoded(MULTI.digest) == (count * max_crops >= num_crops)
    embedded, failures = pictures.encode([chunk(MULTI)])
    assert failures == {}
    torch.testing.assert_close(embedded[MULTI.digest], whole, rtol=0.0, atol=2e-5)
    assert not pictures.sliced.has_encoded(MULTI.digest), "what was prefilled is not kept"


@pytest.mark.parametrize(
    ("num_crops", "max_crops", "slices"),
    [(9, 6, [5, 4]), (13, 6, [5, 4, 4]), (6, 6, [6]), (3, 6, [3]), (5, 2, [2, 2, 1]), (2, 1, [1, 1])],
)
def test_slices_of_a_picture_are_as_large_as_each_other(num_crops: int, max_crops: int, slices: list[int]) -> None:
    left, found = num_crops, []
    while left:
        found.append(PictureSlice("", None, max_crops).num_crops(left))
        left -= found[-1]
    assert found == slices


@torch.inference_mode()
def test_crops_are_encoded_in_slices_of_the_same_size() -> None:
    pictures, sizes = encoder(), []
    model = pictures._vision
    num_crops, encode = model.prepare_image(MULTI).num_crops, model.encode_crops
    model.encode_crops = lambda parts: (sizes.append(sum(map(len, parts))), encode(parts))[1]  # type: ignore[method-assign]
    while not pictures.sliced.has_encoded(MULTI.digest):
        pictures.sliced.advance(slice_of(MULTI, num_crops - 1))
    assert num_crops > 4
    assert sizes == [-(-num_crops // 2), num_crops // 2]


@torch.inference_mode()
def test_a_picture_prefilled_early_is_finished_then() -> None:
    whole = encoder().encode([chunk(MULTI)])[0][MULTI.digest]
    pictures = encoder()
    pictures.sliced.advance(slice_of(MULTI, 1))
    embedded, _ = pictures.encode([chunk(MULTI), chunk(MULTI, row=1)])
    torch.testing.assert_close(embedded[MULTI.digest], whole, rtol=0.0, atol=2e-5)


@torch.inference_mode()
def test_what_failed_in_slices_is_tried_again_as_a_whole() -> None:
    pictures = encoder()
    model = pictures._vision
    model.encode_crops = out_of_memory  # type: ignore[method-assign]
    pictures.sliced.advance(slice_of(MULTI, 1))
    del model.encode_crops
    assert pictures.sliced.has_encoded(MULTI.digest), "it waits for no more slices"
    embedded, failures = pictures.encode([chunk(MULTI)])
    assert list(embedded) == [MULTI.digest]
    assert failures == {}


def out_of_memory(patches: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("for a moment")


@torch.inference_mode()
def test_a_failure_is_told_when_the_picture_is_prefilled_and_hits_its_rows_only() -> None:
    pictures = encoder()
    pictures.sliced.advance(PictureSlice("feed", None, 1))
    assert pictures.sliced.has_encoded("feed")
    bad = PrefillChunk(1, 0, [ImageSpan("feed", POSITIONS, 1)], POSITIONS, samples=False)
    embedded, failures = pictures.encode([chunk(MULTI), bad])
    assert list(embedded) == [MULTI.digest]
    assert list(failures) == [1]


@torch.inference_mode()
def test_pictures_that_nobody_prefills_are_forgotten_in_the_end() -> None:
    pictures = encoder()
    first = other(0)
    for index in range(MAX_PICTURES + 1):
        pictures.sliced.advance(slice_of(other(index), 100))
    assert not pictures.sliced.has_encoded(first.digest)
    assert pictures.sliced.has_encoded(other(1).digest)
    assert first.digest in pictures.encode([chunk(first)])[0], "it is encoded anew"


@torch.inference_mode()
def test_pictures_that_nobody_prefills_are_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = encoder()
    pictures.sliced.advance(slice_of(MULTI, 1))
    monkeypatch.setattr(pictures_module, "MAX_NUMBERS", pictures.sliced._num_numbers)
    pictures.sliced.advance(slice_of(other(0), 1))
    pictures.sliced.advance(slice_of(MULTI, 1))
    assert list(pictures.sliced._pictures) == [MULTI.digest], "the older one goes, and never the one at hand"
