"""What the model said about the tokens of a prompt, as entries of a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from kestrel.request import PromptReport, TokenLogprobs
from kestrel.skills.base import ModelProfile
from kestrel.skills.logprobs import ShownTokens


def prompt_logprobs(ids: Sequence[int], report: PromptReport, profile: ModelProfile) -> Iterator[dict[str, Any] | None]:
    """One entry per id, made as they are asked for. Nothing comes before the first, so its entry is None."""
    tokens = ShownTokens(profile.tokenizer)
    unscored = len(ids) - report.num_scores
    yield from repeat(None, unscored)
    for i, score in zip(ids[unscored:], chain.from_iterable(report.stretches), strict=True):
        yield {**tokens.entry(i, TokenLogprobs(score.logprob, score.top)), "rank": score.rank}
