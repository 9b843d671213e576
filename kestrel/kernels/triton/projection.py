"""The projection to queries, keys and values for a handful of rows, with what follows it: rotation and storing.

A kernel less in every layer of a decode step. A program's block of outputs consists of partners in the rotation: its
second half holds those of its first.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.fp8 import LARGEST_FP8
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, dependent, has_room, wait_for_inputs
from kestrel.kernels.triton.linear import (
    MAX_ROWS,
    SUMMED_ROWS,
    Tuning,
    first_weights,
    output_numbers,
    row_dots,
    row_sums,
)
from kestrel.kernels.triton.norms import rms_norm
from kestrel.kernels.triton.paged_attention import page_layout
from kestrel.kernels.triton.rotary import for_cache


@triton.jit
def _first_of_pair(pair, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """(head, dimension): those that rotate, then those that do not."""
    at = pair % (HEAD_DIM // 2)
    return pair // (HEAD_DIM // 2), tl.where(at < HALF, at, at + HALF)


@triton.jit
def _second_of_pair(d, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """The partner's dimension."""
    return tl.where(d < HALF, d + HALF, d + (HEAD_DIM // 2 - HALF))


@triton.jit
def _put(
    x, head, d, rows, inside, slots, q_ptr, k_cache_ptr, v_cache_ptr, inverse_k_scale, inverse_v_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Queries in their tensor, keys and values in their slots."""
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    tl.store(q_ptr + rows * (HEADS * HEAD_DIM) + head * HEAD_DIM + d, x, mask=inside & is_query)
    place = slots // PAGE_SIZE * PAGE_STRIDE + slots % PAGE_SIZE * POSITION_STRIDE + (head - HEADS) * HEAD_STRIDE + d
    k = for_cache(x, inverse_k_scale, LARGEST, k_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + place, k, mask=inside & (~is_query) & (~is_value))
    v = for_cache(x, inverse_v_scale, LARGEST, v_cache_ptr.dtype.element_ty)
    tl.store(v_cache_ptr + place - KV_HEADS * HEAD_STRIDE, v, mask=inside & is_value)


@triton.jit
def _outputs(first_pair, BLOCK_OUT: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Rows of the weight: the first of each pair, then the partners."""
    lane = tl.arange(0, BLOCK_OUT)
    head, d = _first_of_pair(first_pair + lane % (BLOCK_OUT // 2), HEAD_DIM, HALF)
    return head * HEAD_DIM + tl.where(lane < BLOCK_OUT // 2, d, _second_of_pair(d, HEAD_DIM, HALF))


@triton.jit
def _targets(
    first_pair, row, num_rows, positions_ptr, slots_ptr, cos_ptr, sin_ptr,
    BLOCK_OUT: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Of the first of each pair: head, dimension, whether it is there, slot, and the rotation where there is one."""
    head, d = _first_of_pair(first_pair + tl.arange(0, BLOCK_OUT // 2), HEAD_DIM, HALF)
    head, d = head[None, :], d[None, :]
    inside = (row < num_rows) & (head < HEADS + 2 * KV_HEADS)
    slots = tl.load(slots_ptr + row, mask=row < num_rows, other=0).to(tl.int64)
    cos, sin = 1.0, 0.0
    if HALF > 0:
        rotates = inside & (d < HALF) & (head < HEADS + KV_HEADS)
        table = tl.load(positions_ptr + row, mask=row < num_rows, other=0).to(tl.int64) * HALF + d
        cos = tl.load(cos_ptr + table, mask=rotates, other=1.0)
        sin = tl.load(sin_ptr + table, mask=rotates, other=0.0)
    return head, d, inside, slots, cos, sin


@triton.jit(do_not_specialize=["num_rows"])
def _project_and_store(
    x_ptr, w_ptr, bias_ptr, scale_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, k_cache_ptr,
    v_cache_ptr, num_rows, num_out, num_in, x_stride, w_stride, eps, inverse_k_scale, inverse_v_scale,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr, BY_DOTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, LARGEST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    first_pair, rows = tl.program_id(0) * (BLOCK_OUT // 2), tl.arange(0, ROWS)
    outs = _outputs(first_pair, BLOCK_OUT, HEAD_DIM, HALF)
    w_rows = outs.to(tl.int64) * w_stride
    if BY_DOTS:
        wait_for_inputs(DEPENDENT)
    else:
        w_place = w_ptr + w_rows[None, :, None]
        w = first_weights(w_place, outs, num_out, num_in, BLOCK_IN, EVEN)
        scale = output_numbers(scale_ptr, outs[None, :], num_out, HAS_SCALE)
        bias = output_numbers(bias_ptr, outs[None, :], num_out, HAS_BIAS)
    # What the end needs is on its way before the product.
    head, d, inside, slots, cos, sin = _targets(
        first_pair, rows[:, None], num_rows, positions_ptr, slots_ptr, cos_ptr, sin_ptr,
        BLOCK_OUT, HEADS, KV_HEADS, HEAD_DIM, HALF,
    )  # fmt: skip
    if BY_DOTS:
        w_place = w_ptr + w_rows[:, None]
        total, _ = row_dots(
            x_ptr, w_place, w_place, rows, outs, num_rows, num_out, num_in, x_stride,
            ROWS, BLOCK_OUT, BLOCK_IN, EVEN, False,
        )  # fmt: skip
        total = tl.trans(total)
        scale = output_numbers(scale_ptr, outs[None, :], num_out, HAS_SCALE)
        bias = output_numbers(bias_ptr, outs[None, :], num_out, HAS_BIAS)
    else:
        wait_for_inputs(DEPENDENT)
        total, _ = row_sums(
            x_ptr, w_place, w_place, w, w, norm_ptr, rows, outs, num_rows, num_out, num_in, x_stride, eps,
            ROWS, BLOCK_OUT, BLOCK_IN, EVEN, False, HAS_NORM,
        )  # fmt: skip
    if HAS_SCALE:
        total *= scale
    if HAS_BIAS:
        total += bias

    # Rounded before the rotation and after it, as it is in two operations.
    halves = tl.permute(tl.reshape(total.to(q_ptr.dtype.element_ty), (ROWS, 2, BLOCK_OUT // 2)), (0, 2, 1))
    first, second = tl.split(halves)
    if HALF > 0:
        x, y = first.to(tl.float32), second.to(tl.float32)
        first = (x * cos + y * (-sin)).to(first.dtype)
        second = (y * cos + x * sin).to(second.dtype)
    _put(
        first, head, d, rows[:, None], inside, slots, q_ptr, k_cache_ptr, v_cache_ptr, inverse_k_scale, inverse_v_scale,
        HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE, HEAD_STRIDE, LARGEST,
    )  # fmt: skip
    _put(
        second, head, _second_of_pair(d, HEAD_DIM, HALF), rows[:, None], inside, slots, q_ptr, k_cache_ptr, v_cache_ptr,
        inverse_k_scale, inverse_v_scale,
        HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE, HEAD_STRIDE, LARGEST,
    )  # fmt: skip


def project_and_store(
    x_MD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None,
    scale_F: Tensor | None,
    norm: tuple[Tensor, float] | None,
    n_heads: int,
    n_kv_heads: int,
    cos_table: Tensor | None,
    sin_table: Tensor | None,
    positions_M: Tensor,
    slots_M: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """q [M, heads, head_dim], contiguous, M ≤ 16. Rows of x and of the weight may lie apart."""
    (num_rows, num_in), num_out = x_MD.shape, weight_FD.shape[0]
    head_dim = num_out // (n_heads + 2 * n_kv_heads)
    assert num_rows <= MAX_ROWS
    assert num_out == (n_heads + 2 * n_kv_heads) * head_dim
    assert head_dim % 2 == 0
    assert weight_FD.shape[1] == num_in
    assert weight_FD.stride(1) == x_MD.stride(1) == 1
    assert k_cache.shape[2:] == (n_kv_heads, head_dim)
    for tensor in (cos_table, sin_table, positions_M, slots_M, scale_F):
        assert tensor is None or tensor.is_contiguous()
    q_MHD = torch.empty(num_rows, n_heads, head_dim, dtype=x_MD.dtype, device=x_MD.device)
    if num_rows == 0:
        return q_MHD
    if norm is not None and num_rows > SUMMED_ROWS:
        x_MD, norm = rms_norm(x_MD, *norm), None
    found = tuning or table.find("small_linear", num_rows, tuple(weight_FD.shape), x_MD.dtype, weight_FD.dtype)
    chosen = found or Tuning.of(num_rows, num_out, num_in, x_MD.element_size(), has_room=has_room(x_MD.device))
    by_dots, block_out = num_rows > SUMMED_ROWS, max(2, chosen.block_out)
    _project_and_store[(triton.cdiv(num_out, block_out),)](
        x_MD, weight_FD, x_MD if bias_F is None else bias_F, x_MD if scale_F is None else scale_F,
        x_MD if norm is None else norm[0], positions_M if cos_table is None else cos_table,
        positions_M if sin_table is None else sin_table, positions_M, slots_M, q_MHD, k_cache, v_cache,
        num_rows, num_out, num_in, x_MD.stride(0), weight_FD.stride(0), 0.0 if norm is None else norm[1],
        1.0 / k_scale, 1.0 / v_scale,
        ROWS=MAX_ROWS if by_dots else num_rows, BLOCK_OUT=block_out, BLOCK_IN=chosen.block_in,
        EVEN=num_in % chosen.block_in == 0 and num_out % block_out == 0, BY_DOTS=by_dots,
        HAS_BIAS=bias_F is not None, HAS_SCALE=scale_F is not None, HAS_NORM=norm is not None,
        HEADS=n_heads, KV_HEADS=n_kv_heads, HEAD_DIM=head_dim, HALF=0 if cos_table is None else cos_table.shape[1],
        LARGEST=LARGEST_FP8, **page_layout(k_cache, v_cache), num_warps=chosen.num_warps,
        num_stages=chosen.num_stages, **dependent(),
    )  # fmt: skip
    return q_MHD
