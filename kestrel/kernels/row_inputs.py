"""What a decode step reads of its rows before the first layer, gathered in one operation.

An entry b of B belongs to row rows_B[b] and stands at position positions_B[b]: its keys and values go to the slot
pages[row, position // page_size] · page_size + position % page_size, and it sees position + 1 keys.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kestrel.kernels.row_tables import RowState


class RowInputs(NamedTuple):
    """int64 but for the values."""

    pages_BP: Tensor
    slots_B: Tensor
    num_keys_B: Tensor
    last_id_B: Tensor
    last_kind_B: Tensor
    last_value_B2: Tensor


def row_inputs(rows_B: Tensor, positions_B: Tensor, pages_RP: Tensor, rows: RowState, page_size: int) -> RowInputs:
    assert rows_B.shape == positions_B.shape
    pages_BP = pages_RP[rows_B]
    page_B = pages_BP.gather(1, (positions_B // page_size)[:, None])[:, 0]
    return RowInputs(
        pages_BP=pages_BP,
        slots_B=page_B * page_size + positions_B % page_size,
        num_keys_B=positions_B + 1,
        last_id_B=rows.last_id[rows_B],
        last_kind_B=rows.last_kind[rows_B],
        last_value_B2=rows.last_value[rows_B],
    )
