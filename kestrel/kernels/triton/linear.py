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
from kestrel.kernels.triton.launch import HOPPER, NO_TABLE, TuningTable, dependent, has_room, wait_for_inputs
from kestrel.kernels.triton.norms import rms_norm

# ---------------------------------------------------------------------- a handful of rows
# A linear layer for at most 16 rows, or 64 of a gated one: the weights stream through once, and everything else hides
# behind them.
#
# Up to `SUMMED_ROWS` rows, a program takes a few outputs and adds products lane by lane; lanes meet once, after the
# last block. With more rows the tensor cores do it, outputs as their long side and the rows of x, padded to 16, as the
# short; a norm is an operation of its own then, because x goes past the registers. Rows of float8 go to the tensor
# cores however few they are.


MAX_ROWS = 16
MAX_GATED_ROWS = 64
MAX_FORKED_ROWS = 64
"""Of a parallel block: the most rows of a decode step that was measured with both halves at the same time."""
SUMMED_ROWS = 1
MANY_OUTPUTS, LONG_ROWS = 3072, 8192
"""Fewer outputs of shorter rows are cut into narrow blocks, so that all multiprocessors work."""
FEW_SUMS, MANY_SUMS = 2048, 8192
"""Up to so many outputs, larger blocks of a row hide more of the wait for x."""
SHORT_ROWS = 2048


def max_gated_rows(capability: tuple[int, int]) -> int:
    """Up to which one kernel was faster than a product and a gate: for many rows this is known of Hopper alone."""
    return MAX_GATED_ROWS if capability[0] == HOPPER else MAX_ROWS


def max_small_fp8_rows(capability: tuple[int, int]) -> int:
    """Up to which `small_fp8_linear` was faster than the library's product: known of Hopper alone."""
    return MAX_ROWS if capability[0] == HOPPER else 0


