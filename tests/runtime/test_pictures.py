"""Pictures of a step are encoded together, and a bad one hits its own rows only."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kestrel.images.picture import Canvas, RgbImage
from kestrel.kernels.ops import PLAIN
from kestrel.models.contract import EncodeCrops, PreparedImage
from kestrel.moondream.decoder import MoondreamDecoder, MoondreamVision
from kestrel.runtime.contract import PrefillChunk
from kestrel.runtime.pictures import PictureEncoder
from kestrel.tokens import ImageSpan
from tests.moondream.coarse import POSITIONS, coarse
from tests.moondream.goldens import pixels


class WatchedVision(MoondreamVision):
    """Notes how many crops came together; pictures whose top left pixel is white break the encoder."""

    def __init__(self) -> None:
        super().__init__(coarse("md2").model)
        self.groups: list[list[int]] = []
        self.goes: list[int] = []

    def embed_images(self, images: Sequence[PreparedImage], encode_crops: EncodeCrops | None = None) -> list[Tensor]:
        self.groups.append([image.num_crops for image in images])
        if any(bool((image.patches_NPC[0, 0] == 1.0).all()) for image in images):
            raise RuntimeError("the encoder broke")
        return super().embed_images(images, encode_crops)

    def encode_crops(self, patches: Sequence[Tensor]) -> Tensor:
        self.goes.append(sum(map(len, patches)))
        return super().encode_crops(patches)


def chunk(row: int, name: str, white_corner: bool = False) -> PrefillChunk:
    array = pixels(name).copy()
    if white_corner:
        array[:200, :200] = 255
    image = RgbImage.from_pixels(array)
    span = ImageSpan(image.digest, POSITIONS, 1)
    return PrefillChunk(row, 0, [span], POSITIONS, samples=False, images={image.digest: image})


@torch.inference_mode()
def test_pictures_of_several_requests_are_encoded_together_as_each_alone() -> None:
    vision = WatchedVision()
    chunks = [chunk(0, "small"), chunk(1, "multi"), chunk(2, "small")]
    together, failures = PictureEncoder(vision, max_crops=64).encode(chunks)
    assert failures == {}
    assert len(vision.groups) == 1, "one pass, and a repeated picture is encoded once"
    assert len(vision.groups[0]) == 2
    for each in chunks:
        alone, _ = PictureEncoder(vision, max_crops=1).encode([each])
        digest = next(iter(each.images))
        torch.testing.assert_close(together[digest], alone[digest], rtol=0.0, atol=2e-5)


@pytest.mark.parametrize("max_crops", [1, 5])
@torch.inference_mode()
def test_no_more_crops_come_together_than_allowed_also_of_one_picture(max_crops: int) -> None:
    vision = WatchedVision()
    chunks = [chunk(0, "multi"), chunk(1, "small")]
    embedded, _ = PictureEncoder(vision, max_crops).encode(chunks)
    num_crops = [vision.prepare_image(next(iter(each.images.values()))).num_crops for each in chunks]
    assert num_crops[0] > 5
    assert sum(vision.goes) == sum(num_crops)
    assert max(vision.goes) == max_crops
    at_once, _ = PictureEncoder(vision, max_crops=64).encode(chunks)
    for digest, expected in at_once.items():
        torch.testing.assert_close(embedded[digest], expected, rtol=0.0, atol=2e-5)


@torch.inference_mode()
def test_a_picture_that_breaks_the_encoder_fails_its_own_rows_only() -> None:
    vision = WatchedVision()
    chunks = [chunk(0, "small"), chunk(1, "small", white_corner=True), chunk(2, "small", white_corner=True)]
    embedded, failures = PictureEncoder(vision, max_crops=64).encode(chunks)
    assert set(failures) == {1, 2}
    assert all("broke" in str(error) for error in failures.values())
    assert list(embedded) == [next(iter(chunks[0].images))]


@pytest.mark.parametrize("is_fused", [False, True])
@torch.inference_mode()
def test_a_picture_reduced_outside_of_the_step_is_cut_into_the_same_patches(is_fused: bool) -> None:
    decoder = MoondreamDecoder(copy.deepcopy(coarse("md2").model))
    if is_fused:
        decoder.fuse(PLAIN)
    vision = decoder.vision
    assert vision is not None
    form = vision.picture_form(None)
    assert not form.takes_as_it_is(1, 1), "on a CPU no picture is resized in a step"
    for name in ("multi", "small"):
        image = RgbImage.from_pixels(pixels(name))
        reduced = form.shrink(Canvas(image.pixels), image.digest)
        expected, got = vision.prepare_image(image), vision.prepare_image(reduced)
        assert got.tiles_hw == expected.tiles_hw
        assert torch.equal(got.patches_NPC, expected.patches_NPC)
