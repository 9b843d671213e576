"""Attention over keys and values that lie in pages: one query a row, or whole chunks of queries."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.ops import Op
from kestrel.kernels.paged_attention import as_pages
from kestrel.kernels.paged_attention import attend_chunks as plain_attend_chunks
from kestrel.kernels.triton.device_functions import widened
from kestrel.kernels.triton.launch import HOPPER, NO_TABLE, TuningTable, dependent, fault_of, wait_for_inputs


def page_layout(k_cache: Tensor, v_cache: Tensor) -> dict[str, int]:
    """What kernels are compiled for. Positions and heads of a page lie in any order, a head's numbers side by side."""
    assert k_cache.shape == v_cache.shape
    assert k_cache.stride() == v_cache.stride()
    page, position, head, dim = k_cache.stride()
    assert dim == 1
    return {"PAGE_SIZE": k_cache.shape[1], "PAGE_STRIDE": page, "POSITION_STRIDE": position, "HEAD_STRIDE": head}


# ---------------------------------------------------------------------- one query a row
# Decode attention over pages, keys split between programs: each split leaves its share, a second kernel adds them up.
#
# A row's keys are shared out evenly between the splits by its own number of keys, which only the device knows; the
# number of splits is fixed by the shapes, so that a captured graph can be replayed for any contents.
#
# With one query head per key head the products are plain sums. A tile's lanes then keep running softmaxes of their own,
# one per key of the tile, which meet only after the last key: no sum in the loop crosses warps. Grouped heads go
# through the tensor cores, a group padded to 16 queries.


FEW_ROWS = 4
MANY_ROWS = 40
"""From here on every multiprocessor has rows enough without splitting their keys."""


