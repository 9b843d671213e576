"""The chat skill: a conversation, written in the model's own format, whose last message is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrel.constraints import response_format
from kestrel.errors import RequestError, shown
from kestrel.settings import any_text, boolean, text
from kestrel.skills.base import ChatFormat, Message, ModelProfile, Prompt, SkillState
from kestrel.skills.builtin import (
    BuiltinSkill,
    SampledRequest,
    answer_constraint,
    check_pictures,
    laid_out,
    not_supported,
    opens_reasoning,
)
from kestrel.skills.decode_rules import answer_rules, reasoning_rules
from kestrel.skills.fields import FieldTable
from kestrel.skills.states import ReasoningState, TextState
from kestrel.tokens import ImageSpan

_ROLES = ("system", "user", "assistant")


def conversation(name: str, value: Any) -> tuple[Message, ...]:
    """Messages of [{"role", "content"}, …].

    Content is text, or a list of {"type": "text", "text"} and (in user messages) {"type": "image", "image"} parts;
    text parts become lines.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise RequestError(name, f"must be a list of messages with at least one in it (got {shown(value)})")
    messages = [_message(f"{name}[{index}]", raw) for index, raw in enumerate(value)]
    if messages[-1].role != "user":
        raise RequestError(name, "must end with a user message, the one to answer")
    return tuple(messages)


def _message(name: str, raw: Any) -> Message:
    if not isinstance(raw, Mapping):
        raise RequestError(name, f'must be {{"role": …, "content": …}} (got {shown(raw)})')
    unknown = [key for key in raw if key not in ("role", "content")]
    if unknown:
        raise RequestError(f"{name}.{unknown[0]}", "is not a field of a message; known fields: content, role")
    role = raw.get("role")
    if role not in _ROLES:
        raise RequestError(f"{name}.role", f"must be one of: {', '.join(_ROLES)} (got {shown(role)})")
    words, images = _content(f"{name}.content", raw.get("content"))
    if images and role != "user":
        raise RequestError(f"{name}.content", f"holds a picture in a {role} message; only user messages may")
    if role == "user":
        text(f"{name}.content", words)
    return Message(name, role, words, images)


def _content(name: str, raw: Any) -> tuple[str, tuple[Any, ...]]:
    if not isinstance(raw, (list, tuple)):
        return any_text(name, raw), ()
    words: list[str] = []
    images: list[Any] = []
    for index, part in enumerate(raw):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image") or set(part) != {"type", kind} or part[kind] is None:
            shapes = '{"type": "text", "text": …} or {"type": "image", "image": …}'
            raise RequestError(f"{name}[{index}]", f"must be {shapes}")
        if kind == "text":
            words.append(any_text(f"{name}[{index}].text", part["text"]))
        else:
            images.append(part["image"])
    return "\n".join(words), tuple(images)


# ---------------------------------------------------------------------- the skill

_FIELDS = FieldTable("chat", {"messages": conversation, "reasoning": boolean, "response_format": response_format})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(SampledRequest):
    messages: tuple[Message, ...]
    reasoning: bool


class ChatSkill(BuiltinSkill[ChatRequest]):
    """Result: as the query skill's. An `image` beside the messages is the first user message's, before its own."""

    name = "chat"

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> ChatRequest:
        chat = _format_of(profile)
        values = _FIELDS.read(fields)
        given: tuple[Message, ...] = values.required(
            "messages", 'a list such as [{"role": "user", "content": "Hello"}]'
        )
        chat.check(given)
        messages = _with_pictures(given, values.images)
        images = tuple(image for message in messages for image in message.images)
        check_pictures(profile, images)
        return ChatRequest(
            messages=messages,
            reasoning=opens_reasoning(profile, values.own.get("reasoning")),
            sampling=self.text_sampling(values, profile),
            images=images,
            adapter=values.adapter,
            response_format=values.own.get("response_format"),
        )

    def prompt(self, request: ChatRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        items = _format_of(profile).items(profile, request.messages, images, reasoning=request.reasoning)
        grammar = reasoning_rules(profile) if request.reasoning else answer_rules(profile)
        return laid_out(items, grammar, request.sampling, answer_constraint(request, grammar, profile))

    def start(self, request: ChatRequest, profile: ModelProfile) -> SkillState:
        if request.reasoning:
            return ReasoningState(profile, request.sampling)
        return TextState(profile, request.sampling, "answer")


def _format_of(profile: ModelProfile) -> ChatFormat:
    if profile.chat is None:
        raise not_supported(profile, "chat")
    return profile.chat


def _with_pictures(messages: tuple[Message, ...], images: Sequence[Any]) -> tuple[Message, ...]:
    first = next(index for index, message in enumerate(messages) if message.role == "user")
    message = replace(messages[first], images=(*images, *messages[first].images))
    return (*messages[:first], message, *messages[first + 1 :])
