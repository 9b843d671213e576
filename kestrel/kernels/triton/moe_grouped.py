"""Mixture-of-experts MLP for many tokens, with adapters or without."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from kestrel.kernels.moe_mlp import ExpertDeltas, ExpertFactors, Gate
from kestrel.kernels.triton.device_functions import gated, widened
from kestrel.kernels.triton.fp8 import rows_to_fp8
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, dependent, wait_for_inputs

# ---------------------------------------------------------------------- blocks of pairs
# Pairs of token and expert put in blocks of one expert each, on the device.
#
# A block holds `rows_per_block` places; an expert takes as many whole blocks as its pairs need, in the order of the
# pairs. How many blocks there can be at most follows from the shapes, so nothing is read on the host: a place without a
# pair and a block without an expert hold -1.


PAIRS_AT_A_TIME = 1024
PLACES_AT_A_TIME = 128


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pair number (token · k + place in the token's routing) of every place, and the expert of every block."""

    pairs_R: Tensor
    expert_G: Tensor
    rows_per_block: int


def max_blocks(num_pairs: int, num_experts: int, rows_per_block: int) -> int:
    """Each expert with pairs wastes less than a block."""
    return num_pairs // rows_per_block + min(num_pairs, num_experts)


@triton.jit
def _fill(ptr, start, end, value, AT_A_TIME: tl.constexpr):
    for first in range(start, end, AT_A_TIME):
        place = first + tl.arange(0, AT_A_TIME)
        tl.store(ptr + place, tl.zeros((AT_A_TIME,), dtype=tl.int32) + value, mask=place < end)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _group(
    ids_ptr, pairs_ptr, expert_ptr, num_pairs, num_blocks, num_experts,
    ROWS: tl.constexpr, BINS: tl.constexpr, AT_A_TIME: tl.constexpr, PLACES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per expert: counts everybody's pairs to find its first block, then places its own."""
    wait_for_inputs(DEPENDENT)
    expert = tl.program_id(0)
    lane = tl.arange(0, AT_A_TIME)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, num_pairs, AT_A_TIME):
        ids = tl.load(ids_ptr + first + lane, mask=first + lane < num_pairs, other=num_experts).to(tl.int32)
        counts += tl.histogram(ids, BINS)
    blocks = tl.where(bins < num_experts, (counts + ROWS - 1) // ROWS, 0)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    own_count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    own_blocks = (own_count + ROWS - 1) // ROWS
    _fill(expert_ptr, first_block, first_block + own_blocks, expert, PLACES)
    if expert == num_experts - 1:
        _fill(expert_ptr, first_block + own_blocks, num_blocks, -1, PLACES)
    start = first_block * ROWS
    _fill(pairs_ptr, start + own_count, start + own_blocks * ROWS, -1, PLACES)
    for first in range(0, num_pairs, AT_A_TIME):
        pair = first + lane
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=num_experts).to(tl.int32)
        is_own = (ids == expert).to(tl.int32)
        place = start + tl.cumsum(is_own, axis=0) - 1
        tl.store(pairs_ptr + place, pair, mask=is_own > 0)
        start += tl.sum(is_own, axis=0)


def group_pairs(ids_TK: Tensor, num_experts: int, rows_per_block: int, *, lets_next_start: bool = True) -> Blocks:
    """`lets_next_start`: the next kernel may start meanwhile, and waits before it reads this."""
    assert ids_TK.is_contiguous()
    num_pairs = ids_TK.numel()
    num_blocks = max_blocks(num_pairs, num_experts, rows_per_block)
    pairs_R = torch.empty(num_blocks * rows_per_block, dtype=torch.int32, device=ids_TK.device)
    expert_G = torch.empty(num_blocks, dtype=torch.int32, device=ids_TK.device)
    if num_pairs > 0:
        _group[(num_experts,)](
            ids_TK, pairs_R, expert_G, num_pairs, num_blocks, num_experts,
            ROWS=rows_per_block, BINS=triton.next_power_of_2(num_experts + 1),
            AT_A_TIME=min(PAIRS_AT_A_TIME, max(32, triton.next_power_of_2(num_pairs))), PLACES=PLACES_AT_A_TIME,
            **(dependent() if lets_next_start else {"DEPENDENT": False}),
        )  # fmt: skip
    return Blocks(pairs_R, expert_G, rows_per_block)


