"""The complete skill: a raw prompt, as text or token ids, continued in text, scored, or both. No template is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrel.constraints import response_format
from kestrel.errors import RequestError, shown
from kestrel.request import PromptOutputs, PromptReport, SkillOutput, TokenLogprobs
from kestrel.settings import SETTINGS, SamplingParams, any_text, boolean, some_token_ids, tokens_or_none
from kestrel.skills.base import ModelProfile, Prompt, SkillState
from kestrel.skills.builtin import BuiltinSkill, SampledRequest, answer_constraint, check_pictures, laid_out, opening
from kestrel.skills.decode_rules import text_rules
from kestrel.skills.fields import FieldTable, Values
from kestrel.skills.logprobs import ShownTokens, prompt_logprobs
from kestrel.skills.states import TextState
from kestrel.tokens import ContextItem, ImageSpan, Text


def _raw_prompt(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return any_text(name, value)
    if isinstance(value, (list, tuple)):
        return some_token_ids(name, value)
    raise RequestError(name, f"must be some text or a list of token ids (got {shown(value)})")


_FIELDS = FieldTable(
    "complete",
    {
        "prompt": _raw_prompt,
        "response_format": response_format,
        "echo": boolean,
        "add_special_tokens": boolean,
        "prompt_logprobs": SETTINGS["logprobs"].kind,
    },
    setting_checks={"max_tokens": tokens_or_none},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRequest(SampledRequest):
    prompt: str | tuple[int, ...]
    add_special_tokens: bool
    echo: bool
    prompt_logprobs: int | None


class CompleteSkill(BuiltinSkill[CompleteRequest]):
    """Result: {"text", "token_ids"}, and with `echo` or `prompt_logprobs` {"prompt_token_ids"}.

    The ids are all that were generated, also what a stop string cut away. With `logprobs` a text that the model ended
    itself also has {"end_logprobs"}: the entry of the id that ended it.
    `prompt_logprobs` = k adds {"prompt_logprobs"}: for each prompt token None (the first) or its log-probability, its
    rank and the k most likely ids in its place. `echo` with `logprobs` = k asks for the same. Then `max_tokens` may be
    0: the prompt is scored and nothing is generated. `text` never includes the prompt.

    Text follows the beginning-of-text token, unless `add_special_tokens` is false. Ids are used as they are; with a
    picture, which follows that token too, a beginning-of-text id at the front of the ids is the one before the picture.
    """

    name = "complete"

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> CompleteRequest:
        values = _FIELDS.read(fields)
        check_pictures(profile, values.images)
        echo = values.own.get("echo", False)
        num_scored = values.own.get("prompt_logprobs", values.settings.get("logprobs") if echo else None)
        _require_purpose(values, num_scored)
        return CompleteRequest(
            prompt=values.required("prompt", "text or a list of token ids"),
            add_special_tokens=_adds_start(values),
            echo=echo or num_scored is not None,
            prompt_logprobs=num_scored,
            sampling=self.text_sampling(values, profile),
            images=values.images,
            max_crops=values.max_crops,
            adapter=values.adapter,
            response_format=values.own.get("response_format"),
        )

    def prompt(self, request: CompleteRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        grammar = text_rules(profile)
        constraint = answer_constraint(request, grammar, profile)
        prompt = laid_out(_items(request, images, profile), grammar, request.sampling, constraint)
        if request.prompt_logprobs is None:
            return prompt
        return replace(prompt, outputs=PromptOutputs(logprobs=request.prompt_logprobs))

    def start(self, request: CompleteRequest, profile: ModelProfile) -> SkillState:
        return CompleteState(profile, request.sampling, "text", _prompt_ids(request, profile) if request.echo else None)


class CompleteState(TextState):
    """`prompt_ids` are echoed in the result, with their scores if there are any."""

    def __init__(
        self, profile: ModelProfile, sampling: SamplingParams, field: str, prompt_ids: Sequence[int] | None = None
    ) -> None:
        super().__init__(profile, sampling, field)
        self._prompt_ids = prompt_ids
        self._report: PromptReport | None = None
        self._end: dict[str, Any] | None = None

    def consume_prompt(self, report: PromptReport) -> None:
        self._report = report

    def consume_end(self, token_id: int, logprobs: TokenLogprobs) -> None:
        self._end = ShownTokens(self.profile.tokenizer).entry(token_id, logprobs)

    def output(self) -> SkillOutput:
        output = super().output()
        output.fields["token_ids"] = list(self.token_ids)
        if self._end is not None:
            output.fields["end_logprobs"] = self._end
        if self._prompt_ids is not None:
            output.fields["prompt_token_ids"] = list(self._prompt_ids)
            if self._report is not None:
                late = prompt_logprobs(self._prompt_ids, self._report, self.profile)
                return replace(output, late={"prompt_logprobs": late})
        return output


def _require_purpose(values: Values, num_scored: int | None) -> None:
    if values.settings.get("max_tokens") == 0 and num_scored is None:
        raise RequestError(
            "max_tokens", "must be at least 1 (got 0); for the prompt's log-probabilities alone set prompt_logprobs too"
        )


def _adds_start(values: Values) -> bool:
    adds_start = values.own.get("add_special_tokens", True)
    if values.images and not adds_start:
        raise RequestError("add_special_tokens", "must be true: a picture follows the beginning of text; leave it out")
    return adds_start


def _prompt_ids(request: CompleteRequest, profile: ModelProfile) -> Sequence[int]:
    """The ids of all tokens, the beginning of text before a picture included."""
    bos, prompt = profile.bos, request.prompt
    start = [] if bos is None or not request.add_special_tokens else [bos]
    if isinstance(prompt, str):
        return [*start, *profile.tokenizer.encode(prompt)]
    return [*start, *prompt] if request.images and prompt[0] != bos else prompt


def _items(request: CompleteRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Sequence[ContextItem]:
    ids = _prompt_ids(request, profile)
    if not images:
        return Text(ids)
    return [*opening(profile, images), *Text(ids if profile.bos is None else ids[1:])]
