"""RMS norms and gated SiLU as Triton kernels against the plain ones."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance, is_nearest_fp8  # isort: skip - before any kernel

import pytest
import torch
from torch.nn import functional

from kestrel.kernels import norms as plain
from kestrel.kernels.linear import silu_gate as plain_gate
from kestrel.kernels.triton import norms as fast
from kestrel.kernels.triton.linear import silu_gate, silu_gate_to_fp8

EPS = 1e-6
SHAPES = [(1, 2048), (5, 896), (3, 720), (2, 1), (9, 7), (2, 3, 64), (0, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plain_version_equals_that_of_torch(shape: tuple[int, ...]) -> None:
    draw = Draw("cpu", torch.float64)
    x, weight = draw(*shape), draw(*shape[-1:])
    torch.testing.assert_close(plain.rms_norm(x, weight, EPS), functional.rms_norm(x, shape[-1:], weight, EPS))


@devices
@pytest.mark.parametrize("num_deltas", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_norms_are_those_of_the_plain_version(shape: tuple[int, ...], num_deltas: int, device: str) -> None:
    draw = Draw(device)
    x, weight = draw(*shape) + 3.0, draw(*shape[-1:])
    if num_deltas == 0:
        torch.testing.assert_close(fast.rms_norm(x, weight, EPS), plain.rms_norm(x, weight, EPS), rtol=1e-5, atol=1e-5)
        return
    a, b = draw(*shape), draw(*shape) if num_deltas == 2 else None
    total, normed = fast.add_rms_norm(x, a, b, weight, EPS)
    expected_total, expected = plain.add_rms_norm(x, a, b, weight, EPS)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, rtol=1e-5, atol=2e-5)


@devices
def test_in_half_precision_a_row_is_rounded_before_and_after_its_weight(device: str) -> None:
    draw, half = Draw(device), HALF[device]
    x, weight = draw(7, 256).to(half), draw(256).to(half)
    found, expected = fast.rms_norm(x, weight, EPS), plain.rms_norm(x, weight, EPS)
    assert (found == expected).float().mean() > 0.98
    torch.testing.assert_close(found, expected, rtol=4e-3 if half is torch.float16 else 2e-2, atol=1e-6)


@devices
@pytest.mark.parametrize("num_deltas", [0, 2])
def test_rows_to_float8_are_those_of_the_norm(num_deltas: int, device: str) -> None:
    draw = Draw(device)
    x, weight, a, b = draw(6, 200), draw(200), draw(6, 200), draw(6, 200)
    if num_deltas == 0:
        numbers, scale = fast.rms_norm_to_fp8(x, weight, EPS)
        exact = plain.rms_norm(x, weight, EPS)
    else:
        total, numbers, scale = fast.add_rms_norm_to_fp8(x, a, b, weight, EPS)
        expected_total, exact = plain.add_rms_norm(x, a, b, weight, EPS)
        assert torch.equal(total, expected_total)
    torch.testing.assert_close(scale, exact.abs().amax(1, keepdim=True) / 448, rtol=1e-5, atol=0.0)
    assert is_nearest_fp8(numbers.float(), scale, exact, device)


@devices
@pytest.mark.parametrize(("rows", "inner"), [(1, 1536), (5, 300), (3, 7), (0, 16)])
def test_gates_open_as_by_the_plain_version(rows: int, inner: int, device: str) -> None:
    draw, half = Draw(device), HALF[device]
    z = draw(rows, 2 * inner, scale=4.0)
    torch.testing.assert_close(silu_gate(z), plain_gate(z), rtol=1e-5, atol=1e-5)
    apart = torch.cat((draw(rows, 8), z), dim=1)[:, 8:]
    assert torch.equal(silu_gate(apart), silu_gate(z))
    narrow = z.to(half)
    exact = plain_gate(narrow.double())
    assert distance(silu_gate(narrow), exact) <= 1.1 * distance(plain_gate(narrow), exact) + 1e-9
    numbers, scale = silu_gate_to_fp8(z)
    if rows:
        torch.testing.assert_close(scale, plain_gate(z).abs().amax(1, keepdim=True) / 448, rtol=1e-5, atol=0.0)
        assert is_nearest_fp8(numbers.float(), scale, plain_gate(z), device)


@devices
def test_a_gate_far_below_zero_is_shut(device: str) -> None:
    hidden = silu_gate(torch.tensor([[-1e4, -100.0, 1e4, 5.0, 5.0, 5.0]], device=device))[0]
    assert bool((hidden[:2].abs() < 1e-30).all())
    assert hidden[2] == 5e4
