"""Rows to float8 in one pass: a row stays in registers between its maximum and its quotients."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.fp8_rows import LARGEST_FP8, SMALLEST_SCALE


@dataclass(frozen=True, slots=True)
class Tuning:
    num_warps: int = 4


@triton.jit
def _quantise(
    x_ptr, out_ptr, scale_ptr, dim, x_stride,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + d, mask=d < dim, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / LARGEST, SMALLEST_SCALE)
    quotient = tl.clamp(x / scale, -LARGEST, LARGEST)
    tl.store(out_ptr + row * dim + d, quotient.to(out_ptr.dtype.element_ty), mask=d < dim)
    tl.store(scale_ptr + row, scale)


def rows_to_fp8(x_TD: Tensor, tuning: Tuning | None = None) -> tuple[Tensor, Tensor]:
    """(x_fp8 [T, D], scales [T, 1] fp32), as row-wise scaled products take them. Rows may lie apart."""
    num_rows, dim = x_TD.shape
    assert x_TD.stride(1) == 1
    out_TD = torch.empty(num_rows, dim, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scale_T1 = torch.empty(num_rows, 1, dtype=torch.float32, device=x_TD.device)
    if num_rows > 0:
        _quantise[(num_rows,)](
            x_TD, out_TD, scale_T1, dim, x_TD.stride(0),
            BLOCK=triton.next_power_of_2(dim), LARGEST=LARGEST_FP8, SMALLEST_SCALE=SMALLEST_SCALE,
            num_warps=(tuning or Tuning()).num_warps,
        )  # fmt: skip
    return out_TD, scale_T1
