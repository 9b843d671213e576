"""Coordinates and sizes against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kestrel.kernels.vision import fourier_features
from kestrel.moondream.config import RegionConfig
from kestrel.moondream.region import RegionModel, coord_from_bins, size_from_bins

from .goldens import FAMILIES, golden, tensors
from .naive import spatial_items

TOLERANCE = 1e-5


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_encoders_equal_the_reference(family: str) -> None:
    units, region = tensors(family, "units"), golden(family).model.region
    assert_close(region.encode_coord(units["coord_in"][:, 0]), units["coord_emb"])
    assert_close(region.encode_size(units["size_in"]), units["size_emb"])


@torch.inference_mode()
def test_fourier_features_equal_the_reference() -> None:
    units, region = tensors("md2", "units"), golden("md2").model.region
    assert_close(fourier_features(units["coord_in"], region.coord_features), units["coord_fourier"])
    assert_close(fourier_features(units["size_in"], region.size_features), units["size_fourier"])


@pytest.mark.parametrize(
    ("family", "has_ln", "hidden", "suffix"),
    [("md2", False, "hidden_in", ""), ("md3", False, "region_hidden_in", ""), ("md3", True, "region_hidden_in", "_ln")],
)
@torch.inference_mode()
def test_decoders_equal_the_reference(family: str, has_ln: bool, hidden: str, suffix: str) -> None:
    units, region = tensors(family, "units"), golden(family, has_ln).model.region
    assert (region.ln is not None) == has_ln
    assert_close(region.decode_coord(units[hidden]), units[f"coord_logits{suffix}"])
    assert_close(region.decode_size(units[hidden]), units[f"size_logits{suffix}"])


@torch.inference_mode()
def test_spatial_references_embed_as_in_the_reference() -> None:
    units, naive = tensors("md2", "units"), golden("md2").naive
    items = spatial_items([[0.25, 0.75], [0.125, 0.25, 0.5, 0.875]])
    embedded = torch.cat([naive.embed_item(item, {}) for item in items])
    assert_close(embedded[:4], units["refs_coords"])
    assert_close(embedded[4:], units["refs_sizes"])


def test_bins_give_the_reference_values() -> None:
    units = tensors("md2", "units")
    torch.testing.assert_close(coord_from_bins(units["bins"]), units["coord_from_bin"], rtol=0.0, atol=0.0)
    torch.testing.assert_close(size_from_bins(units["bins"]), units["size_from_bin"], rtol=1e-6, atol=0.0)


def test_bins_span_the_whole_range() -> None:
    ends = torch.tensor([0, 1023])
    assert coord_from_bins(ends).tolist() == [0.0, 1023 / 1024]
    assert size_from_bins(ends).tolist() == [2.0**-10, 1.0]


@pytest.mark.parametrize("inner_dim", [None, 5])
def test_size_logits_put_width_before_height(inner_dim: int | None) -> None:
    region = RegionModel(RegionConfig(4, 6, 8, 10, 16, inner_dim))
    hidden = torch.randn(3, 4)
    assert region.decode_coord(hidden).shape == (3, 8)
    sizes = region.decode_size(hidden)
    assert sizes.shape == (3, 2, 8)
    assert torch.equal(sizes.flatten(1), region.size_decoder(hidden))


def test_neighbouring_coordinates_stay_apart_in_half_precision() -> None:
    region = RegionModel(RegionConfig(4, 64, 8, 10, 16)).to(torch.bfloat16)
    values = torch.tensor([800, 801]) / 1024
    embedded = region.encode_coord(values)
    assert embedded.dtype == torch.bfloat16
    features = fourier_features(values[:, None], region.coord_features)
    assert features[0].sub(features[1]).abs().max() > 1e-3


def test_every_parameter_can_be_trained() -> None:
    region = RegionModel(RegionConfig(4, 6, 8, 10, 16, inner_dim=5, has_ln=True))
    hidden = region.encode_coord(torch.rand(3)) + region.encode_size(torch.rand(3, 2))
    (region.decode_coord(hidden).square().sum() + region.decode_size(hidden).square().sum()).backward()
    assert [name for name, p in region.named_parameters() if p.grad is None] == []


def test_a_size_is_the_same_wherever_it_stands_in_a_batch() -> None:
    together = size_from_bins(torch.arange(1024))
    for count in (1, 3, 5, 16):
        apart = torch.cat([size_from_bins(part) for part in torch.arange(1024).split(count)])
        assert torch.equal(apart, together)
