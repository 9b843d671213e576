"""Low-rank deltas of several adapters in one batch, two kernels for each end of a block.

The first makes h = a · x of one or two matrices (`shrink`), the second adds b · h. Both work on tiles of rows of one
slot (`tile_slots`, once per step) and read slots and ranks on the device, so that a captured graph serves any rows,
slots and ranks: a tile without rows and the parts of a lower rank end immediately.

With few tiles the columns of x are split over programs. In small tiles whoever reads h adds up its parts, always in the
same order; in large ones a kernel does it once, because each of many blocks of outputs would do it anew.

The base model's product of 2 to 16 rows can make h as well (`small_adapted_linear`): a few more programs of a kernel
that waits for its weights anyway, instead of a kernel between two others.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.low_rank import RANK_STEP, SlotFactors, SlotTiles
from kestrel.kernels.triton import linear
from kestrel.kernels.triton.device_functions import gelu_tanh
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, dependent, has_room, wait_for_inputs
from kestrel.kernels.triton.linear import MAX_ROWS, SUMMED_ROWS, finish, output_numbers, row_dots, small_linear
from kestrel.kernels.triton.moe_grouped import group_pairs

FEW_ROWS = 16
"""Rows of a tile with few of them, where the factors stream through; above, tiles are those of a matrix product."""
SMALL_RANK = 64
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tuning:
    rank_block: int
    """Ranks of one program that makes h."""
    block_in: int
    columns_per_split: int
    block_out: int
    sum_block_out: int
    """The same where two deltas meet in one output, of which there are fewer."""
    expand_ranks: int
    """Ranks that are added at a time."""
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        if self.columns_per_split % self.block_in != 0:
            raise ValueError(
                f"columns_per_split {self.columns_per_split} is no multiple of block_in {self.block_in}: "
                "columns would count twice"
            )

    @classmethod
    def of(cls, rows_per_tile: int, num_rows: int, max_rank: int, dtype: torch.dtype) -> Tuning:
        """Columns are split until there are programs for a whole GPU: the smaller the rank, the more."""
        widest = max(16, triton.next_power_of_2(max_rank))
        is_small, is_wide = max_rank <= SMALL_RANK, dtype == torch.float32
        if rows_per_tile <= FEW_ROWS:
            if is_small:
                expand_ranks = min(32, widest)
                return cls(16, 256, 512, block_out=128, sum_block_out=32, expand_ranks=expand_ranks, num_warps=2)
            return cls(16, 256, 2048, block_out=32, sum_block_out=16, expand_ranks=64 if is_wide else 128)
        block_out = 64 if is_wide else 128
        return cls(
            rank_block=min(64, widest),
            block_in=32 if is_wide else 128 if is_small else 64,
            columns_per_split=1024 if is_small else 2048 if num_rows <= 2048 else 8192,
            block_out=block_out,
            sum_block_out=64 if is_small else block_out,
            expand_ranks=min(32 if is_small or is_wide else 64, widest),
            num_warps=4 if rows_per_tile <= 64 else 8,
        )

    def num_splits(self, num_in: int) -> int:
        return triton.cdiv(num_in, self.columns_per_split)


@triton.jit
def _shrink(
    h_ptr, slot_ptr, rows_ptr, reads_other_ptr,
    x0_ptr, other0_ptr, a0_ptr, rank0_ptr, num_in0, x0_stride, other0_stride, a0_stride,
    x1_ptr, a1_ptr, rank1_ptr, num_in1, x1_stride, a1_stride, max_rank,
    ROWS: tl.constexpr, BLOCK_IN: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS0: tl.constexpr,
    HAS_OTHER: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Two matrices: the first SPLITS0 parts are those of the first, the other parts those of the second."""
    tile, part = tl.program_id(0), tl.program_id(2)
    place = tile * ROWS + tl.arange(0, ROWS)
    rows, found = tl.load(rows_ptr + place), tl.load(slot_ptr + tile).to(tl.int64)
    slot = tl.maximum(found, 0)
    if part < SPLITS0:
        x_ptr, x_stride, num_in, start = x0_ptr, x0_stride, num_in0, part * COLUMNS
        a_ptr, rank_ptr = a0_ptr + slot * a0_stride, rank0_ptr
        if HAS_OTHER:
            reads_other = tl.load(reads_other_ptr + slot)
            if reads_other != 0:
                x_ptr, x_stride = other0_ptr, other0_stride
    else:
        x_ptr, x_stride, num_in, start = x1_ptr, x1_stride, num_in1, (part - SPLITS0) * COLUMNS
        a_ptr, rank_ptr = a1_ptr + slot * a1_stride, rank1_ptr
    rank = tl.where(found >= 0, tl.multiple_of(tl.load(rank_ptr + slot), 16), 0)
    r = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    # Before the first return: a kernel whose programs all end without waiting lets the next one overtake the last.
    wait_for_inputs(DEPENDENT)
    if tl.program_id(1) * RANKS >= rank:
        return
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    x_place = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    for first in range(start, tl.minimum(start + COLUMNS, num_in), BLOCK_IN):
        d = first + tl.arange(0, BLOCK_IN)
        x_mask, a_mask = (rows >= 0)[:, None], (r < rank)[None, :]
        if not EVEN:
            x_mask, a_mask = x_mask & (d < num_in)[None, :], a_mask & (d < num_in)[:, None]
        x = tl.load(x_place + d[None, :], mask=x_mask, other=0.0)
        a = tl.load(a_ptr + r[None, :] * num_in + d[:, None], mask=a_mask, other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    h_place = h_ptr + (part * tl.num_programs(0) * ROWS + place).to(tl.int64)[:, None] * max_rank
    tl.store(h_place + r[None, :], total.to(h_ptr.dtype.element_ty), mask=(r < rank)[None, :])


@triton.jit
def _sum_parts(
    parts_ptr, h_ptr, slot_ptr, rank0_ptr, rank1_ptr, max_rank, splits0, splits1,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Parts of two matrices to h of both: [2, tiles · rows, max_rank]. What lies beyond a rank stays as it was."""
    tile, matrix = tl.program_id(0), tl.program_id(2)
    slot = tl.load(slot_ptr + tile)
    if slot < 0:
        return
    rank_ptr, splits = rank0_ptr, splits0
    if matrix > 0:
        rank_ptr, splits = rank1_ptr, splits1
    rank = tl.load(rank_ptr + slot)
    inside_tile = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_used = (inside_tile < ROWS * max_rank) & (inside_tile % max_rank < rank)
    place = tile.to(tl.int64) * ROWS * max_rank + inside_tile
    stride = tl.num_programs(0).to(tl.int64) * ROWS * max_rank
    part_place = parts_ptr + matrix * splits0 * stride + place
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(splits):
        total += tl.load(part_place, mask=is_used, other=0.0)
        part_place += stride
    tl.store(h_ptr + matrix * stride + place, total.to(h_ptr.dtype.element_ty), mask=is_used)


@dataclass(frozen=True, slots=True)
class Shrunk:
    """h of one or two matrices in parts: [parts of the first, then those of the second, tiles · rows, max_rank]."""

    h: Tensor
    splits: tuple[int, int]


def shrink(
    tiles: SlotTiles,
    chosen: Tuning,
    x_TD: Tensor,
    other_TD: Tensor | None,
    reads_other_S: Tensor | None,
    first: SlotFactors,
    second_x_TD: Tensor | None = None,
    second: SlotFactors | None = None,
) -> Shrunk:
    num_tiles, rows = tiles.rows_KN.shape
    max_rank, has_second = first.a_SRD.shape[1], second is not None
    if second_x_TD is None or second is None:
        second_x_TD, second = x_TD, first
    assert second.a_SRD.shape[1] == max_rank
    num_in, second_in = x_TD.shape[1], second_x_TD.shape[1]
    splits = chosen.num_splits(num_in), chosen.num_splits(second_in) if has_second else 0
    dtype = x_TD.dtype if max(splits) == 1 else torch.float32
    h = torch.empty(sum(splits), num_tiles * rows, max_rank, dtype=dtype, device=x_TD.device)
    other = x_TD if other_TD is None else other_TD
    _shrink[(num_tiles, triton.cdiv(max_rank, chosen.rank_block), sum(splits))](
        h, tiles.slot_K, tiles.rows_KN, first.rank_S if reads_other_S is None else reads_other_S,
        x_TD, other, first.a_SRD, first.rank_S, num_in, x_TD.stride(0), other.stride(0), first.a_SRD.stride(0),
        second_x_TD, second.a_SRD, second.rank_S, second_in, second_x_TD.stride(0), second.a_SRD.stride(0), max_rank,
        ROWS=rows, BLOCK_IN=chosen.block_in, RANKS=chosen.rank_block, COLUMNS=chosen.columns_per_split,
        SPLITS0=splits[0], HAS_OTHER=other_TD is not None,
        EVEN=num_in % chosen.block_in == 0 and second_in % chosen.block_in == 0,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, **dependent(),
    )  # fmt: skip
    shrunk = Shrunk(h, splits)
    return shrunk if rows <= FEW_ROWS or max(splits) == 1 else _summed(shrunk, tiles, first, second, x_TD.dtype)


def _summed(shrunk: Shrunk, tiles: SlotTiles, first: SlotFactors, second: SlotFactors, dtype: torch.dtype) -> Shrunk:
    num_tiles, rows = tiles.rows_KN.shape
    max_rank = shrunk.h.shape[2]
    num_matrices = 2 if shrunk.splits[1] else 1
    h = torch.empty(num_matrices, *shrunk.h.shape[1:], dtype=dtype, device=shrunk.h.device)
    _sum_parts[(num_tiles, triton.cdiv(rows * max_rank, SUM_BLOCK), num_matrices)](
        shrunk.h, h, tiles.slot_K, first.rank_S, second.rank_S, max_rank, *shrunk.splits, ROWS=rows, BLOCK=SUM_BLOCK
    )
    return Shrunk(h, (1, num_matrices - 1))


@triton.jit(do_not_specialize=["num_rows", "num_shrinks"])
def _multiply_and_shrink(
    x_ptr, other_ptr, w_ptr, y_ptr, bias_ptr, gelu_rows_ptr,
    h_ptr, slot_ptr, rows_ptr, reads_other_ptr, a_ptr, rank_ptr,
    num_rows, num_out, num_in, x_stride, other_stride, w_stride, y_stride, a_stride, max_rank, num_shrinks,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr, RANK_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GELU: tl.constexpr, HAS_OTHER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first programs make h of one tile each, the others outputs of the base model."""
    is_shrink = tl.program_id(0) < num_shrinks
    tile, block = tl.program_id(0) // RANK_BLOCKS, tl.program_id(0) - num_shrinks
    rows, limit, source_ptr, source_stride = tl.arange(0, ROWS), num_out, x_ptr, x_stride
    matrix_ptr, matrix_stride = w_ptr, w_stride
    if is_shrink:
        block = tl.program_id(0) % RANK_BLOCKS
        slot = tl.load(slot_ptr + tile).to(tl.int64)
        limit = tl.load(rank_ptr + slot, mask=slot >= 0, other=0)
        # A tile's free places, and a block's places beyond the rank, compute what nobody reads.
        rows = tl.maximum(tl.load(rows_ptr + tile * ROWS + tl.arange(0, ROWS)), 0).to(tl.int32)
        matrix_ptr, matrix_stride = a_ptr + tl.maximum(slot, 0) * a_stride, num_in
        if HAS_OTHER:
            reads_other = tl.load(reads_other_ptr + slot, mask=slot >= 0, other=0)
            if reads_other != 0:
                source_ptr, source_stride = other_ptr, other_stride
    outs = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    lines = tl.where(is_shrink, tl.minimum(outs, tl.maximum(limit, 1) - 1), outs)
    wait_for_inputs(DEPENDENT)
    if block * BLOCK_OUT >= limit:
        return
    place = matrix_ptr + lines.to(tl.int64)[:, None] * matrix_stride
    total, _ = row_dots(
        source_ptr, place, place, rows, outs, num_rows, limit, num_in, source_stride,
        ROWS, BLOCK_OUT, BLOCK_IN, EVEN, False,
    )  # fmt: skip
    own_rows, own_outs = tl.arange(0, ROWS)[None, :], outs[:, None]
    if is_shrink:
        h_place = h_ptr + (tile * ROWS + own_rows).to(tl.int64) * max_rank
        tl.store(h_place + own_outs, total.to(h_ptr.dtype.element_ty), mask=own_outs < limit)
    else:
        bias = output_numbers(bias_ptr, own_outs, num_out, HAS_BIAS)
        inside = (own_rows < num_rows) & (own_outs < num_out)
        finish(
            total, 1.0, bias, 0.0, own_rows, own_outs, inside, y_ptr, gelu_rows_ptr, num_rows, y_stride,
            HAS_BIAS, False, False, HAS_GELU, HAS_GELU,
        )  # fmt: skip


# ---------------------------------------------------------------------- b · h, added


def tile_slots(slot_T: Tensor, num_slots: int, rows_per_tile: int | None = None) -> SlotTiles:
    """From each row's slot, -1 for the base model."""
    rows = rows_per_tile or usual_rows_per_tile(len(slot_T))
    own_T = slot_T.masked_fill(slot_T < 0, num_slots)
    # Its result is read by kernels before they wait: so none of them may start before it has ended.
    blocks = group_pairs(own_T, num_slots + 1, rows, lets_next_start=False)
    return SlotTiles(blocks.expert_G, blocks.pairs_R.view(-1, rows))


def usual_rows_per_tile(num_rows: int) -> int:
    """Decoding has as many rows as the batch, prefill at least as many as a question."""
    return next((rows for rows, most in ((FEW_ROWS, 64), (64, 1024)) if num_rows <= most), 128)


@triton.jit
def _add_delta(
    total, h_place, part_stride, b_ptr, f, rank, num_out,
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
        b = tl.load(b_ptr + r[:, None] * num_out + f[None, :], mask=b_mask, other=0.0)
        total = tl.dot(h.to(b.dtype), b, total, input_precision="ieee")
    return total


@triton.jit
def _expand_inputs(
    h_ptr, slot_ptr, rows_ptr,
    qkv_ptr, b0_ptr, rank0_ptr, num_out0, qkv_stride, b0_stride,
    hidden_ptr, b1_ptr, rank1_ptr, num_out1, hidden_stride, b1_stride, max_rank, num_blocks0,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Outputs in one row: first those of qkv, then the hidden ones, which end with their activation."""
    tile, block = tl.program_id(0), tl.program_id(1)
    place = tile * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_ptr + tile).to(tl.int64)
    rows = tl.load(rows_ptr + place)
    wait_for_inputs(DEPENDENT)
    if slot < 0:
        return
    part_stride = tl.num_programs(0).to(tl.int64) * ROWS * max_rank
    h_place = h_ptr + (place * max_rank).to(tl.int64)[:, None]
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    if block < num_blocks0:
        rank = tl.multiple_of(tl.load(rank0_ptr + slot), 16)
        if rank > 0:
            f = block * OUTPUTS + tl.arange(0, OUTPUTS)
            b_ptr = b0_ptr + slot * b0_stride
            delta = _add_delta(total, h_place, part_stride, b_ptr, f, rank, num_out0, SPLITS, ROWS, RANKS, EVEN)
            y_place = qkv_ptr + rows.to(tl.int64)[:, None] * qkv_stride + f[None, :]
            mask = (rows >= 0)[:, None] & (f < num_out0)[None, :]
            y = tl.load(y_place, mask=mask, other=0.0).to(tl.float32)
            y += delta.to(qkv_ptr.dtype.element_ty).to(tl.float32)
            tl.store(y_place, y.to(qkv_ptr.dtype.element_ty), mask=mask)
    else:
        rank = tl.multiple_of(tl.load(rank1_ptr + slot), 16)
        f = (block - num_blocks0) * OUTPUTS + tl.arange(0, OUTPUTS)
        h_place += SPLITS * part_stride
        b_ptr = b1_ptr + slot * b1_stride
        delta = _add_delta(total, h_place, part_stride, b_ptr, f, rank, num_out1, SPLITS, ROWS, RANKS, EVEN)
        z_place = hidden_ptr + rows.to(tl.int64)[:, None] * hidden_stride + f[None, :]
        mask = (rows >= 0)[:, None] & (f < num_out1)[None, :]
        z = tl.load(z_place, mask=mask, other=0.0).to(tl.float32)
        z += delta.to(hidden_ptr.dtype.element_ty).to(tl.float32)
        z = gelu_tanh(z.to(hidden_ptr.dtype.element_ty).to(tl.float32))
        tl.store(z_place, z.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _expand_outputs(
    h_ptr, slot_ptr, rows_ptr, total_ptr, b0_ptr, rank0_ptr, b1_ptr, rank1_ptr,
    num_out, total_stride, b0_stride, b1_stride, max_rank, num_slots,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, RANKS: tl.constexpr, SPLITS0: tl.constexpr, SPLITS1: tl.constexpr,
    HAS_SECOND: tl.constexpr, HAS_GELU: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place = tile * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_ptr + tile).to(tl.int64)
    rows = tl.load(rows_ptr + place)
    has_rank = (slot >= 0) & (slot < num_slots)
    rank0 = tl.multiple_of(tl.load(rank0_ptr + slot, mask=has_rank, other=0), 16)
    rank1 = rank0 * 0
    if HAS_SECOND:
        rank1 = tl.multiple_of(tl.load(rank1_ptr + slot, mask=has_rank, other=0), 16)
    wait_for_inputs(DEPENDENT)
    if (slot < 0) | (slot == num_slots):
        return
    if (rank0 + rank1 == 0) & (not HAS_GELU):
        return
    part_stride = tl.num_programs(0).to(tl.int64) * ROWS * max_rank
    h_place = h_ptr + (place * max_rank).to(tl.int64)[:, None]
    f = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    y_place = total_ptr + rows.to(tl.int64)[:, None] * total_stride + f[None, :]
    mask = (rows >= 0)[:, None] & (f < num_out)[None, :]
    y = tl.load(y_place, mask=mask, other=0.0).to(tl.float32)
    delta = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    delta = _add_delta(
        delta, h_place, part_stride, b0_ptr + slot * b0_stride, f, rank0, num_out, SPLITS0, ROWS, RANKS, EVEN
    )
    if HAS_SECOND:
        h_place += SPLITS0 * part_stride
        b1_ptr += slot * b1_stride
        delta = _add_delta(delta, h_place, part_stride, b1_ptr, f, rank1, num_out, SPLITS1, ROWS, RANKS, EVEN)
    y += delta
    if HAS_GELU:
        y = gelu_tanh(y.to(total_ptr.dtype.element_ty).to(tl.float32))
    tl.store(y_place, y.to(total_ptr.dtype.element_ty), mask=mask)


def add_input_deltas(
    tiles: SlotTiles,
    y_TD: Tensor,
    qkv_TF: Tensor,
    qkv: SlotFactors,
    hidden_TF: Tensor,
    fc1: SlotFactors,
    *,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> None:
    _check_sizes(y_TD, qkv, qkv_TF)
    _check_sizes(y_TD, fc1, hidden_TF)
    max_rank = qkv.a_SRD.shape[1]
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
        qkv_TF, qkv.b_SRF, qkv.rank_S, qkv_TF.shape[1], qkv_TF.stride(0), qkv.b_SRF.stride(0),
        hidden_TF, fc1.b_SRF, fc1.rank_S, hidden_TF.shape[1], hidden_TF.stride(0), fc1.b_SRF.stride(0),
        max_rank, blocks[0], ROWS=rows, OUTPUTS=chosen.block_out, RANKS=chosen.expand_ranks, SPLITS=shrunk.splits[0],
        EVEN=all(t.shape[1] % chosen.block_out == 0 for t in (qkv_TF, hidden_TF)),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, **dependent(),
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
    max_rank, num_out = proj.b_SRF.shape[1:]
    if num_tiles == 0:
        return
    dims = rows, max_rank, y_TD.shape[1], hidden_TF.shape[1]
    found = tuning or table.find("add_output_deltas", len(y_TD), dims, y_TD.dtype)
    chosen = found or Tuning.of(rows, len(y_TD), max_rank, y_TD.dtype)
    shrunk = shrink(tiles, chosen, mixed_TD, y_TD, reads_norm_S, proj, hidden_TF, fc2)
    _expand_outputs[(num_tiles, triton.cdiv(num_out, chosen.sum_block_out))](
        shrunk.h, tiles.slot_K, tiles.rows_KN, total_TD, proj.b_SRF, proj.rank_S, fc2.b_SRF, fc2.rank_S,
        num_out, total_TD.stride(0), proj.b_SRF.stride(0), fc2.b_SRF.stride(0), max_rank, len(proj.b_SRF),
        ROWS=rows, OUTPUTS=chosen.sum_block_out, RANKS=chosen.expand_ranks,
        SPLITS0=shrunk.splits[0], SPLITS1=shrunk.splits[1], HAS_SECOND=True, HAS_GELU=False,
        EVEN=num_out % chosen.sum_block_out == 0, num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        **dependent(),
    )  # fmt: skip


def add_deltas(
    tiles: SlotTiles,
    y_TF: Tensor,
    x_TD: Tensor,
    factors: SlotFactors,
    other_TD: Tensor | None = None,
    reads_other_S: Tensor | None = None,
    has_gelu: bool = False,
    *,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> None:
    _check_sizes(x_TD, factors, y_TF)
    num_tiles, rows = tiles.rows_KN.shape
    if num_tiles == 0:
        return
    max_rank = factors.a_SRD.shape[1]
    dims = rows, max_rank, x_TD.shape[1], y_TF.shape[1]
    found = tuning or table.find("add_deltas", len(x_TD), dims, x_TD.dtype)
    chosen = found or Tuning.of(rows, len(x_TD), max_rank, x_TD.dtype)
    _expand(shrink(tiles, chosen, x_TD, other_TD, reads_other_S, factors), tiles, y_TF, factors, chosen, has_gelu)


def _expand(
    shrunk: Shrunk, tiles: SlotTiles, y_TF: Tensor, factors: SlotFactors, chosen: Tuning, has_gelu: bool
) -> None:
    """y += b · h of one matrix."""
    num_tiles, rows = tiles.rows_KN.shape
    max_rank, num_out = factors.b_SRF.shape[1:]
    _expand_outputs[(num_tiles, triton.cdiv(num_out, chosen.block_out))](
        shrunk.h, tiles.slot_K, tiles.rows_KN, y_TF,
        factors.b_SRF, factors.rank_S, factors.b_SRF, factors.rank_S,
        num_out, y_TF.stride(0), factors.b_SRF.stride(0), factors.b_SRF.stride(0), max_rank, len(factors.b_SRF),
        ROWS=rows, OUTPUTS=chosen.block_out, RANKS=chosen.expand_ranks,
        SPLITS0=shrunk.splits[0], SPLITS1=0, HAS_SECOND=False, HAS_GELU=has_gelu,
        EVEN=num_out % chosen.block_out == 0, num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        **dependent(),
    )  # fmt: skip


def small_adapted_linear(
    tiles: SlotTiles,
    x_MD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None,
    factors: SlotFactors,
    other_MD: Tensor | None = None,
    reads_other_S: Tensor | None = None,
    is_base_M: Tensor | None = None,
    scale_F: Tensor | None = None,
    is_beside: bool = False,
    *,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """`tuning`: of the deltas. The product has that of `small_linear`, so that it adds up in the same order."""
    num_rows, has_gelu = len(x_MD), is_base_M is not None
    if num_rows <= SUMMED_ROWS or scale_F is not None:
        y_MF = small_linear(
            x_MD, weight_FD, bias_F, None, has_gelu, scale_F, is_base_M, is_beside=is_beside, table=table
        )
        add_deltas(tiles, y_MF, x_MD, factors, other_MD, reads_other_S, has_gelu, tuning=tuning, table=table)
        return y_MF
    y_MF = torch.empty(num_rows, len(weight_FD), dtype=x_MD.dtype, device=x_MD.device)
    _check_sizes(x_MD, factors, y_MF)
    rows, max_rank = tiles.rows_KN.shape[1], factors.a_SRD.shape[1]
    dims = rows, max_rank, x_MD.shape[1], y_MF.shape[1]
    found = tuning or table.find("add_deltas", num_rows, dims, x_MD.dtype)
    chosen = found or Tuning.of(rows, num_rows, max_rank, x_MD.dtype)
    h = _product_and_h(tiles, x_MD, weight_FD, bias_F, y_MF, factors, other_MD, reads_other_S, is_base_M, table)
    _expand(Shrunk(h, (1, 0)), tiles, y_MF, factors, chosen, has_gelu)
    return y_MF


def _product_and_h(
    tiles: SlotTiles,
    x_MD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None,
    y_MF: Tensor,
    factors: SlotFactors,
    other_MD: Tensor | None,
    reads_other_S: Tensor | None,
    is_base_M: Tensor | None,
    table: TuningTable,
) -> Tensor:
    """h; y is what the base model makes of x."""
    (num_rows, num_in), num_out = x_MD.shape, len(weight_FD)
    num_tiles, rows = tiles.rows_KN.shape
    assert rows == MAX_ROWS
    assert weight_FD.stride(1) == 1
    found = table.find("small_linear", num_rows, tuple(weight_FD.shape), x_MD.dtype, weight_FD.dtype)
    room = has_room(x_MD.device)
    chosen = found or linear.Tuning.of(num_rows, num_out, num_in, x_MD.element_size(), has_room=room)
    max_rank = factors.a_SRD.shape[1]
    rank_blocks = triton.cdiv(max_rank, chosen.block_out)
    other = x_MD if other_MD is None else other_MD
    h = torch.empty(1, num_tiles * rows, max_rank, dtype=x_MD.dtype, device=x_MD.device)
    _multiply_and_shrink[(num_tiles * rank_blocks + triton.cdiv(num_out, chosen.block_out),)](
        x_MD, other, weight_FD, y_MF, x_MD if bias_F is None else bias_F, x_MD if is_base_M is None else is_base_M,
        h, tiles.slot_K, tiles.rows_KN, factors.rank_S if reads_other_S is None else reads_other_S,
        factors.a_SRD, factors.rank_S, num_rows, num_out, num_in, x_MD.stride(0), other.stride(0),
        weight_FD.stride(0), y_MF.stride(0), factors.a_SRD.stride(0), max_rank, num_tiles * rank_blocks,
        ROWS=rows, BLOCK_OUT=chosen.block_out, BLOCK_IN=chosen.block_in,
        EVEN=num_in % chosen.block_in == 0 and num_out % chosen.block_out == 0, RANK_BLOCKS=rank_blocks,
        HAS_BIAS=bias_F is not None, HAS_GELU=is_base_M is not None, HAS_OTHER=other_MD is not None,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, **dependent(),
    )  # fmt: skip
    return h


def _check_sizes(x_TD: Tensor, factors: SlotFactors, y_TF: Tensor) -> None:
    num_slots, max_rank, num_in = factors.a_SRD.shape
    assert factors.b_SRF.shape == (num_slots, max_rank, y_TF.shape[1])
    assert factors.rank_S.shape == (num_slots + 1,)
    assert max_rank % RANK_STEP == 0
    assert x_TD.shape == (len(y_TF), num_in)
    assert x_TD.stride(1) == y_TF.stride(1) == 1
    assert factors.a_SRD[0].is_contiguous()
    assert factors.b_SRF[0].is_contiguous()
