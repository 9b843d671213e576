"""The caption skill: a picture described in text, in one of the lengths the model knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel.errors import RequestError, shown
from kestrel.settings import text
from kestrel.skills.base import ModelProfile, Prompt, SkillState
from kestrel.skills.builtin import (
    BuiltinSkill,
    SampledRequest,
    check_pictures,
    laid_out,
    not_supported,
    opening,
    template_of,
)
from kestrel.skills.decode_rules import answer_rules
from kestrel.skills.fields import FieldTable
from kestrel.skills.states import TextState
from kestrel.tokens import ImageSpan, Text

_FIELDS = FieldTable("caption", {"length": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionRequest(SampledRequest):
    length: str


class CaptionSkill(BuiltinSkill[CaptionRequest]):
    """Result: {"caption"}. `length` is "normal" unless given."""

    name = "caption"

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> CaptionRequest:
        lengths = caption_lengths(profile)
        if not lengths:
            raise not_supported(profile, self.name)
        values = _FIELDS.read(fields)
        length = values.own.get("length", "normal")
        if length not in lengths:
            raise RequestError(
                "length", f"{shown(length)} is not known to {profile.name}; use one of: {', '.join(lengths)}"
            )
        check_pictures(profile, values.images, needed_by=self.name)
        return CaptionRequest(
            length=length,
            sampling=self.text_sampling(values, profile),
            images=values.images,
            max_crops=values.max_crops,
            adapter=values.adapter,
        )

    def prompt(self, request: CaptionRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        template = template_of(profile, f"caption.{request.length}")
        items = [*opening(profile, images), *Text(template.prefix), *Text(template.suffix)]
        return laid_out(items, answer_rules(profile), request.sampling)

    def start(self, request: CaptionRequest, profile: ModelProfile) -> SkillState:
        return TextState(profile, request.sampling, "caption")


def caption_lengths(profile: ModelProfile) -> list[str]:
    """The lengths this model has a template for."""
    return [key.removeprefix("caption.") for key in profile.templates if key.startswith("caption.")]
