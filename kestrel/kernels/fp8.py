"""Rows of numbers in float8 (e4m3), each with a scale of its own, and linear layers on them.

    scale = max |x| of the row / 448        (448: the largest float8);  x ≈ scale · x_fp8

A row of zeros has the smallest scale that keeps its quotient finite. What is computed on the way to float8, such as an
activation, is fp32 and not rounded before.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LARGEST_FP8 = 448.0
SMALLEST_SCALE = 2.0**-100


def rows_to_fp8(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """(x_fp8 [T, D], scales [T, 1] fp32), as row-wise scaled products take them."""
    assert x_TD.ndim == 2
    wide_TD = x_TD.float()
    scale_T1 = (wide_TD.abs().amax(dim=1, keepdim=True) / LARGEST_FP8).clamp(min=SMALLEST_SCALE)
    return (wide_TD / scale_T1).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn), scale_T1


def gelu_to_fp8(x_TF: Tensor) -> tuple[Tensor, Tensor]:
    """(y_fp8 [T, F], scales [T, 1] fp32) of y = GELU_tanh(x)."""
    return rows_to_fp8(functional.gelu(x_TF.float(), approximate="tanh"))


# ---------------------------------------------------------------------- linear layers
#     y = (x_scale · x_fp8) · (weight_scale · weight_fp8)ᵀ + bias
#
# Sums are fp32, and only y is rounded, to `out_dtype`. Both versions take the same arguments; the fast one needs widths
# that are multiples of 16, a bias of bfloat16 and results of bfloat16, as the product of the GPU's library does. Rows
# of the weights may lie apart, as some columns of a wider matrix do.


WIDTH_MULTIPLE = 16
FEWEST_ROWS = 64
"""From here on the library has a fast product for all sizes. Fewer rows, but for one, take longer than so many."""


def weights_to_fp8(weight_FD: Tensor) -> tuple[Tensor, Tensor]:
    """(weight_fp8 [F, D], scales [F] fp32): a scale per output."""
    weight_fp8_FD, scale_F1 = rows_to_fp8(weight_FD)
    return weight_fp8_FD, scale_F1.squeeze(1)


def fp8_linear(
    x_fp8_TD: Tensor,
    x_scale_T1: Tensor,
    weight_fp8_FD: Tensor,
    weight_scale_F: Tensor,
    bias_F: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """y [T, F], from rows and weights made wide again."""
    _check(x_fp8_TD, x_scale_T1, weight_fp8_FD, weight_scale_F, bias_F)
    y_TF = (x_fp8_TD.float() * x_scale_T1) @ (weight_fp8_FD.float() * weight_scale_F[:, None]).T
    return (y_TF if bias_F is None else y_TF + bias_F.float()).to(out_dtype)


def add_fp8_linear(
    sum_TF: Tensor, x_fp8_TD: Tensor, x_scale_T1: Tensor, weight_fp8_FD: Tensor, weight_scale_F: Tensor
) -> Tensor:
    """sum += y without a bias, in place, rounded once."""
    y_TF = fp8_linear(x_fp8_TD, x_scale_T1, weight_fp8_FD, weight_scale_F, None, torch.float32)
    return sum_TF.copy_(sum_TF + y_TF)


def scaled_mm_linear(
    x_fp8_TD: Tensor,
    x_scale_T1: Tensor,
    weight_fp8_FD: Tensor,
    weight_scale_F: Tensor,
    bias_F: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """y [T, F], by tensor cores that multiply float8."""
    _check(x_fp8_TD, x_scale_T1, weight_fp8_FD, weight_scale_F, bias_F)
    assert out_dtype is torch.bfloat16
    assert bias_F is None or bias_F.dtype is torch.bfloat16
    assert all(width % WIDTH_MULTIPLE == 0 for width in (*weight_fp8_FD.shape, weight_fp8_FD.stride(0)))
    if x_fp8_TD.shape[0] == 0:
        return torch.empty(0, weight_fp8_FD.shape[0], dtype=out_dtype, device=x_fp8_TD.device)
    # The library has nothing for some sizes, such as 32 rows of 8192 numbers to 2048, where it has for 64 rows.
    # The rows are there several times then, and only the first of the results are read.
    num_rows = len(x_fp8_TD)
    for times in (1, max(2, -(-FEWEST_ROWS // num_rows))):
        try:
            return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                x_fp8_TD.repeat(times, 1) if times > 1 else x_fp8_TD,
                weight_fp8_FD.t(),
                scale_a=x_scale_T1.repeat(times, 1) if times > 1 else x_scale_T1,
                scale_b=weight_scale_F[None, :],
                bias=bias_F,
                out_dtype=out_dtype,
                use_fast_accum=True,
            )[:num_rows]
        except RuntimeError as error:
            if "NOT_SUPPORTED" not in str(error):
                raise
    return fp8_linear(x_fp8_TD, x_scale_T1, weight_fp8_FD, weight_scale_F, bias_F, out_dtype)


def _check(
    x_fp8_TD: Tensor, x_scale_T1: Tensor, weight_fp8_FD: Tensor, weight_scale_F: Tensor, bias_F: Tensor | None
) -> None:
    (num_rows, num_in), num_out = x_fp8_TD.shape, weight_fp8_FD.shape[0]
    assert x_fp8_TD.dtype is weight_fp8_FD.dtype is torch.float8_e4m3fn
    assert x_fp8_TD.is_contiguous()
    assert weight_fp8_FD.stride(1) == 1
    assert weight_fp8_FD.shape == (num_out, num_in)
    assert x_scale_T1.shape == (num_rows, 1)
    assert weight_scale_F.shape == (num_out,)
    assert bias_F is None or bias_F.shape == (num_out,)
