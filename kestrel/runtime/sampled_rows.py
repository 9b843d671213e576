"""What was sampled, on its way from the device to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kestrel.errors import NumericalError
from kestrel.kernels.row_tables import COORD, GOING_ON, NOT_FINITE, SIZE, STOPPED
from kestrel.request import FinishReason, TokenLogprobs
from kestrel.runtime.contract import RowOutput, StepOutput
from kestrel.runtime.rows import HostRow
from kestrel.runtime.sampler import Sampled
from kestrel.runtime.upload import start_download
from kestrel.tokens import CoordToken, SizeToken, TextToken, Token

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
