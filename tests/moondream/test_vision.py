"""The vision tower against the reference, stage by stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kestrel.kernels.vision import average_to_grid, stitch
from kestrel.moondream.config import VisionConfig
from kestrel.moondream.vision import VisionModel

from .goldens import golden, pixels, tensors
from .naive import image_digest
from .patches import image_patches
from .plain_vision import plain_block

TOLERANCE = 2e-5

TINY = VisionConfig(
    enc_dim=8,
    enc_patch_size=2,
    enc_n_layers=3,
    enc_ff_dim=12,
    enc_n_heads=2,
    proj_out_dim=6,
    crop_size=10,
    in_channels=3,
    max_crops=4,
    overlap_margin=1,
    proj_inner_dim=7,
)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=TOLERANCE)


@cache
def encoded(name: str) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """(patches, features, tiles) of a golden picture."""
    patches, tiles = image_patches(pixels(name), golden("md2").config.vision)
    with torch.inference_mode():
        return patches, golden("md2").model.vision.encode_crops(patches), tiles


@torch.inference_mode()
def test_patches_and_the_first_block_equal_the_reference() -> None:
    expected, vision = tensors("md2", "vision"), golden("md2").model.vision
    patches, _, tiles = encoded("small")
    assert tiles == (1, 1)
    assert_close(patches[0, ::243], expected["small.patches_crop1_sample"])
    embedded = vision.patch_emb(patches) + vision.pos_emb
    assert_close(embedded[0, [0, 81]], expected["small.after_embed_crop1_rows0_81"])
    assert_close(plain_block(vision.blocks[0], embedded)[0, [0, 81]], expected["small.after_block0_crop1_rows0_81"])


@pytest.mark.parametrize("name", ["small", "multi"])
@torch.inference_mode()
def test_every_stage_equals_the_reference(name: str) -> None:
    expected, vision = tensors("md2", "vision"), golden("md2").model.vision
    _, features, tiles = encoded(name)
    # The reference encodes the only tile of a small picture again; we have it as crop 0.
    with_tiles = features if len(features) > 1 else features.expand(2, -1, -1)
    assert_close(with_tiles[:, ::81], expected[f"{name}.encoder_features_sample"])
    stitched = stitch(with_tiles[1:].unflatten(1, (27, 27)), tiles, 4)
    assert_close(stitched[::5, ::7], expected[f"{name}.reconstructed_sample"])
    assert_close(average_to_grid(stitched, 27)[::9], expected[f"{name}.pooled_sample"])
    assert_close(vision.embed_image(features, tiles), expected[f"{name}.projected"])


@pytest.mark.parametrize("name", ["small", "multi"])
def test_moondream_3_projects_as_the_reference(name: str) -> None:
    embeddings = golden("md3").naive.embed_image(image_digest(pixels(name)), pixels(name))
    assert_close(embeddings[::8], tensors("md3", "vision")[f"{name}.projected_sample"])


def test_crops_are_encoded_independently() -> None:
    vision = VisionModel(TINY)
    patches = torch.randn(3, TINY.num_patches, TINY.patch_dim)
    together = vision.encode_crops(patches)
    torch.testing.assert_close(vision.encode_crops(patches[1:2])[0], together[1])


@pytest.mark.parametrize("early_block", [0, 1, 2])
def test_early_features_are_the_stream_after_the_named_block(early_block: int) -> None:
    vision = VisionModel(TINY)
    patches = torch.randn(2, TINY.num_patches, TINY.patch_dim)
    features = vision.encode_crops_with_early(patches, early_block)
    x = vision.patch_emb(patches) + vision.pos_emb
    for block in vision.blocks[: early_block + 1]:
        x = plain_block(block, x)
    torch.testing.assert_close(features.early, x)
    torch.testing.assert_close(features.final, vision.encode_crops(patches))


@pytest.mark.parametrize("early_block", [-1, 3])
def test_an_early_block_must_exist(early_block: int) -> None:
    with pytest.raises(AssertionError):
        VisionModel(TINY).encode_crops_with_early(torch.randn(1, TINY.num_patches, TINY.patch_dim), early_block)


@pytest.mark.parametrize("tiles_hw", [(1, 1), (1, 3), (2, 2), (3, 4)])
@pytest.mark.parametrize("margin", [0, 1, 2])
def test_stitched_tiles_cut_from_one_map_give_the_map_back(tiles_hw: tuple[int, int], margin: int) -> None:
    grid, step = 6, 6 - 2 * margin
    height, width = (tiles * step + 2 * margin for tiles in tiles_hw)
    whole = torch.arange(height * width * 2, dtype=torch.float32).view(height, width, 2)
    tiles = [
        whole[i * step : i * step + grid, j * step : j * step + grid]
        for i in range(tiles_hw[0])
        for j in range(tiles_hw[1])
    ]
    assert torch.equal(stitch(torch.stack(tiles), tiles_hw, margin), whole)


def test_pooling_averages_overlapping_ranges_of_rows_and_columns() -> None:
    features = torch.randn(13, 7, 3)
    pooled = average_to_grid(features, 5).view(5, 5, 3)
    for i in range(5):
        for j in range(5):
            rows = slice(i * 13 // 5, -(-(i + 1) * 13 // 5))
            columns = slice(j * 7 // 5, -(-(j + 1) * 7 // 5))
            torch.testing.assert_close(pooled[i, j], features[rows, columns].mean(dim=(0, 1)))


def test_one_crop_stands_for_itself_and_its_only_tile() -> None:
    vision = VisionModel(TINY)
    features = torch.randn(1, TINY.num_patches, TINY.enc_dim)
    assert torch.equal(vision.embed_image(features, (1, 1)), vision.embed_image(features.repeat(2, 1, 1), (1, 1)))


def test_a_missing_tile_is_refused() -> None:
    with pytest.raises(AssertionError, match="every tile"):
        VisionModel(TINY).embed_image(torch.randn(4, TINY.num_patches, TINY.enc_dim), (2, 2))


def test_the_grid_does_not_depend_on_the_number_of_layers() -> None:
    vision = VisionModel(replace(TINY, enc_n_layers=1))
    features = vision.encode_crops(torch.randn(5, TINY.num_patches, TINY.patch_dim))
    assert vision.embed_image(features, (2, 2)).shape == (25, TINY.proj_out_dim)


def test_every_parameter_can_be_trained() -> None:
    vision = VisionModel(TINY)
    features = vision.encode_crops(torch.randn(5, TINY.num_patches, TINY.patch_dim))
    vision.embed_image(features, (2, 2)).square().sum().backward()
    assert [name for name, p in vision.named_parameters() if p.grad is None] == []
