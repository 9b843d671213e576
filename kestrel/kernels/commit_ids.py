"""From the id chosen for each row to what the row emits, and what is noted of it.

The id takes its edge in the row's grammar (`kestrel.kernels.row_tables`): a spent phase may put another id in its
place, an edge may emit another one, an emitted coordinate or size id takes along the value of its region head. A stop
id ends its row. Everything that the next step needs is written to the row's own tensors.

Entries that only fill up a batch all belong to one row: its tensors then hold what some of them left, always a state
that exists, and what they return is of no use to anybody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kestrel.kernels.row_tables import (
    CARRIES_COORD,
    CARRIES_SIZE,
    COORD,
    END_STATE,
    GOING_ON,
    NO_ID,
    NOT_FINITE,
    OUT_OF_BUDGET,
    SIZE,
    STOPPED,
    TEXT,
    EndingTensors,
    GrammarTensors,
    RegionHeads,
    RowState,
)
from kestrel.kernels.sampling import can_end, chosen


@dataclass(frozen=True, slots=True)
class Advance:
    """What sampling did to each row."""

    sampled_B: Tensor
    """The id whose edge was taken."""
    emitted_B: Tensor
    state_B: Tensor
    """Next state; the current one where the row ended."""
    ended_B: Tensor
    changes_phase_B: Tensor
    carries_B: Tensor


def commit_ids(
    ranks_SBC: Tensor,
    rows_B: Tensor,
    rows: RowState,
    grammar: GrammarTensors,
    endings: EndingTensors | None,
    region: RegionHeads,
) -> tuple[Tensor, Tensor]:
    """(integers [B, 5]: emitted id, kind, finish, state, spent; values [B, 3] in fp32: one
    or two numbers, and their log-probability), and the rows updated."""
    is_finite_B, sampled_B = chosen(ranks_SBC)
    state_B, spent_B = rows.state[rows_B], rows.spent[rows_B]
    step = advance(state_B, sampled_B, spent_B >= rows.budget[rows_B], grammar)
    if endings is not None:
        step = stop(step, rows_B, state_B, grammar, endings)
    kind_B, values_B3 = _kinds_and_values(step, region)
    spent_B = torch.where(step.changes_phase_B, 0, spent_B + 1)
    generated_B = rows.generated[rows_B] + ~step.ended_B
    phase_over_B = (spent_B >= rows.budget[rows_B]) & (grammar.when_spent_N[step.state_B] == NO_ID)
    out_of_budget_B = phase_over_B | (generated_B >= rows.max_total[rows_B])
    finish_B = torch.where(step.ended_B, STOPPED, torch.where(out_of_budget_B, OUT_OF_BUDGET, GOING_ON))
    finish_B = torch.where(is_finite_B, finish_B, NOT_FINITE)
    rows.last_id[rows_B], rows.last_kind[rows_B], rows.last_value[rows_B] = step.emitted_B, kind_B, values_B3[:, :2]
    rows.state[rows_B], rows.spent[rows_B], rows.generated[rows_B] = step.state_B, spent_B, generated_B
    return torch.stack((step.emitted_B, kind_B, finish_B, step.state_B, spent_B), dim=1), values_B3


def advance(state_B: Tensor, sampled_B: Tensor, is_spent_B: Tensor, grammar: GrammarTensors) -> Advance:
    when_spent_B = grammar.when_spent_N[state_B]
    sampled_B = torch.where(is_spent_B & (when_spent_B != NO_ID), when_spent_B, sampled_B)
    hits_BE = grammar.edge_id_NE[state_B] == sampled_B[:, None]
    edge_B = torch.where(hits_BE.any(1), hits_BE.int().argmax(1), hits_BE.shape[1])
    goto_B, emit_B = grammar.edge_goto[state_B, edge_B], grammar.edge_emit[state_B, edge_B]
    ended_B = goto_B == END_STATE
    next_B = torch.where(ended_B, state_B, goto_B)
    return Advance(
        sampled_B=sampled_B,
        emitted_B=torch.where(emit_B == NO_ID, sampled_B, emit_B),
        state_B=next_B,
        ended_B=ended_B,
        changes_phase_B=grammar.phase_N[next_B] != grammar.phase_N[state_B],
        carries_B=grammar.carries_N[state_B],
    )


def stop(step: Advance, rows_B: Tensor, state_B: Tensor, grammar: GrammarTensors, endings: EndingTensors) -> Advance:
    """The step with those rows ended that took one of their stop ids in `state_B`."""
    stopped_B = (endings.stop_ids_RS[rows_B] == step.sampled_B[:, None]).any(1) & can_end(state_B, grammar)
    return replace(
        step,
        ended_B=step.ended_B | stopped_B,
        state_B=torch.where(stopped_B, state_B, step.state_B),
        changes_phase_B=step.changes_phase_B & ~stopped_B,
    )


def _kinds_and_values(step: Advance, region: RegionHeads) -> tuple[Tensor, Tensor]:
    kind_B = torch.full_like(step.emitted_B, TEXT)
    values_B3 = torch.zeros(len(kind_B), 3, device=kind_B.device)
    if region.coords_B2 is not None:
        is_coord_B = (step.emitted_B == region.coord_id) & (step.carries_B & CARRIES_COORD > 0)
        kind_B = torch.where(is_coord_B, COORD, kind_B)
        coord_B, logprob_B = region.coords_B2.unbind(1)
        coords_B3 = torch.stack((coord_B, values_B3[:, 1], logprob_B), dim=1)
        values_B3 = torch.where(is_coord_B[:, None], coords_B3, values_B3)
    if region.sizes_B3 is not None:
        is_size_B = (step.emitted_B == region.size_id) & (step.carries_B & CARRIES_SIZE > 0)
        kind_B = torch.where(is_size_B, SIZE, kind_B)
        values_B3 = torch.where(is_size_B[:, None], region.sizes_B3, values_B3)
    return kind_B, values_B3
