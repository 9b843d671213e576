"""What the model said about the tokens of a prompt, as entries of a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrel.prompt_outputs import PromptReport
from kestrel.request import TokenLogprobs
from kestrel.skills.base import ModelProfile
from kestrel.skills.logprobs import ShownTokens


def prompt_logprobs(ids: Sequence[int], report: PromptReport, profile: ModelProfile) -> list[dict[str, Any] | None]:
    """One entry per id. Nothing comes before the first, so its entry is None."""
    tokens = ShownTokens(profile.tokenizer)
    unscored = len(ids) - len(report.scores)
    entries = [
        {**tokens.entry(i, TokenLogprobs(score.logprob, score.top)), "rank": score.rank}
        for i, score in zip(ids[unscored:], report.scores, strict=True)
    ]
    return [*([None] * unscored), *entries]
