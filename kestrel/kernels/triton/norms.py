"""Layer and RMS normalisation as one pass over memory: a row stays in registers between its statistics and its result.

A program keeps weight and bias in registers over several rows. Where the result is wanted in float8, the row's largest
number is found while it is still there.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.triton.device_functions import RowTiles, load_tile, store_tile
from kestrel.kernels.triton.fp8 import fp8_rows_like, store_row
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, dependent, wait_for_inputs

MANY_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Tuning:
    num_warps: int = 1
    rows_per_program: int = 1

    @classmethod
    def of(cls, num_rows: int, dim: int) -> Tuning:
        """Few rows: as many lanes as a row has use for. Many rows: a warp each, which needs no barriers."""
        if num_rows < MANY_ROWS:
            return cls(num_warps=min(8, max(1, triton.next_power_of_2(dim) // 256)))
        return cls(num_warps=1 if dim <= 1536 else 4)


@triton.jit
def _sum_tile(
    x_ptr, a_ptr, b_ptr, total_ptr, offset, a_offset, cols, dim,
    MASKED: tl.constexpr, HAS_A: tl.constexpr, HAS_B: tl.constexpr,
):  # fmt: skip
    """x + a + b of one tile as it is stored, in fp32; stored only when something was added."""
    x = load_tile(x_ptr, offset, cols, dim, MASKED).to(tl.float32)
    if HAS_A:
        x += load_tile(a_ptr, a_offset, cols, dim, MASKED)
        if HAS_B:
            x += load_tile(b_ptr, offset, cols, dim, MASKED)
        x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
        store_tile(total_ptr, offset, cols, dim, x, MASKED)
    return x


@triton.jit
def _weighted(normed, weight, DTYPE: tl.constexpr):
    """Rounded before and after the weight, as the plain version does."""
    return (normed.to(DTYPE).to(tl.float32) * weight.to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_a_rows"])
def _normalise(
    x_ptr, a_ptr, b_ptr, total_ptr, y_ptr, scale_ptr, weight_ptr, bias_ptr, shift_ptr, num_rows, num_a_rows, dim, eps,
    ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, REST_MASKED: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_A: tl.constexpr, HAS_B: tl.constexpr, TO_FP8: tl.constexpr, RMS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    main = tl.arange(0, MAIN)
    weight = load_tile(weight_ptr, 0, main, dim, False)
    if not RMS:
        bias = load_tile(bias_ptr, 0, main, dim, False)
    if HAS_SHIFT:
        shift = load_tile(shift_ptr, 0, main, dim, False)
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        weight_rest = load_tile(weight_ptr, 0, rest, dim, REST_MASKED)
        if not RMS:
            bias_rest = load_tile(bias_ptr, 0, rest, dim, REST_MASKED)
        if HAS_SHIFT:
            shift_rest = load_tile(shift_ptr, 0, rest, dim, REST_MASKED)
    first = tl.program_id(0).to(tl.int64) * ROWS
    wait_for_inputs(DEPENDENT)
    for row in range(first, tl.minimum(first + ROWS, num_rows)):
        offset, a_offset = row * dim, row % num_a_rows * dim
        x = _sum_tile(x_ptr, a_ptr, b_ptr, total_ptr, offset, a_offset, main, dim, False, HAS_A, HAS_B)
        if HAS_SHIFT:
            x += shift
        if REST > 0:
            x_rest = _sum_tile(x_ptr, a_ptr, b_ptr, total_ptr, offset, a_offset, rest, dim, REST_MASKED, HAS_A, HAS_B)
            if HAS_SHIFT:
                x_rest += shift_rest
        if not RMS:
            total = tl.sum(x, axis=0)
            if REST > 0:
                total += tl.sum(x_rest, axis=0)
            mean = total / dim
            x -= mean
            if REST > 0:
                x_rest -= mean
        squares = tl.sum(x * x, axis=0)
        if REST > 0:
            if REST_MASKED:
                x_rest = tl.where(rest < dim, x_rest, 0.0)
            squares += tl.sum(x_rest * x_rest, axis=0)
        per_deviation = 1.0 / tl.sqrt(squares / dim + eps)
        if RMS:
            y = _weighted(x * per_deviation, weight, x_ptr.dtype.element_ty)
            y_rest = y
            if REST > 0:
                y_rest = _weighted(x_rest * per_deviation, weight_rest, x_ptr.dtype.element_ty)
        else:
            y = x * per_deviation * weight + bias
            y_rest = y
            if REST > 0:
                y_rest = x_rest * per_deviation * weight_rest + bias_rest
        store_row(y_ptr, scale_ptr, row, dim, y, y_rest, MAIN, REST, REST_MASKED, TO_FP8)


def layer_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    shift_D: Tensor | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """Rows, plus `shift_D`, normalised over their last dimension; any number of leading dimensions."""
    y_TD = torch.empty_like(x_TD)
    chosen = tuning or _found("layer_norm", x_TD, table)
    _launch(x_TD, None, None, x_TD, y_TD, None, weight_D, bias_D, eps, chosen, shift_D)
    return y_TD


def add_layer_norm(
    x_TD: Tensor,
    delta_a_TD: Tensor,
    delta_b_TD: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> tuple[Tensor, Tensor]:
    """(sum, normed sum), both of the shape and dtype of x. A delta `a` of fewer rows repeats."""
    total_TD, y_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    chosen = tuning or _found("add_layer_norm", x_TD, table)
    _launch(x_TD, delta_a_TD, delta_b_TD, total_TD, y_TD, None, weight_D, bias_D, eps, chosen)
    return total_TD, y_TD


def layer_norm_to_fp8(
    x_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    shift_D: Tensor | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> tuple[Tensor, Tensor]:
    """(normed rows in float8 [T, D], their scales [T, 1] fp32)."""
    y_TD, scale_T1 = fp8_rows_like(x_TD)
    chosen = tuning or _found("layer_norm_to_fp8", x_TD, table)
    _launch(x_TD, None, None, x_TD, y_TD, scale_T1, weight_D, bias_D, eps, chosen, shift_D)
    return y_TD, scale_T1


def add_layer_norm_to_fp8(
    x_TD: Tensor,
    delta_a_TD: Tensor,
    delta_b_TD: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum in the dtype of x, normed sum in float8, its scales [T, 1] fp32). A delta `a` of fewer rows repeats."""
    total_TD = torch.empty_like(x_TD)
    y_TD, scale_T1 = fp8_rows_like(x_TD)
    chosen = tuning or _found("add_layer_norm_to_fp8", x_TD, table)
    _launch(x_TD, delta_a_TD, delta_b_TD, total_TD, y_TD, scale_T1, weight_D, bias_D, eps, chosen)
    return total_TD, y_TD, scale_T1


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, tuning: Tuning | None = None, table: TuningTable = NO_TABLE
) -> Tensor:
    """Rows normalised over their last dimension; any number of leading dimensions."""
    y_TD = torch.empty_like(x_TD)
    chosen = tuning or _found("rms_norm", x_TD, table)
    _launch(x_TD, None, None, x_TD, y_TD, None, weight_D, None, eps, chosen)
    return y_TD


