"""The middle of a gated MLP in one pass, to the dtype of its input or to float8."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.triton.fp8_rows import Tuning, store_fp8_scale
from kestrel.kernels.triton.row_tiles import RowTiles, load_tile, store_tile
from kestrel.kernels.triton.tuning_table import NO_TABLE, TuningTable


@triton.jit
def _hidden_part(z_ptr, offset, cols, dim, MASKED: tl.constexpr):
    """silu(gate) · up, both rounded as the plain version does."""
    gate = load_tile(z_ptr, offset, cols, dim, MASKED).to(tl.float32)
    up = load_tile(z_ptr, offset + dim, cols, dim, MASKED).to(tl.float32)
    dtype = z_ptr.dtype.element_ty
    # Limited, so that the exponential stays finite.
    silu = gate / (1.0 + tl.exp(tl.minimum(-gate, 80.0)))
    return (silu.to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)


@triton.jit
def _gate(
    z_ptr, out_ptr, scale_ptr, dim, z_stride,
    MAIN: tl.constexpr, REST: tl.constexpr, REST_MASKED: tl.constexpr, TO_FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    main = tl.arange(0, MAIN)
    y = _hidden_part(z_ptr, row * z_stride, main, dim, False)
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        y_rest = _hidden_part(z_ptr, row * z_stride, rest, dim, REST_MASKED)
    if TO_FP8:
        largest = tl.max(tl.abs(y), axis=0)
        if REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(y_rest), axis=0))
        per_scale = store_fp8_scale(scale_ptr, row, largest)
        y *= per_scale
        if REST > 0:
            y_rest *= per_scale
    store_tile(out_ptr, row * dim, main, dim, y, False)
    if REST > 0:
        store_tile(out_ptr, row * dim, rest, dim, y_rest, REST_MASKED)


def silu_gate(z_TF: Tensor, tuning: Tuning | None = None, table: TuningTable = NO_TABLE) -> Tensor:
    """hidden [T, F / 2]. Rows may lie apart."""
    num_rows, width = z_TF.shape
    out_TI = torch.empty(num_rows, width // 2, dtype=z_TF.dtype, device=z_TF.device)
    _launch(z_TF, out_TI, None, tuning or table.find("silu_gate", num_rows, (width,), z_TF.dtype))
    return out_TI


def silu_gate_to_fp8(
    z_TF: Tensor, tuning: Tuning | None = None, table: TuningTable = NO_TABLE
) -> tuple[Tensor, Tensor]:
    """(hidden in float8 [T, F / 2], its scales [T, 1] fp32). Rows may lie apart."""
    num_rows, width = z_TF.shape
    out_TI = torch.empty(num_rows, width // 2, dtype=torch.float8_e4m3fn, device=z_TF.device)
    scale_T1 = torch.empty(num_rows, 1, dtype=torch.float32, device=z_TF.device)
    _launch(z_TF, out_TI, scale_T1, tuning or table.find("silu_gate_to_fp8", num_rows, (width,), z_TF.dtype))
    return out_TI, scale_T1


def _launch(z_TF: Tensor, out_TI: Tensor, scale_T1: Tensor | None, tuning: Tuning | None) -> None:
    num_rows, dim = out_TI.shape
    assert z_TF.stride(1) == 1
    assert z_TF.shape[1] == 2 * dim
    tiles = RowTiles.of(dim)
    if num_rows > 0:
        _gate[(num_rows,)](
            z_TF, out_TI, z_TF if scale_T1 is None else scale_T1, dim, z_TF.stride(0),
            MAIN=tiles.main, REST=tiles.rest, REST_MASKED=tiles.is_rest_masked, TO_FP8=scale_T1 is not None,
            num_warps=(tuning or Tuning.of(dim)).num_warps,
        )  # fmt: skip
