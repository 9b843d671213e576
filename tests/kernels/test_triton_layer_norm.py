"""Layer norms as Triton kernels against the plain ones."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

import pytest
import torch

from kestrel.kernels import layer_norm as plain
from kestrel.kernels.triton.layer_norm import Tuning, add_layer_norm, layer_norm

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
@pytest.mark.parametrize("rows_per_program", [1, 4, 16])
def test_how_rows_are_shared_out_changes_nothing(rows_per_program: int, device: str) -> None:
    draw = Draw(device)
    x, weight, bias = draw(11, 96), draw(96), draw(96)
    got = layer_norm(x, weight, bias, EPS, Tuning(num_warps=1, rows_per_program=rows_per_program))
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
