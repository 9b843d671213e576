"""The refiner on a Moondream's own vision tower."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from kestrel.errors import CheckpointError
from kestrel.images.masks import rasterise_path
from kestrel.images.picture import RgbImage
from kestrel.models.contract import OutlineRefiner
from kestrel.moondream.config import VisionConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.refiner import (
    EARLY_BLOCK,
    MoondreamOutlineRefiner,
    RefinerConfig,
    RefinerHead,
    SegmentRefiner,
    VisionCropEncoder,
    load_outline_refiner,
    load_refiner,
)
from kestrel.moondream.vision import VisionModel

from .goldens import golden
from .plain_vision import plain_block
from .refiner_parts import SQUARE, EchoHead, SilentHead, box, gradient

WEIGHTS = Path(__file__).parents[1] / "goldens" / "segment" / "refiner_head.safetensors"
GOLDEN_HEAD = RefinerConfig(enc_dim=32, embed_dim=32)
CENTRE = box(0.3, 0.2, 0.7, 0.8)
TINY_VISION = VisionConfig(
    enc_dim=8,
    enc_patch_size=2,
    enc_n_layers=10,
    enc_ff_dim=12,
    enc_n_heads=2,
    proj_out_dim=6,
    crop_size=6,
    in_channels=3,
    max_crops=4,
    overlap_margin=1,
    proj_inner_dim=7,
)


class ListeningHead(EchoHead):
    """Keeps the features it is given."""

    def __init__(self, config: RefinerConfig) -> None:
        super().__init__(config)
        self.heard: list[tuple[Tensor, Tensor]] = []

    def forward(self, final_features: Tensor, early_features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        assert torch.is_inference_mode_enabled()
        self.heard.append((final_features, early_features))
        return super().forward(final_features, early_features, mask)


def picture(height: int = 60, width: int = 90) -> RgbImage:
    return RgbImage.from_pixels(gradient(height, width))


def patches_by_hand(crop: np.ndarray, patch_size: int) -> Tensor:
    side = crop.shape[0] // patch_size
    patches = [
        crop[row * patch_size : (row + 1) * patch_size, column * patch_size : (column + 1) * patch_size]
        for row in range(side)
        for column in range(side)
    ]
    return torch.tensor(np.stack([patch.transpose(2, 0, 1).reshape(-1) for patch in patches]) / 127.5 - 1)


@torch.inference_mode()
def test_the_encoder_gives_the_final_features_and_the_stream_after_the_early_block() -> None:
    vision = VisionModel(TINY_VISION)
    torch.nn.init.normal_(vision.pos_emb)
    crop = np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8)
    crop.flags.writeable = False
    final, early = VisionCropEncoder(vision, patch_size=2)(crop)
    stream = (vision.patch_emb(patches_by_hand(crop, 2).float()) + vision.pos_emb).view(1, 9, 8)
    for index, block in enumerate(vision.blocks):
        stream = plain_block(block, stream)
        if index == EARLY_BLOCK:
            torch.testing.assert_close(early, stream)
    torch.testing.assert_close(final, vision.post_ln(stream))
    assert final.shape == early.shape == (1, 9, 8)


@torch.inference_mode()
def test_the_encoder_keeps_to_the_precision_of_the_tower() -> None:
    vision = VisionModel(TINY_VISION).to(torch.bfloat16)
    features = VisionCropEncoder(vision, patch_size=2)(np.zeros((6, 6, 3), np.uint8))
    assert [feature.dtype for feature in features] == [torch.bfloat16, torch.bfloat16]


def test_the_head_gets_the_features_of_the_crop_around_the_box() -> None:
    model, head = golden("md2").model, ListeningHead(GOLDEN_HEAD)
    refiner: OutlineRefiner = MoondreamOutlineRefiner(head, model)
    image = picture(64, 80)
    assert refiner.refine_outline(image, SQUARE, box(0.25, 0.25, 0.75, 0.75)) is not None
    crop = Image.fromarray(image.pixels[8:56, 10:70]).resize((378, 378), Image.Resampling.BILINEAR)
    with torch.inference_mode():
        expected = model.vision.encode_crops(patches_by_hand(np.asarray(crop), 14).float().unsqueeze(0))
        torch.testing.assert_close(head.heard[0][0], expected, rtol=0, atol=1e-4)
    assert not torch.equal(head.heard[0][0], head.heard[0][1])
    assert len(head.heard) == 5


def test_path_and_box_come_back_together() -> None:
    refiner = MoondreamOutlineRefiner(EchoHead(GOLDEN_HEAD), golden("md2").model)
    refined = refiner.refine_outline(picture(), SQUARE, CENTRE)
    assert refined is not None
    path, bbox = refined
    assert bbox == pytest.approx(CENTRE, abs=0.03)
    coarse, drawn = rasterise_path(SQUARE, CENTRE, 60, 90), rasterise_path(path, bbox, 60, 90)
    assert (coarse & drawn).sum() / (coarse | drawn).sum() > 0.9


@pytest.mark.exhaustive
def test_a_loaded_head_gives_the_same_as_the_stage_by_itself() -> None:
    model = golden("md2").model
    head = load_refiner(WEIGHTS, "cpu", torch.float32)
    expected = SegmentRefiner(head, VisionCropEncoder(model.vision, 14)).refine(picture().pixels, SQUARE, CENTRE)
    refined = load_outline_refiner(WEIGHTS, model).refine_outline(picture(), SQUARE, CENTRE)
    assert refined == (None if expected is None else (expected.svg_path, expected.bbox))


def test_a_head_is_loaded_in_the_precision_of_the_model() -> None:
    model = copy.deepcopy(golden("md2").model).to(torch.bfloat16)
    refined = load_outline_refiner(WEIGHTS, model).refine_outline(picture(), SQUARE, CENTRE)
    assert refined is None or refined[0].startswith("M ")


def test_nothing_found_keeps_the_coarse_outline() -> None:
    refiner = MoondreamOutlineRefiner(SilentHead(GOLDEN_HEAD), golden("md2").model)
    assert refiner.refine_outline(picture(), SQUARE, CENTRE) is None


@pytest.mark.parametrize(
    "bbox",
    [
        {},
        {"x_min": 0.1, "y_min": 0.1, "x_max": 0.9},
        {**CENTRE, "x_max": 1.01},
        {**CENTRE, "y_min": -0.01},
        {**CENTRE, "x_min": math.nan},
        {**CENTRE, "y_max": math.inf},
        {**CENTRE, "x_min": None},
        box(0.7, 0.2, 0.3, 0.8),
        box(0.4, 0.2, 0.4, 0.8),
        box(1, 1, 1, 1),
    ],
)
def test_a_box_that_is_none_keeps_the_coarse_outline(bbox: Mapping[str, Any]) -> None:
    head = ListeningHead(GOLDEN_HEAD)
    assert MoondreamOutlineRefiner(head, golden("md2").model).refine_outline(picture(), SQUARE, bbox) is None
    assert not head.heard


@pytest.mark.parametrize("path", ["", "nonsense", "M 0 0 L 1e300 0", "M 5 5 L 6 5 L 6 6 Z"])
def test_a_path_that_draws_nothing_keeps_the_coarse_outline(path: str) -> None:
    refiner = MoondreamOutlineRefiner(EchoHead(GOLDEN_HEAD), golden("md2").model)
    assert refiner.refine_outline(picture(1, 1), path, box(0, 0, 0.1, 0.1)) is None


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (replace(GOLDEN_HEAD, enc_dim=16), (16, 32)),
        (replace(GOLDEN_HEAD, grid=4), (4, 27)),
        (replace(GOLDEN_HEAD, mask_size=351), (351, 378)),
    ],
)
def test_a_head_for_another_tower_is_refused_with_both_numbers(config: RefinerConfig, numbers: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError) as caught:
        MoondreamOutlineRefiner(RefinerHead(config), golden("md2").model)
    assert tuple(map(int, re.findall(r"\d+", str(caught.value)))) == numbers


def test_a_tower_without_the_early_block_is_refused() -> None:
    config = golden("md2").config
    with torch.device("meta"):
        model = MoondreamModel(replace(config, vision=replace(config.vision, enc_n_layers=EARLY_BLOCK)))
    with pytest.raises(CheckpointError, match="block 8, counted from 0, and the model has 8 blocks"):
        MoondreamOutlineRefiner(RefinerHead(GOLDEN_HEAD), model)


def test_a_missing_weights_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.pt"):
        load_outline_refiner(tmp_path / "absent.pt", golden("md2").model)
