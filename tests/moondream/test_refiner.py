"""The stage around the refiner's network: what it looks at, and what it gives back or gives up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kestrel.errors import RequestError
from kestrel.images.masks import rasterise_path
from kestrel.moondream.refiner import RefinedMask, RefinerConfig, RefinerHead, SegmentRefiner

from .refiner_parts import SQUARE, TINY, EchoHead, GreyEncoder, NoisyHead, SilentHead, box, gradient


def assert_well_formed(result: RefinedMask, height: int, width: int) -> None:
    assert result.mask.shape == (height, width)
    assert result.mask.any()
    rows, columns = np.nonzero(result.mask)
    assert result.bbox == box(
        columns.min() / width, rows.min() / height, (columns.max() + 1) / width, (rows.max() + 1) / height
    )
    assert result.svg_path.startswith("M ")
    assert result.svg_path.endswith(" Z")
    assert np.isfinite(result.expected_iou)


def test_a_head_that_agrees_keeps_the_coarse_shape() -> None:
    image, bbox = gradient(240, 320), box(0.25, 0.25, 0.75, 0.75)
    coarse_path = "M 0 0.5 A 0.5 0.5 0 1 1 1 0.5 A 0.5 0.5 0 1 1 0 0.5 Z"
    config = RefinerConfig(enc_dim=8, embed_dim=32, num_layers=1)
    result = SegmentRefiner(EchoHead(config), GreyEncoder(config)).refine(image, coarse_path, bbox)
    assert result is not None
    assert_well_formed(result, 240, 320)
    coarse = rasterise_path(coarse_path, bbox, 240, 320)
    drawn = rasterise_path(result.svg_path, result.bbox, 240, 320)
    assert (result.mask & coarse).sum() / (result.mask | coarse).sum() > 0.97
    assert (result.mask & drawn).sum() / (result.mask | drawn).sum() > 0.98
    assert result.expected_iou == pytest.approx(0.9)


def test_the_encoder_sees_the_box_and_a_quarter_more_on_each_side() -> None:
    image = np.zeros((100, 200, 3), np.uint8)
    image[30:90, 70:190] = 255
    encoder = GreyEncoder(TINY)
    SegmentRefiner(EchoHead(TINY), encoder).refine(image, SQUARE, box(0.45, 0.4, 0.85, 0.8))
    (crop,) = encoder.crops
    assert crop.shape == (56, 56, 3)
    assert crop.min() == 255
    image[29], image[:, 69] = 128, 128
    SegmentRefiner(EchoHead(TINY), encoder).refine(image, SQUARE, box(0.445, 0.395, 0.85, 0.8))
    assert encoder.crops[1].min() < 255


@pytest.mark.parametrize("coarse_path", ["", "M 0 0 H V z", "M 5 5 L 6 5 L 6 6 Z", "nonsense"])
def test_an_empty_coarse_mask_is_given_up_before_the_encoder(coarse_path: str) -> None:
    encoder = GreyEncoder(TINY)
    assert SegmentRefiner(EchoHead(TINY), encoder).refine(gradient(50, 50), coarse_path, box(0, 0, 0.5, 0.5)) is None
    assert not encoder.crops


def test_an_empty_refined_mask_is_given_up() -> None:
    refiner = SegmentRefiner(SilentHead(TINY), GreyEncoder(TINY))
    assert refiner.refine(gradient(50, 50), SQUARE, box(0.2, 0.2, 0.8, 0.8)) is None


@pytest.mark.parametrize("share", [0.03, 0.05])
def test_small_objects_are_refined_too(share: float) -> None:
    """The smaller one covers less of the picture than the islands that are dropped elsewhere."""
    bbox = box(0.5, 0.5, 0.5 + share, 0.5 + share)
    result = SegmentRefiner(EchoHead(TINY), GreyEncoder(TINY)).refine(gradient(400, 400), SQUARE, bbox)
    assert result is not None
    assert_well_formed(result, 400, 400)
    coarse = rasterise_path(SQUARE, bbox, 400, 400)
    assert (result.mask & coarse).sum() / (result.mask | coarse).sum() > 0.8


def test_a_refined_mask_of_fine_noise_is_given_up() -> None:
    config = RefinerConfig(enc_dim=8, embed_dim=32, num_layers=1)
    refiner = SegmentRefiner(NoisyHead(config), GreyEncoder(config))
    assert refiner.refine(gradient(378, 378), SQUARE, box(0, 0, 1, 1)) is None


@pytest.mark.parametrize("shape", [(1, 1), (1, 60), (60, 1), (37, 53), (150, 100)])
@pytest.mark.parametrize(
    "bbox",
    [
        box(0, 0, 1, 1),
        box(0, 0, 0.01, 0.01),
        box(0.99, 0.99, 1, 1),
        box(0.5, 0, 0.5, 1),
        box(1, 1, 1, 1),
        box(0, 0.3, 1, 0.31),
        box(0.2, 0.1, 0.7, 1),
    ],
)
def test_an_untrained_head_gives_a_sound_result_or_none(shape: tuple[int, int], bbox: dict[str, float]) -> None:
    result = SegmentRefiner(RefinerHead(TINY).eval(), GreyEncoder(TINY)).refine(gradient(*shape), SQUARE, bbox)
    if result is not None:
        assert_well_formed(result, *shape)


def test_a_bfloat16_head_takes_features_of_another_type() -> None:
    encoder = GreyEncoder(TINY)
    refiner = SegmentRefiner(RefinerHead(TINY).to(torch.bfloat16).eval(), encoder)
    result = refiner.refine(gradient(60, 80), SQUARE, box(0.1, 0.1, 0.9, 0.9))
    assert len(encoder.crops) == 1
    if result is not None:
        assert_well_formed(result, 60, 80)


def test_a_picture_of_another_form_is_refused() -> None:
    refiner = SegmentRefiner(EchoHead(TINY), GreyEncoder(TINY))
    for image in (np.zeros((10, 10), np.uint8), np.zeros((10, 10, 4), np.uint8), np.zeros((10, 10, 3), np.float32)):
        with pytest.raises(RequestError, match="image"):
            refiner.refine(image, SQUARE, box(0, 0, 1, 1))  # pyright: ignore[reportArgumentType]
