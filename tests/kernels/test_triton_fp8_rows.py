"""Rows in float8: the plain version against arithmetic, the Triton kernel against the plain version."""

from __future__ import annotations

from tests.kernels.triton_mode import Draw, devices  # isort: skip - before any kernel

import pytest
import torch

from kestrel.kernels.fp8_rows import rows_to_fp8 as plain
from kestrel.kernels.triton.fp8_rows import rows_to_fp8

SHAPES = [(1, 1152), (5, 2048), (3, 77), (2, 1), (0, 16)]


def test_the_largest_of_a_row_becomes_the_largest_float8_and_errors_stay_within_half_a_step() -> None:
    x = Draw("cpu")(6, 300) * torch.tensor([[1e-6], [1.0], [3e4], [7.0], [0.2], [1e9]])
    narrow, scale = plain(x)
    assert (narrow.float().abs().amax(dim=1) == 448.0).all()
    back = narrow.float() * scale
    # Three bits after the leading one: half a step is 1/16. Below 2^-6 steps stop shrinking.
    allowed = torch.maximum(x.abs() / 16, scale * 2.0**-10)
    assert ((back - x).abs() <= allowed * 1.001).all()


def test_a_row_of_zeros_stays_zero() -> None:
    narrow, scale = plain(torch.zeros(2, 8))
    assert (narrow.float() == 0.0).all()
    assert torch.isfinite(scale).all()


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_scales_are_those_of_the_plain_version(shape: tuple[int, int], device: str) -> None:
    x = Draw(device)(*shape)
    x[:1] = 0.0
    narrow, scale = rows_to_fp8(x)
    assert narrow.shape == x.shape
    torch.testing.assert_close(scale, plain(x)[1], rtol=1e-6, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_those_of_the_plain_version(shape: tuple[int, int]) -> None:
    """Not in the interpreter, which does not round to the nearest float8."""
    x = Draw("cuda", torch.bfloat16)(*shape)
    (got, _), (expected, _) = rows_to_fp8(x), plain(x)
    steps = (got.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    # Quotients may be rounded differently; where one lies on a tie, that decides between neighbours.
    assert (steps <= 1).all()
    assert steps.float().sum() <= 1e-2 * steps.numel()