@dataclass(frozen=True, slots=True)
class RowsTuning:
    block_keys: int = 32
    num_warps: int = 2
    num_stages: int = 3
    target_programs: int = 1024
    """Keys are split until there are about so many programs: several for each multiprocessor at once."""
    min_keys_per_split: int = 64

    @classmethod
    def of(cls, num_rows: int, cache_dtype: torch.dtype, group: int = 1, head_dim: int = 64) -> RowsTuning:
        """Found on an H200. Numbers of one byte take more work to unpack than to read. A group of heads has its keys in
        one program, and few splits are added up sooner than many."""
        if group > 1:
            if num_rows == 1:
                return cls(block_keys=16, num_warps=4, target_programs=264 if head_dim > 64 else 200)
            if num_rows <= FEW_ROWS:
                return cls(block_keys=32, num_warps=4, target_programs=132)
            if num_rows >= MANY_ROWS and head_dim > 64:
                return cls(block_keys=32, num_warps=4, num_stages=4, target_programs=264)
            return cls(block_keys=64, num_warps=4, target_programs=264)
        if cache_dtype.itemsize == 1:
            return cls(block_keys=16) if num_rows >= MANY_ROWS else cls(num_warps=4)
        return cls(block_keys=64) if num_rows >= MANY_ROWS else cls()

    def num_splits(self, num_rows: int, num_kv_heads: int, max_keys: int) -> int:
        wanted = triton.cdiv(self.target_programs, max(1, num_rows * num_kv_heads))
        return max(1, min(wanted, max_keys // self.min_keys_per_split))


@triton.jit
def _tile_places(
    pages_ptr, keys, end, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr
):  # fmt: skip
    """Where the keys of a tile lie in their head."""
    page = tl.load(pages_ptr + keys // PAGE_SIZE, mask=keys < end, other=0).to(tl.int64)
    return page * PAGE_STRIDE + keys % PAGE_SIZE * POSITION_STRIDE


@triton.jit
def _single_head(
    q_ptr, k_ptr, v_ptr, pages_ptr, places, start, end, score_scale,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr,
):  # fmt: skip
    """(largest score, sum of weights, weighted values [DIMS]) of one query; scores to the base 2."""
    d = tl.arange(0, DIMS)
    q = tl.load(q_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32) * score_scale
    top = tl.full((BLOCK_KEYS,), -1.0e30, dtype=tl.float32)
    weight = tl.zeros((BLOCK_KEYS,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_KEYS, DIMS), dtype=tl.float32)
    for first in range(start, end, BLOCK_KEYS):
        keys = first + tl.arange(0, BLOCK_KEYS)
        place = places[:, None] + d[None, :]
        inside = (keys < end)[:, None] & (d < HEAD_DIM)[None, :]
        # The next tile's pages are read along with this tile's keys: one wait per tile instead of two.
        places = _tile_places(pages_ptr, keys + BLOCK_KEYS, end, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE)
        k = tl.load(k_ptr + place, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + place, mask=inside, other=0.0).to(tl.float32)
        score = tl.where(keys < end, tl.sum(k * q[None, :], axis=1), float("-inf"))
        new_top = tl.maximum(top, score)
        kept, p = tl.exp2(top - new_top), tl.exp2(score - new_top)
        weight = weight * kept + p
        mixed = mixed * kept[:, None] + p[:, None] * v
        top = new_top
    all_top = tl.max(top, axis=0)
    kept = tl.exp2(top - all_top)
    return all_top, tl.sum(weight * kept, axis=0), tl.sum(mixed * kept[:, None], axis=0)


@triton.jit
def _head_group(
    q_ptr, k_ptr, v_ptr, pages_ptr, places, start, end, score_scale,
    GROUP: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr,
):  # fmt: skip
    """(largest scores [PADDED], sums of weights [PADDED], weighted values [PADDED, DIMS]) of a group of queries."""
    d, g = tl.arange(0, DIMS), tl.arange(0, PADDED)
    q_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + g[:, None] * HEAD_DIM + d[None, :], mask=q_mask, other=0.0)
    top = tl.full((PADDED,), -1.0e30, dtype=tl.float32)
    weight = tl.zeros((PADDED,), dtype=tl.float32)
    mixed = tl.zeros((PADDED, DIMS), dtype=tl.float32)
    for first in range(start, end, BLOCK_KEYS):
        keys = first + tl.arange(0, BLOCK_KEYS)
        place = places[:, None] + d[None, :]
        inside = (keys < end)[:, None] & (d < HEAD_DIM)[None, :]
        # As above: the next tile's pages along with this tile's keys.
        places = _tile_places(pages_ptr, keys + BLOCK_KEYS, end, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE)
        k = widened(tl.load(k_ptr + place, mask=inside, other=0.0), q.dtype)
        v = widened(tl.load(v_ptr + place, mask=inside, other=0.0), q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
        score = tl.where((keys < end)[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        kept, p = tl.exp2(top - new_top), tl.exp2(score - new_top[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        mixed = tl.dot(p.to(q.dtype), v, mixed * kept[:, None], input_precision="ieee")
        top = new_top
    return top, weight, mixed


@triton.jit
def _attend_split(
    q_ptr, k_ptr, v_ptr, pages_ptr, num_keys_ptr, out_ptr, part_ptr, part_top_ptr, part_weight_ptr,
    score_scale, v_scale, q_stride, out_stride, pages_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_keys = tl.load(num_keys_ptr + row).to(tl.int32)
    per_split = tl.cdiv(tl.cdiv(num_keys, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    start = split * per_split
    end = tl.minimum(start + per_split, num_keys)
    first_head = kv_head * GROUP
    q_ptr += row.to(tl.int64) * q_stride + first_head * HEAD_DIM
    k_ptr += kv_head * HEAD_STRIDE
    v_ptr += kv_head * HEAD_STRIDE
    pages_ptr += row.to(tl.int64) * pages_stride
    d = tl.arange(0, DIMS)
    places = _tile_places(pages_ptr, start + tl.arange(0, BLOCK_KEYS), end, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE)
    wait_for_inputs(DEPENDENT)
    if GROUP == 1:
        top, weight, mixed = _single_head(
            q_ptr, k_ptr, v_ptr, pages_ptr, places, start, end, score_scale,
            HEAD_DIM, DIMS, BLOCK_KEYS, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE,
        )  # fmt: skip
        heads = first_head
        offsets, mask = d, d < HEAD_DIM
        head_mask = heads >= 0
    else:
        top, weight, mixed = _head_group(
            q_ptr, k_ptr, v_ptr, pages_ptr, places, start, end, score_scale,
            GROUP, PADDED, HEAD_DIM, DIMS, BLOCK_KEYS, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE,
        )  # fmt: skip
        g = tl.arange(0, PADDED)
        heads, head_mask = first_head + g, g < GROUP
        offsets, mask = g[:, None] * HEAD_DIM + d[None, :], (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    if SPLITS == 1:
        share = v_scale / tl.where(weight > 0.0, weight, 1.0)
        mixed = mixed * (share if GROUP == 1 else share[:, None])
        out = out_ptr + row.to(tl.int64) * out_stride + first_head * HEAD_DIM + offsets
        tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        part = (row * SPLITS + split) * (KV_HEADS * GROUP)
        tl.store(part_ptr + (part + first_head).to(tl.int64) * HEAD_DIM + offsets, mixed, mask=mask)
        tl.store(part_top_ptr + part + heads, top, mask=head_mask)
        tl.store(part_weight_ptr + part + heads, weight, mask=head_mask)


@triton.jit
def _add_splits(
    part_ptr, part_top_ptr, part_weight_ptr, out_ptr, v_scale, out_stride,
    HEADS: tl.constexpr, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    head, row = tl.program_id(0), tl.program_id(1)
    s, d = tl.arange(0, PADDED_SPLITS), tl.arange(0, DIMS)
    part = (row * SPLITS + s) * HEADS + head
    top = tl.load(part_top_ptr + part, mask=s < SPLITS, other=-1.0e30)
    weight = tl.load(part_weight_ptr + part, mask=s < SPLITS, other=0.0)
    mask = (s < SPLITS)[:, None] & (d < HEAD_DIM)[None, :]
    mixed = tl.load(part_ptr + part.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    kept = tl.exp2(top - tl.max(top, axis=0))
    total = tl.sum(weight * kept, axis=0)
    out = tl.sum(mixed * kept[:, None], axis=0) * (v_scale / tl.where(total > 0.0, total, 1.0))
    place = out_ptr + row.to(tl.int64) * out_stride + head * HEAD_DIM + d
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def attend_rows(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages_BP: Tensor,
    num_keys_B: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out_BHD: Tensor | None = None,
    tuning: RowsTuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """One query per row over the row's first `num_keys` positions. Rows of q and of `out_BHD` may lie apart."""
    num_rows, num_heads, head_dim = q_BHD.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    assert num_heads % num_kv_heads == 0
    assert k_cache.shape[3] == head_dim
    assert pages_BP.stride(1) == 1
    out_BHD = torch.empty_like(q_BHD, memory_format=torch.contiguous_format) if out_BHD is None else out_BHD
    for tensor in (q_BHD, out_BHD):
        assert tensor.shape == q_BHD.shape
        assert tensor.stride()[1:] == (head_dim, 1)
    if num_rows == 0:
        return out_BHD
    dims = num_heads, num_kv_heads, head_dim
    found = tuning or table.find("attend_rows", num_rows, dims, q_BHD.dtype, k_cache.dtype)
    chosen = found or RowsTuning.of(num_rows, k_cache.dtype, num_heads // num_kv_heads, head_dim)
    num_splits = chosen.num_splits(num_rows, num_kv_heads, pages_BP.shape[1] * page_size)
    mixed, top, weight = _parts(num_rows * num_splits * num_heads, head_dim, q_BHD.device)
    padded_dims, group = triton.next_power_of_2(head_dim), num_heads // num_kv_heads
    _attend_split[(num_kv_heads, num_rows, num_splits)](
        q_BHD, k_cache, v_cache, pages_BP, num_keys_B, out_BHD, mixed, top, weight,
        k_scale * math.log2(math.e) / math.sqrt(head_dim), v_scale,
        q_BHD.stride(0), out_BHD.stride(0), pages_BP.stride(0),
        KV_HEADS=num_kv_heads, GROUP=group, PADDED=max(16, triton.next_power_of_2(group)), SPLITS=num_splits,
        HEAD_DIM=head_dim, DIMS=max(16, padded_dims), BLOCK_KEYS=chosen.block_keys,
        **page_layout(k_cache, v_cache), num_warps=chosen.num_warps, num_stages=chosen.num_stages, **dependent(),
    )  # fmt: skip
    if num_splits > 1:
        _add_splits[(num_heads, num_rows)](
            mixed, top, weight, out_BHD, v_scale, out_BHD.stride(0),
            HEADS=num_heads, SPLITS=num_splits, PADDED_SPLITS=triton.next_power_of_2(num_splits),
            HEAD_DIM=head_dim, DIMS=padded_dims, num_warps=1, **dependent(),
        )  # fmt: skip
    return out_BHD


def _parts(count: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what the splits leave: weighted values, largest scores, sums of weights."""
    parts = torch.empty(count * (head_dim + 2), dtype=torch.float32, device=device)
    mixed, top, weight = parts.split([count * head_dim, count, count])
    return mixed, top, weight


# ---------------------------------------------------------------------- chunks of queries
# Attention of whole chunks of queries over pages, every chunk of a step in one launch.
#
# A program takes a block of queries of one head of one chunk and walks over the keys that any of them sees: first the
# blocks that all of them see whole, without a mask, then the ones that need it. How many queries a chunk has and where
# they stand only the device knows; the grid is fixed by the longest chunk and programs past a chunk's end return, so
# that a captured graph can be replayed for any contents.


@dataclass(frozen=True, slots=True)
class ChunksTuning:
    block_queries: int = 64
    block_keys: int = 64
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def of(cls, max_count: int, head_dim: int, bytes_per_number: int = 2) -> ChunksTuning:
        """Blocks of queries no larger than the longest chunk needs.

        Wide heads take more warps to stay in registers; full precision, which has no tensor cores, takes small blocks.
        """
        queries = min(64, max(16, triton.next_power_of_2(max_count)))
        if bytes_per_number > 2:
            return cls(min(32, queries), 32, num_warps=8, num_stages=2)
        if max_count <= 64:
            return cls(64, block_keys=128 if head_dim <= 64 else 64)
        return cls(num_stages=2)


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
    q, k_ptr, v_ptr, pages_ptr, places, top, weight, mixed, first, seen_Q, end, score_scale,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys added to running softmaxes; scores to the base 2. Also returns the places of the next block."""
    keys, d = first + tl.arange(0, BLOCK_K), tl.arange(0, DIMS)
    place = places[:, None] + d[None, :]
    # The next block's pages are read along with this block's keys: one wait per block instead of two.
    places = _tile_places(pages_ptr, keys + BLOCK_K, end, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE)
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
    return places, new_top, weight, mixed


@triton.jit(
    do_not_specialize=["pages_stride"],
    do_not_specialize_on_alignment=["pages_ptr", "first_ptr", "count_ptr", "start_ptr", "bidirectional_ptr"],
)
def _attend_chunks(
    q_ptr, k_ptr, v_ptr, pages_ptr, first_ptr, count_ptr, start_ptr, bidirectional_ptr, out_ptr,
    score_scale, v_scale, q_stride, out_stride, pages_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    head, chunk = tl.program_id(1), tl.program_id(2)
    # The last queries of a chunk see the most keys: they come first, so that no long program is left for the end.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
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
    k_ptr += head // GROUP * HEAD_STRIDE
    v_ptr += head // GROUP * HEAD_STRIDE
    pages_ptr += chunk.to(tl.int64) * pages_stride
    top = tl.full((BLOCK_Q,), -1.0e30, dtype=tl.float32)
    weight = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_Q, DIMS), dtype=tl.float32)
    places = _tile_places(pages_ptr, tl.arange(0, BLOCK_K), end, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE)
    for first in range(0, full, BLOCK_K):
        places, top, weight, mixed = _attend_block(
            q, k_ptr, v_ptr, pages_ptr, places, top, weight, mixed, first, seen_Q, end, score_scale,
            HEAD_DIM, DIMS, BLOCK_K, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE, False,
        )  # fmt: skip
    for first in range(full, end, BLOCK_K):
        places, top, weight, mixed = _attend_block(
            q, k_ptr, v_ptr, pages_ptr, places, top, weight, mixed, first, seen_Q, end, score_scale,
            HEAD_DIM, DIMS, BLOCK_K, PAGE_SIZE, PAGE_STRIDE, POSITION_STRIDE, True,
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
    max_count: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out_THD: Tensor | None = None,
    tuning: ChunksTuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """Queries of several chunks over their own pages. Rows of q and of `out_THD` may lie apart."""
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads, num_chunks = k_cache.shape[2], pages_CP.shape[0]
    assert num_heads % num_kv_heads == 0
    assert k_cache.shape[3] == head_dim
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
    chosen = found or ChunksTuning.of(max_count, head_dim, q_THD.element_size())
    _attend_chunks[(triton.cdiv(max_count, chosen.block_queries), num_heads, num_chunks)](
        q_THD, k_cache, v_cache, pages_CP, first_C, count_C, start_C, bidirectional_C, out_THD,
        k_scale * math.log2(math.e) / math.sqrt(head_dim), v_scale,
        q_THD.stride(0), out_THD.stride(0), pages_CP.stride(0),
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, DIMS=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_Q=chosen.block_queries, BLOCK_K=chosen.block_keys,
        **page_layout(k_cache, v_cache), num_warps=chosen.num_warps, num_stages=chosen.num_stages, **dependent(),
    )  # fmt: skip
    return out_THD


# Which of them is the fastest that runs here: long chunks by the Hopper kernel where there is one.


logger = logging.getLogger("kestrel.kernels")

LONG = {64: 640, 128: 256}
"""Queries by size of a head: up to so many, tiles of the Hopper kernel have few keys and mostly wait."""


def fastest_attend_chunks(capability: tuple[int, int]) -> Op:
    return attend_chunks_on_hopper if capability[0] == HOPPER else attend_chunks


def attend_chunks_on_hopper(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *where: Any,
    out_THD: Tensor | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """As `attend_chunks`; by the Hopper kernel if it takes these sizes."""
    if not _suits_hopper(q_THD, k_cache, max_count=where[5]):
        return attend_chunks(q_THD, k_cache, v_cache, *where, out_THD=out_THD, table=table)
    # Here and not above: other GPUs, and Triton before 3.6, have no use for the module.
    from kestrel.kernels.triton import hopper_chunk_attention as hopper  # noqa: PLC0415

    return hopper.attend_chunks(q_THD, k_cache, v_cache, *where, out_THD=out_THD)


def _suits_hopper(q_THD: Tensor, k_cache: Tensor, max_count: int) -> bool:
    """Long chunks, heads of one or two loads, addresses that a load can start from, and pages of whole loads."""
    (_, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q_THD.shape, k_cache.shape
    if not q_THD.dtype == k_cache.dtype == torch.bfloat16:
        return False
    if max_count <= LONG.get(head_dim, max_count) or page_size % 16 or q_THD.stride(0) % 8 or q_THD.data_ptr() % 16:
        return False
    return _is_right_on_hopper(num_heads // num_kv_heads, head_dim, q_THD.device)


@lru_cache(maxsize=64)
def _is_right_on_hopper(group: int, head_dim: int, device: torch.device) -> bool:
    """Tried once for heads of a kind, by the first step of a process, which is not a captured one."""
    from kestrel.kernels.triton import hopper_chunk_attention as hopper  # noqa: PLC0415

    start, count = torch.tensor([[0, 77], [200, 130]], device=device)
    pages = torch.randperm(2 * 16, device=device).view(2, 16)
    q_THD = torch.randn(count.sum(), 2 * group, head_dim, device=device, dtype=torch.bfloat16)
    k_cache, v_cache = as_pages(torch.randn(2, 2 * 16, 16, 2, head_dim, device=device, dtype=torch.bfloat16))
    where = pages, count.cumsum(0) - count, count, start, torch.zeros_like(count), 200
    fault = fault_of(
        lambda: hopper.attend_chunks(q_THD, k_cache, v_cache, *where),
        lambda: plain_attend_chunks(q_THD.float(), k_cache.float(), v_cache.float(), *where),
    )
    if fault is not None:
        logger.warning("attention of prompts runs without the Hopper kernel: %s", fault)
    return fault is None
