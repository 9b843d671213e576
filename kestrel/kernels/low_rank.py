"""Low-rank deltas of several adapters in one batch.

    y[n] += b[slot(n)] · (a[slot(n)] · x[n])        for every row n that has a slot

Rows without a slot keep y bit by bit. An adapter may have a lower rank than the buffers: it uses the first `rank` rows
of `a` and columns of `b`. The two products run in the dtype of x, one adapter after the other.

Who uses what is read from tensors, so that a captured step can be replayed for other rows, slots and ranks:
`tile_slots` puts the rows of a batch in tiles of one slot each, which all layers share. `add_deltas` serves one matrix,
and `small_adapted_linear` is a linear layer of a handful of rows with the deltas of that matrix. With many rows each
end of a block with parallel attention and MLP is one operation:

    add_input_deltas:   qkv += Δqkv(y);  hidden = GELU_tanh(hidden + Δfc1(y))
    add_output_deltas:  total += Δproj(attention or y) + Δfc2(hidden)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.kernels.linear import small_linear


def low_rank(x_ND: Tensor, a_RD: Tensor, b_FR: Tensor) -> Tensor:
    """The delta of one adapter."""
    return functional.linear(functional.linear(x_ND, a_RD), b_FR)


RANK_STEP = 16
"""Ranks on the device are multiples of this, filled up with zeros: what tensor cores multiply at a time."""


def stored_rank(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


class SlotFactors(NamedTuple):
    """The factors of one matrix for all slots. The base model counts as one slot more: the last, of rank 0."""

    a_SRD: Tensor
    b_SRF: Tensor
    """Ranks outermost, as of `a`: an adapter of a lower rank reads a part that lies together."""
    rank_S: Tensor
    """int32, one longer than the others; each is a `stored_rank`."""


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """The rows of a batch in tiles of one slot each, those of the base model too. -1: no slot, no row."""

    slot_K: Tensor
    rows_KN: Tensor


def tile_slots(slot_T: Tensor, num_slots: int, rows_per_tile: int = 16) -> SlotTiles:
    """From each row's slot, -1 for the base model. How many tiles there are follows from the shapes."""
    num_rows = len(slot_T)
    slot_T = slot_T.masked_fill(slot_T < 0, num_slots)
    num_tiles = num_rows // rows_per_tile + min(num_rows, num_slots + 1)
    slot_K = torch.full((num_tiles,), -1, dtype=torch.int64, device=slot_T.device)
    rows_KN = torch.full((num_tiles, rows_per_tile), -1, dtype=torch.int64, device=slot_T.device)
    tile = 0
    for slot in range(num_slots + 1):
        for rows_N in (slot_T == slot).nonzero()[:, 0].split(rows_per_tile):
            if len(rows_N):
                slot_K[tile], rows_KN[tile, : len(rows_N)] = slot, rows_N
                tile += 1
    return SlotTiles(slot_K, rows_KN)


def add_deltas(
    tiles: SlotTiles,
    y_TF: Tensor,
    x_TD: Tensor,
    factors: SlotFactors,
    other_TD: Tensor | None = None,
    reads_other_S: Tensor | None = None,
    has_gelu: bool = False,
) -> None:
    """y += Δ(x), in place; slots of which `reads_other_S` says so read `other` instead. `has_gelu`: y =
    GELU_tanh(y + Δ(x)) instead. Rows of the base model keep their y in any case."""
    for slot, rows_N in _rows_by_slot(tiles, factors):
        source_TD = x_TD if other_TD is None or reads_other_S is None or not reads_other_S[slot] else other_TD
        y_TF.index_add_(0, rows_N, _slot_delta(source_TD[rows_N], factors, slot))
        if has_gelu:
            y_TF[rows_N] = functional.gelu(y_TF[rows_N], approximate="tanh")


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
) -> Tensor:
    """y = x · (scale · weight)ᵀ + bias + Δ(x), M ≤ 16; `other`, `reads_other_S` as of `add_deltas`. With `is_base_M`,
    which says what rows are those of the base model, GELU_tanh follows. Rows of the base model get what `small_linear`
    gives them, bit by bit."""
    has_gelu = is_base_M is not None
    y_MF = small_linear(x_MD, weight_FD, bias_F, None, has_gelu, scale_F, is_base_M, is_beside=is_beside)
    add_deltas(tiles, y_MF, x_MD, factors, other_MD, reads_other_S, has_gelu)
    return y_MF


def add_input_deltas(
    tiles: SlotTiles,
    y_TD: Tensor,
    qkv_TF: Tensor,
    qkv: SlotFactors,
    hidden_TF: Tensor,
    fc1: SlotFactors,
) -> None:
    """In place. The GELU is for rows of the base model too."""
    for slot, rows_N in _rows_by_slot(tiles, qkv):
        qkv_TF.index_add_(0, rows_N, _slot_delta(y_TD[rows_N], qkv, slot))
        hidden_TF.index_add_(0, rows_N, _slot_delta(y_TD[rows_N], fc1, slot))
    hidden_TF.copy_(functional.gelu(hidden_TF, approximate="tanh"))


def add_output_deltas(
    tiles: SlotTiles,
    total_TD: Tensor,
    mixed_TD: Tensor,
    y_TD: Tensor,
    reads_norm_S: Tensor,
    proj: SlotFactors,
    hidden_TF: Tensor,
    fc2: SlotFactors,
) -> None:
    """In place. proj's delta reads the attention's output `mixed`, or `y` where `reads_norm_S` says so of a slot."""
    for slot, rows_N in _rows_by_slot(tiles, proj):
        x_TD = y_TD if reads_norm_S[slot] else mixed_TD
        total_TD.index_add_(0, rows_N, _slot_delta(x_TD[rows_N], proj, slot))
        total_TD.index_add_(0, rows_N, _slot_delta(hidden_TF[rows_N], fc2, slot))


def _rows_by_slot(tiles: SlotTiles, factors: SlotFactors) -> list[tuple[int, Tensor]]:
    """(slot, all its rows) of the adapters that are used."""
    used = sorted({slot for slot in tiles.slot_K.tolist() if 0 <= slot < len(factors.a_SRD)})
    rows_of = ((slot, tiles.rows_KN[tiles.slot_K == slot]) for slot in used)
    return [(slot, rows_KN[rows_KN >= 0].long()) for slot, rows_KN in rows_of]


def _slot_delta(x_ND: Tensor, factors: SlotFactors, slot: int) -> Tensor:
    rank = int(factors.rank_S[slot])
    return low_rank(x_ND, factors.a_SRD[slot, :rank], factors.b_SRF[slot, :rank].T)
