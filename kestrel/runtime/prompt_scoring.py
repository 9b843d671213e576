"""What prefill chunks tell about their prompt: log-probabilities and pooled hidden states, on the device.

The chunks of one step are scored together, a slice of positions at a time, so that the logits never take more than
`MAX_LOGITS` numbers however long the prompt is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from kestrel.errors import NumericalError
from kestrel.models.contract import DecoderModel
from kestrel.request import ScoredToken
from kestrel.runtime.contract import PrefillChunk, PromptPart
from kestrel.runtime.device import start_download, upload
from kestrel.runtime.prompt_targets import first_pooled, scored_ids

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
    return _send_to_host(PromptTensors(chunks, scores, torch.stack(sums) if sums else None))


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
        for logprob, rank, top_ids, top in zip(*(column.tolist() for column in columns), strict=True):
            yield ScoredToken(logprob, rank, tuple(zip(top_ids, top, strict=True)))


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


def _send_to_host(tensors: PromptTensors) -> PromptTensors:
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
