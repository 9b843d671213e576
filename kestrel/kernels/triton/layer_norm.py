"""Layer normalisation as one pass over memory: a row stays in registers between its statistics and its result.

A row of D numbers is held as two tiles, the largest power of two in D and what is left of it (1152 = 1024 + 128), so
that few lanes idle. A program keeps weight and bias in registers over several rows.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MANY_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Tuning:
    num_warps: int = 1
    rows_per_program: int = 4

    @classmethod
    def of(cls, num_rows: int, dim: int) -> Tuning:
        """Few rows: as many lanes as a row has use for. Many rows: a warp each, which needs no barriers."""
        if num_rows < MANY_ROWS:
            return cls(num_warps=min(8, max(1, triton.next_power_of_2(dim) // 256)), rows_per_program=1)
        return cls(num_warps=1 if dim <= 1536 else 2)


@triton.jit
def _load(ptr, offset, cols, dim, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(ptr + offset + cols, mask=cols < dim, other=0.0)
    return tl.load(ptr + offset + cols)


@triton.jit
def _store(ptr, offset, cols, dim, value, MASKED: tl.constexpr):
    if MASKED:
        tl.store(ptr + offset + cols, value.to(ptr.dtype.element_ty), mask=cols < dim)
    else:
        tl.store(ptr + offset + cols, value.to(ptr.dtype.element_ty))


@triton.jit
def _sum_tile(
    x_ptr, a_ptr, b_ptr, total_ptr, offset, cols, dim, MASKED: tl.constexpr, HAS_A: tl.constexpr, HAS_B: tl.constexpr
):
    """x + a + b of one tile as it is stored, in fp32; stored only when something was added."""
    x = _load(x_ptr, offset, cols, dim, MASKED).to(tl.float32)
    if HAS_A:
        x += _load(a_ptr, offset, cols, dim, MASKED)
        if HAS_B:
            x += _load(b_ptr, offset, cols, dim, MASKED)
        x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
        _store(total_ptr, offset, cols, dim, x, MASKED)
    return x


@triton.jit(do_not_specialize=["num_rows"])
def _normalise(
    x_ptr, a_ptr, b_ptr, total_ptr, y_ptr, weight_ptr, bias_ptr, num_rows, dim, eps,
    ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, REST_MASKED: tl.constexpr,
    HAS_A: tl.constexpr, HAS_B: tl.constexpr,
):  # fmt: skip
    main = tl.arange(0, MAIN)
    weight = _load(weight_ptr, 0, main, dim, False)
    bias = _load(bias_ptr, 0, main, dim, False)
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        weight_rest = _load(weight_ptr, 0, rest, dim, REST_MASKED)
        bias_rest = _load(bias_ptr, 0, rest, dim, REST_MASKED)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(first, tl.minimum(first + ROWS, num_rows)):
        offset = row * dim
        x = _sum_tile(x_ptr, a_ptr, b_ptr, total_ptr, offset, main, dim, False, HAS_A, HAS_B)
        total = tl.sum(x, axis=0)
        if REST > 0:
            x_rest = _sum_tile(x_ptr, a_ptr, b_ptr, total_ptr, offset, rest, dim, REST_MASKED, HAS_A, HAS_B)
            total += tl.sum(x_rest, axis=0)
        mean = total / dim
        x -= mean
        squares = tl.sum(x * x, axis=0)
        if REST > 0:
            x_rest -= mean
            if REST_MASKED:
                x_rest = tl.where(rest < dim, x_rest, 0.0)
            squares += tl.sum(x_rest * x_rest, axis=0)
        scale = 1.0 / tl.sqrt(squares / dim + eps)
        _store(y_ptr, offset, main, dim, x * scale * weight + bias, False)
        if REST > 0:
            _store(y_ptr, offset, rest, dim, x_rest * scale * weight_rest + bias_rest, REST_MASKED)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, tuning: Tuning | None = None) -> Tensor:
    """Rows normalised over their last dimension; any number of leading dimensions."""
    y_TD = torch.empty_like(x_TD)
    _launch(x_TD, None, None, x_TD, y_TD, weight_D, bias_D, eps, tuning)
    return y_TD


def add_layer_norm(
    x_TD: Tensor,
    delta_a_TD: Tensor,
    delta_b_TD: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum, normed sum), both of the shape and dtype of x."""
    total_TD, y_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    _launch(x_TD, delta_a_TD, delta_b_TD, total_TD, y_TD, weight_D, bias_D, eps, tuning)
    return total_TD, y_TD


def _launch(
    x_TD: Tensor,
    delta_a_TD: Tensor | None,
    delta_b_TD: Tensor | None,
    total_TD: Tensor,
    y_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    tuning: Tuning | None,
) -> None:
    dim = x_TD.shape[-1]
    assert weight_D.shape == bias_D.shape == (dim,)
    for tensor in (x_TD, delta_a_TD, delta_b_TD):
        assert tensor is None or (tensor.shape == x_TD.shape and tensor.is_contiguous())
    num_rows = x_TD.numel() // dim
    if num_rows == 0:
        return
    chosen = tuning or Tuning.of(num_rows, dim)
    main = 1 << (dim.bit_length() - 1)
    rest = triton.next_power_of_2(dim - main) if dim > main else 0
    _normalise[(triton.cdiv(num_rows, chosen.rows_per_program),)](
        x_TD, x_TD if delta_a_TD is None else delta_a_TD, x_TD if delta_b_TD is None else delta_b_TD,
        total_TD, y_TD, weight_D, bias_D, num_rows, dim, eps,
        ROWS=chosen.rows_per_program, MAIN=main, REST=rest, REST_MASKED=main + rest != dim,
        HAS_A=delta_a_TD is not None, HAS_B=delta_b_TD is not None, num_warps=chosen.num_warps,
    )  # fmt: skip
