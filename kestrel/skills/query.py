"""The query skill: a question, with or without a picture, answered in text; optionally with thinking first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel.constraints import response_format
from kestrel.errors import RequestError
from kestrel.settings import boolean, text
from kestrel.skills.base import ModelProfile, Prompt, SkillState
from kestrel.skills.builtin import (
    BuiltinSkill,
    SampledRequest,
    SpatialRef,
    answer_constraint,
    block,
    check_pictures,
    laid_out,
    opening,
    opens_reasoning,
    spatial_refs,
    template_of,
)
from kestrel.skills.decode_rules import answer_rules, reasoning_rules
from kestrel.skills.fields import FieldTable
from kestrel.skills.states import ReasoningState, TextState
from kestrel.tokens import ImageSpan

_FIELDS = FieldTable(
    "query",
    {"question": text, "reasoning": boolean, "spatial_refs": spatial_refs, "response_format": response_format},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRequest(SampledRequest):
    question: str
    reasoning: bool
    spatial_refs: tuple[SpatialRef, ...] = ()


class QuerySkill(BuiltinSkill[QueryRequest]):
    """Result: {"answer"}, and with reasoning {"reasoning": {"text", "grounding"}}. The question is used as given."""

    name = "query"

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> QueryRequest:
        template_of(profile, self.name)
        values = _FIELDS.read(fields)
        check_pictures(profile, values.images)
        refs = values.own.get("spatial_refs", ())
        if refs and not values.images:
            raise RequestError("spatial_refs", "point at places on a picture; give an image or leave them out")
        return QueryRequest(
            question=values.required("question", "the question as text"),
            reasoning=opens_reasoning(profile, values.own.get("reasoning")),
            spatial_refs=refs,
            sampling=self.text_sampling(values, profile),
            images=values.images,
            max_crops=values.max_crops,
            adapter=values.adapter,
            response_format=values.own.get("response_format"),
        )

    def prompt(self, request: QueryRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        template = template_of(profile, self.name)
        opener = profile.reasoning_opener if request.reasoning else profile.answer_opener
        question = block(profile, template.prefix, request.spatial_refs, request.question, opener)
        grammar = reasoning_rules(profile) if request.reasoning else answer_rules(profile)
        constraint = answer_constraint(request, grammar, profile)
        return laid_out([*opening(profile, images), *question], grammar, request.sampling, constraint)

    def start(self, request: QueryRequest, profile: ModelProfile) -> SkillState:
        if request.reasoning:
            return ReasoningState(profile, request.sampling)
        return TextState(profile, request.sampling, "answer")
