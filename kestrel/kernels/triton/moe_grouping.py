"""Pairs of token and expert put in blocks of one expert each, on the device.

A block holds `rows_per_block` places; an expert takes as many whole blocks as its pairs need, in the order of the
pairs. How many blocks there can be at most follows from the shapes, so nothing is read on the host: a place without a
pair and a block without an expert hold -1.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS_AT_A_TIME = 1024
PLACES_AT_A_TIME = 128


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pair number (token · k + place in the token's routing) of every place, and the expert of every block."""

    pairs_R: Tensor
    expert_G: Tensor
    places_Q: Tensor
    """Where each pair is."""
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
    ids_ptr, pairs_ptr, expert_ptr, places_ptr, num_pairs, num_blocks, num_experts,
    ROWS: tl.constexpr, BINS: tl.constexpr, AT_A_TIME: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One program per expert: counts everybody's pairs to find its first block, then places its own."""
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
        tl.store(places_ptr + pair, place, mask=is_own > 0)
        start += tl.sum(is_own, axis=0)


def group_pairs(ids_TK: Tensor, num_experts: int, rows_per_block: int) -> Blocks:
    assert ids_TK.is_contiguous()
    num_pairs = ids_TK.numel()
    num_blocks = max_blocks(num_pairs, num_experts, rows_per_block)
    pairs_R = torch.empty(num_blocks * rows_per_block, dtype=torch.int32, device=ids_TK.device)
    expert_G = torch.empty(num_blocks, dtype=torch.int32, device=ids_TK.device)
    places_Q = torch.empty(num_pairs, dtype=torch.int32, device=ids_TK.device)
    if num_pairs > 0:
        _group[(num_experts,)](
            ids_TK, pairs_R, expert_G, places_Q, num_pairs, num_blocks, num_experts,
            ROWS=rows_per_block, BINS=triton.next_power_of_2(num_experts + 1),
            AT_A_TIME=min(PAIRS_AT_A_TIME, max(32, triton.next_power_of_2(num_pairs))), PLACES=PLACES_AT_A_TIME,
        )  # fmt: skip
    return Blocks(pairs_R, expert_G, places_Q, rows_per_block)
