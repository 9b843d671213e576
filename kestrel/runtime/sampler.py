"""The sampling step: hidden states in, every row's next token, value and grammar state out, all on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.grammar import Carries
from kestrel.kernels.sampling import Truncation, draw, truncate, uniform
from kestrel.models.contract import DecoderModel
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
    t = table.tensors
    state_B, spent_B = t.state[rows_B], t.spent[rows_B]
    raw_BV = model.logits(hidden_BD).float()

    weighed_BV = table.penalties.apply(raw_BV, row_indices)
    weighed_BV = table.logit_bias.apply(weighed_BV, row_indices)
    masked_BV = _masked(table, host, rows_B, state_B, apply_masks(weighed_BV, row_indices, masks))
    masked_BV = table.endings.forbid(masked_BV, row_indices, state_B, spent_B)
    best_B, greedy_B = masked_BV.max(-1)
    sampled_B = _choose(table, host, rows_B, masked_BV, greedy_B)
    step = table.grammars.advance(state_B, sampled_B, is_spent_B=spent_B >= t.budget[rows_B])
    step = table.endings.stop(step, row_indices, state_B)
    kind_B, values_B2 = _values(model, host, hidden_BD, step.emitted_B, step.carries_B)

    spent_B = torch.where(step.changes_phase_B, 0, spent_B + 1)
    generated_B = t.generated[rows_B] + ~step.ended_B
    phase_over_B = (spent_B >= t.budget[rows_B]) & table.grammars.ends_when_spent(step.state_B)
    out_of_budget_B = phase_over_B | (generated_B >= t.max_total[rows_B])
    finish_B = torch.where(step.ended_B, STOPPED, torch.where(out_of_budget_B, OUT_OF_BUDGET, GOING_ON))
    finish_B = torch.where(best_B.isfinite(), finish_B, NOT_FINITE)

    table.penalties.count(row_indices, step.emitted_B, kind_B == TEXT)
    t.last_id[rows_B], t.last_kind[rows_B], t.last_value[rows_B] = step.emitted_B, kind_B, values_B2
    t.state[rows_B], t.spent[rows_B], t.generated[rows_B] = step.state_B, spent_B, generated_B
    sampled = Sampled(torch.stack((step.emitted_B, kind_B, finish_B, step.state_B, spent_B), dim=1), values_B2)
    _add_logprobs(sampled, host, raw_BV, step.emitted_B)
    return sampled


def _masked(table: RowTable, host: list[HostRow], rows_B: Tensor, state_B: Tensor, scores_BV: Tensor) -> Tensor:
    """What both the grammar and the request's own id limits allow."""
    if table.id_limits is not None and any(row.has_id_limits for row in host):
        limited_B = upload([row.has_id_limits for row in host], rows_B.device)
        scores_BV = scores_BV.masked_fill(limited_B[:, None] & ~table.id_limits[rows_B], -torch.inf)
    return table.grammars.mask(scores_BV, state_B)


def _choose(table: RowTable, host: list[HostRow], rows_B: Tensor, logits_BV: Tensor, greedy_B: Tensor) -> Tensor:
    if not any(row.samples_randomly for row in host):
        return greedy_B
    t = table.tensors
    how = Truncation(t.temperature[rows_B], t.top_k[rows_B], t.top_p[rows_B], t.min_p[rows_B])
    probs_BV, order_BV = truncate(logits_BV, how)
    drawn_B = draw(probs_BV, order_BV, uniform(t.seed[rows_B], t.generated[rows_B]))
    return torch.where(how.temperature_B > 0, drawn_B, greedy_B)


def _values(
    model: DecoderModel, host: list[HostRow], hidden_BD: Tensor, emitted_B: Tensor, carries_B: Tensor
) -> tuple[Tensor, Tensor]:
    """(kind, value) of each emitted id; region heads run only when some row's grammar can use them."""
    kind_B = torch.full_like(emitted_B, TEXT)
    values_B2 = torch.zeros(len(host), 2, device=hidden_BD.device)
    wanted = Carries.NOTHING
    for row in host:
        wanted |= row.carries
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
