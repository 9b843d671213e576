"""The sampling step: hidden states in, every row's next token, value and grammar state out, all on the device; and how
that gets to the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.errors import NumericalError
from kestrel.grammar import Carries
from kestrel.kernels.commit_ids import commit_ids
from kestrel.kernels.row_tables import COORD, GOING_ON, NO_REGIONS, NOT_FINITE, SIZE, STOPPED, TEXT, RegionHeads
from kestrel.kernels.sampling import draw_ids, mask, rank
from kestrel.models.contract import DecoderModel
from kestrel.request import FinishReason, TokenLogprobs
from kestrel.runtime.contract import RowOutput, StepOutput
from kestrel.runtime.device import start_download, upload
from kestrel.runtime.rows import HostRow, RowTable
from kestrel.runtime.sampling_options import apply_masks
from kestrel.tokens import CoordToken, SizeToken, TextToken, Token


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
    regions = model.regions
    if regions is None:
        return NO_REGIONS
    return RegionHeads(
        coord_id=regions.coord_id,
        size_id=regions.size_id,
        coords_B=regions.decode_coords(hidden_BD).float() if wanted & Carries.COORD else None,
        sizes_B2=regions.decode_sizes(hidden_BD).float() if wanted & Carries.SIZE else None,
    )


def _add_logprobs(sampled: Sampled, host: list[HostRow], raw_BV: Tensor, emitted_B: Tensor) -> None:
    wanted = [row.logprobs for row in host if row.logprobs is not None]
    if not wanted:
        return
    logprobs_BV = torch.log_softmax(raw_BV, dim=-1)
    sampled.chosen_logprob_B = logprobs_BV.gather(1, emitted_B[:, None])[:, 0]
    if max(wanted) > 0:
        sampled.top_logprob_BK, sampled.top_id_BK = logprobs_BV.topk(min(max(wanted), raw_BV.shape[1]), dim=-1)


# ---------------------------------------------------------------------- from the device to the scheduler


FINISH = 2
"""Column of `Sampled.integers_B5` that says whether and how a row ended."""
NOT_FINITE_MESSAGE = (
    "the model gave no finite score for any allowed token; if the weights are sound, use dtype bfloat16 or float32"
)


@dataclass(slots=True)
class SampledPart:
    """Rows that were sampled together. `sampled` is on its way to the host; `arrived` tells when it is there."""

    row_indices: list[int]
    host_rows: list[HostRow]
    sampled: Sampled
    arrived: torch.cuda.Event | None


def send_part(row_indices: list[int], host_rows: list[HostRow], sampled: Sampled) -> SampledPart:
    """Starts the copy to the host."""
    on_host, arrived = _send_to_host(sampled)
    return SampledPart(row_indices, host_rows, on_host, arrived)


def read_part(part: SampledPart, output: StepOutput) -> None:
    """Adds the rows to `output`, once they have arrived."""
    if part.arrived is not None:
        part.arrived.synchronize()
    integers, values = part.sampled.integers_B5.tolist(), part.sampled.values_B2.tolist()
    logprobs = _logprobs(part.sampled, part.host_rows)
    for b, row in enumerate(part.row_indices):
        if integers[b][FINISH] == NOT_FINITE:
            output.failures[row] = NumericalError(NOT_FINITE_MESSAGE)
        else:
            output.rows.append(_row_output(row, part.host_rows[b], integers[b], values[b], logprobs[b]))


def _send_to_host(sampled: Sampled) -> tuple[Sampled, torch.cuda.Event | None]:
    """Start the copy to pinned host memory; on the CPU the tensors are there already."""
    if not sampled.integers_B5.is_cuda:
        return sampled, None
    on_host = Sampled(start_download(sampled.integers_B5), start_download(sampled.values_B2))
    if sampled.chosen_logprob_B is not None:
        on_host.chosen_logprob_B = start_download(sampled.chosen_logprob_B)
    if sampled.top_logprob_BK is not None and sampled.top_id_BK is not None:
        on_host.top_logprob_BK, on_host.top_id_BK = (
            start_download(sampled.top_logprob_BK),
            start_download(sampled.top_id_BK),
        )
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(sampled.integers_B5.device))
    return on_host, arrived


def _row_output(
    row: int, host: HostRow, integers: list[int], value: list[float], logprobs: TokenLogprobs | None
) -> RowOutput:
    token_id, kind, finish, state, spent = integers
    token: Token | None = TextToken(token_id)
    if finish == STOPPED:
        token = None
    elif kind == COORD:
        token = CoordToken(value[0])
    elif kind == SIZE:
        token = SizeToken(value[0], value[1])
    reason = None
    if finish != GOING_ON:
        reason = FinishReason.STOP if finish == STOPPED else FinishReason.LENGTH
    end_id = token_id if token is None else None
    return RowOutput(row, token, reason, state - host.grammar_base, spent, logprobs, end_id)


def _logprobs(sampled: Sampled, hosts: list[HostRow]) -> list[TokenLogprobs | None]:
    if sampled.chosen_logprob_B is None:
        return [None] * len(hosts)
    chosen = sampled.chosen_logprob_B.tolist()
    top_ids = [[]] * len(hosts) if sampled.top_id_BK is None else sampled.top_id_BK.tolist()
    top = [[]] * len(hosts) if sampled.top_logprob_BK is None else sampled.top_logprob_BK.tolist()
    return [
        None if host.logprobs is None else TokenLogprobs(c, tuple(zip(ids, lps, strict=True))[: host.logprobs])
        for host, c, ids, lps in zip(hosts, chosen, top_ids, top, strict=True)
    ]
