"""Low-rank deltas of several adapters in one batch, two kernels for each end of a block.

The first makes h = a · x (`low_rank_shrink`), the second adds b · h. Both work on tiles of rows of one slot
(`tile_slots`, once per step) and read slots and ranks on the device, so that a captured graph serves any rows, slots
and ranks: a tile without rows and the parts of a lower rank end at once.
Parts of h are always added up in the same order.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.low_rank import RANK_STEP, SlotFactors, SlotTiles
from kestrel.kernels.triton.activations import gelu_tanh
from kestrel.kernels.triton.low_rank_shrink import FEW_ROWS, Tuning, shrink
from kestrel.kernels.triton.moe_grouping import group_pairs
from kestrel.kernels.triton.tuning_table import NO_TABLE, TuningTable


def tile_slots(slot_T: Tensor, num_slots: int, rows_per_tile: int | None = None) -> SlotTiles:
    """From each row's slot, -1 for the base model."""
    rows = rows_per_tile or usual_rows_per_tile(len(slot_T))
    own_T = slot_T.masked_fill(slot_T < 0, num_slots)
    blocks = group_pairs(own_T, num_slots + 1, rows)
    return SlotTiles(blocks.expert_G, blocks.pairs_R.view(-1, rows))


def usual_rows_per_tile(num_rows: int) -> int:
    """Decoding has as many rows as the batch, prefill at least as many as a question."""
    return next((rows for rows, most in ((FEW_ROWS, 64), (64, 1024)) if num_rows <= most), 128)


