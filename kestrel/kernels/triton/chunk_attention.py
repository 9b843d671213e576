"""Attention of whole chunks of queries over pages, every chunk of a step in one launch.

A program takes a block of queries of one head of one chunk and walks over the keys that any of them sees: first the
blocks that all of them see whole, without a mask, then the ones that need it. How many queries a chunk has and where
they stand only the device knows; the grid is fixed by the longest chunk and programs past a chunk's end return, so that
a captured graph can be replayed for any contents.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.triton.dependent_launch import dependent, wait_for_inputs
from kestrel.kernels.triton.paged_attention import tile_slots
from kestrel.kernels.triton.tuning_table import NO_TABLE, TuningTable
from kestrel.kernels.triton.widening import widened


@dataclass(frozen=True, slots=True)
class Tuning:
    block_queries: int = 64
    block_keys: int = 64
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def of(cls, max_count: int, head_dim: int, bytes_per_number: int = 2) -> Tuning:
        """Blocks of queries no larger than the longest chunk needs.

        Wide heads take more warps to stay in registers; full precision, which has no tensor cores, takes small blocks.
        """
        queries = min(64, max(16, triton.next_power_of_2(max_count)))
        if bytes_per_number > 2:
            return cls(min(32, queries), 32, num_warps=8, num_stages=2)
        return cls(64, block_keys=128 if max_count <= 64 and head_dim <= 64 else 64)


@triton.jit
def _cache_tile(ptr, place, keys, end, d, dtype, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        tile = tl.load(ptr + place, mask=(keys < end)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    elif DIMS > HEAD_DIM:
        tile = tl.load(ptr + place, mask=(d < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(ptr + place)
    return widened(tile, dtype)


@triton.jit
def _attend_block(
    q, k_ptr, v_ptr, pages_ptr, slots, top, weight, mixed, first, seen_Q, end, score_scale, slot_stride,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys added to running softmaxes; scores to the base 2. Also returns the slots of the next block."""
    keys, d = first + tl.arange(0, BLOCK_K), tl.arange(0, DIMS)
    place = slots[:, None] * slot_stride + d[None, :]
    # The next block's pages are read along with this block's keys: one wait per block instead of two.
    slots = tile_slots(pages_ptr, keys + BLOCK_K, end, PAGE_SIZE)
    k = _cache_tile(k_ptr, place, keys, end, d, q.dtype, HEAD_DIM, DIMS, MASKED)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        score = tl.where(keys[None, :] < seen_Q[:, None], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1) * score_scale)
    p = tl.exp2(score * score_scale - new_top[:, None])
    kept = tl.exp2(top - new_top)
    weight = weight * kept + tl.sum(p, axis=1)
    v = _cache_tile(v_ptr, place, keys, end, d, q.dtype, HEAD_DIM, DIMS, MASKED)
    mixed = tl.dot(p.to(q.dtype), v, mixed * kept[:, None], input_precision="ieee")
    return slots, new_top, weight, mixed


@triton.jit(
    do_not_specialize=["pages_stride"],
    do_not_specialize_on_alignment=["pages_ptr", "first_ptr", "count_ptr", "start_ptr", "bidirectional_ptr"],
)
def _attend_chunks(
    q_ptr, k_ptr, v_ptr, pages_ptr, first_ptr, count_ptr, start_ptr, bidirectional_ptr, out_ptr,
    score_scale, v_scale, q_stride, out_stride, pages_stride, slot_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    head, chunk = tl.program_id(1), tl.program_id(2)
    first_query = tl.program_id(0) * BLOCK_Q
    count = tl.load(count_ptr + chunk).to(tl.int32)
    if first_query >= count:
        return
    start = tl.load(start_ptr + chunk).to(tl.int32)
    sees_all = tl.load(bidirectional_ptr + chunk) != 0
    queries, d = first_query + tl.arange(0, BLOCK_Q), tl.arange(0, DIMS)
    all_keys = start + count
    seen_Q = tl.where(sees_all, all_keys, tl.minimum(start + queries + 1, all_keys))
    end = tl.where(sees_all, all_keys, tl.minimum(start + first_query + BLOCK_Q, all_keys))
    full = tl.where(sees_all, all_keys, start + first_query + 1) // BLOCK_K * BLOCK_K

    rows = tl.load(first_ptr + chunk).to(tl.int64) + queries
    inside = (queries < count)[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + rows[:, None] * q_stride + head * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    k_ptr += head // GROUP * HEAD_DIM
    v_ptr += head // GROUP * HEAD_DIM
    pages_ptr += chunk.to(tl.int64) * pages_stride
    top = tl.full((BLOCK_Q,), -1.0e30, dtype=tl.float32)
    weight = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_Q, DIMS), dtype=tl.float32)
    slots = tile_slots(pages_ptr, tl.arange(0, BLOCK_K), end, PAGE_SIZE)
    for first in range(0, full, BLOCK_K):
        slots, top, weight, mixed = _attend_block(
            q, k_ptr, v_ptr, pages_ptr, slots, top, weight, mixed, first, seen_Q, end, score_scale, slot_stride,
            HEAD_DIM, DIMS, BLOCK_K, PAGE_SIZE, False,
        )  # fmt: skip
    for first in range(full, end, BLOCK_K):
        slots, top, weight, mixed = _attend_block(
            q, k_ptr, v_ptr, pages_ptr, slots, top, weight, mixed, first, seen_Q, end, score_scale, slot_stride,
            HEAD_DIM, DIMS, BLOCK_K, PAGE_SIZE, True,
        )  # fmt: skip
    out = (mixed * (v_scale / weight)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * out_stride + head * HEAD_DIM + d[None, :], out, mask=inside)


def attend_chunks(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages_CP: Tensor,
    first_C: Tensor,
    count_C: Tensor,
    start_C: Tensor,
    bidirectional_C: Tensor,
    page_size: int,
    max_count: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out_THD: Tensor | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """Queries of several chunks over their own pages. Rows of q and of `out_THD` may lie apart."""
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads, num_chunks = k_cache.shape[1], pages_CP.shape[0]
    assert num_heads % num_kv_heads == 0
    assert k_cache.shape == v_cache.shape
    assert k_cache.shape[2] == head_dim
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert pages_CP.stride(1) == 1
    for per_chunk in (first_C, count_C, start_C, bidirectional_C):
        assert per_chunk.shape == (num_chunks,)
        assert per_chunk.is_contiguous()
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format) if out_THD is None else out_THD
    for tensor in (q_THD, out_THD):
        assert tensor.shape == q_THD.shape
        assert tensor.stride()[1:] == (head_dim, 1)
    if num_chunks == 0 or max_count == 0:
        return out_THD
    dims = num_heads, num_kv_heads, head_dim
    found = tuning or table.find("attend_chunks", max_count, dims, q_THD.dtype, k_cache.dtype)
    chosen = found or Tuning.of(max_count, head_dim, q_THD.element_size())
    _attend_chunks[(triton.cdiv(max_count, chosen.block_queries), num_heads, num_chunks)](
        q_THD, k_cache, v_cache, pages_CP, first_C, count_C, start_C, bidirectional_C, out_THD,
        k_scale * math.log2(math.e) / math.sqrt(head_dim), v_scale,
        q_THD.stride(0), out_THD.stride(0), pages_CP.stride(0), k_cache.stride(0),
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, DIMS=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_Q=chosen.block_queries, BLOCK_K=chosen.block_keys, PAGE_SIZE=page_size,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, **dependent(),
    )  # fmt: skip
    return out_THD