@dataclass(frozen=True, slots=True)
class Tuning:
    block_out: int
    block_in: int
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def of(
        cls,
        num_rows: int,
        num_out: int,
        num_in: int,
        bytes_per_number: int = 2,
        *,
        is_gated: bool = False,
        is_beside: bool = False,
        has_room: bool = False,
    ) -> Tuning:
        """A gated layer reads two rows of weights for each output. `is_beside`: other kernels run at the same time.
        `has_room`: blocks may take 180 KiB together."""
        width = 1 + is_gated
        if bytes_per_number == 1:
            return cls(64, 256, num_stages=9) if has_room and num_in % 256 == 0 else cls(64, 128)
        if num_rows <= SUMMED_ROWS:
            if has_room and num_out % 4 == 0 and num_in % 512 == 0 and num_in <= 4096:
                return cls._of_one_row(num_out, num_in, is_gated=is_gated)
            if num_in > 4096:
                return cls(2, 1024, num_warps=2) if is_beside and num_out % 2 == 0 else cls(block_out=1, block_in=1024)
            block_out = 2 if num_out % 2 == 0 and not is_gated else 1
            return cls(block_out, block_in=min(512, triton.next_power_of_2(num_in)), num_warps=2)
        if num_rows > MAX_ROWS:
            return cls(64, 64, num_stages=5) if has_room and bytes_per_number == 2 else cls(16, 64, num_stages=2)
        if has_room and bytes_per_number == 2 and num_in % 512 == 0:
            if num_out >= MANY_SUMS and num_in <= SHORT_ROWS and not is_gated:
                return cls(128, 64, num_warps=8, num_stages=5)
            if num_out >= MANY_OUTPUTS or num_in >= LONG_ROWS:
                return cls(64, 128, num_stages=5 if is_gated else 9)
            return cls(16, 512 // width, num_stages=5)
        block_out = max(16, next((size for size in (64, 32) if num_out * width >= 132 * size), 16) // width)
        row = max(16, triton.next_power_of_2(num_in))
        if bytes_per_number > 2:  # twice the bytes: fewer of them at a time, so that every GPU has room
            return cls(block_out, min(4096 // width // block_out, row), num_stages=2)
        return cls(block_out, min(8192 // width // block_out, row))

    @classmethod
    def _of_one_row(cls, num_out: int, num_in: int, *, is_gated: bool) -> Tuning:
        """Found inside whole decode steps of an H200. A block as long as a row has all its weights on their way while
        the kernel before it ends, and too many such blocks wait for each other."""
        if is_gated:
            return cls(2, 1024) if num_in % 1024 == 0 and num_in <= SHORT_ROWS else cls(2, 512, num_warps=2)
        if num_out > MANY_SUMS or num_in % 1024:
            return cls(4, 512, num_warps=2)
        if num_in > SHORT_ROWS:
            return cls(2, 1024)
        return cls(2, num_in) if num_out <= FEW_SUMS and num_in == SHORT_ROWS else cls(4, 1024, num_warps=2)


@triton.jit
def output_numbers(ptr, outs, num_out, IS_THERE: tl.constexpr):
    """Scales or biases."""
    numbers = 0.0
    if IS_THERE:
        numbers = tl.load(ptr + outs, mask=outs < num_out, other=0.0).to(tl.float32)
    return numbers


@triton.jit
def _residual(ptr, stride, rows, outs, inside, IS_THERE: tl.constexpr):
    numbers = 0.0
    if IS_THERE:
        numbers = tl.load(ptr + rows * stride + outs, mask=inside, other=0.0).to(tl.float32)
    return numbers


@triton.jit
def finish(
    total, scale, bias, residual, rows, outs, inside, y_ptr, gelu_rows_ptr, num_rows, y_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GELU: tl.constexpr,
    HAS_GELU_ROWS: tl.constexpr,
):  # fmt: skip
    """What follows the product, in fp32, up to the store."""
    if HAS_SCALE:
        total *= scale
    if HAS_BIAS:
        total += bias
    if HAS_GELU:
        active = gelu_tanh(total)
        if HAS_GELU_ROWS:
            active = tl.where(tl.load(gelu_rows_ptr + rows, mask=rows < num_rows, other=0) != 0, active, total)
        total = active
    if HAS_RESIDUAL:
        total += residual
    tl.store(y_ptr + rows * y_stride + outs, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _finish_gate(gate, up, scale, up_scale, rows, outs, inside, y_ptr, y_stride, HAS_SCALE: tl.constexpr):
    """The same of a gated layer: silu(gate) · up."""
    if HAS_SCALE:
        gate *= scale
        up *= up_scale
    dtype = y_ptr.dtype.element_ty
    tl.store(y_ptr + rows * y_stride + outs, _silu_times(gate.to(dtype), up.to(dtype)).to(dtype), mask=inside)


@triton.jit
def _silu_times(gate, up):
    """silu(gate) · up in fp32, rounded where the plain version rounds."""
    wide = gate.to(tl.float32)
    # Limited, so that the exponential stays finite.
    silu = wide / (1.0 + tl.exp(tl.minimum(-wide, 80.0)))
    return silu.to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit
def _weights(place, d, outs, num_out, num_in, EVEN: tl.constexpr):
    """Those of one block."""
    if EVEN:
        return tl.load(place + d)
    return tl.load(place + d, mask=(outs < num_out) & (d < num_in), other=0.0)


@triton.jit
def row_sums(
    x_ptr, w_place, up_place, first_w, first_up, norm_ptr, rows, outs, num_rows, num_out, num_in, x_stride, eps,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """x · wᵀ and x · upᵀ, [ROWS, BLOCK_OUT], lane by lane. `first_w` and `first_up` are read where blocks are even."""
    total = tl.zeros((ROWS, BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    up_total = total
    squares = tl.zeros((ROWS, 1, BLOCK_IN), dtype=tl.float32)
    # x and w are loaded in three dimensions, so that both lie in the lanes as their product does.
    x_place = x_ptr + rows[:, None, None] * x_stride
    first, all_outs = tl.arange(0, BLOCK_IN)[None, None, :], outs[None, :, None]
    begin = 0
    if EVEN:
        x = tl.load(x_place + first).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + first).to(tl.float32)
        total += x * first_w.to(tl.float32)
        if GATED:
            up_total += x * first_up.to(tl.float32)
        begin = BLOCK_IN
    for start in range(begin, num_in, BLOCK_IN):
        d = start + first
        w = _weights(w_place, d, all_outs, num_out, num_in, EVEN)
        up = _weights(up_place, d, all_outs, num_out, num_in, EVEN) if GATED else w
        if EVEN:
            x = tl.load(x_place + d).to(tl.float32)
        else:
            x = tl.load(x_place + d, mask=(rows < num_rows)[:, None, None] & (d < num_in), other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + d, mask=None if EVEN else d < num_in, other=None if EVEN else 0.0).to(tl.float32)
        total += x * w.to(tl.float32)
        if GATED:
            up_total += x * up.to(tl.float32)
    y, y_up = tl.sum(total, axis=2), tl.sum(up_total, axis=2)
    if HAS_NORM:
        per_deviation = 1.0 / tl.sqrt(tl.sum(squares, axis=2) / num_in + eps)
        y, y_up = y * per_deviation, y_up * per_deviation
    return y, y_up


@triton.jit
def first_weights(place, outs, num_out, num_in, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr):
    """For `row_sums`. Loaded before the wait: they are on their way while the kernel before ends."""
    w = 0.0
    if EVEN:
        w = _weights(place, tl.arange(0, BLOCK_IN)[None, None, :], outs[None, :, None], num_out, num_in, EVEN)
    return w


@triton.jit
def row_dots(
    x_ptr, w_place, up_place, rows, outs, num_rows, num_out, num_in, x_stride,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """w · xᵀ and up · xᵀ, [BLOCK_OUT, ROWS], by the tensor cores."""
    total = tl.zeros((BLOCK_OUT, ROWS), dtype=tl.float32)
    up_total = total
    for start in range(0, num_in, BLOCK_IN):
        d = start + tl.arange(0, BLOCK_IN)
        x_mask = (rows < num_rows)[None, :]
        w_mask = None
        if not EVEN:
            x_mask = x_mask & (d < num_in)[:, None]
            w_mask = (outs < num_out)[:, None] & (d < num_in)[None, :]
        x = tl.load(x_ptr + rows[None, :] * x_stride + d[:, None], mask=x_mask, other=0.0)
        w = tl.load(w_place + d[None, :], mask=w_mask, other=None if EVEN else 0.0)
        total = tl.dot(widened(w, x.dtype), x, total, input_precision="ieee")
        if GATED:
            up = tl.load(up_place + d[None, :], mask=w_mask, other=None if EVEN else 0.0)
            up_total = tl.dot(widened(up, x.dtype), x, up_total, input_precision="ieee")
    return total, up_total


@triton.jit(do_not_specialize=["num_rows"])
def _by_sums(
    x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, scale_ptr, x_scale_ptr, gelu_rows_ptr, norm_ptr,
    num_rows, num_out, num_in, x_stride, w_stride, y_stride, residual_stride, eps,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GELU: tl.constexpr,
    HAS_GELU_ROWS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_X_SCALE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tl.static_assert(not HAS_X_SCALE)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, ROWS)
    w_place = w_ptr + outs.to(tl.int64)[None, :, None] * w_stride
    up_place = w_place + num_out.to(tl.int64) * w_stride
    w = first_weights(w_place, outs, num_out, num_in, BLOCK_IN, EVEN)
    up = first_weights(up_place, outs, num_out, num_in, BLOCK_IN, EVEN) if GATED else w
    own_rows, own_outs = rows[:, None], outs[None, :]
    inside = (own_rows < num_rows) & (own_outs < num_out)
    # Before the wait: from memory they take as long as weights.
    scale = output_numbers(scale_ptr, own_outs, num_out, HAS_SCALE)
    up_scale = output_numbers(scale_ptr + num_out, own_outs, num_out, HAS_SCALE and GATED)
    bias = output_numbers(bias_ptr, own_outs, num_out, HAS_BIAS)
    wait_for_inputs(DEPENDENT)
    residual = _residual(residual_ptr, residual_stride, own_rows, own_outs, inside, HAS_RESIDUAL)
    y, y_up = row_sums(
        x_ptr, w_place, up_place, w, up, norm_ptr, rows, outs, num_rows, num_out, num_in, x_stride, eps,
        ROWS, BLOCK_OUT, BLOCK_IN, EVEN, GATED, HAS_NORM,
    )  # fmt: skip
    if GATED:
        _finish_gate(y, y_up, scale, up_scale, own_rows, own_outs, inside, y_ptr, y_stride, HAS_SCALE)
    else:
        finish(
            y, scale, bias, residual, own_rows, own_outs, inside, y_ptr, gelu_rows_ptr, num_rows, y_stride,
            HAS_BIAS, HAS_RESIDUAL, HAS_SCALE, HAS_GELU, HAS_GELU_ROWS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _by_dots(
    x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, scale_ptr, x_scale_ptr, gelu_rows_ptr, norm_ptr,
    num_rows, num_out, num_in, x_stride, w_stride, y_stride, residual_stride, eps,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GELU: tl.constexpr,
    HAS_GELU_ROWS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_X_SCALE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tl.static_assert(not HAS_NORM)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, ROWS)
    w_place = w_ptr + outs.to(tl.int64)[:, None] * w_stride
    up_place = w_place + num_out.to(tl.int64) * w_stride
    own_rows, own_outs = rows[None, :], outs[:, None]
    inside = (own_rows < num_rows) & (own_outs < num_out)
    wait_for_inputs(DEPENDENT)
    total, up_total = row_dots(
        x_ptr, w_place, up_place, rows, outs, num_rows, num_out, num_in, x_stride,
        ROWS, BLOCK_OUT, BLOCK_IN, EVEN, GATED,
    )  # fmt: skip
    if HAS_X_SCALE:
        total *= tl.load(x_scale_ptr + own_rows, mask=own_rows < num_rows, other=0.0)
    # Not before the product: its blocks leave no room for programs that wait, so nothing would come earlier.
    scale = output_numbers(scale_ptr, own_outs, num_out, HAS_SCALE)
    up_scale = output_numbers(scale_ptr + num_out, own_outs, num_out, HAS_SCALE and GATED)
    bias = output_numbers(bias_ptr, own_outs, num_out, HAS_BIAS)
    residual = _residual(residual_ptr, residual_stride, own_rows, own_outs, inside, HAS_RESIDUAL)
    if GATED:
        _finish_gate(total, up_total, scale, up_scale, own_rows, own_outs, inside, y_ptr, y_stride, HAS_SCALE)
    else:
        finish(
            total, scale, bias, residual, own_rows, own_outs, inside, y_ptr, gelu_rows_ptr, num_rows, y_stride,
            HAS_BIAS, HAS_RESIDUAL, HAS_SCALE, HAS_GELU, HAS_GELU_ROWS,
        )  # fmt: skip


def small_linear(
    x_MD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None = None,
    residual_MF: Tensor | None = None,
    has_gelu: bool = False,
    scale_F: Tensor | None = None,
    gelu_rows_M: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    is_beside: bool = False,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """y [M, F] in the dtype of x, M ≤ 16. Rows of x, of the weight and of the residual may lie apart. `is_beside`:
    other kernels run at the same time."""
    num_rows, num_out = x_MD.shape[0], weight_FD.shape[0]
    assert residual_MF is None or (residual_MF.shape == (num_rows, num_out) and residual_MF.stride(1) == 1)
    assert gelu_rows_M is None or (gelu_rows_M.shape == (num_rows,) and gelu_rows_M.is_contiguous())
    found = tuning or table.find("small_linear", num_rows, tuple(weight_FD.shape), x_MD.dtype, weight_FD.dtype)
    y_MF = torch.empty(num_rows, num_out, dtype=x_MD.dtype, device=x_MD.device)
    _launch_small(
        x_MD, weight_FD, y_MF, scale_F, norm, found, bias_F=bias_F, residual_MF=residual_MF, has_gelu=has_gelu,
        gelu_rows_M=gelu_rows_M, is_beside=is_beside,
    )  # fmt: skip
    return y_MF


def small_fp8_linear(
    x_fp8_MD: Tensor,
    x_scale_M1: Tensor,
    weight_fp8_FD: Tensor,
    weight_scale_F: Tensor,
    bias_F: Tensor | None,
    out_dtype: torch.dtype,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """(x_scale · x_fp8) · (weight_scale · weight_fp8)ᵀ + bias, M ≤ 16."""
    num_rows, num_out = x_fp8_MD.shape[0], weight_fp8_FD.shape[0]
    found = tuning or table.find("small_fp8_linear", num_rows, tuple(weight_fp8_FD.shape), x_fp8_MD.dtype)
    y_MF = torch.empty(num_rows, num_out, dtype=out_dtype, device=x_fp8_MD.device)
    _launch_small(x_fp8_MD, weight_fp8_FD, y_MF, weight_scale_F, None, found, bias_F=bias_F, x_scale_M1=x_scale_M1)
    return y_MF


def gated_linear(
    x_MD: Tensor,
    weight_FD: Tensor,
    scale_F: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """hidden [M, F / 2] in the dtype of x, M ≤ 64. Rows of x and of the weight may lie apart."""
    num_rows, width = x_MD.shape[0], weight_FD.shape[0]
    found = tuning or table.find("gated_linear", num_rows, tuple(weight_FD.shape), x_MD.dtype, weight_FD.dtype)
    hidden_MI = torch.empty(num_rows, width // 2, dtype=x_MD.dtype, device=x_MD.device)
    _launch_small(x_MD, weight_FD, hidden_MI, scale_F, norm, found, is_gated=True)
    return hidden_MI


def _launch_small(
    x_MD: Tensor,
    weight_FD: Tensor,
    y_MF: Tensor,
    scale_F: Tensor | None,
    norm: tuple[Tensor, float] | None,
    tuning: Tuning | None,
    *,
    bias_F: Tensor | None = None,
    residual_MF: Tensor | None = None,
    has_gelu: bool = False,
    gelu_rows_M: Tensor | None = None,
    is_gated: bool = False,
    is_beside: bool = False,
    x_scale_M1: Tensor | None = None,
) -> None:
    num_rows, num_in = x_MD.shape
    num_out = y_MF.shape[1]
    assert num_rows <= (MAX_GATED_ROWS if is_gated else MAX_ROWS)
    assert weight_FD.shape == (num_out * (1 + is_gated), num_in)
    assert weight_FD.stride(1) == x_MD.stride(1) == 1
    assert scale_F is None or (scale_F.shape == weight_FD.shape[:1] and scale_F.is_contiguous())
    assert norm is None or (norm[0].shape == (num_in,) and norm[0].is_contiguous())
    assert x_scale_M1 is None or (x_scale_M1.shape == (num_rows, 1) and x_scale_M1.is_contiguous())
    if num_rows == 0:
        return
    if norm is not None and num_rows > SUMMED_ROWS:
        x_MD, norm = rms_norm(x_MD, *norm), None
    chosen = tuning or Tuning.of(
        num_rows, num_out, num_in, x_MD.element_size(),
        is_gated=is_gated, is_beside=is_beside, has_room=has_room(x_MD.device),
    )  # fmt: skip
    kernel, padded_rows = _by_sums, triton.next_power_of_2(num_rows)
    if num_rows > SUMMED_ROWS or x_scale_M1 is not None:
        kernel, padded_rows = _by_dots, max(MAX_ROWS, padded_rows)
    has_full_rows = kernel is _by_dots or padded_rows == num_rows
    kernel[(triton.cdiv(num_out, chosen.block_out),)](
        x_MD, weight_FD, y_MF,
        x_MD if bias_F is None else bias_F,
        x_MD if residual_MF is None else residual_MF,
        x_MD if scale_F is None else scale_F,
        x_MD if x_scale_M1 is None else x_scale_M1,
        x_MD if gelu_rows_M is None else gelu_rows_M,
        x_MD if norm is None else norm[0],
        num_rows, num_out, num_in, x_MD.stride(0), weight_FD.stride(0), y_MF.stride(0),
        0 if residual_MF is None else residual_MF.stride(0), 0.0 if norm is None else norm[1],
        ROWS=padded_rows, BLOCK_OUT=chosen.block_out, BLOCK_IN=chosen.block_in,
        EVEN=num_in % chosen.block_in == 0 and num_out % chosen.block_out == 0 and has_full_rows, GATED=is_gated,
        HAS_BIAS=bias_F is not None, HAS_RESIDUAL=residual_MF is not None, HAS_SCALE=scale_F is not None,
        HAS_GELU=has_gelu, HAS_GELU_ROWS=gelu_rows_M is not None, HAS_NORM=norm is not None,
        HAS_X_SCALE=x_scale_M1 is not None,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, **dependent(),
    )  # fmt: skip


# ---------------------------------------------------------------------- gated SiLU
# In one pass, to the dtype of its input or to float8.


@triton.jit
def _hidden_part(z_ptr, offset, cols, dim, MASKED: tl.constexpr):
    """silu(gate) · up, rounded as the plain version does."""
    gate = load_tile(z_ptr, offset, cols, dim, MASKED)
    up = load_tile(z_ptr, offset + dim, cols, dim, MASKED)
    return _silu_times(gate, up).to(gate.dtype).to(tl.float32)


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
