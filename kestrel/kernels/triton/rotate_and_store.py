"""Scaling, rotation and storing of a fused projection in one pass.

A program takes one token and a block of its q, k and v heads, which lie one after another. Each number is read together
with its partner in the rotation; dimensions that do not rotate have cosine 1 and sine 0.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.fp8_rows import LARGEST_FP8
from kestrel.kernels.triton.dependent_launch import dependent, wait_for_inputs
from kestrel.kernels.triton.tuning_table import NO_TABLE, TuningTable


@dataclass(frozen=True, slots=True)
class Tuning:
    heads_per_program: int = 8
    num_warps: int = 2


@triton.jit
def _for_cache(x, inverse_scale, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    if tl.float8e4nv == DTYPE:
        x = tl.clamp(x.to(tl.float32) * inverse_scale, -LIMIT, LIMIT)
    return x.to(DTYPE)


@triton.jit
def _normed(x, per_deviation, q_norm_ptr, k_norm_ptr, at, inside, is_query, is_value):
    """The RMS norm of queries and keys, rounded before and after the weight; values as they are."""
    weight = tl.load(q_norm_ptr + at, mask=inside & is_query, other=0.0)
    weight += tl.load(k_norm_ptr + at, mask=inside & (~is_query) & (~is_value), other=0.0)
    normed = (x.to(tl.float32) * per_deviation).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    return tl.where(is_value, x, normed.to(x.dtype))


@triton.jit
def _rotate_and_store(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, tau_q_ptr, tau_v_ptr, q_norm_ptr, k_norm_ptr, q_ptr,
    k_cache_ptr, v_cache_ptr, qkv_stride, inverse_k_scale, inverse_v_scale, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HAS_TAU: tl.constexpr, HAS_NORMS: tl.constexpr, BLOCK_HEADS: tl.constexpr, DIMS: tl.constexpr,
    LARGEST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    d = tl.arange(0, DIMS)[None, :]
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    inside = (head < HEADS + 2 * KV_HEADS) & (d < HEAD_DIM)
    rotates = (d < 2 * HALF) & (head < HEADS + KV_HEADS)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    source = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    wait_for_inputs(DEPENDENT)
    x = tl.load(source + d, mask=inside, other=0.0)
    other = tl.load(source + partner, mask=rotates, other=0.0)
    if HAS_TAU:
        tau_q = tl.load(tau_q_ptr + token * HEADS + head, mask=is_query, other=1.0)
        tau_v = tl.load(
            tau_v_ptr + token * KV_HEADS + (head - HEADS - KV_HEADS),
            mask=is_value & (head < HEADS + 2 * KV_HEADS),
            other=1.0,
        )
        factor = tau_q * tau_v
        x = (x.to(tl.float32) * factor).to(x.dtype)
        other = (other.to(tl.float32) * factor).to(x.dtype)
    if HAS_NORMS:
        wide = x.to(tl.float32)
        per_deviation = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)[:, None]
        x = _normed(x, per_deviation, q_norm_ptr, k_norm_ptr, d, d < HEAD_DIM, is_query, is_value)
        other = _normed(other, per_deviation, q_norm_ptr, k_norm_ptr, partner, rotates, is_query, is_value)
    if HALF > 0:
        table = tl.load(positions_ptr + token).to(tl.int64) * HALF + d % HALF
        cos = tl.load(cos_ptr + table, mask=rotates, other=1.0)
        sin = tl.load(sin_ptr + table, mask=rotates, other=0.0)
        signed = tl.where(d < HALF, -sin, sin)
        x = (x.to(tl.float32) * cos + other.to(tl.float32) * signed).to(x.dtype)
    tl.store(q_ptr + token * (HEADS * HEAD_DIM) + head * HEAD_DIM + d, x, mask=inside & is_query)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    k_place = slot * (KV_HEADS * HEAD_DIM) + (head - HEADS) * HEAD_DIM + d
    k = _for_cache(x, inverse_k_scale, LARGEST, k_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + k_place, k, mask=inside & (head >= HEADS) & (head < HEADS + KV_HEADS))
    v = _for_cache(x, inverse_v_scale, LARGEST, v_cache_ptr.dtype.element_ty)
    tl.store(v_cache_ptr + k_place - KV_HEADS * HEAD_DIM, v, mask=inside & is_value)


def rotate_and_store(
    qkv_TF: Tensor,
    n_heads: int,
    n_kv_heads: int,
    cos_table: Tensor | None,
    sin_table: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tau: tuple[Tensor, Tensor] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    norms: tuple[Tensor, Tensor, float] | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """q [T, heads, head_dim], contiguous. Rows of `qkv_TF` may lie apart, as the columns of a wider projection do."""
    num_tokens, width = qkv_TF.shape
    num_all_heads = n_heads + 2 * n_kv_heads
    head_dim = width // num_all_heads
    assert width == num_all_heads * head_dim
    assert k_cache.shape == v_cache.shape == (k_cache.shape[0], n_kv_heads, head_dim)
    assert cos_table is None or (sin_table is not None and cos_table.shape == sin_table.shape)
    assert qkv_TF.stride(1) == 1
    for tensor in (k_cache, v_cache, cos_table, sin_table, positions_T, slots_T, *(tau or ())):
        assert tensor is None or tensor.is_contiguous()
    q_THD = torch.empty(num_tokens, n_heads, head_dim, dtype=qkv_TF.dtype, device=qkv_TF.device)
    if num_tokens == 0:
        return q_THD
    dims = n_heads, n_kv_heads, head_dim
    chosen = tuning or table.find("rotate_and_store", num_tokens, dims, qkv_TF.dtype) or Tuning()
    tau_q, tau_v = tau or (positions_T, positions_T)
    q_norm_D, k_norm_D, eps = norms or (qkv_TF, qkv_TF, 0.0)
    _rotate_and_store[(num_tokens, triton.cdiv(num_all_heads, chosen.heads_per_program))](
        qkv_TF, positions_T if cos_table is None else cos_table, positions_T if sin_table is None else sin_table,
        positions_T, slots_T, tau_q, tau_v, q_norm_D, k_norm_D, q_THD, k_cache, v_cache,
        qkv_TF.stride(0), 1.0 / k_scale, 1.0 / v_scale, eps,
        HEADS=n_heads, KV_HEADS=n_kv_heads, HEAD_DIM=head_dim, HALF=0 if cos_table is None else cos_table.shape[1],
        HAS_TAU=tau is not None, HAS_NORMS=norms is not None, BLOCK_HEADS=chosen.heads_per_program,
        DIMS=triton.next_power_of_2(head_dim),
        LARGEST=LARGEST_FP8, num_warps=chosen.num_warps, **dependent(),
    )  # fmt: skip
    return q_THD
