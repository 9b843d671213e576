"""What the sampling step reads and writes on the device: rows, the rules of their grammars, wishes about their scores
and their ends.

R counts rows, N states of all grammars together. Ids are listed per state in rows of equal width, padded at their end
with `vocab_size`, which is no id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

TEXT, COORD, SIZE = 0, 1, 2
"""Kinds of a row's last token."""
CARRIES_COORD, CARRIES_SIZE = 1, 2
"""Bits of `GrammarTensors.carries_N`."""
GOING_ON, STOPPED, OUT_OF_BUDGET, NOT_FINITE = 0, 1, 2, 3
"""Whether and how a row ended."""
NO_ID = -1
END_STATE = -1
"""Where an edge leads that finishes a row."""


@dataclass(slots=True)
class RowState:
    """[R] each, int64, but `last_value`: [R, 2], fp32."""

    last_id: Tensor
    last_kind: Tensor
    last_value: Tensor
    state: Tensor
    spent: Tensor
    """Tokens of the present phase."""
    generated: Tensor
    budget: Tensor
    """Of each phase."""
    max_total: Tensor


@dataclass(slots=True)
class DrawingRows(RowState):
    """Beside it, how rows draw, [R] each: `seed` and `top_k` int64, the others fp32."""

    seed: Tensor
    temperature: Tensor
    """0 for rows that take the most likely id."""
    top_k: Tensor
    """0 for all ids."""
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class GrammarTensors:
    """All int64 and contiguous. E edges by id, and one column more for any other id."""

    vocab_size: int
    allowed_NA: Tensor
    """What may be sampled where `is_limited`; everything elsewhere."""
    suppressed_NS: Tensor
    end_ids_NF: Tensor
    """Ids whose own edge finishes a row."""
    is_limited_N: Tensor
    phase_N: Tensor
    carries_N: Tensor
    when_spent_N: Tensor
    """The id that is taken, whatever was sampled, when the phase is spent; NO_ID where the row then ends."""
    edge_id_NE: Tensor
    """Padded with NO_ID."""
    edge_goto: Tensor
    """[N, E + 1]: a state, or END_STATE."""
    edge_emit: Tensor
    """[N, E + 1]: the id to emit, NO_ID for the sampled one."""

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return (
            self.allowed_NA, self.suppressed_NS, self.end_ids_NF, self.is_limited_N, self.phase_N, self.carries_N,
            self.when_spent_N, self.edge_id_NE, self.edge_goto, self.edge_emit,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EndingTensors:
    """Wishes of each row; one without any has zeros and no ids."""

    ends_from_R: Tensor
    """Tokens of a phase before which no id of the grammar's own may end the row."""
    stops_from_R: Tensor
    """The same for its stop ids, which count in states that an id of the grammar's own could end."""
    stop_ids_RS: Tensor


PENALTIES, BIAS, MASK, ID_LIMITS = 1, 2, 4, 8
"""Bits of `ScoreWishes.kinds_R`."""


@dataclass(frozen=True, slots=True)
class ScoreWishes:
    """How each row's scores differ from the logits. Tensors of a kind that no row of a step has may be missing."""

    kinds_R: Tensor
    """int32: which of the kinds a row has; the rest of its numbers mean nothing."""
    penalties_R3: Tensor | None = None
    """Presence, frequency, repetition."""
    in_prompt_RV: Tensor | None = None
    counts_RV: Tensor | None = None
    """How often the answer so far holds each id, fp32."""
    bias_RV: Tensor | None = None
    mask_RW: Tensor | None = None
    """int32: bit id % 32 of word id // 32 is set where an id may be sampled."""
    limits_RW: Tensor | None = None
    """The same."""


@dataclass(frozen=True, slots=True)
class RegionHeads:
    """What the region heads read from each entry's hidden state; None: no row can use it."""

    coord_id: int
    size_id: int
    coords_B2: Tensor | None = None
    """A coordinate and its log-probability."""
    sizes_B3: Tensor | None = None
    """Width, height and their log-probability."""


NO_REGIONS = RegionHeads(coord_id=-1, size_id=-1)
"""Of a model whose tokens are text: no id is one of these."""


# ---------------------------------------------------------------------- inputs of a step
# What a decode step reads of its rows before the first layer, gathered in one operation.
#
# An entry b of B belongs to row rows_B[b] and stands at position positions_B[b]: its keys and values go to the slot
# pages[row, position // page_size] · page_size + position % page_size, and it sees position + 1 keys.


class RowInputs(NamedTuple):
    """int64 but for the values."""

    positions_B: Tensor
    """A copy: the given ones may be where the next are left."""
    pages_BP: Tensor
    slots_B: Tensor
    num_keys_B: Tensor
    last_id_B: Tensor
    last_kind_B: Tensor
    last_value_B2: Tensor


def row_inputs(
    rows_B: Tensor,
    positions_B: Tensor,
    pages_RP: Tensor,
    rows: RowState,
    page_size: int,
    next_positions_B: Tensor | None = None,
) -> RowInputs:
    """`next_positions_B`: where the positions after these are left, for the next step of the same rows. May be
    `positions_B`."""
    assert rows_B.shape == positions_B.shape
    pages_BP = pages_RP[rows_B]
    positions_B = positions_B.clone()
    if next_positions_B is not None:
        next_positions_B.copy_(positions_B + 1)
    page_B = pages_BP.gather(1, (positions_B // page_size)[:, None])[:, 0]
    return RowInputs(
        positions_B=positions_B,
        pages_BP=pages_BP,
        slots_B=page_B * page_size + positions_B % page_size,
        num_keys_B=positions_B + 1,
        last_id_B=rows.last_id[rows_B],
        last_kind_B=rows.last_kind[rows_B],
        last_value_B2=rows.last_value[rows_B],
    )
