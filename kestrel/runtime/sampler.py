"""From hidden states to results: every row's next token, value and grammar state, and what prefill chunks tell about
their prompt; all on the device, and how that gets to the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.errors import NumericalError
from kestrel.grammar import Carries
from kestrel.kernels.commit_ids import commit_ids
from kestrel.kernels.row_tables import COORD, GOING_ON, NO_REGIONS, NOT_FINITE, SIZE, STOPPED, TEXT, RegionHeads
from kestrel.kernels.sampling import draw_ids, mask, rank, weigh_ids
from kestrel.models.contract import DecoderModel
from kestrel.request import FinishReason, ScoredToken, TokenLogprobs
from kestrel.runtime.contract import PrefillChunk, PromptPart, RowOutput, StepOutput
from kestrel.runtime.device import start_download, upload
from kestrel.runtime.prompt_targets import first_pooled, scored_ids
from kestrel.runtime.rows import HostRow, RowTable
from kestrel.tokens import CoordToken, SizeToken, TextToken, Token


@dataclass(slots=True)
class Sampled:
    """One entry per sampled row, in the order of the step. `integers_B5`: id, kind, finish, state, spent."""

    integers_B5: Tensor
    values_B3: Tensor | None
    """Coordinates and sizes with their log-probabilities; not read where no row's grammar can use them."""
    chosen_logprob_B: Tensor | None = None
    top_logprob_BK: Tensor | None = None
    top_id_BK: Tensor | None = None


def sample_rows(model: DecoderModel, table: RowTable, hidden_BD: Tensor, row_indices: list[int]) -> Sampled:
    """Samples for `row_indices` (row b of `hidden_BD` belongs to row_indices[b]) and updates the table."""
    host = [table.host[row] for row in row_indices]
    rows_B = upload(row_indices, table.device)
    state_B, spent_B = table.tensors.state[rows_B], table.tensors.spent[rows_B]
    raw_BV = model.logits(hidden_BD).float()

    masked_BV = mask(_weighed(table, raw_BV, row_indices), state_B, table.grammars.tensors)
    masked_BV = table.endings.forbid(masked_BV, row_indices, state_B, spent_B)
    is_random = any(row.samples_randomly for row in host)
    ranks_SBC = draw_ids(masked_BV, rows_B, table.tensors) if is_random else rank(*masked_BV.max(-1))[None, :, None]
    endings = table.endings.tensors if table.endings.stops_any_of(row_indices) else None
    region = region_heads(model, wanted_values(host), hidden_BD, raw_BV, table, rows_B)
    sampled = Sampled(*commit_ids(ranks_SBC, rows_B, table.tensors, table.grammars.tensors, endings, region))
    note_emitted(table, table.wishes.among(row_indices), rows_B, sampled)
    return with_logprobs(sampled, raw_BV, wanted_logprobs(host))


def _weighed(table: RowTable, logits_BV: Tensor, row_indices: list[int]) -> Tensor:
    """Scores after what rows wish about them; the others stay as they are, bit by bit, and cost nothing."""
    users = table.wishes.users_among(row_indices)
    if users is None:
        return logits_BV
    wishes = table.wishes.tensors(table.wishes.among(row_indices))
    return logits_BV.index_copy(0, users.at_U, weigh_ids(logits_BV[users.at_U], users.rows_U, wishes))


def note_emitted(table: RowTable, kinds: int, rows_B: Tensor, sampled: Sampled) -> None:
    """For the penalties of the next step."""
    if not kinds:
        return  # a comparison for nothing is a kernel in every step
    table.wishes.count(kinds, rows_B, sampled.integers_B5[:, 0], sampled.integers_B5[:, 1] == TEXT)


def wanted_values(host: list[HostRow]) -> Carries:
    """What some row's grammar can use."""
    wanted = Carries.NOTHING
    for row in host:
        if row.carries is not Carries.NOTHING:  # the union of two takes a microsecond
            wanted |= row.carries
    return wanted


def region_heads(
    model: DecoderModel, wanted: Carries, hidden_BD: Tensor, logits_BV: Tensor, table: RowTable, rows_B: Tensor
) -> RegionHeads:
    """Only the wanted ones run. To be called before the ids are committed: it reads the rows' states."""
    regions = model.regions
    if regions is None:
        return NO_REGIONS
    coords_B2 = sizes_B3 = None
    if wanted & Carries.COORD:
        coords_B2 = regions.decode_coords(hidden_BD)
        end_ids_BF = table.grammars.tensors.end_ids_NF[table.tensors.state[rows_B]]
        coords_B2[:, 1] += _logprob_of_going_on(logits_BV, regions.coord_id, end_ids_BF)
    if wanted & Carries.SIZE:
        sizes_B3 = regions.decode_sizes(hidden_BD)
    return RegionHeads(regions.coord_id, regions.size_id, coords_B2, sizes_B3)