# ---------------------------------------------------------------------- deltas of adapters
# Low-rank deltas of experts: a pair of token and expert has factors of its own, by the token's adapter and the expert.
#
# They follow the blocks of pairs, in tiles: one kernel makes h = a · x in parts, by columns of x, a second b · h. The
# kernel of the expert's product adds that before it writes. A tile goes through the slots that it holds: usually one or
# two, since the tokens of a prompt stand together. Slots and ranks are read on the device, and pairs of the base model
# add nothing.


TILE_ROWS, SHRINK_BYTES, EXPAND_OUTPUTS, RANKS = 32, 2048, 128, 16
NO_MORE_SLOTS = tl.constexpr(1 << 30)


class BlockDeltas(NamedTuple):
    """What adapters add to one product of the blocks."""

    delta_RF: Tensor
    """By place; only those of adapters are written."""
    slot_T: Tensor


@triton.jit
def _next_slot(slots, last):
    return tl.min(tl.where(slots > last, slots, NO_MORE_SLOTS), axis=0)


@triton.jit
def _shrink_tiles(
    x_ptr, h_ptr, pairs_ptr, expert_ptr, slots_ptr, a_ptr, rank_ptr, num_in, x_stride, num_experts, max_rank,
    TOP_K: tl.constexpr, BY_PLACE: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RANKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A part of h = a · x; rows of x are tokens, or places in the blocks."""
    tile, part = tl.program_id(0), tl.program_id(1)
    expert = tl.load(expert_ptr + tile // TILES).to(tl.int64)
    if expert < 0:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    pairs = tl.load(pairs_ptr + rows)
    slots = tl.load(slots_ptr + pairs // TOP_K, mask=pairs >= 0, other=-1).to(tl.int32)
    x_rows = rows if BY_PLACE else pairs // TOP_K
    d = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x_mask = (slots >= 0)[:, None] if EVEN else (slots >= 0)[:, None] & (d < num_in)
    x = tl.load(x_ptr + x_rows.to(tl.int64)[:, None] * x_stride + d, mask=x_mask, other=0.0)
    h_place = h_ptr + (part * tl.num_programs(0) * ROWS + rows).to(tl.int64)[:, None] * max_rank
    slot = _next_slot(slots, -1)
    while slot < NO_MORE_SLOTS:
        rank = tl.load(rank_ptr + slot)
        for first in range(0, rank, RANKS):
            r = first + tl.arange(0, RANKS)
            a_mask = (r < rank)[:, None] if EVEN else (r < rank)[:, None] & (d < num_in)
            a = tl.load(
                a_ptr + ((slot * num_experts + expert) * max_rank + r)[:, None] * num_in + d, mask=a_mask, other=0.0
            )
            h = tl.dot(x, tl.trans(a), input_precision="ieee")
            tl.store(h_place + r[None, :], h, mask=(slots == slot)[:, None] & (r < rank)[None, :])
        slot = _next_slot(slots, slot)


@triton.jit
def _expand_tiles(
    h_ptr, delta_ptr, pairs_ptr, expert_ptr, slots_ptr, b_ptr, rank_ptr, num_out, num_experts, max_rank,
    TOP_K: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """b · h; h, the sum of its parts, is rounded as the plain version does."""
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile // TILES).to(tl.int64)
    if expert < 0:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    pairs = tl.load(pairs_ptr + rows)
    slots = tl.load(slots_ptr + pairs // TOP_K, mask=pairs >= 0, other=-1).to(tl.int32)
    f = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    h_place = h_ptr + rows.to(tl.int64)[:, None] * max_rank
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    slot = _next_slot(slots, -1)
    while slot < NO_MORE_SLOTS:
        rank = tl.load(rank_ptr + slot)
        b_place = b_ptr + ((slot * num_experts + expert) * num_out + f)[:, None] * max_rank
        for first in range(0, rank, RANKS):
            r = first + tl.arange(0, RANKS)[None, :]
            is_own = (slots == slot)[:, None] & (r < rank)
            h = tl.zeros((ROWS, RANKS), dtype=tl.float32)
            for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
                h_part = h_place + part * tl.num_programs(0).to(tl.int64) * ROWS * max_rank
                h += tl.load(h_part + r, mask=is_own, other=0.0)
            b = tl.load(b_place + r, mask=(f < num_out)[:, None] & (r < rank), other=0.0)
            total = tl.dot(h.to(b.dtype), tl.trans(b), total, input_precision="ieee")
        slot = _next_slot(slots, slot)
    place = delta_ptr + rows.to(tl.int64)[:, None] * num_out + f[None, :]
    tl.store(place, total.to(delta_ptr.dtype.element_ty), mask=(slots >= 0)[:, None] & (f < num_out)[None, :])


def block_deltas(
    x_RD: Tensor, top_k: int, slot_T: Tensor, factors: ExpertFactors, blocks: Blocks, *, by_place: bool
) -> BlockDeltas:
    """`by_place`: rows of x are those of the blocks, not of the tokens."""
    num_experts, max_rank, num_in = factors.a_SERD.shape[1:]
    num_places, num_out = len(blocks.pairs_R), factors.b_SEFR.shape[2]
    assert factors.a_SERD.is_contiguous()
    assert factors.b_SEFR.is_contiguous()
    assert x_RD.stride(1) == 1
    rows, columns = min(TILE_ROWS, blocks.rows_per_block), _fitting(SHRINK_BYTES // x_RD.element_size(), num_in)
    outputs, parts = _fitting(EXPAND_OUTPUTS, num_out), triton.cdiv(num_in, columns)
    h_PRR = torch.empty(parts, num_places, max_rank, dtype=torch.float32, device=x_RD.device)
    delta_RF = torch.empty(num_places, num_out, dtype=x_RD.dtype, device=x_RD.device)
    num_tiles, tiles = num_places // rows, blocks.rows_per_block // rows
    _shrink_tiles[(num_tiles, parts)](
        x_RD, h_PRR, blocks.pairs_R, blocks.expert_G, slot_T, factors.a_SERD, factors.rank_S,
        num_in, x_RD.stride(0), num_experts, max_rank,
        TOP_K=top_k, BY_PLACE=by_place, TILES=tiles, ROWS=rows, COLUMNS=columns, RANKS=RANKS,
        EVEN=num_in % columns == 0, num_stages=1,
    )  # fmt: skip
    _expand_tiles[(num_tiles, triton.cdiv(num_out, outputs))](
        h_PRR, delta_RF, blocks.pairs_R, blocks.expert_G, slot_T, factors.b_SEFR, factors.rank_S,
        num_out, num_experts, max_rank,
        TOP_K=top_k, TILES=tiles, ROWS=rows, OUTPUTS=outputs, PARTS=parts, RANKS=RANKS, num_warps=8,
    )  # fmt: skip
    return BlockDeltas(delta_RF, slot_T)


# ---------------------------------------------------------------------- the experts
# Mixture-of-experts MLP for many tokens: blocks of pairs that share an expert go through its matrices together.
#
# Four kernels: pairs are put in blocks; each block goes through both halves of fc1 in one pass over its tokens, and
# gates them; each block goes through fc2; a token's experts are added up in fp32, in routing order. Blocks of one
# expert run side by side, so that its matrices are read from memory once.


@dataclass(frozen=True, slots=True)
class Tuning:
    rows_per_block: int = 64
    gate_outputs: int = 64
    mix_outputs: int = 128
    block_in: int = 64
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def of(cls, num_pairs: int, num_experts: int) -> Tuning:
        """Blocks about as large as an expert's usual share of the pairs."""
        share = num_pairs / num_experts
        if share > 96:
            return cls(rows_per_block=128, num_warps=8, num_stages=3)
        rows = next((rows for rows in (16, 32) if share <= 0.75 * rows), 64)
        return cls(rows_per_block=rows)

    @classmethod
    def of_fp8(cls, num_pairs: int, num_experts: int) -> Tuning:
        """The same for numbers of one byte: twice as many of them in a block."""
        share = num_pairs / num_experts
        if share > 48:
            return cls(rows_per_block=128, block_in=128, num_warps=8, num_stages=3)
        rows = next((rows for rows in (16, 32) if share <= 0.75 * rows), 64)
        return cls(rows_per_block=rows, block_in=128, num_stages=3)


@triton.jit
def _factor(x, dtype, WIDENS: tl.constexpr):
    return x.to(tl.float32) if WIDENS else widened(x, dtype)


@triton.jit
def _gate_blocks(
    x_ptr, x_scale_ptr, pairs_ptr, expert_ptr, fc1_ptr, scale_ptr, delta_ptr, slots_ptr, hidden_ptr,
    num_in, num_inner, x_stride,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_X_SCALE: tl.constexpr, HAS_DELTA: tl.constexpr, WIDENS: tl.constexpr,
    GATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    group = tl.program_id(0)
    expert = tl.load(expert_ptr + group).to(tl.int64)
    if expert < 0:
        return
    rows = group * ROWS + tl.arange(0, ROWS)
    pairs = tl.load(pairs_ptr + rows)
    i = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = expert * (2 * num_inner)
    x_place = x_ptr + (pairs // TOP_K).to(tl.int64)[:, None] * x_stride
    h_place = fc1_ptr + (first + i)[:, None] * num_in
    g_place = fc1_ptr + (first + num_inner + i)[:, None] * num_in
    h = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    g = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, num_in, BLOCK):
        d = start + tl.arange(0, BLOCK)[None, :]
        if EVEN:
            x = tl.load(x_place + d, mask=(pairs >= 0)[:, None], other=0.0)
            w_h, w_g = tl.load(h_place + d), tl.load(g_place + d)
        else:
            inside = (d < num_in) & (i < num_inner)[:, None]
            x = tl.load(x_place + d, mask=(pairs >= 0)[:, None] & (d < num_in), other=0.0)
            w_h, w_g = tl.load(h_place + d, mask=inside, other=0.0), tl.load(g_place + d, mask=inside, other=0.0)
        x = _factor(x, x.dtype, WIDENS)
        h = tl.dot(x, tl.trans(_factor(w_h, x.dtype, WIDENS)), h, input_precision="ieee")
        g = tl.dot(x, tl.trans(_factor(w_g, x.dtype, WIDENS)), g, input_precision="ieee")
    if HAS_SCALE:
        h *= tl.load(scale_ptr + first + i, mask=i < num_inner, other=0.0)[None, :]
        g *= tl.load(scale_ptr + first + num_inner + i, mask=i < num_inner, other=0.0)[None, :]
    if HAS_X_SCALE:
        x_scale = tl.load(x_scale_ptr + pairs // TOP_K, mask=pairs >= 0, other=0.0)[:, None]
        h *= x_scale
        g *= x_scale
    if HAS_DELTA:
        slots = tl.load(slots_ptr + pairs // TOP_K, mask=pairs >= 0, other=-1)
        has_delta = (slots >= 0)[:, None] & (i < num_inner)[None, :]
        delta_place = delta_ptr + rows.to(tl.int64)[:, None] * (2 * num_inner) + i[None, :]
        h += tl.load(delta_place, mask=has_delta, other=0.0).to(tl.float32)
        g += tl.load(delta_place + num_inner, mask=has_delta, other=0.0).to(tl.float32)
    out = gated(h, g, GATE).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + rows.to(tl.int64)[:, None] * num_inner + i[None, :], out, mask=(i < num_inner)[None, :])


@triton.jit
def _project_blocks(
    hidden_ptr, hidden_scale_ptr, pairs_ptr, expert_ptr, fc2_ptr, scale_ptr, delta_ptr, slots_ptr, out_ptr,
    num_inner, num_out,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_HIDDEN_SCALE: tl.constexpr, HAS_DELTA: tl.constexpr, WIDENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    group = tl.program_id(0)
    expert = tl.load(expert_ptr + group).to(tl.int64)
    if expert < 0:
        return
    rows = group * ROWS + tl.arange(0, ROWS)
    pairs = tl.load(pairs_ptr + rows)
    f = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    hidden_place = hidden_ptr + rows.to(tl.int64)[:, None] * num_inner
    w_place = fc2_ptr + (expert * num_out + f)[:, None] * num_inner
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, num_inner, BLOCK):
        i = start + tl.arange(0, BLOCK)[None, :]
        if EVEN:
            hidden, w = tl.load(hidden_place + i), tl.load(w_place + i)
        else:
            hidden = tl.load(hidden_place + i, mask=(i < num_inner) & (rows >= 0)[:, None], other=0.0)
            w = tl.load(w_place + i, mask=(i < num_inner) & (f < num_out)[:, None], other=0.0)
        hidden = _factor(hidden, hidden.dtype, WIDENS)
        total = tl.dot(hidden, tl.trans(_factor(w, hidden.dtype, WIDENS)), total, input_precision="ieee")
    if HAS_SCALE:
        total *= tl.load(scale_ptr + expert * num_out + f, mask=f < num_out, other=0.0)[None, :]
    if HAS_HIDDEN_SCALE:
        total *= tl.load(hidden_scale_ptr + rows)[:, None]
    if HAS_DELTA:
        slots = tl.load(slots_ptr + pairs // TOP_K, mask=pairs >= 0, other=-1)
        delta_place = delta_ptr + rows.to(tl.int64)[:, None] * num_out + f[None, :]
        total += tl.load(delta_place, mask=(slots >= 0)[:, None] & (f < num_out)[None, :], other=0.0).to(tl.float32)
    place = out_ptr + pairs.to(tl.int64)[:, None] * num_out + f[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(pairs >= 0)[:, None] & (f < num_out)[None, :])


@triton.jit
def _add_experts(
    out_ptr, weights_ptr, y_ptr, num_out, TOP_K: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        pair = token * TOP_K + k
        out = tl.load(out_ptr + pair * num_out + f, mask=f < num_out, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * out
    tl.store(y_ptr + token * num_out + f, total.to(y_ptr.dtype.element_ty), mask=f < num_out)


def moe_grouped(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    fc1_EFD: Tensor,
    fc2_EDI: Tensor,
    fc1_scale_EF: Tensor | None = None,
    fc2_scale_ED: Tensor | None = None,
    deltas: ExpertDeltas | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
    *,
    gate: Gate = "gelu",
) -> Tensor:
    """What `kestrel.kernels.moe_mlp.moe_mlp` gives, or `moe_mlp_adapted`; scales are those of matrices kept in float8,
    one per output."""
    num_tokens, num_in = x_TD.shape
    num_experts, num_out, num_inner = fc2_EDI.shape
    assert fc1_EFD.shape == (num_experts, 2 * num_inner, num_in)
    assert weights_TK.shape == ids_TK.shape
    assert x_TD.stride(1) == 1
    for tensor in (weights_TK, fc1_EFD, fc2_EDI, fc1_scale_EF, fc2_scale_ED):
        assert tensor is None or tensor.is_contiguous()
    if num_tokens == 0:
        return torch.empty(0, num_out, dtype=x_TD.dtype, device=x_TD.device)
    dims = num_experts, ids_TK.shape[1], num_inner, num_in
    found = tuning or table.find("moe_grouped", num_tokens, dims, x_TD.dtype, fc1_EFD.dtype)
    chosen = found or Tuning.of(ids_TK.numel(), num_experts)
    blocks = group_pairs(ids_TK, num_experts, chosen.rows_per_block)
    x, dtype = ScaledRows(x_TD), x_TD.dtype
    top_k, added = ids_TK.shape[1], None
    if deltas is not None:
        added = block_deltas(x_TD, top_k, deltas.slot_T, deltas.fc1, blocks, by_place=False)
    hidden_RI = _gated(x, top_k, blocks, fc1_EFD, fc1_scale_EF, chosen, dtype, gate, added)
    if deltas is not None:
        added = block_deltas(hidden_RI, top_k, deltas.slot_T, deltas.fc2, blocks, by_place=True)
    out_QD = _projected(ScaledRows(hidden_RI), ids_TK.shape, blocks, fc2_EDI, fc2_scale_ED, chosen, dtype, added)
    return _summed(out_QD, weights_TK)


def moe_grouped_fp8(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    fc1_EFD: Tensor,
    fc2_EDI: Tensor,
    fc1_scale_EF: Tensor,
    fc2_scale_ED: Tensor,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
    *,
    gate: Gate = "gelu",
) -> Tensor:
    """What `kestrel.kernels.moe_mlp.moe_mlp_fp8` gives: rows are quantised too, and the tensor cores take float8."""
    num_tokens, num_in = x_TD.shape
    num_experts, num_out, num_inner = fc2_EDI.shape
    if num_tokens == 0:
        return torch.empty(0, num_out, dtype=x_TD.dtype, device=x_TD.device)
    dims = num_experts, ids_TK.shape[1], num_inner, num_in
    found = tuning or table.find("moe_grouped_fp8", num_tokens, dims, x_TD.dtype, fc1_EFD.dtype)
    chosen = found or Tuning.of_fp8(ids_TK.numel(), num_experts)
    blocks = group_pairs(ids_TK, num_experts, chosen.rows_per_block)
    x, dtype = ScaledRows(*rows_to_fp8(x_TD, table=table)), x_TD.dtype
    hidden_RI = _gated(x, ids_TK.shape[1], blocks, fc1_EFD, fc1_scale_EF, chosen, dtype, gate)
    hidden = ScaledRows(*rows_to_fp8(hidden_RI, table=table))
    out_QD = _projected(hidden, ids_TK.shape, blocks, fc2_EDI, fc2_scale_ED, chosen, dtype)
    return _summed(out_QD, weights_TK)


class ScaledRows(NamedTuple):
    """Rows as they are, or in float8 with a scale each."""

    numbers: Tensor
    scale: Tensor | None = None


def _widens(rows: ScaledRows) -> bool:
    """Triton's interpreter has no products of float8."""
    return rows.scale is not None and not isinstance(_factor, JITFunction)


def _summed(out_QD: Tensor, weights_TK: Tensor) -> Tensor:
    num_tokens, top_k = weights_TK.shape
    num_out = out_QD.shape[1]
    y_TD = torch.empty(num_tokens, num_out, dtype=out_QD.dtype, device=out_QD.device)
    block = min(1024, triton.next_power_of_2(num_out))
    _add_experts[(num_tokens, triton.cdiv(num_out, block))](
        out_QD, weights_TK, y_TD, num_out, TOP_K=top_k, BLOCK=block, **dependent()
    )
    return y_TD


def _gated(
    x: ScaledRows,
    top_k: int,
    blocks: Blocks,
    fc1_EFD: Tensor,
    scale_EF: Tensor | None,
    tuning: Tuning,
    dtype: torch.dtype,
    gate: Gate,
    added: BlockDeltas | None = None,
) -> Tensor:
    """The gated halves of fc1 for every place; places without a pair hold what a token of zeros would give."""
    x_TD = x.numbers
    num_inner, num_in = fc1_EFD.shape[1] // 2, fc1_EFD.shape[2]
    hidden_RI = torch.empty(len(blocks.pairs_R), num_inner, dtype=dtype, device=x_TD.device)
    block, outputs = _fitting(tuning.block_in, num_in), _fitting(tuning.gate_outputs, num_inner)
    _gate_blocks[(len(blocks.expert_G), triton.cdiv(num_inner, outputs))](
        x_TD, x_TD if x.scale is None else x.scale,
        blocks.pairs_R, blocks.expert_G, fc1_EFD, x_TD if scale_EF is None else scale_EF,
        *(added or (x_TD, blocks.pairs_R)), hidden_RI, num_in, num_inner, x_TD.stride(0),
        TOP_K=top_k, ROWS=blocks.rows_per_block, OUTPUTS=outputs, BLOCK=block,
        EVEN=num_in % block == 0 and num_inner % outputs == 0,
        HAS_SCALE=scale_EF is not None, HAS_X_SCALE=x.scale is not None, HAS_DELTA=added is not None,
        WIDENS=_widens(x), GATE=gate,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages, **dependent(),
    )  # fmt: skip
    return hidden_RI


def _projected(
    hidden: ScaledRows,
    pairs_shape: torch.Size,
    blocks: Blocks,
    fc2_EDI: Tensor,
    scale_ED: Tensor | None,
    tuning: Tuning,
    dtype: torch.dtype,
    added: BlockDeltas | None = None,
) -> Tensor:
    """fc2 of every pair, in the order of the pairs."""
    hidden_RI = hidden.numbers
    _, num_out, num_inner = fc2_EDI.shape
    out_QD = torch.empty(pairs_shape.numel(), num_out, dtype=dtype, device=hidden_RI.device)
    block, outputs = _fitting(tuning.block_in, num_inner), _fitting(tuning.mix_outputs, num_out)
    _project_blocks[(len(blocks.expert_G), triton.cdiv(num_out, outputs))](
        hidden_RI, hidden_RI if hidden.scale is None else hidden.scale,
        blocks.pairs_R, blocks.expert_G, fc2_EDI, hidden_RI if scale_ED is None else scale_ED,
        *(added or (hidden_RI, blocks.pairs_R)), out_QD, num_inner, num_out,
        TOP_K=pairs_shape[1], ROWS=blocks.rows_per_block, OUTPUTS=outputs, BLOCK=block,
        EVEN=num_inner % block == 0 and num_out % outputs == 0,
        HAS_SCALE=scale_ED is not None, HAS_HIDDEN_SCALE=hidden.scale is not None, HAS_DELTA=added is not None,
        WIDENS=_widens(hidden),
        num_warps=tuning.num_warps, num_stages=tuning.num_stages, **dependent(),
    )  # fmt: skip
    return out_QD


def _fitting(block: int, size: int) -> int:
    """A block no larger than the size needs, but large enough for the tensor cores."""
    return max(16, min(block, triton.next_power_of_2(size)))
