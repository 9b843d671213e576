"""Low-rank deltas of several adapters in one batch, as two kernels: h = a · x, then y += b · h.

Rows are worked on in tiles of one adapter each. Tiles live in buffers of fixed size, so that a captured graph can be
replayed with other rows: a tile without rows has matrix -1 and ends at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.low_rank import SlotRows

ROWS_PER_TILE = 16
BLOCK_IN = 64
BLOCK_OUT = 64
BLOCK_RANK = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """Which rows go through which matrix; `rows` is padded with -1."""

    matrix_K: Tensor
    rows_KN: Tensor

    @classmethod
    def of(cls, users: Sequence[SlotRows], device: torch.device) -> Tiles:
        """From host-side lists; for eager use and for filling the buffers of a graph."""
        matrices: list[int] = []
        parts: list[Tensor] = []
        for user in users:
            for part in user.rows_N.split(ROWS_PER_TILE):
                matrices.append(user.slot)
                parts.append(torch.nn.functional.pad(part, (0, ROWS_PER_TILE - len(part)), value=-1))
        rows_KN = torch.stack(parts) if parts else torch.empty(0, ROWS_PER_TILE, dtype=torch.int64)
        return cls(torch.tensor(matrices, dtype=torch.int64, device=device), rows_KN.to(device))


@triton.jit
def _shrink(
    x_ptr, a_ptr, h_ptr, matrix_ptr, rows_ptr, rank_ptr,
    num_in, max_rank, x_stride, a_stride,
    ROWS: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    tile, rank_block = tl.program_id(0), tl.program_id(1)
    matrix = tl.load(matrix_ptr + tile)
    if matrix < 0:
        return
    rank = tl.load(rank_ptr + matrix)
    if rank_block * BLOCK_RANK >= rank:
        return
    slots = tl.arange(0, ROWS)
    rows = tl.load(rows_ptr + tile * ROWS + slots)
    r = rank_block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    total = tl.zeros((ROWS, BLOCK_RANK), dtype=tl.float32)
    for start in range(0, num_in, BLOCK_IN):
        d = start + tl.arange(0, BLOCK_IN)
        x = tl.load(
            x_ptr + rows[:, None] * x_stride + d[None, :], mask=(rows[:, None] >= 0) & (d[None, :] < num_in), other=0.0
        )
        a = tl.load(
            a_ptr + matrix * a_stride + r[None, :] * num_in + d[:, None],
            mask=(r[None, :] < rank) & (d[:, None] < num_in),
            other=0.0,
        )
        total += tl.dot(x, a, input_precision="ieee")
    out = h_ptr + (tile * ROWS + slots)[:, None] * max_rank + r[None, :]
    tl.store(out, total.to(h_ptr.dtype.element_ty), mask=r[None, :] < rank)


@triton.jit
def _expand(
    h_ptr, b_ptr, y_ptr, matrix_ptr, rows_ptr, rank_ptr,
    num_out, max_rank, y_stride, b_stride,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    tile, out_block = tl.program_id(0), tl.program_id(1)
    matrix = tl.load(matrix_ptr + tile)
    if matrix < 0:
        return
    rank = tl.load(rank_ptr + matrix)
    slots = tl.arange(0, ROWS)
    rows = tl.load(rows_ptr + tile * ROWS + slots)
    f = out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    total = tl.zeros((ROWS, BLOCK_OUT), dtype=tl.float32)
    for start in range(0, rank, BLOCK_RANK):
        r = start + tl.arange(0, BLOCK_RANK)
        h = tl.load(h_ptr + (tile * ROWS + slots)[:, None] * max_rank + r[None, :], mask=r[None, :] < rank, other=0.0)
        b = tl.load(
            b_ptr + matrix * b_stride + f[None, :] * max_rank + r[:, None],
            mask=(f[None, :] < num_out) & (r[:, None] < rank),
            other=0.0,
        )
        total += tl.dot(h, b, input_precision="ieee")
    place = y_ptr + rows[:, None] * y_stride + f[None, :]
    mask = (rows[:, None] >= 0) & (f[None, :] < num_out)
    before = tl.load(place, mask=mask, other=0.0)
    # The delta is rounded before it is added, as the plain version does.
    delta = total.to(y_ptr.dtype.element_ty)
    tl.store(place, (before.to(tl.float32) + delta.to(tl.float32)).to(y_ptr.dtype.element_ty), mask=mask)


def add_low_rank(y_TF: Tensor, x_TD: Tensor, tiles: Tiles, a_MRD: Tensor, b_MFR: Tensor, rank_M: Tensor) -> Tensor:
    """y with the deltas added, in place. M counts matrices: slots, or slots times experts."""
    num_tiles = tiles.matrix_K.shape[0]
    max_rank, num_in = a_MRD.shape[1:]
    num_out = b_MFR.shape[1]
    assert y_TF.shape == (x_TD.shape[0], num_out)
    assert x_TD.shape[1] == num_in
    assert b_MFR.shape[2] == max_rank
    assert x_TD.stride(1) == y_TF.stride(1) == 1
    assert a_MRD[0].is_contiguous()
    assert b_MFR[0].is_contiguous()
    if num_tiles == 0:
        return y_TF
    h = torch.empty(num_tiles * ROWS_PER_TILE, max_rank, dtype=x_TD.dtype, device=x_TD.device)
    _shrink[(num_tiles, triton.cdiv(max_rank, BLOCK_RANK))](
        x_TD, a_MRD, h, tiles.matrix_K, tiles.rows_KN, rank_M,
        num_in, max_rank, x_TD.stride(0), a_MRD.stride(0),
        ROWS=ROWS_PER_TILE, BLOCK_IN=BLOCK_IN, BLOCK_RANK=BLOCK_RANK,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    _expand[(num_tiles, triton.cdiv(num_out, BLOCK_OUT))](
        h, b_MFR, y_TF, tiles.matrix_K, tiles.rows_KN, rank_M,
        num_out, max_rank, y_TF.stride(0), b_MFR.stride(0),
        ROWS=ROWS_PER_TILE, BLOCK_OUT=BLOCK_OUT, BLOCK_RANK=BLOCK_RANK,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return y_TF