def _logprob_of_going_on(logits_BV: Tensor, coord_id: int, end_ids_BF: Tensor) -> Tensor:
    """Of a coordinate, when it and the end are all that can come; 0 where nothing can end the row. The lists of end ids
    are padded with V."""
    vocab_size = logits_BV.shape[1]
    ends_BF = logits_BV.gather(1, end_ids_BF.clamp(max=vocab_size - 1)).float()
    end_B = ends_BF.masked_fill(end_ids_BF >= vocab_size, -torch.inf).logsumexp(1)
    return -functional.softplus(end_B - logits_BV[:, coord_id].float())


def wanted_logprobs(host: list[HostRow]) -> int | None:
    """The most likely ids that some row wants to know beside its own; None where no row wants any."""
    return max((row.logprobs for row in host if row.logprobs is not None), default=None)


def with_logprobs(sampled: Sampled, logits_BV: Tensor, num_top: int | None) -> Sampled:
    """Those of the model's own distribution."""
    if num_top is None:
        return sampled
    logprobs_BV = torch.log_softmax(logits_BV.float(), dim=-1)
    chosen_B = logprobs_BV.gather(1, sampled.integers_B5[:, :1])[:, 0]
    top = logprobs_BV.topk(min(num_top, logits_BV.shape[1]), dim=-1) if num_top else (None, None)
    return replace(sampled, chosen_logprob_B=chosen_B, top_logprob_BK=top[0], top_id_BK=top[1])


# ---------------------------------------------------------------------- from the device to the scheduler


FINISH = 2
"""Column of `Sampled.integers_B5` that says whether and how a row ended."""
NO_VALUES = [0.0, 0.0, 0.0]
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
    carries = wanted_values(host_rows) is not Carries.NOTHING
    on_host, arrived = _send_to_host(sampled if carries else replace(sampled, values_B3=None))
    return SampledPart(row_indices, host_rows, on_host, arrived)


def read_part(part: SampledPart, output: StepOutput) -> None:
    """Adds the rows to `output`, once they have arrived."""
    if part.arrived is not None:
        part.arrived.synchronize()
    integers, values_B3 = part.sampled.integers_B5.tolist(), part.sampled.values_B3
    values = [NO_VALUES] * len(integers) if values_B3 is None else values_B3.tolist()
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
    values_B3 = None if sampled.values_B3 is None else start_download(sampled.values_B3)
    on_host = Sampled(start_download(sampled.integers_B5), values_B3)
    if sampled.chosen_logprob_B is not None:
        on_host.chosen_logprob_B = start_download(sampled.chosen_logprob_B)
    if sampled.top_logprob_BK is not None and sampled.top_id_BK is not None:
        on_host.top_logprob_BK, on_host.top_id_BK = (
            start_download(sampled.top_logprob_BK),
            start_download(sampled.top_id_BK),
        )
    arrived = torch.cuda.Event()
    arrived.record()
    return on_host, arrived


def _row_output(
    row: int, host: HostRow, integers: list[int], value: list[float], logprobs: TokenLogprobs | None
) -> RowOutput:
    token_id, kind, finish, state, spent = integers
    token: Token | None = TextToken(token_id)
    if finish == STOPPED:
        token = None
    elif kind == COORD:
        token = CoordToken(value[0], value[2])
    elif kind == SIZE:
        token = SizeToken(*value)
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


# ---------------------------------------------------------------------- prompts
# Log-probabilities and pooled hidden states. The chunks of one step are scored together, a slice of positions at a
# time, so that the logits never take more than `MAX_LOGITS` numbers however long the prompt is.


MAX_LOGITS = 2**23
NOT_FINITE_PROMPT = (
    "the model gave numbers for the prompt that are not finite; if the weights are sound, use dtype bfloat16 or float32"
)


@dataclass(slots=True)
class Scores:
    """One entry per scored token of a step; K is the largest number of likely ids that a chunk asks for."""

    logprob_N: Tensor
    rank_N: Tensor
    top_logprob_NK: Tensor
    top_id_NK: Tensor


@dataclass(slots=True)
class AskedChunk:
    """A chunk with a wish, and where its results lie in those of the step."""

    row: int
    logprobs: int
    num_scores: int
    num_pooled: int


@dataclass(slots=True)
class PromptTensors:
    """Results of one step on their way to the host; `arrived` tells when they are there."""

    chunks: list[AskedChunk]
    scores: Scores | None
    hidden_sum_CD: Tensor | None  # a row for each chunk that pools
    arrived: torch.cuda.Event | None = None


def score_prompts(model: DecoderModel, prefill: list[PrefillChunk], hidden_TD: Tensor) -> PromptTensors | None:
    """Results of the chunks that ask for some. `hidden_TD` begins with the positions of `prefill`, in order."""
    chunks: list[AskedChunk] = []
    at: list[int] = []
    ids: list[int] = []
    sums: list[Tensor] = []
    region_ids = (-1, -1) if model.regions is None else (model.regions.coord_id, model.regions.size_id)
    first = 0
    for chunk in prefill:
        last = first + chunk.num_positions
        if chunk.prompt_outputs is not None:
            targets = scored_ids(chunk, *region_ids)
            at += [first + local for local, _ in targets]
            ids += [token_id for _, token_id in targets]
            pooled_TD = hidden_TD[first + first_pooled(chunk) : last]
            if len(pooled_TD):
                sums.append(model.final_norm(pooled_TD).sum(0, dtype=torch.float64))
            chunks.append(AskedChunk(chunk.row, chunk.prompt_outputs.logprobs or 0, len(targets), len(pooled_TD)))
        first = last
    if not chunks:
        return None
    scores = _score(model, hidden_TD, at, ids, max(chunk.logprobs for chunk in chunks)) if at else None
    return _send_prompts(PromptTensors(chunks, scores, torch.stack(sums) if sums else None))