@triton.jit
def _add_delta(
    total, h_place, part_stride, b_ptr, f, rank, num_out, max_rank,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """total + b · h; h, the sum of its parts, is rounded as the plain version does."""
    for first in range(0, rank, RANKS):
        r = first + tl.arange(0, RANKS)
        h = tl.load(h_place + r[None, :], mask=(r < rank)[None, :], other=0.0)
        for part in tl.static_range(1, SPLITS):
            h += tl.load(h_place + part * part_stride + r[None, :], mask=(r < rank)[None, :], other=0.0)
        b_mask = (r < rank)[:, None]
        if not EVEN:
            b_mask = b_mask & (f < num_out)[None, :]
        b = tl.load(b_ptr + f[None, :] * max_rank + r[:, None], mask=b_mask, other=0.0)
        total = tl.dot(h.to(b.dtype), b, total, input_precision="ieee")
    return total


@triton.jit
def _expand_inputs(
    h_ptr, slot_ptr, rows_ptr,
    qkv_ptr, b0_ptr, rank0_ptr, num_out0, qkv_stride, b0_stride,
    hidden_ptr, b1_ptr, rank1_ptr, num_out1, hidden_stride, b1_stride, max_rank, num_slots, num_blocks0,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr,
    ACTIVATES_BASE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Outputs in one row: first those of qkv, then the hidden ones, which end with their activation."""
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + tile).to(tl.int64)
    if slot < 0:
        return
    place = tile * ROWS + tl.arange(0, ROWS)
    rows = tl.load(rows_ptr + place)
    part_stride = tl.num_programs(0).to(tl.int64) * ROWS * max_rank
    h_place = h_ptr + (place * max_rank).to(tl.int64)[:, None]
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    if block < num_blocks0:
        rank = tl.multiple_of(tl.load(rank0_ptr + slot), 16)
        if rank > 0:
            f = block * OUTPUTS + tl.arange(0, OUTPUTS)
            b_ptr = b0_ptr + slot * b0_stride
            delta = _add_delta(
                total, h_place, part_stride, b_ptr, f, rank, num_out0, max_rank, SPLITS, ROWS, RANKS, EVEN
            )
            y_place = qkv_ptr + rows.to(tl.int64)[:, None] * qkv_stride + f[None, :]
            mask = (rows >= 0)[:, None] & (f < num_out0)[None, :]
            y = tl.load(y_place, mask=mask, other=0.0).to(tl.float32)
            y += delta.to(qkv_ptr.dtype.element_ty).to(tl.float32)
            tl.store(y_place, y.to(qkv_ptr.dtype.element_ty), mask=mask)
    elif (slot < num_slots) | ACTIVATES_BASE:
        rank = tl.multiple_of(tl.load(rank1_ptr + slot), 16)
        f = (block - num_blocks0) * OUTPUTS + tl.arange(0, OUTPUTS)
        h_place += SPLITS * part_stride
        b_ptr = b1_ptr + slot * b1_stride
        delta = _add_delta(total, h_place, part_stride, b_ptr, f, rank, num_out1, max_rank, SPLITS, ROWS, RANKS, EVEN)
        z_place = hidden_ptr + rows.to(tl.int64)[:, None] * hidden_stride + f[None, :]
        mask = (rows >= 0)[:, None] & (f < num_out1)[None, :]
        z = tl.load(z_place, mask=mask, other=0.0).to(tl.float32)
        z += delta.to(hidden_ptr.dtype.element_ty).to(tl.float32)
        z = gelu_tanh(z.to(hidden_ptr.dtype.element_ty).to(tl.float32))
        tl.store(z_place, z.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _expand_outputs(
    h_ptr, slot_ptr, rows_ptr, total_ptr, b0_ptr, rank0_ptr, b1_ptr, rank1_ptr,
    num_out, total_stride, b0_stride, b1_stride, max_rank,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, RANKS: tl.constexpr, SPLITS0: tl.constexpr, SPLITS1: tl.constexpr,
    HAS_SECOND: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(slot_ptr + tile).to(tl.int64)
    if slot < 0:
        return
    rank0 = tl.multiple_of(tl.load(rank0_ptr + slot), 16)
    rank1 = tl.multiple_of(tl.load(rank1_ptr + slot), 16)
    if not HAS_SECOND:
        rank1 = rank0 * 0
    if rank0 + rank1 == 0:
        return
    place = tile * ROWS + tl.arange(0, ROWS)
    rows = tl.load(rows_ptr + place)
    part_stride = tl.num_programs(0).to(tl.int64) * ROWS * max_rank
    h_place = h_ptr + (place * max_rank).to(tl.int64)[:, None]
    f = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    delta = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    delta = _add_delta(
        delta, h_place, part_stride, b0_ptr + slot * b0_stride, f, rank0, num_out, max_rank, SPLITS0, ROWS, RANKS, EVEN
    )
    if HAS_SECOND:
        h_place += SPLITS0 * part_stride
        b1_ptr += slot * b1_stride
        delta = _add_delta(delta, h_place, part_stride, b1_ptr, f, rank1, num_out, max_rank, SPLITS1, ROWS, RANKS, EVEN)
    y_place = total_ptr + rows.to(tl.int64)[:, None] * total_stride + f[None, :]
    mask = (rows >= 0)[:, None] & (f < num_out)[None, :]
    y = tl.load(y_place, mask=mask, other=0.0).to(tl.float32) + delta
    tl.store(y_place, y.to(total_ptr.dtype.element_ty), mask=mask)


def add_input_deltas(
    tiles: SlotTiles,
    y_TD: Tensor,
    qkv_TF: Tensor,
    qkv: SlotFactors,
    hidden_TF: Tensor,
    fc1: SlotFactors,
    *,
    activates_base: bool,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> None:
    _check_sizes(y_TD, qkv, qkv_TF)
    _check_sizes(y_TD, fc1, hidden_TF)
    num_slots, max_rank, _ = qkv.a_SRD.shape
    num_tiles, rows = tiles.rows_KN.shape
    if num_tiles == 0:
        return
    dims = rows, max_rank, y_TD.shape[1], qkv_TF.shape[1], hidden_TF.shape[1]
    found = tuning or table.find("add_input_deltas", len(y_TD), dims, y_TD.dtype)
    chosen = found or Tuning.of(rows, len(y_TD), max_rank, y_TD.dtype)
    shrunk = shrink(tiles, chosen, y_TD, None, None, qkv, y_TD, fc1)
    blocks = [triton.cdiv(out_TF.shape[1], chosen.block_out) for out_TF in (qkv_TF, hidden_TF)]
    _expand_inputs[(num_tiles, sum(blocks))](
        shrunk.h, tiles.slot_K, tiles.rows_KN,
        qkv_TF, qkv.b_SFR, qkv.rank_S, qkv_TF.shape[1], qkv_TF.stride(0), qkv.b_SFR.stride(0),
        hidden_TF, fc1.b_SFR, fc1.rank_S, hidden_TF.shape[1], hidden_TF.stride(0), fc1.b_SFR.stride(0),
        max_rank, num_slots, blocks[0],
        ROWS=rows, OUTPUTS=chosen.block_out, RANKS=chosen.expand_ranks, SPLITS=shrunk.splits[0],
        ACTIVATES_BASE=activates_base, EVEN=all(t.shape[1] % chosen.block_out == 0 for t in (qkv_TF, hidden_TF)),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip


def add_output_deltas(
    tiles: SlotTiles,
    total_TD: Tensor,
    mixed_TD: Tensor,
    y_TD: Tensor,
    reads_norm_S: Tensor,
    proj: SlotFactors,
    hidden_TF: Tensor,
    fc2: SlotFactors,
    *,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> None:
    _check_sizes(mixed_TD, proj, total_TD)
    _check_sizes(y_TD, proj, total_TD)
    _check_sizes(hidden_TF, fc2, total_TD)
    num_tiles, rows = tiles.rows_KN.shape
    num_out, max_rank = proj.b_SFR.shape[1:]
    if num_tiles == 0:
        return
    dims = rows, max_rank, y_TD.shape[1], hidden_TF.shape[1]
    found = tuning or table.find("add_output_deltas", len(y_TD), dims, y_TD.dtype)
    chosen = found or Tuning.of(rows, len(y_TD), max_rank, y_TD.dtype)
    shrunk = shrink(tiles, chosen, mixed_TD, y_TD, reads_norm_S, proj, hidden_TF, fc2)
    _expand_outputs[(num_tiles, triton.cdiv(num_out, chosen.sum_block_out))](
        shrunk.h, tiles.slot_K, tiles.rows_KN, total_TD, proj.b_SFR, proj.rank_S, fc2.b_SFR, fc2.rank_S,
        num_out, total_TD.stride(0), proj.b_SFR.stride(0), fc2.b_SFR.stride(0), max_rank,
        ROWS=rows, OUTPUTS=chosen.sum_block_out, RANKS=chosen.expand_ranks,
        SPLITS0=shrunk.splits[0], SPLITS1=shrunk.splits[1], HAS_SECOND=True,
        EVEN=num_out % chosen.sum_block_out == 0, num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip


def add_deltas(
    tiles: SlotTiles,
    y_TF: Tensor,
    x_TD: Tensor,
    factors: SlotFactors,
    other_TD: Tensor | None = None,
    reads_other_S: Tensor | None = None,
    *,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> None:
    _check_sizes(x_TD, factors, y_TF)
    num_tiles, rows = tiles.rows_KN.shape
    num_out, max_rank = factors.b_SFR.shape[1:]
    if num_tiles == 0:
        return
    dims = rows, max_rank, x_TD.shape[1], num_out
    found = tuning or table.find("add_deltas", len(x_TD), dims, x_TD.dtype)
    chosen = found or Tuning.of(rows, len(x_TD), max_rank, x_TD.dtype)
    shrunk = shrink(tiles, chosen, x_TD, other_TD, reads_other_S, factors)
    _expand_outputs[(num_tiles, triton.cdiv(num_out, chosen.sum_block_out))](
        shrunk.h, tiles.slot_K, tiles.rows_KN, y_TF,
        factors.b_SFR, factors.rank_S, factors.b_SFR, factors.rank_S,
        num_out, y_TF.stride(0), factors.b_SFR.stride(0), factors.b_SFR.stride(0), max_rank,
        ROWS=rows, OUTPUTS=chosen.sum_block_out, RANKS=chosen.expand_ranks,
        SPLITS0=shrunk.splits[0], SPLITS1=0, HAS_SECOND=False,
        EVEN=num_out % chosen.sum_block_out == 0, num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip


def _check_sizes(x_TD: Tensor, factors: SlotFactors, y_TF: Tensor) -> None:
    num_slots, max_rank, num_in = factors.a_SRD.shape
    assert factors.b_SFR.shape == (num_slots, y_TF.shape[1], max_rank)
    assert factors.rank_S.shape == (num_slots + 1,)
    assert max_rank % RANK_STEP == 0
    assert x_TD.shape == (len(y_TF), num_in)
    assert x_TD.stride(1) == y_TF.stride(1) == 1
    assert factors.a_SRD[0].is_contiguous()
    assert factors.b_SFR[0].is_contiguous()
