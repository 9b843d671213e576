"""The sampling step: hidden states in, every row's next token, value and grammar state out, all on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.grammar import Carries
from kestrel.kernels.sampling import Truncation, draw, truncate, uniform
from kestrel.models.contract import DecoderModel
from kestrel.runtime.grammar_tables import Advance
from kestrel.runtime.rows import COORD, SIZE, TEXT, HostRow, RowTable
from kestrel.runtime.token_masks import apply_masks
from kestrel.runtime.upload import upload

GOING_ON, STOPPED, OUT_OF_BUDGET, NOT_FINITE = 0, 1, 2, 3


@dataclass(slots=True)
class Sampled:
    """One entry per sampled row, in the order of the step. `integers_B5`: id, kind, finish, state, spent."""

    integers_B5: Tensor
    values_B2: Tensor
    chosen_logprob_B: Tensor | None = None
    top_logprob_BK: Tensor | None = None
    top_id_BK: Tensor | None = None


def sample_rows(
    model: DecoderModel, table: RowTable, hidden_BD: Tensor, row_indices: list[int], masks: Mapping[int, bytes]
) -> Sampled:
    """Samples for `row_indices` (row b of `hidden_BD` belongs to row_indices[b]) and updates the table."""
    host = [table.host[row] for row in row_indices]
    rows_B = upload(row_indices, table.device)
    state_B, spent_B = table.tensors.state[rows_B], table.tensors.spent[rows_B]
    raw_BV = model.logits(hidden_BD).float()

    weighed_BV = table.penalties.apply(raw_BV, row_indices)
    weighed_BV = table.logit_bias.apply(weighed_BV, row_indices)
    weighed_BV = apply_masks(weighed_BV, row_indices, masks)
    masked_BV = table.grammars.mask(_within_id_limits(table, host, rows_B, weighed_BV), state_B)
    masked_BV = table.endings.forbid(masked_BV, row_indices, state_B, spent_B)
    best_B, greedy_B = masked_BV.max(-1)
    is_random = any(row.samples_randomly for row in host)
    sampled_B = draw_rows(table, rows_B, masked_BV, greedy_B) if is_random else greedy_B
    step = table.grammars.advance(state_B, sampled_B, is_spent_B=spent_B >= table.tensors.budget[rows_B])
    step = table.endings.stop(step, row_indices, state_B)
    kind_B, values_B2 = region_values(model, wanted_values(host), hidden_BD, step)
    table.penalties.count(row_indices, step.emitted_B, kind_B == TEXT)
    sampled = commit_rows(table, rows_B, step, best_B, kind_B, values_B2)
    _add_logprobs(sampled, host, raw_BV, step.emitted_B)
    return sampled


def commit_rows(
    table: RowTable, rows_B: Tensor, step: Advance, best_B: Tensor, kind_B: Tensor, values_B2: Tensor
) -> Sampled:
    """Notes in the table what each row emitted, and whether it ended."""
    t = table.tensors
    spent_B = torch.where(step.changes_phase_B, 0, t.spent[rows_B] + 1)
    generated_B = t.generated[rows_B] + ~step.ended_B
    phase_over_B = (spent_B >= t.budget[rows_B]) & table.grammars.ends_when_spent(step.state_B)
    out_of_budget_B = phase_over_B | (generated_B >= t.max_total[rows_B])
    finish_B = torch.where(step.ended_B, STOPPED, torch.where(out_of_budget_B, OUT_OF_BUDGET, GOING_ON))
    finish_B = torch.where(best_B.isfinite(), finish_B, NOT_FINITE)
    t.last_id[rows_B], t.last_kind[rows_B], t.last_value[rows_B] = step.emitted_B, kind_B, values_B2
    t.state[rows_B], t.spent[rows_B], t.generated[rows_B] = step.state_B, spent_B, generated_B
    return Sampled(torch.stack((step.emitted_B, kind_B, finish_B, step.state_B, spent_B), dim=1), values_B2)


def _within_id_limits(table: RowTable, host: list[HostRow], rows_B: Tensor, scores_BV: Tensor) -> Tensor:
    """What the requests' own id limits allow."""
    if table.id_limits is None or not any(row.has_id_limits for row in host):
        return scores_BV
    limited_B = upload([row.has_id_limits for row in host], rows_B.device)
    return scores_BV.masked_fill(limited_B[:, None] & ~table.id_limits[rows_B], -torch.inf)


def draw_rows(table: RowTable, rows_B: Tensor, logits_BV: Tensor, greedy_B: Tensor) -> Tensor:
    """A draw for the rows that sample, the most likely id for the others."""
    t = table.tensors
    how = Truncation(t.temperature[rows_B], t.top_k[rows_B], t.top_p[rows_B], t.min_p[rows_B])
    probs_BV, order_BV = truncate(logits_BV, how)
    drawn_B = draw(probs_BV, order_BV, uniform(t.seed[rows_B], t.generated[rows_B]))
    return torch.where(how.temperature_B > 0, drawn_B, greedy_B)


def wanted_values(host: list[HostRow]) -> Carries:
    """What some row's grammar can use."""
    wanted = Carries.NOTHING
    for row in host:
        wanted |= row.carries
    return wanted


def region_values(model: DecoderModel, wanted: Carries, hidden_BD: Tensor, step: Advance) -> tuple[Tensor, Tensor]:
    """(kind, value) of each emitted id; only the wanted region heads run."""
    emitted_B, carries_B = step.emitted_B, step.carries_B
    kind_B = torch.full_like(emitted_B, TEXT)
    values_B2 = torch.zeros(len(emitted_B), 2, device=hidden_BD.device)
    if wanted & Carries.COORD:
        is_coord_B = (emitted_B == model.shape.coord_id) & (carries_B & int(Carries.COORD) > 0)
        kind_B = torch.where(is_coord_B, COORD, kind_B)
        coords_B2 = torch.stack((model.decode_coords(hidden_BD).float(), values_B2[:, 1]), dim=1)
        values_B2 = torch.where(is_coord_B[:, None], coords_B2, values_B2)
    if wanted & Carries.SIZE:
        is_size_B = (emitted_B == model.shape.size_id) & (carries_B & int(Carries.SIZE) > 0)
        kind_B = torch.where(is_size_B, SIZE, kind_B)
        values_B2 = torch.where(is_size_B[:, None], model.decode_sizes(hidden_BD).float(), values_B2)
    return kind_B, values_B2


def _add_logprobs(sampled: Sampled, host: list[HostRow], raw_BV: Tensor, emitted_B: Tensor) -> None:
    wanted = [row.logprobs for row in host if row.logprobs is not None]
    if not wanted:
        return
    logprobs_BV = torch.log_softmax(raw_BV, dim=-1)
    sampled.chosen_logprob_B = logprobs_BV.gather(1, emitted_B[:, None])[:, 0]
    if max(wanted) > 0:
        sampled.top_logprob_BK, sampled.top_id_BK = logprobs_BV.topk(min(max(wanted), raw_BV.shape[1]), dim=-1)
