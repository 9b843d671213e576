"""What the built-in skills share beyond the contract: requests that carry their sampling, and a source of seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from kestrel.sampling_params import SamplingParams
from kestrel.skills.base import ModelProfile, SkillRequest, SkillSpec
from kestrel.skills.fields import DrawSeed, Values, random_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRequest(SkillRequest):
    sampling: SamplingParams


SampledT = TypeVar("SampledT", bound=SampledRequest)


class BuiltinSkill(SkillSpec[SampledT]):
    def __init__(self, draw_seed: DrawSeed = random_seed) -> None:
        self._draw_seed = draw_seed

    def text_sampling(self, values: Values, profile: ModelProfile) -> SamplingParams:
        """Free text: the model's own temperature and top-p unless the request says otherwise."""
        defaults = profile.defaults
        return values.sampling(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            max_new_tokens=defaults.max_new_tokens,
            draw_seed=self._draw_seed,
        )

    def greedy_sampling(self, values: Values, max_new_tokens: int) -> SamplingParams:
        """Structured output: the most likely token unless the request says otherwise."""
        return values.sampling(temperature=0.0, top_p=1.0, max_new_tokens=max_new_tokens, draw_seed=self._draw_seed)
