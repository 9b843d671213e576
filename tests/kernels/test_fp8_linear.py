"""Linear layers in float8: the plain version against arithmetic, the library's product against the plain version."""

from __future__ import annotations

import pytest
import torch

from kestrel.kernels.fp8 import fp8_linear, rows_to_fp8, scaled_mm_linear, weights_to_fp8
from tests.kernels.triton_mode import Draw

SHAPES = [(1, 64, 32), (5, 48, 80), (32, 2048, 8192), (750, 2048, 2048), (0, 32, 16)]
SMALL_SHAPES = [shape for shape in SHAPES if shape[1] < 100]


def multiplies_scaled_rows(device: str) -> bool:
    """Whether torch does here; some versions only do so on a GPU."""
    rows = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
    ones = torch.ones(16, device=device)
    try:
        scaled_mm_linear(rows, ones[:, None], rows, ones, None, torch.bfloat16)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def quantised(shape: tuple[int, int, int], device: str) -> tuple[torch.Tensor, ...]:
    num_rows, num_out, num_in = shape
    draw = Draw(device)
    rows = rows_to_fp8(draw(num_rows, num_in) * (1.0 + draw.integers(9, num_rows, 1)))
    return *rows, *weights_to_fp8(draw(num_out, num_in, scale=num_in**-0.5)), draw(num_out).to(torch.bfloat16)


def test_numbers_that_float8_holds_are_multiplied_exactly() -> None:
    # The largest of every row is 448 times a power of two: so is its scale, and its quotients are float8 as they stand.
    x = torch.tensor([[448.0, 1.5, -2.0], [0.25, 224.0, 16.0]])
    weight = torch.tensor([[-448.0, 2.0, 1.0], [3.0, 112.0, 0.5]])
    weight_fp8, weight_scale = weights_to_fp8(weight)
    assert weight_scale.tolist() == [1.0, 0.25]
    got = fp8_linear(*rows_to_fp8(x), weight_fp8, weight_scale, torch.tensor([0.5, -1.0]), torch.float32)
    assert got.tolist() == [
        [448.0 * -448.0 + 3.0 - 2.0 + 0.5, 448.0 * 3.0 + 1.5 * 112.0 - 1.0 - 1.0],
        [0.25 * -448.0 + 448.0 + 16.0 + 0.5, 0.75 + 224.0 * 112.0 + 8.0 - 1.0],
    ]


def test_a_layer_in_float8_is_close_to_the_one_it_was_made_from() -> None:
    draw = Draw("cpu")
    x, weight, bias = draw(64, 256), draw(96, 256, scale=1 / 16), draw(96)
    exact = x.double() @ weight.double().T + bias
    got = fp8_linear(*rows_to_fp8(x), *weights_to_fp8(weight), bias, torch.float32)
    relative = (got - exact).norm() / exact.norm()
    # Uniform errors of at most 1/16 in both factors, independent of each other.
    assert 0.005 < relative < 0.045


def matches_the_plain_version(shape: tuple[int, int, int], device: str) -> None:
    x, x_scale, weight, weight_scale, bias = quantised(shape, device)
    for some_bias in (bias, None):
        got = scaled_mm_linear(x, x_scale, weight, weight_scale, some_bias, torch.bfloat16)
        expected = fp8_linear(x, x_scale, weight, weight_scale, some_bias, torch.float32)
        assert (got.shape, got.dtype) == (expected.shape, torch.bfloat16)
        largest = expected.abs().amax() if expected.numel() else torch.tensor(1.0)
        # The fast sums of the tensor cores keep 14 bits, and lose more the longer they are; the result keeps 8.
        atol = 2e-3 * max(1.0, shape[2] / 2048) * float(largest)
        torch.testing.assert_close(got.float(), expected, rtol=2.0**-7, atol=atol)


@pytest.mark.skipif(not multiplies_scaled_rows("cpu"), reason="this torch scales rows only on a GPU")
@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_the_fast_product_is_that_of_the_numbers_made_wide(shape: tuple[int, int, int]) -> None:
    matches_the_plain_version(shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fast_product_on_the_gpu_is_that_of_the_numbers_made_wide(shape: tuple[int, int, int]) -> None:
    matches_the_plain_version(shape, "cuda")


@pytest.mark.parametrize("fewest_rows", [1, 64, 100])
def test_sizes_that_the_library_lacks_are_multiplied_all_the_same(
    fewest_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are, several times, or in the plain way."""
    x, x_scale, weight, weight_scale, bias = quantised((5, 48, 80), "cpu")

    def library(rows: torch.Tensor, other: torch.Tensor, **how: torch.Tensor) -> torch.Tensor:
        if len(rows) < fewest_rows:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        scales = how["scale_a"], how["scale_b"][0]
        return fp8_linear(rows, scales[0], other.t(), scales[1], how["bias"], torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", library)
    got = scaled_mm_linear(x, x_scale, weight, weight_scale, bias, torch.bfloat16)
    expected = fp8_linear(x, x_scale, weight, weight_scale, bias, torch.bfloat16)
    torch.testing.assert_close(got, expected, rtol=2.0**-8, atol=0)


def takes_columns_of_a_wider_matrix(device: str) -> None:
    x, x_scale, wide, scale, bias = quantised((40, 64, 96), device)
    for columns in (slice(32), slice(32, None)):
        part, rows = wide[:, columns], x[:, columns].contiguous()
        got = scaled_mm_linear(rows, x_scale, part, scale, bias, torch.bfloat16)
        expected = fp8_linear(rows, x_scale, part.contiguous(), scale, bias, torch.float32)
        torch.testing.assert_close(got.float(), expected, rtol=2.0**-7, atol=2e-3 * float(expected.abs().amax()))


@pytest.mark.skipif(not multiplies_scaled_rows("cpu"), reason="this torch scales rows only on a GPU")
def test_weights_may_be_columns_of_a_wider_matrix() -> None:
    takes_columns_of_a_wider_matrix("cpu")


@pytest.mark.gpu
def test_weights_may_be_columns_of_a_wider_matrix_on_the_gpu() -> None:
    takes_columns_of_a_wider_matrix("cuda")


@pytest.mark.parametrize("shape", [(4, 40, 32), (4, 32, 40)])
def test_the_fast_product_refuses_widths_that_are_no_multiples_of_16(shape: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError):
        scaled_mm_linear(*quantised(shape, "cpu"), torch.bfloat16)  # pyright: ignore[reportArgumentType]
