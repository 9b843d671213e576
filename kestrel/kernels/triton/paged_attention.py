"""Decode attention over pages, keys split between programs: each split leaves its share, a second kernel adds them up.

A row's keys are shared out evenly between the splits by its own number of keys, which only the device knows; the number
of splits is fixed by the shapes, so that a captured graph can be replayed for any contents.

With one query head per key head the products are plain sums. A tile's lanes then keep running softmaxes of their own,
one per key of the tile, which meet only after the last key: no sum in the loop crosses warps. Grouped heads go through
the tensor cores, a group padded to 16 queries.
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
from kestrel.kernels.triton.tuning_table import NO_TABLE, TuningTable
from kestrel.kernels.triton.widening import widened

MANY_ROWS = 40
"""From here on every multiprocessor has rows enough without splitting their keys."""


@dataclass(frozen=True, slots=True)
class Tuning:
    block_keys: int = 32
    num_warps: int = 2
    num_stages: int = 3
    target_programs: int = 1024
    """Keys are split until there are about so many programs: several for each multiprocessor at once."""
    min_keys_per_split: int = 64

    @classmethod
    def of(cls, num_rows: int, cache_dtype: torch.dtype) -> Tuning:
        """Found on an H200. Numbers of one byte take more work to unpack than to read."""
        if cache_dtype.itemsize == 1:
            return cls(block_keys=16) if num_rows >= MANY_ROWS else cls(num_warps=4)
        return cls(block_keys=64) if num_rows >= MANY_ROWS else cls()

    def num_splits(self, num_rows: int, num_kv_heads: int, max_keys: int) -> int:
        wanted = triton.cdiv(self.target_programs, max(1, num_rows * num_kv_heads))
        return max(1, min(wanted, max_keys // self.min_keys_per_split))


@triton.jit
def tile_slots(pages_ptr, keys, end, PAGE_SIZE: tl.constexpr):
    page = tl.load(pages_ptr + keys // PAGE_SIZE, mask=keys < end, other=0).to(tl.int64)
    return page * PAGE_SIZE + keys % PAGE_SIZE


@triton.jit
def _single_head(
    q_ptr, k_ptr, v_ptr, pages_ptr, start, end, score_scale, slot_stride,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """(largest score, sum of weights, weighted values [DIMS]) of one query; scores to the base 2."""
    d = tl.arange(0, DIMS)
    q = tl.load(q_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32) * score_scale
    top = tl.full((BLOCK_KEYS,), -1.0e30, dtype=tl.float32)
    weight = tl.zeros((BLOCK_KEYS,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_KEYS, DIMS), dtype=tl.float32)
    slots = tile_slots(pages_ptr, start + tl.arange(0, BLOCK_KEYS), end, PAGE_SIZE)
    for first in range(start, end, BLOCK_KEYS):
        keys = first + tl.arange(0, BLOCK_KEYS)
        place = slots[:, None] * slot_stride + d[None, :]
        inside = (keys < end)[:, None] & (d < HEAD_DIM)[None, :]
        # The next tile's pages are read along with this tile's keys: one wait per tile instead of two.
        slots = tile_slots(pages_ptr, keys + BLOCK_KEYS, end, PAGE_SIZE)
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
    q_ptr, k_ptr, v_ptr, pages_ptr, start, end, score_scale, slot_stride,
    GROUP: tl.constexpr, PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr,
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
        slots = tile_slots(pages_ptr, keys, end, PAGE_SIZE)
        place = slots[:, None] * slot_stride + d[None, :]
        inside = (keys < end)[:, None] & (d < HEAD_DIM)[None, :]
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
    score_scale, v_scale, q_stride, out_stride, pages_stride, slot_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_keys = tl.load(num_keys_ptr + row).to(tl.int32)
    per_split = tl.cdiv(tl.cdiv(num_keys, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    start = split * per_split
    end = tl.minimum(start + per_split, num_keys)
    first_head = kv_head * GROUP
    q_ptr += row.to(tl.int64) * q_stride + first_head * HEAD_DIM
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    pages_ptr += row.to(tl.int64) * pages_stride
    d = tl.arange(0, DIMS)
    if GROUP == 1:
        top, weight, mixed = _single_head(
            q_ptr, k_ptr, v_ptr, pages_ptr, start, end, score_scale, slot_stride,
            HEAD_DIM, DIMS, BLOCK_KEYS, PAGE_SIZE,
        )  # fmt: skip
        heads = first_head
        offsets, mask = d, d < HEAD_DIM
        head_mask = heads >= 0
    else:
        top, weight, mixed = _head_group(
            q_ptr, k_ptr, v_ptr, pages_ptr, start, end, score_scale, slot_stride,
            GROUP, PADDED, HEAD_DIM, DIMS, BLOCK_KEYS, PAGE_SIZE,
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
    page_size: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out_BHD: Tensor | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """One query per row over the row's first `num_keys` positions. Rows of q and of `out_BHD` may lie apart."""
    num_rows, num_heads, head_dim = q_BHD.shape
    num_kv_heads = k_cache.shape[1]
    assert num_heads % num_kv_heads == 0
    assert k_cache.shape == v_cache.shape
    assert k_cache.shape[2] == head_dim
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert pages_BP.stride(1) == 1
    out_BHD = torch.empty_like(q_BHD, memory_format=torch.contiguous_format) if out_BHD is None else out_BHD
    for tensor in (q_BHD, out_BHD):
        assert tensor.shape == q_BHD.shape
        assert tensor.stride()[1:] == (head_dim, 1)
    if num_rows == 0:
        return out_BHD
    dims = num_heads, num_kv_heads, head_dim
    found = tuning or table.find("attend_rows", num_rows, dims, q_BHD.dtype, k_cache.dtype)
    chosen = found or Tuning.of(num_rows, k_cache.dtype)
    num_splits = chosen.num_splits(num_rows, num_kv_heads, pages_BP.shape[1] * page_size)
    mixed, top, weight = _parts(num_rows * num_splits * num_heads, head_dim, q_BHD.device)
    padded_dims, group = triton.next_power_of_2(head_dim), num_heads // num_kv_heads
    _attend_split[(num_kv_heads, num_rows, num_splits)](
        q_BHD, k_cache, v_cache, pages_BP, num_keys_B, out_BHD, mixed, top, weight,
        k_scale * math.log2(math.e) / math.sqrt(head_dim), v_scale,
        q_BHD.stride(0), out_BHD.stride(0), pages_BP.stride(0), k_cache.stride(0),
        KV_HEADS=num_kv_heads, GROUP=group, PADDED=max(16, triton.next_power_of_2(group)), SPLITS=num_splits,
        HEAD_DIM=head_dim, DIMS=max(16, padded_dims), BLOCK_KEYS=chosen.block_keys, PAGE_SIZE=page_size,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, **dependent(),
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
