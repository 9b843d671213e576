"""The embed skill: one unit vector for a text, a picture, or both. Nothing is generated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrel.errors import NumericalError, RequestError
from kestrel.request import FinishReason, PromptOutputs, PromptReport, SkillOutput, StreamDelta, TokenLogprobs
from kestrel.settings import SamplingParams, some_token_ids, text
from kestrel.skills.base import ModelProfile, Prompt, SkillState
from kestrel.skills.builtin import BuiltinSkill, SampledRequest, check_pictures, laid_out, opening
from kestrel.skills.decode_rules import text_rules
from kestrel.skills.fields import FieldTable, Values
from kestrel.tokens import ImageSpan, Text, Token

_FIELDS = FieldTable("embed", {"text": text, "token_ids": some_token_ids})


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(SampledRequest):
    text: str | None
    token_ids: tuple[int, ...]


class EmbedSkill(BuiltinSkill[EmbedRequest]):
    """Result: {"embedding", "num_tokens"}. `finish_reason` is "length", as nothing may be generated.

    The embedding is the mean of the last hidden states, after the model's final norm, over all `num_tokens` positions
    of picture and text, scaled to length 1. The beginning-of-text token opens the context as always but does not count:
    it stands before every text and says nothing about this one. `token_ids` take the place of the text's ids; a
    beginning-of-text id at their front is the one that opens the context.
    """

    name = "embed"

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> EmbedRequest:
        values = _FIELDS.read(fields)
        _require_no_sampling(values)
        check_pictures(profile, values.images)
        words, ids = values.own.get("text"), values.own.get("token_ids", ())
        if words is not None and ids:
            raise RequestError("token_ids", "are given together with text; give one of the two")
        if ids and ids[0] == profile.bos:
            ids = ids[1:]
        if words is None and not ids and not values.images:
            raise RequestError("text", "is required: give text, token_ids (beyond the beginning of text) or an image")
        return EmbedRequest(
            text=words,
            token_ids=ids,
            sampling=SamplingParams(max_new_tokens=0),
            images=values.images,
            max_crops=values.max_crops,
            adapter=values.adapter,
        )

    def prompt(self, request: EmbedRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        ids = request.token_ids if request.text is None else profile.tokenizer.encode(request.text)
        prompt = laid_out([*opening(profile, images), *Text(ids)], text_rules(profile), request.sampling)
        return replace(prompt, outputs=PromptOutputs(pool_from=0 if profile.bos is None else 1))

    def start(self, request: EmbedRequest, profile: ModelProfile) -> SkillState:
        return EmbedState()


class EmbedState(SkillState):
    """Waits for the pooled prompt."""

    def __init__(self) -> None:
        self._report = PromptReport()

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        raise AssertionError("an embedding request generated a token")

    def consume_prompt(self, report: PromptReport) -> None:
        self._report = report

    def finish(self, reason: FinishReason) -> SkillOutput:
        mean = self._report.hidden_mean
        length = math.hypot(*mean)
        if length == 0.0:
            raise NumericalError("the mean hidden state is zero and has no direction; check the weights")
        embedding = [value / length for value in mean]
        return SkillOutput({"embedding": embedding, "num_tokens": self._report.num_pooled}, "")


def _require_no_sampling(values: Values) -> None:
    for name in values.settings:
        if name not in ("adapter", "max_crops"):
            raise RequestError(name, "has no effect in embed, which generates no tokens; leave it out")
