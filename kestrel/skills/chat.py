"""The chat skill: a conversation laid out as consecutive query blocks, whose last question is answered.

Moondream has no chat format of its own. After one beginning-of-text token each user turn is its pictures, then a query
block with the answer opener and the assistant's text; a leading system message stands before the first user text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel.constraints import response_format
from kestrel.skills.base import ModelProfile, Prompt, SkillState
from kestrel.skills.builtin import BuiltinSkill, SampledRequest
from kestrel.skills.checks import boolean
from kestrel.skills.decode_rules import answer_rules, reasoning_rules
from kestrel.skills.fields import FieldTable
from kestrel.skills.layout import block, check_pictures, laid_out, opening, opens_reasoning, template_of
from kestrel.skills.messages import Turn, conversation
from kestrel.skills.reasoning import ReasoningState
from kestrel.skills.structured import answer_constraint
from kestrel.skills.text_state import TextState
from kestrel.tokens import ContextItem, ImageSpan, text_tokens

_FIELDS = FieldTable("chat", {"messages": conversation, "reasoning": boolean, "response_format": response_format})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(SampledRequest):
    turns: tuple[Turn, ...]
    reasoning: bool


class ChatSkill(BuiltinSkill[ChatRequest]):
    """Result: as the query skill's. An `image` beside the messages belongs to the first user turn, before its own."""

    name = "chat"

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> ChatRequest:
        template_of(profile, "query")
        values = _FIELDS.read(fields)
        turns: tuple[Turn, ...] = values.required("messages", 'a list such as [{"role": "user", "content": "Hello"}]')
        turns = (turns[0].with_images_first(values.images), *turns[1:])
        images = tuple(image for turn in turns for image in turn.images)
        check_pictures(profile, images)
        return ChatRequest(
            turns=turns,
            reasoning=opens_reasoning(profile, values.own.get("reasoning")),
            sampling=self.text_sampling(values, profile),
            images=images,
            adapter=values.adapter,
            response_format=values.own.get("response_format"),
        )

    def prompt(self, request: ChatRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        prefix = template_of(profile, "query").prefix
        items: list[ContextItem] = []
        used = 0
        for turn in request.turns:
            spans = images[used : used + len(turn.images)]
            used += len(turn.images)
            items += spans if items else opening(profile, spans)
            is_last = turn.answer is None
            opener = profile.reasoning_opener if is_last and request.reasoning else profile.answer_opener
            items += block(profile, prefix, (), turn.question, opener)
            if turn.answer is not None:
                items += text_tokens(profile.tokenizer.encode(turn.answer))
        grammar = reasoning_rules(profile) if request.reasoning else answer_rules(profile)
        return laid_out(items, grammar, request.sampling, answer_constraint(request, grammar, profile))

    def start(self, request: ChatRequest, profile: ModelProfile) -> SkillState:
        if request.reasoning:
            return ReasoningState(profile, request.sampling)
        return TextState(profile, request.sampling, "answer")
