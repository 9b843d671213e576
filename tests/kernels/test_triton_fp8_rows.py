"""Rows in float8: the plain version against arithmetic, the Triton kernel against the plain version."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, fp8_steps, is_nearest_fp8  # isort: skip - before any kernel

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kestrel.kernels.fp8 import gelu_to_fp8 as plain_gelu
from kestrel.kernels.fp8 import rows_to_fp8 as plain
from kestrel.kernels.triton.fp8 import RowTuning, gelu_to_fp8, rows_to_fp8

SHAPES = [(1, 1152), (5, 2048), (3, 77), (2, 1), (3, 4304), (0, 16)]


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
    assert is_nearest_fp8(narrow, scale, x, device)
    torch.testing.assert_close(scale, plain(x)[1], rtol=1e-6, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_those_of_the_plain_version(shape: tuple[int, int]) -> None:
    """Not in the interpreter, which does not round to the nearest float8."""
    x = Draw("cuda", torch.bfloat16)(*shape)
    (got, _), (expected, _) = rows_to_fp8(x), plain(x)
    steps = fp8_steps(got, expected)
    # Quotients may be rounded differently; where one lies on a tie, that decides between neighbours.
    assert (steps <= 1).all()
    assert steps.float().sum() <= 1e-2 * steps.numel()


@devices
@pytest.mark.parametrize("scale_of_x", [1.0, 30.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_activated_rows_are_rounded_to_the_nearest(shape: tuple[int, int], scale_of_x: float, device: str) -> None:
    x = Draw(device)(*shape, scale=scale_of_x)
    # Far below zero all that is left of a GELU is its rounding.
    x[:, 0] = 1.0
    narrow, scale = gelu_to_fp8(x)
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(scale, plain_gelu(x)[1], rtol=2e-6, atol=0.0)
    assert is_nearest_fp8(narrow, scale, exact, device)


@devices
@pytest.mark.parametrize("to_fp8", [rows_to_fp8, gelu_to_fp8])
@pytest.mark.parametrize("num_warps", [1, 8])
def test_rows_may_be_columns_of_a_wider_tensor(to_fp8: Callable[..., Any], num_warps: int, device: str) -> None:
    wide = Draw(device, HALF[device])(5, 96)
    got, expected = to_fp8(wide[:, 30:], RowTuning(num_warps)), to_fp8(wide[:, 30:].contiguous())
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(got[1], expected[1])


@devices
def test_activations_are_not_rounded_to_the_dtype_of_their_rows(device: str) -> None:
    x = Draw(device, HALF[device])(40, 300)
    largest = torch.nn.functional.gelu(x.double(), approximate="tanh").abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(gelu_to_fp8(x)[1], (largest / 448.0).float(), rtol=2e-6, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_activated_numbers_are_those_of_the_plain_version(shape: tuple[int, int]) -> None:
    x = Draw("cuda", torch.bfloat16)(*shape)
    steps = fp8_steps(gelu_to_fp8(x)[0], plain_gelu(x)[0])
    assert (steps <= 1).all()
    assert steps.float().sum() <= 1e-2 * steps.numel()
