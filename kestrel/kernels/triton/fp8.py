"""Rows to float8 in one pass, with a GELU before it or not: a row stays in registers from its load to its quotients."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.fp8 import LARGEST_FP8, SMALLEST_SCALE
from kestrel.kernels.triton.device_functions import RowTiles, gelu_tanh, load_tile, store_tile
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, dependent, wait_for_inputs

_LARGEST = tl.constexpr(LARGEST_FP8)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


@dataclass(frozen=True, slots=True)
class RowTuning:
    num_warps: int = 4

    @classmethod
    def of(cls, dim: int) -> RowTuning:
        """About 32 numbers in a lane."""
        return cls(min(8, max(1, RowTiles.of(dim).main // 1024)))


@triton.jit
def store_row(
    out_ptr, scale_ptr, row, dim, y, y_rest,
    MAIN: tl.constexpr, REST: tl.constexpr, REST_MASKED: tl.constexpr, TO_FP8: tl.constexpr,
):  # fmt: skip
    """A row held in one tile, or in two where REST is above 0: as it is, or in float8 with its scale."""
    if TO_FP8:
        largest = tl.max(tl.abs(y), axis=0)
        if REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(y_rest), axis=0))
        scale = tl.maximum(largest / _LARGEST, _SMALLEST_SCALE)
        tl.store(scale_ptr + row, scale)
        # No number then exceeds 448 by as much as float8 would notice: quotients need no limit.
        per_scale = 1.0 / scale
        y *= per_scale
        if REST > 0:
            y_rest *= per_scale
    store_tile(out_ptr, row * dim, tl.arange(0, MAIN), dim, y, False)
    if REST > 0:
        store_tile(out_ptr, row * dim, MAIN + tl.arange(0, REST), dim, y_rest, REST_MASKED)


@triton.jit
def _load_row_part(x_ptr, offset, cols, dim, MASKED: tl.constexpr, HAS_GELU: tl.constexpr):
    x = load_tile(x_ptr, offset, cols, dim, MASKED).to(tl.float32)
    if HAS_GELU:
        x = gelu_tanh(x)
    return x


@triton.jit
def _quantise(
    x_ptr, out_ptr, scale_ptr, dim, x_stride,
    MAIN: tl.constexpr, REST: tl.constexpr, REST_MASKED: tl.constexpr, HAS_GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(DEPENDENT)
    x = _load_row_part(x_ptr, row * x_stride, tl.arange(0, MAIN), dim, False, HAS_GELU)
    x_rest = x
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        x_rest = _load_row_part(x_ptr, row * x_stride, rest, dim, REST_MASKED, HAS_GELU)
    store_row(out_ptr, scale_ptr, row, dim, x, x_rest, MAIN, REST, REST_MASKED, True)


def rows_to_fp8(x_TD: Tensor, tuning: RowTuning | None = None, table: TuningTable = NO_TABLE) -> tuple[Tensor, Tensor]:
    """(x_fp8 [T, D], scales [T, 1] fp32), as row-wise scaled products take them. Rows may lie apart."""
    return _launch(x_TD, False, tuning or _found("rows_to_fp8", x_TD, table))


def gelu_to_fp8(x_TF: Tensor, tuning: RowTuning | None = None, table: TuningTable = NO_TABLE) -> tuple[Tensor, Tensor]:
    """(y_fp8 [T, F], scales [T, 1] fp32) of y = GELU_tanh(x). Rows may lie apart."""
    return _launch(x_TF, True, tuning or _found("gelu_to_fp8", x_TF, table))


def _found(op: str, x_TD: Tensor, table: TuningTable) -> RowTuning | None:
    num_rows, dim = x_TD.shape
    return table.find(op, num_rows, (dim,), x_TD.dtype)


def fp8_rows_like(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Space for numbers and scales of as many rows."""
    num_rows, dim = x_TD.shape
    y_TD = torch.empty(num_rows, dim, dtype=torch.float8_e4m3fn, device=x_TD.device)
    return y_TD, torch.empty(num_rows, 1, dtype=torch.float32, device=x_TD.device)


def _launch(x_TD: Tensor, has_gelu: bool, tuning: RowTuning | None) -> tuple[Tensor, Tensor]:
    num_rows, dim = x_TD.shape
    assert x_TD.stride(1) == 1
    out_TD, scale_T1 = fp8_rows_like(x_TD)
    tiles = RowTiles.of(dim)
    if num_rows > 0:
        _quantise[(num_rows,)](
            x_TD, out_TD, scale_T1, dim, x_TD.stride(0),
            MAIN=tiles.main, REST=tiles.rest, REST_MASKED=tiles.is_rest_masked, HAS_GELU=has_gelu,
            num_warps=(tuning or RowTuning.of(dim)).num_warps, **dependent(),
        )  # fmt: skip
    return out_TD, scale_T1
