"""The sampling step: hidden states in, every row's next token, value and grammar state out, all on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.grammar import Carries
from kestrel.kernels.best_ids import mask, rank
from kestrel.kernels.commit_ids import commit_ids
from kestrel.kernels.draw_ids import draw_ids
from kestrel.kernels.row_tables import TEXT, RegionHeads
from kestrel.models.contract import DecoderModel
from kestrel.runtime.rows import HostRow, RowTable
from kestrel.runtime.token_masks import apply_masks
from kestrel.runtime.upload import upload


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
    masked_BV = mask(_within_id_limits(table, host, rows_B, weighed_BV), state_B, table.grammars.tensors)
    masked_BV = table.endings.forbid(masked_BV, row_indices, state_B, spent_B)
    is_random = any(row.samples_randomly for row in host)
    ranks_SBC = draw_ids(masked_BV, rows_B, table.tensors) if is_random else rank(*masked_BV.max(-1))[None, :, None]
    endings = table.endings.tensors if table.endings.stops_any_of(row_indices) else None
    region = region_heads(model, wanted_values(host), hidden_BD)
    sampled = Sampled(*commit_ids(ranks_SBC, rows_B, table.tensors, table.grammars.tensors, endings, region))
    emitted_B, kind_B = sampled.integers_B5[:, 0], sampled.integers_B5[:, 1]
    table.penalties.count(row_indices, emitted_B, kind_B == TEXT)
    _add_logprobs(sampled, host, raw_BV, emitted_B)
    return sampled


def _within_id_limits(table: RowTable, host: list[HostRow], rows_B: Tensor, scores_BV: Tensor) -> Tensor:
    """What the requests' own id limits allow."""
    if table.id_limits is None or not any(row.has_id_limits for row in host):
        return scores_BV
    limited_B = upload([row.has_id_limits for row in host], rows_B.device)
    return scores_BV.masked_fill(limited_B[:, None] & ~table.id_limits[rows_B], -torch.inf)


def wanted_values(host: list[HostRow]) -> Carries:
    """What some row's grammar can use."""
    wanted = Carries.NOTHING
    for row in host:
        wanted |= row.carries
    return wanted


def region_heads(model: DecoderModel, wanted: Carries, hidden_BD: Tensor) -> RegionHeads:
    """Only the wanted ones run."""
    return RegionHeads(
        coord_id=model.shape.coord_id,
        size_id=model.shape.size_id,
        coords_B=model.decode_coords(hidden_BD).float() if wanted & Carries.COORD else None,
        sizes_B2=model.decode_sizes(hidden_BD).float() if wanted & Carries.SIZE else None,
    )


def _add_logprobs(sampled: Sampled, host: list[HostRow], raw_BV: Tensor, emitted_B: Tensor) -> None:
    wanted = [row.logprobs for row in host if row.logprobs is not None]
    if not wanted:
        return
    logprobs_BV = torch.log_softmax(raw_BV, dim=-1)
    sampled.chosen_logprob_B = logprobs_BV.gather(1, emitted_B[:, None])[:, 0]
    if max(wanted) > 0:
        sampled.top_logprob_BK, sampled.top_id_BK = logprobs_BV.topk(min(max(wanted), raw_BV.shape[1]), dim=-1)