def add_rms_norm(
    x_TD: Tensor,
    delta_a_TD: Tensor,
    delta_b_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> tuple[Tensor, Tensor]:
    """(sum, normed sum), both of the shape and dtype of x."""
    total_TD, y_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    chosen = tuning or _found("add_rms_norm", x_TD, table)
    _launch(x_TD, delta_a_TD, delta_b_TD, total_TD, y_TD, None, weight_D, None, eps, chosen)
    return total_TD, y_TD


def rms_norm_to_fp8(
    x_TD: Tensor, weight_D: Tensor, eps: float, tuning: Tuning | None = None, table: TuningTable = NO_TABLE
) -> tuple[Tensor, Tensor]:
    """(normed rows in float8 [T, D], their scales [T, 1] fp32)."""
    y_TD, scale_T1 = fp8_rows_like(x_TD)
    chosen = tuning or _found("rms_norm_to_fp8", x_TD, table)
    _launch(x_TD, None, None, x_TD, y_TD, scale_T1, weight_D, None, eps, chosen)
    return y_TD, scale_T1


def add_rms_norm_to_fp8(
    x_TD: Tensor,
    delta_a_TD: Tensor,
    delta_b_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum in the dtype of x, normed sum in float8, its scales [T, 1] fp32)."""
    total_TD = torch.empty_like(x_TD)
    y_TD, scale_T1 = fp8_rows_like(x_TD)
    chosen = tuning or _found("add_rms_norm_to_fp8", x_TD, table)
    _launch(x_TD, delta_a_TD, delta_b_TD, total_TD, y_TD, scale_T1, weight_D, None, eps, chosen)
    return total_TD, y_TD, scale_T1


def _found(op: str, x_TD: Tensor, table: TuningTable) -> Tuning | None:
    dim = x_TD.shape[-1]
    return table.find(op, x_TD.numel() // dim, (dim,), x_TD.dtype)


def _launch(
    x_TD: Tensor,
    delta_a_TD: Tensor | None,
    delta_b_TD: Tensor | None,
    total_TD: Tensor,
    y_TD: Tensor,
    scale_T1: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    tuning: Tuning | None,
    shift_D: Tensor | None = None,
) -> None:
    """Without `bias_D` it is an RMS norm."""
    dim = x_TD.shape[-1]
    assert weight_D.shape == (dim,)
    assert bias_D is None or bias_D.shape == (dim,)
    assert shift_D is None or shift_D.shape == (dim,)
    for tensor in (x_TD, delta_a_TD, delta_b_TD):
        assert tensor is None or (tensor.shape[-1] == dim and tensor.is_contiguous())
    assert delta_b_TD is None or delta_b_TD.shape == x_TD.shape
    num_rows = x_TD.numel() // dim
    num_a_rows = num_rows if delta_a_TD is None else delta_a_TD.numel() // dim
    if num_rows == 0:
        return
    assert num_rows % num_a_rows == 0
    chosen = tuning or Tuning.of(num_rows, dim)
    tiles = RowTiles.of(dim)
    _normalise[(triton.cdiv(num_rows, chosen.rows_per_program),)](
        x_TD, x_TD if delta_a_TD is None else delta_a_TD, x_TD if delta_b_TD is None else delta_b_TD,
        total_TD, y_TD, x_TD if scale_T1 is None else scale_T1, weight_D, weight_D if bias_D is None else bias_D,
        weight_D if shift_D is None else shift_D, num_rows, num_a_rows, dim, eps, HAS_SHIFT=shift_D is not None,
        ROWS=chosen.rows_per_program, MAIN=tiles.main, REST=tiles.rest, REST_MASKED=tiles.is_rest_masked,
        HAS_A=delta_a_TD is not None, HAS_B=delta_b_TD is not None, TO_FP8=scale_T1 is not None, RMS=bias_D is None,
        num_warps=chosen.num_warps, **dependent(),
    )  # fmt: skip
