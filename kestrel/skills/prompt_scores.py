"""What the model said about the tokens of a prompt, as entries of a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrel.prompt_outputs import PromptReport
from kestrel.request import TokenLogprobs
from kestrel.skills.base import ModelProfile
from kestrel.skills.recording import TokenTexts, logprob_entry


def prompt_logprobs(ids: Sequence[int], report: PromptReport, profile: ModelProfile) -> list[dict[str, Any] | None]:
    """One entry per id. Nothing comes before the first, so its entry is None."""
    texts = TokenTexts(profile.tokenizer)
    unscored = len(ids) - len(report.scores)
    entries = [
        {**logprob_entry(i, TokenLogprobs(score.logprob, score.top), texts), "rank": score.rank}
        for i, score in zip(ids[unscored:], report.scores, strict=True)
    ]
    return [*([None] * unscored), *entries]