def read_prompts(tensors: PromptTensors) -> tuple[list[PromptPart], dict[int, Exception]]:
    """The parts of the step, in the order of its chunks, and the rows whose numbers are no numbers."""
    if tensors.arrived is not None:
        tensors.arrived.synchronize()
    first = 0
    sums = iter([] if tensors.hidden_sum_CD is None else tensors.hidden_sum_CD.tolist())
    parts: list[PromptPart] = []
    failures: dict[int, Exception] = {}
    for chunk in tensors.chunks:
        scored = ScoredTokens(tensors.scores, first, first + chunk.num_scores, chunk.logprobs)
        first += chunk.num_scores
        hidden_sum = tuple(next(sums)) if chunk.num_pooled else ()
        if scored.has_nan or not all(map(math.isfinite, hidden_sum)):
            failures[chunk.row] = NumericalError(NOT_FINITE_PROMPT)
        parts.append(PromptPart(chunk.row, scored, hidden_sum, chunk.num_pooled))
    return parts, failures


class ScoredTokens(Sequence[ScoredToken]):
    """The entries of one chunk, made of their tensors when they are first looked at, on the thread that looks."""

    def __init__(self, scores: Scores | None, first: int, last: int, num_top: int) -> None:
        self._scores = scores
        self._rows = slice(first, last)
        self._num_top = num_top
        self._made: list[ScoredToken] | None = None

    @property
    def has_nan(self) -> bool:
        return self._scores is not None and bool(self._scores.logprob_N[self._rows].isnan().any())

    def __len__(self) -> int:
        return self._rows.stop - self._rows.start

    @overload
    def __getitem__(self, index: int) -> ScoredToken: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ScoredToken]: ...
    def __getitem__(self, index: int | slice) -> ScoredToken | Sequence[ScoredToken]:
        if self._made is None:
            self._made = list(self._make())
        return self._made[index]

    def __iter__(self) -> Iterator[ScoredToken]:
        return iter(self._made) if self._made is not None else self._make()

    def _make(self) -> Iterator[ScoredToken]:
        """One at a time, so that who looks can take breaks."""
        if self._scores is None:
            return
        rows, tops = self._rows, slice(0, self._num_top)
        columns = (
            self._scores.logprob_N[rows],
            self._scores.rank_N[rows],
            self._scores.top_id_NK[rows, tops],
            self._scores.top_logprob_NK[rows, tops],
        )
        for logprob, place, top_ids, top in zip(*(column.tolist() for column in columns), strict=True):
            yield ScoredToken(logprob, place, tuple(zip(top_ids, top, strict=True)))


def _score(model: DecoderModel, hidden_TD: Tensor, at: list[int], ids: list[int], num_top: int) -> Scores:
    at_N = upload(at, hidden_TD.device, torch.int64)
    ids_N = upload(ids, hidden_TD.device, torch.int64)
    rows = max(1, MAX_LOGITS // model.shape.vocab_size)
    slices = [
        _score_slice(model, hidden_TD[at_S], ids_S, num_top)
        for at_S, ids_S in zip(at_N.split(rows), ids_N.split(rows), strict=True)
    ]
    return Scores(
        torch.cat([one.logprob_N for one in slices]),
        torch.cat([one.rank_N for one in slices]),
        torch.cat([one.top_logprob_NK for one in slices]),
        torch.cat([one.top_id_NK for one in slices]),
    )


def _score_slice(model: DecoderModel, hidden_ND: Tensor, ids_N: Tensor, num_top: int) -> Scores:
    logprobs_NV = torch.log_softmax(model.logits(hidden_ND).float(), dim=-1)
    chosen_N1 = logprobs_NV.gather(1, ids_N[:, None])
    top_logprob_NK, top_id_NK = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]), dim=-1)
    return Scores(chosen_N1[:, 0], 1 + (logprobs_NV > chosen_N1).sum(-1), top_logprob_NK, top_id_NK)


def _send_prompts(tensors: PromptTensors) -> PromptTensors:
    """Start the copy to pinned host memory; on the CPU the tensors are there already."""
    scores, sums = tensors.scores, tensors.hidden_sum_CD
    some = sums if scores is None else scores.logprob_N
    if some is None or not some.is_cuda:
        return tensors
    if scores is not None:
        columns = (scores.logprob_N, scores.rank_N, scores.top_logprob_NK, scores.top_id_NK)
        scores = Scores(*(start_download(column) for column in columns))
    arrived = torch.cuda.Event()
    on_host = PromptTensors(tensors.chunks, scores, None if sums is None else start_download(sums), arrived)
    arrived.record(torch.cuda.current_stream(some.device))
    return on_host
