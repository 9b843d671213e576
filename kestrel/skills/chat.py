"""The chat skill: a conversation laid out as consecutive query blocks, whose last question is answered.

Moondream has no chat format of its own. After one beginning-of-text token each user turn is its pictures, then a query
block with the answer opener and the assistant's text; a leading system message stands before the first user text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrel.constraints import response_format
from kestrel.errors import RequestError, shown
from kestrel.settings import any_text, boolean, text
from kestrel.skills.base import ModelProfile, Prompt, SkillState
from kestrel.skills.builtin import BuiltinSkill, SampledRequest, answer_constraint
from kestrel.skills.decode_rules import answer_rules, reasoning_rules
from kestrel.skills.fields import FieldTable
from kestrel.skills.layout import block, check_pictures, laid_out, opening, opens_reasoning, template_of
from kestrel.skills.states import ReasoningState, TextState
from kestrel.tokens import ContextItem, ImageSpan, text_tokens

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question with its pictures and, except in the last turn, the answer that was given."""

    question: str
    images: tuple[Any, ...] = ()
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class _Message:
    name: str
    role: str
    text: str
    images: tuple[Any, ...]


def conversation(name: str, value: Any) -> tuple[Turn, ...]:
    """Turns of [{"role", "content"}, …]: an optional system message, then user and assistant in turn, a user last.

    Content is text, or a list of {"type": "text", "text"} and (in user messages) {"type": "image", "image"} parts;
    text parts become lines.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise RequestError(name, f"must be a list of messages with at least one in it (got {shown(value)})")
    messages = [_message(f"{name}[{index}]", raw) for index, raw in enumerate(value)]
    system = messages[0].text if messages[0].role == "system" else ""
    spoken = messages[1:] if messages[0].role == "system" else messages
    if not spoken or spoken[-1].role != "user":
        raise RequestError(name, "must end with a user message, the one to answer")
    turns = list(_turns(spoken))
    if system:
        turns[0] = replace(turns[0], question=f"{system}\n\n{turns[0].question}")
    return tuple(turns)


def _turns(spoken: list[_Message]) -> Iterator[Turn]:
    question: _Message | None = None
    for message in spoken:
        expected = "user" if question is None else "assistant"
        if message.role != expected:
            remedy = "user and assistant must take turns, with a system message only at the front"
            raise RequestError(f"{message.name}.role", f"is {message.role!r} where {expected!r} must follow; {remedy}")
        if question is None:
            question = message
        else:
            yield Turn(question.text, question.images, answer=message.text)
            question = None
    if question is not None:
        yield Turn(question.text, question.images)


def _message(name: str, raw: Any) -> _Message:
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
    return _Message(name, role, words, images)


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
    turns: tuple[Turn, ...]
    reasoning: bool


class ChatSkill(BuiltinSkill[ChatRequest]):
    """Result: as the query skill's. An `image` beside the messages belongs to the first user turn, before its own."""

    name = "chat"

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> ChatRequest:
        template_of(profile, "query")
        values = _FIELDS.read(fields)
        turns: tuple[Turn, ...] = values.required("messages", 'a list such as [{"role": "user", "content": "Hello"}]')
        turns = (replace(turns[0], images=(*values.images, *turns[0].images)), *turns[1:])
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
