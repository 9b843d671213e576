"""The inputs of a decode step in one launch: a program copies a block of one entry's pages, the first also the rest."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.row_tables import RowInputs, RowState
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable


@dataclass(frozen=True, slots=True)
class Tuning:
    block_pages: int = 256
    num_warps: int = 2


@triton.jit
def _gather(
    rows_ptr, positions_ptr, next_positions_ptr, pages_ptr, last_id_ptr, last_kind_ptr, last_value_ptr,
    positions_out_ptr, pages_out_ptr, slots_ptr, num_keys_ptr, id_out_ptr, kind_out_ptr, value_out_ptr, num_pages,
    HAS_NEXT: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + entry).to(tl.int64)
    pages_ptr += row * num_pages
    p = block * BLOCK + tl.arange(0, BLOCK)
    pages = tl.load(pages_ptr + p, mask=p < num_pages)
    tl.store(pages_out_ptr + entry * num_pages + p, pages, mask=p < num_pages)
    if block == 0:
        position = tl.load(positions_ptr + entry)
        tl.store(positions_out_ptr + entry, position)
        if HAS_NEXT:
            tl.store(next_positions_ptr + entry, position + 1)
        page = tl.load(pages_ptr + position // PAGE_SIZE)
        tl.store(slots_ptr + entry, page * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(num_keys_ptr + entry, position + 1)
        tl.store(id_out_ptr + entry, tl.load(last_id_ptr + row))
        tl.store(kind_out_ptr + entry, tl.load(last_kind_ptr + row))
        both = tl.arange(0, 2)
        tl.store(value_out_ptr + 2 * entry + both, tl.load(last_value_ptr + 2 * row + both))


def row_inputs(
    rows_B: Tensor,
    positions_B: Tensor,
    pages_RP: Tensor,
    rows: RowState,
    page_size: int,
    next_positions_B: Tensor | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> RowInputs:
    num_entries, num_pages = len(rows_B), pages_RP.shape[1]
    assert positions_B.shape == rows_B.shape
    for tensor in (rows_B, positions_B, pages_RP, rows.last_id, rows.last_kind, rows.last_value):
        assert tensor.is_contiguous()
    if next_positions_B is not None:
        assert next_positions_B.shape == rows_B.shape
        assert next_positions_B.is_contiguous()
    out = RowInputs(
        torch.empty_like(positions_B),
        pages_RP.new_empty(num_entries, num_pages),
        *(torch.empty_like(rows_B) for _ in range(4)),
        rows.last_value.new_empty(num_entries, 2),
    )
    chosen = tuning or table.find("row_inputs", num_entries, (), pages_RP.dtype) or Tuning()
    block = min(chosen.block_pages, triton.next_power_of_2(num_pages))
    _gather[(num_entries, triton.cdiv(num_pages, block))](
        rows_B, positions_B, positions_B if next_positions_B is None else next_positions_B, pages_RP,
        rows.last_id, rows.last_kind, rows.last_value, *out, num_pages,
        HAS_NEXT=next_positions_B is not None, PAGE_SIZE=page_size, BLOCK=block, num_warps=chosen.num_warps,
    )  # fmt: skip
    return out
