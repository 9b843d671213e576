"""Low-rank deltas of experts: a pair of token and expert has factors of its own, by the token's adapter and the expert.

A program takes one pair, since few of them share factors, and ranks are small: an expert holds its share of an
adapter's rank alone. Slots and ranks are read on the device; pairs of the base model end immediately.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.moe_mlp import ExpertFactors
from kestrel.kernels.triton.moe_grouping import Blocks

MAX_RANKS, BLOCK_IN, OUTPUTS = 16, 512, 1024


@triton.jit
def _shrink_pairs(
    x_ptr, h_ptr, a_ptr, rank_ptr, places_ptr, ids_ptr, slots_ptr, num_in, x_stride, num_experts, max_rank,
    TOP_K: tl.constexpr, BY_PLACE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h = a · x of one pair; rows of x are tokens, or places in the blocks of experts."""
    pair = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + pair // TOP_K).to(tl.int64)
    if slot < 0:
        return
    rank = tl.load(rank_ptr + slot)
    if tl.program_id(1) * RANKS >= rank:
        return
    r = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    row = tl.load(places_ptr + pair).to(tl.int64) if BY_PLACE else pair // TOP_K
    a_place = a_ptr + ((slot * num_experts + expert) * max_rank + r)[:, None] * num_in
    total = tl.zeros((RANKS, BLOCK), dtype=tl.float32)
    for start in range(0, num_in, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + d, mask=d < num_in, other=0.0).to(tl.float32)
        a = tl.load(a_place + d[None, :], mask=(r < rank)[:, None] & (d < num_in)[None, :], other=0.0)
        total += a.to(tl.float32) * x[None, :]
    h = tl.sum(total, axis=1)
    tl.store(h_ptr + pair * max_rank + r, h.to(h_ptr.dtype.element_ty), mask=r < rank)


@triton.jit
def _expand_pairs(
    h_ptr, out_ptr, b_ptr, rank_ptr, ids_ptr, slots_ptr, num_out, num_experts, max_rank,
    TOP_K: tl.constexpr, ADDS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """b · h of one pair, added to what is there or put there."""
    pair = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + pair // TOP_K).to(tl.int64)
    if slot < 0:
        return
    rank = tl.load(rank_ptr + slot)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    b_place = b_ptr + ((slot * num_experts + expert) * num_out + f)[:, None] * max_rank
    total = tl.zeros((BLOCK, RANKS), dtype=tl.float32)
    for first in range(0, rank, RANKS):
        r = first + tl.arange(0, RANKS)
        h = tl.load(h_ptr + pair * max_rank + r, mask=r < rank, other=0.0).to(tl.float32)
        b = tl.load(b_place + r[None, :], mask=(r < rank)[None, :] & (f < num_out)[:, None], other=0.0)
        total += b.to(tl.float32) * h[None, :]
    delta = tl.sum(total, axis=1)
    if ADDS:
        delta += tl.load(out_ptr + pair * num_out + f, mask=f < num_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + pair * num_out + f, delta.to(out_ptr.dtype.element_ty), mask=f < num_out)


def pair_deltas(x_RD: Tensor, ids_TK: Tensor, slot_T: Tensor, factors: ExpertFactors, blocks: Blocks) -> Tensor:
    """[pairs, F] of rows by token; only pairs of adapters are written."""
    out_QF = torch.empty(ids_TK.numel(), factors.b_SEFR.shape[2], dtype=x_RD.dtype, device=x_RD.device)
    _launch(x_RD, out_QF, ids_TK, slot_T, factors, blocks, by_place=False)
    return out_QF


def add_pair_deltas(
    out_QF: Tensor, x_RD: Tensor, ids_TK: Tensor, slot_T: Tensor, factors: ExpertFactors, blocks: Blocks
) -> None:
    """In place; rows of x are those of the blocks."""
    _launch(x_RD, out_QF, ids_TK, slot_T, factors, blocks, by_place=True)


def _launch(
    x_RD: Tensor,
    out_QF: Tensor,
    ids_TK: Tensor,
    slot_T: Tensor,
    factors: ExpertFactors,
    blocks: Blocks,
    *,
    by_place: bool,
) -> None:
    num_experts, max_rank, num_in = factors.a_SERD.shape[1:]
    num_out, top_k = out_QF.shape[1], ids_TK.shape[1]
    assert factors.b_SEFR.shape[1:] == (num_experts, num_out, max_rank)
    assert factors.a_SERD.is_contiguous()
    assert factors.b_SEFR.is_contiguous()
    assert x_RD.stride(1) == 1
    ranks = min(MAX_RANKS, triton.next_power_of_2(max_rank))
    h_QR = torch.empty(len(out_QF), max_rank, dtype=x_RD.dtype, device=x_RD.device)
    _shrink_pairs[(len(out_QF), triton.cdiv(max_rank, ranks))](
        x_RD, h_QR, factors.a_SERD, factors.rank_S, blocks.places_Q, ids_TK, slot_T,
        num_in, x_RD.stride(0), num_experts, max_rank,
        TOP_K=top_k, BY_PLACE=by_place, RANKS=ranks,
        BLOCK=min(BLOCK_IN, triton.next_power_of_2(num_in)),
    )  # fmt: skip
    block = min(OUTPUTS, triton.next_power_of_2(num_out))
    _expand_pairs[(len(out_QF), triton.cdiv(num_out, block))](
        h_QR, out_QF, factors.b_SEFR, factors.rank_S, ids_TK, slot_T, num_out, num_experts, max_rank,
        TOP_K=top_k, ADDS=by_place, RANKS=ranks, BLOCK=block,
    )  # fmt: skip
