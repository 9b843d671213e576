"""How many tokens a request took, in the dialect's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrel.engine import EngineResult, EngineStream


@dataclass(frozen=True)
class PromptShare:
    """How choices share prompts: of `choices_per_prompt` neighbours the prompt counts once."""

    choices_per_prompt: int = 1
    image_tokens: int = 0
    """Positions that the pictures of each prompt take."""


def usage_of(results: Sequence[EngineResult], share: PromptShare) -> dict[str, Any]:
    prompts = results[:: share.choices_per_prompt]
    details = {
        "cached_tokens": sum(result.metrics.cached_tokens for result in prompts),
        "image_tokens": share.image_tokens * len(prompts),
    }
    return _usage(
        sum(result.metrics.input_tokens for result in prompts),
        sum(result.metrics.output_tokens for result in results),
        details,
        sum(result.num_reasoning_tokens for result in results),
    )


@dataclass
class RunningUsage:
    """The tokens of streams so far. What was cached is known at the end only."""

    streams: Sequence[EngineStream]
    share: PromptShare
    results: dict[int, EngineResult] = field(default_factory=dict)
    _generated: dict[int, int] = field(default_factory=dict)
    _thinking: dict[int, int] = field(default_factory=dict)

    def note(self, index: int, num_generated: int, is_thinking: bool) -> None:
        self._generated[index] = num_generated
        if is_thinking:
            self._thinking[index] = num_generated

    def so_far(self) -> dict[str, Any]:
        if len(self.results) == len(self.streams):
            return self.final()
        prompts = self.streams[:: self.share.choices_per_prompt]
        prompt_tokens = sum(stream.num_prompt_tokens for stream in prompts)
        return _usage(prompt_tokens, sum(self._generated.values()), None, sum(self._thinking.values()))

    def final(self) -> dict[str, Any]:
        return usage_of([self.results[index] for index in range(len(self.streams))], self.share)


def _usage(prompt: int, completion: int, details: dict[str, int] | None, reasoning: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
