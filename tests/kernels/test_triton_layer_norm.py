"""Layer norms as Triton kernels against the plain ones."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance, fp8_steps, is_nearest_fp8  # isort: skip - before any kernel

import pytest
import torch

from kestrel.kernels import norms as plain
from kestrel.kernels.triton.norms import (
    Tuning,
    add_layer_norm,
    add_layer_norm_to_fp8,
    layer_norm,
    layer_norm_to_fp8,
)

EPS = 1e-5
SHAPES = [(1, 1152), (5, 2048), (3, 720), (2, 1), (9, 7), (2, 3, 64), (0, 64)]


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_normalised_as_by_the_plain_version(shape: tuple[int, ...], device: str) -> None:
    draw = Draw(device)
    x, weight, bias = (draw(*size) for size in (shape, shape[-1:], shape[-1:]))
    x += 3.0
    expected = plain.layer_norm(x.double(), weight.double(), bias.double(), EPS).float()
    torch.testing.assert_close(layer_norm(x, weight, bias, EPS), expected, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_what_all_rows_lack_is_added_before_without_rounding(shape: tuple[int, ...], device: str) -> None:
    draw, half = Draw(device), HALF[device]
    x, weight, bias, shift = (draw(*size) for size in (shape, *[shape[-1:]] * 3))
    expected = plain.layer_norm((x.double() + shift), weight.double(), bias.double(), EPS).float()
    torch.testing.assert_close(layer_norm(x, weight, bias, EPS, shift), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain.layer_norm(x, weight, bias, EPS, shift), expected, rtol=1e-5, atol=1e-5)
    narrow = x.to(half), weight.to(half), bias.to(half), EPS, 1e-4 * shift
    assert distance(layer_norm(*narrow), plain.layer_norm(*narrow)) <= 1e-3


@devices
@pytest.mark.parametrize("num_deltas", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_and_its_norm_are_those_of_the_plain_version(
    shape: tuple[int, ...], num_deltas: int, device: str
) -> None:
    draw = Draw(device)
    x, weight, bias = (draw(*size) for size in (shape, shape[-1:], shape[-1:]))
    a, b = draw(*shape), draw(*shape) if num_deltas == 2 else None
    total, normed = add_layer_norm(x, a, b, weight, bias, EPS)
    expected_total, expected_normed = plain.add_layer_norm(x, a, b, weight, bias, EPS)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected_normed, rtol=1e-5, atol=2e-5)


@devices
@pytest.mark.parametrize("rows_per_program", [1, 4])
def test_a_delta_of_fewer_rows_repeats(rows_per_program: int, device: str) -> None:
    draw, tuning = Draw(device), Tuning(rows_per_program=rows_per_program)
    x, a, weight, bias = draw(15, 72), draw(5, 72), draw(72), draw(72)
    expected = add_layer_norm(x, a.repeat(3, 1), None, weight, bias, EPS)
    for got in (
        add_layer_norm(x, a, None, weight, bias, EPS, tuning),
        plain.add_layer_norm(x, a, None, weight, bias, EPS),
    ):
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=2e-5)
    as_bytes = add_layer_norm_to_fp8(x, a, None, weight, bias, EPS)[1].view(torch.uint8)
    assert torch.equal(as_bytes, add_layer_norm_to_fp8(x, a.repeat(3, 1), None, weight, bias, EPS)[1].view(torch.uint8))


@devices
@pytest.mark.parametrize("rows_per_program", [1, 4, 16])
def test_how_rows_are_shared_out_changes_nothing(rows_per_program: int, device: str) -> None:
    draw = Draw(device)
    x, weight, bias = draw(11, 96), draw(96), draw(96)
    got = layer_norm(x, weight, bias, EPS, tuning=Tuning(num_warps=1, rows_per_program=rows_per_program))
    torch.testing.assert_close(got, plain.layer_norm(x, weight, bias, EPS), rtol=1e-5, atol=1e-5)


@devices
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(device: str) -> None:
    draw = Draw(device, HALF[device])
    x, a, b = (draw(21, 1152) for _ in range(3))
    weight, bias = draw(1152), draw(1152)
    total, normed = add_layer_norm(x, a, b, weight, bias, EPS)
    plain_total, plain_normed = plain.add_layer_norm(x, a, b, weight, bias, EPS)
    exact_total, _ = plain.add_layer_norm(x.double(), a.double(), b.double(), weight.double(), bias.double(), EPS)
    exact_normed = plain.layer_norm(total.double(), weight.double(), bias.double(), EPS)
    assert torch.equal(total, plain_total)
    assert distance(total, exact_total) <= 1.05 * distance(plain_total, exact_total)
    assert distance(normed, exact_normed) <= 1.05 * distance(plain_normed, exact_normed)
    assert torch.equal(layer_norm(total, weight, bias, EPS), normed)


FP8_SHAPES = [shape for shape in SHAPES if len(shape) == 2]


@devices
@pytest.mark.parametrize("num_deltas", [0, 1, 2])
@pytest.mark.parametrize("shape", FP8_SHAPES)
def test_normed_rows_in_float8_are_those_of_the_plain_version(
    shape: tuple[int, int], num_deltas: int, device: str
) -> None:
    draw = Draw(device)
    x, a, b, weight, bias = (draw(*size) for size in (shape, shape, shape, shape[1:], shape[1:]))
    if num_deltas == 0:
        shift = draw(*shape[1:])
        total, (narrow, scale) = x + shift, layer_norm_to_fp8(x, weight, bias, EPS, shift)
    else:
        total, narrow, scale = add_layer_norm_to_fp8(x, a, b if num_deltas == 2 else None, weight, bias, EPS)
        assert torch.equal(total, plain.residual_sum(x, a, b if num_deltas == 2 else None))
    exact = plain.layer_norm(total.double(), weight.double(), bias.double(), EPS)
    largest = exact.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(scale, (largest / 448.0).float(), rtol=1e-5, atol=1e-7)
    assert is_nearest_fp8(narrow, scale, exact, device)


@devices
def test_rows_are_not_rounded_to_their_own_dtype_on_the_way_to_float8(device: str) -> None:
    draw = Draw(device, HALF[device])
    x, weight, bias = draw(33, 1152), draw(1152), draw(1152)
    scale = layer_norm_to_fp8(x, weight, bias, EPS)[1]
    wide = plain.layer_norm(x.float(), weight.float(), bias.float(), EPS)
    torch.testing.assert_close(scale, wide.abs().amax(dim=1, keepdim=True) / 448.0, rtol=1e-5, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FP8_SHAPES)
def test_float8_numbers_are_rounded_as_by_the_plain_version(shape: tuple[int, int]) -> None:
    """Not in the interpreter, which does not round to the nearest float8."""
    draw = Draw("cuda", torch.bfloat16)
    given = [draw(*size) for size in (shape, shape, shape, shape[1:], shape[1:])]
    total, got, _ = add_layer_norm_to_fp8(*given, EPS)  # pyright: ignore[reportCallIssue]
    expected_total, expected, _ = plain.add_layer_norm_to_fp8(*given, EPS)  # pyright: ignore[reportCallIssue]
    assert torch.equal(total, expected_total)
    steps = fp8_steps(got, expected)
    assert (steps <= 1).all()
    assert steps.float().sum() <= 1e-2 * steps.numel()


@devices
def test_a_row_that_is_nowhere_but_zero_has_a_finite_scale(device: str) -> None:
    zeros = torch.zeros(2, 96, device=device)
    narrow, scale = layer_norm_to_fp8(zeros, zeros[0], zeros[0], EPS)
    assert (narrow.float() == 0.0).all()
    assert (scale > 0.0).all()
