"""The complete skill: a raw prompt, as text or token ids, continued in text. No template is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel.constraints import response_format
from kestrel.errors import RequestError, shown
from kestrel.request import SkillOutput
from kestrel.skills.base import ModelProfile, Prompt, SkillState
from kestrel.skills.builtin import BuiltinSkill, SampledRequest
from kestrel.skills.decode_rules import text_rules
from kestrel.skills.fields import FieldTable, any_text, some_token_ids
from kestrel.skills.layout import check_pictures, laid_out, opening
from kestrel.skills.structured import answer_constraint
from kestrel.skills.text_state import TextState
from kestrel.tokens import ContextItem, ImageSpan, text_tokens


def _raw_prompt(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return any_text(name, value)
    if isinstance(value, (list, tuple)):
        return some_token_ids(name, value)
    raise RequestError(name, f"must be some text or a list of token ids (got {shown(value)})")


_FIELDS = FieldTable("complete", {"prompt": _raw_prompt, "response_format": response_format})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRequest(SampledRequest):
    prompt: str | tuple[int, ...]


class CompleteSkill(BuiltinSkill[CompleteRequest]):
    """Result: {"text", "token_ids"}.

    Text follows the beginning-of-text token. Ids are used as they are; with a picture, which follows that token too,
    a beginning-of-text id at the front of the ids is the one before the picture.
    """

    name = "complete"

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> CompleteRequest:
        values = _FIELDS.read(fields)
        check_pictures(profile, values.images)
        return CompleteRequest(
            prompt=values.required("prompt", "text or a list of token ids"),
            sampling=self.text_sampling(values, profile),
            images=values.images,
            adapter=values.adapter,
            response_format=values.own.get("response_format"),
        )

    def prompt(self, request: CompleteRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        items, grammar = _items(request.prompt, images, profile), text_rules(profile)
        return laid_out(items, grammar, request.sampling, answer_constraint(request, grammar, profile))

    def start(self, request: CompleteRequest, profile: ModelProfile) -> SkillState:
        return CompleteState(profile, request.sampling, "text")


class CompleteState(TextState):
    def output(self) -> SkillOutput:
        output = super().output()
        output.fields["token_ids"] = list(self.token_ids)
        return output


def _items(prompt: str | tuple[int, ...], images: Sequence[ImageSpan], profile: ModelProfile) -> Sequence[ContextItem]:
    if isinstance(prompt, str):
        return [*opening(profile, images), *text_tokens(profile.tokenizer.encode(prompt))]
    if not images:
        return text_tokens(prompt)
    rest = prompt[1:] if prompt[0] == profile.ids.bos else prompt
    return [*opening(profile, images), *text_tokens(rest)]
