"""Fourier features against their formula."""

from __future__ import annotations

import math

import pytest
import torch

from kestrel.kernels.vision import fourier_features


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("num_values", "channels", "num_frequencies"), [(1, 1, 1), (5, 1, 32), (3, 2, 7)])
def test_cosines_come_first_and_angles_sum_over_channels(num_values: int, channels: int, num_frequencies: int) -> None:
    values, frequencies = torch.rand(num_values, channels), torch.randn(channels, num_frequencies)
    features = fourier_features(values, frequencies)
    assert features.shape == (num_values, 2 * num_frequencies)
    for n in range(num_values):
        for f in range(num_frequencies):
            angle = 2 * math.pi * sum(values[n, c].item() * frequencies[c, f].item() for c in range(channels))
            assert features[n, f].item() == pytest.approx(math.cos(angle), abs=1e-5)
            assert features[n, num_frequencies + f].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_half_precision_inputs_are_computed_in_fp32() -> None:
    values, frequencies = torch.rand(4, 2).to(torch.bfloat16), (50 * torch.randn(2, 3)).to(torch.bfloat16)
    features = fourier_features(values, frequencies)
    assert features.dtype == torch.float32
    assert torch.equal(features, fourier_features(values.float(), frequencies.float()))


def test_no_values_give_no_features() -> None:
    assert fourier_features(torch.empty(0, 2), torch.randn(2, 3)).shape == (0, 6)
