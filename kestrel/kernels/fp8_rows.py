"""Rows of numbers in float8 (e4m3), each with a scale of its own.

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
