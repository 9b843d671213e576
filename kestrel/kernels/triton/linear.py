"""Linear layers of a handful of rows, and the middle of a gated MLP."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.triton.device_functions import RowTiles, gelu_tanh, load_tile, widened
from kestrel.kernels.triton.fp8 import RowTuning, store_row
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, dependent, wait_for_inputs

# ---------------------------------------------------------------------- a handful of rows
# A linear layer for at most 16 rows: the weights stream through once, and everything else hides behind them.
#
# Up to `SUMMED_ROWS` rows, a program takes a few outputs and adds products lane by lane; lanes meet once, after the
# last block. With more rows the tensor cores do it, outputs as their long side and the rows of x, padded to 16, as the
# short.


MAX_ROWS = 16
SUMMED_ROWS = 1


@dataclass(frozen=True, slots=True)
class Tuning:
    block_out: int
    block_in: int
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def of(cls, num_rows: int, num_out: int, num_in: int, bytes_per_number: int = 2) -> Tuning:
        if num_rows <= SUMMED_ROWS:
            if num_in > 4096:
                return cls(block_out=1, block_in=1024)
            block_out = 2 if num_out % 2 == 0 else 1
            return cls(block_out, block_in=min(512, triton.next_power_of_2(num_in)), num_warps=2)
        block_out = next((size for size in (64, 32) if num_out >= 132 * size), 16)
        if bytes_per_number > 2:  # twice the bytes: fewer of them at a time, so that every GPU has room
            return cls(block_out, min(4096 // block_out, max(16, triton.next_power_of_2(num_in))), num_stages=2)
        return cls(block_out, min(8192 // block_out, max(16, triton.next_power_of_2(num_in))))


@triton.jit
def _finish(
    total, rows, outs, inside, y_ptr, bias_ptr, residual_ptr, scale_ptr, gelu_rows_ptr,
    num_rows, num_out, y_stride, residual_stride, gelu_from,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GELU: tl.constexpr,
    HAS_GELU_ROWS: tl.constexpr,
):  # fmt: skip
    """What follows the product, in fp32, up to the store."""
    if HAS_SCALE:
        total *= tl.load(scale_ptr + outs, mask=outs < num_out, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outs, mask=outs < num_out, other=0.0).to(tl.float32)
    if HAS_GELU:
        is_active = outs >= gelu_from
        if HAS_GELU_ROWS:
            is_active = is_active & (tl.load(gelu_rows_ptr + rows, mask=rows < num_rows, other=0) != 0)
        total = tl.where(is_active, gelu_tanh(total), total)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + rows * residual_stride + outs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows * y_stride + outs, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _by_sums(
    x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, scale_ptr, gelu_rows_ptr,
    num_rows, num_out, num_in, x_stride, y_stride, residual_stride, gelu_from,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
    HAS_GELU_ROWS: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    # x and w are loaded in three dimensions, so that both lie in the lanes as their product does.
    x_place = x_ptr + rows[:, None, None] * x_stride
    w_place = w_ptr + outs.to(tl.int64)[None, :, None] * num_in
    begin = 0
    if EVEN:
        # The first weights are on their way while the kernel before ends.
        w = tl.load(w_place + tl.arange(0, BLOCK_IN)[None, None, :])
        wait_for_inputs(DEPENDENT)
        total += tl.load(x_place + tl.arange(0, BLOCK_IN)[None, None, :]).to(tl.float32) * w.to(tl.float32)
        begin = BLOCK_IN
    else:
        wait_for_inputs(DEPENDENT)
    for start in range(begin, num_in, BLOCK_IN):
        d = start + tl.arange(0, BLOCK_IN)[None, None, :]
        if EVEN:
            w = tl.load(w_place + d)
            x = tl.load(x_place + d)
        else:
            w = tl.load(w_place + d, mask=(outs < num_out)[None, :, None] & (d < num_in), other=0.0)
            x = tl.load(x_place + d, mask=(rows < num_rows)[:, None, None] & (d < num_in), other=0.0)
        total += x.to(tl.float32) * w.to(tl.float32)
    inside = (rows < num_rows)[:, None] & (outs < num_out)[None, :]
    _finish(
        tl.sum(total, axis=2), rows[:, None], outs[None, :], inside,
        y_ptr, bias_ptr, residual_ptr, scale_ptr, gelu_rows_ptr,
        num_rows, num_out, y_stride, residual_stride, gelu_from,
        HAS_BIAS, HAS_RESIDUAL, HAS_SCALE, HAS_GELU, HAS_GELU_ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _by_dots(
    x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, scale_ptr, gelu_rows_ptr,
    num_rows, num_out, num_in, x_stride, y_stride, residual_stride, gelu_from,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
    HAS_GELU_ROWS: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, ROWS)
    total = tl.zeros((BLOCK_OUT, ROWS), dtype=tl.float32)
    w_place = w_ptr + outs.to(tl.int64)[:, None] * num_in
    wait_for_inputs(DEPENDENT)
    for start in range(0, num_in, BLOCK_IN):
        d = start + tl.arange(0, BLOCK_IN)
        if EVEN:
            w = tl.load(w_place + d[None, :])
            x = tl.load(x_ptr + rows[None, :] * x_stride + d[:, None], mask=(rows < num_rows)[None, :], other=0.0)
        else:
            w = tl.load(w_place + d[None, :], mask=(outs < num_out)[:, None] & (d < num_in)[None, :], other=0.0)
            x_mask = (rows < num_rows)[None, :] & (d < num_in)[:, None]
            x = tl.load(x_ptr + rows[None, :] * x_stride + d[:, None], mask=x_mask, other=0.0)
        total = tl.dot(widened(w, x.dtype), x, total, input_precision="ieee")
    inside = (rows < num_rows)[None, :] & (outs < num_out)[:, None]
    _finish(
        total, rows[None, :], outs[:, None], inside,
        y_ptr, bias_ptr, residual_ptr, scale_ptr, gelu_rows_ptr,
        num_rows, num_out, y_stride, residual_stride, gelu_from,
        HAS_BIAS, HAS_RESIDUAL, HAS_SCALE, HAS_GELU, HAS_GELU_ROWS,
    )  # fmt: skip


def small_linear(
    x_MD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None = None,
    residual_MF: Tensor | None = None,
    gelu_from: int | None = None,
    scale_F: Tensor | None = None,
    gelu_rows_M: Tensor | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """y [M, F] in the dtype of x, M ≤ 16. Rows of x and of the residual may lie apart."""
    num_rows, num_in = x_MD.shape
    num_out = weight_FD.shape[0]
    assert num_rows <= MAX_ROWS
    assert weight_FD.shape == (num_out, num_in)
    assert weight_FD.is_contiguous()
    assert x_MD.stride(1) == 1
    assert residual_MF is None or (residual_MF.shape == (num_rows, num_out) and residual_MF.stride(1) == 1)
    assert scale_F is None or (scale_F.shape == (num_out,) and scale_F.is_contiguous())
    assert gelu_rows_M is None or (gelu_rows_M.shape == (num_rows,) and gelu_rows_M.is_contiguous())
    y_MF = torch.empty(num_rows, num_out, dtype=x_MD.dtype, device=x_MD.device)
    if num_rows == 0:
        return y_MF
    found = tuning or table.find("small_linear", num_rows, (num_out, num_in), x_MD.dtype, weight_FD.dtype)
    chosen = found or Tuning.of(num_rows, num_out, num_in, x_MD.element_size())
    kernel, padded_rows = _by_dots, MAX_ROWS
    if num_rows <= SUMMED_ROWS:
        kernel, padded_rows = _by_sums, triton.next_power_of_2(num_rows)
    has_full_rows = kernel is _by_dots or padded_rows == num_rows
    kernel[(triton.cdiv(num_out, chosen.block_out),)](
        x_MD, weight_FD, y_MF,
        x_MD if bias_F is None else bias_F,
        x_MD if residual_MF is None else residual_MF,
        x_MD if scale_F is None else scale_F,
        x_MD if gelu_rows_M is None else gelu_rows_M,
        num_rows, num_out, num_in, x_MD.stride(0), num_out, 0 if residual_MF is None else residual_MF.stride(0),
        0 if gelu_from is None else gelu_from,
        ROWS=padded_rows, BLOCK_OUT=chosen.block_out, BLOCK_IN=chosen.block_in,
        EVEN=num_in % chosen.block_in == 0 and num_out % chosen.block_out == 0 and has_full_rows,
        HAS_BIAS=bias_F is not None, HAS_RESIDUAL=residual_MF is not None, HAS_SCALE=scale_F is not None,
        HAS_GELU=gelu_from is not None, HAS_GELU_ROWS=gelu_rows_M is not None,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, **dependent(),
    )  # fmt: skip
    return y_MF


# ---------------------------------------------------------------------- gated SiLU
# In one pass, to the dtype of its input or to float8.


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
    y = _hidden_part(z_ptr, row * z_stride, tl.arange(0, MAIN), dim, False)
    y_rest = y
    if REST > 0:
        y_rest = _hidden_part(z_ptr, row * z_stride, MAIN + tl.arange(0, REST), dim, REST_MASKED)
    store_row(out_ptr, scale_ptr, row, dim, y, y_rest, MAIN, REST, REST_MASKED, TO_FP8)


def silu_gate(z_TF: Tensor, tuning: RowTuning | None = None, table: TuningTable = NO_TABLE) -> Tensor:
    """hidden [T, F / 2]. Rows may lie apart."""
    num_rows, width = z_TF.shape
    out_TI = torch.empty(num_rows, width // 2, dtype=z_TF.dtype, device=z_TF.device)
    _launch(z_TF, out_TI, None, tuning or table.find("silu_gate", num_rows, (width,), z_TF.dtype))
    return out_TI


def silu_gate_to_fp8(
    z_TF: Tensor, tuning: RowTuning | None = None, table: TuningTable = NO_TABLE
) -> tuple[Tensor, Tensor]:
    """(hidden in float8 [T, F / 2], its scales [T, 1] fp32). Rows may lie apart."""
    num_rows, width = z_TF.shape
    out_TI = torch.empty(num_rows, width // 2, dtype=torch.float8_e4m3fn, device=z_TF.device)
    scale_T1 = torch.empty(num_rows, 1, dtype=torch.float32, device=z_TF.device)
    _launch(z_TF, out_TI, scale_T1, tuning or table.find("silu_gate_to_fp8", num_rows, (width,), z_TF.dtype))
    return out_TI, scale_T1


def _launch(z_TF: Tensor, out_TI: Tensor, scale_T1: Tensor | None, tuning: RowTuning | None) -> None:
    num_rows, dim = out_TI.shape
    assert z_TF.stride(1) == 1
    assert z_TF.shape[1] == 2 * dim
    tiles = RowTiles.of(dim)
    if num_rows > 0:
        _gate[(num_rows,)](
            z_TF, out_TI, z_TF if scale_T1 is None else scale_T1, dim, z_TF.stride(0),
            MAIN=tiles.main, REST=tiles.rest, REST_MASKED=tiles.is_rest_masked, TO_FP8=scale_T1 is not None,
            num_warps=(tuning or RowTuning.of(dim)).num_warps,
        )  # fmt: skip
