"""What the fake runtime says about a prompt, by hand.

The hidden state of position p is (running sum at p, p). The token that would be sampled after p without a grammar has
the log-probability -1 and rank 1; every other id has -2 and rank 2, the next ones of the vocabulary first.
"""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.request import ScoredToken
from kestrel.runtime.contract import PrefillChunk, PromptPart
from kestrel.runtime.prompt_targets import first_pooled, scored_ids

LIKELY, UNLIKELY = -1.0, -2.0


def fake_prompt_part(
    chunk: PrefillChunk, running_sums: Sequence[int], vocab_size: int, coord_id: int, size_id: int
) -> PromptPart:
    """`running_sums` has one entry per position of the chunk."""
    assert chunk.prompt_outputs is not None
    positions = range(chunk.start, chunk.start + chunk.num_positions)
    predicted = [(total + position) % vocab_size for total, position in zip(running_sums, positions, strict=True)]
    num_top = min(chunk.prompt_outputs.logprobs or 0, vocab_size)
    scores = tuple(
        _score(predicted[local], token_id, num_top, vocab_size)
        for local, token_id in scored_ids(chunk, coord_id, size_id)
    )
    first = first_pooled(chunk)
    hidden_sum = (float(sum(running_sums[first:])), float(sum(positions[first:])))
    num_pooled = chunk.num_positions - first
    return PromptPart(chunk.row, scores, hidden_sum if num_pooled else (), num_pooled)


def _score(predicted: int, token_id: int, num_top: int, vocab_size: int) -> ScoredToken:
    top = tuple(((predicted + k) % vocab_size, UNLIKELY if k else LIKELY) for k in range(num_top))
    return ScoredToken(LIKELY, 1, top) if token_id == predicted else ScoredToken(UNLIKELY, 2, top)
