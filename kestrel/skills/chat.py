"""The chat skill: a conversation, written in the model's own format, whose last message is answered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kestrel.constraints import ResponseFormat, response_format
from kestrel.errors import RequestError, shown
from kestrel.grammar import Grammar
from kestrel.settings import any_text, boolean
from kestrel.skills.base import (
    ChatFormat,
    Conversation,
    Message,
    ModelProfile,
    Prompt,
    SkillState,
    ThinkingIds,
    WrittenChat,
)
from kestrel.skills.builtin import (
    BuiltinSkill,
    SampledRequest,
    answer_constraint,
    check_pictures,
    laid_out,
    not_supported,
    opens_reasoning,
)
from kestrel.skills.decode_rules import answer_rules, open_thought_rules, reasoning_rules
from kestrel.skills.fields import FieldTable, Values
from kestrel.skills.states import ReasoningState, TextState
from kestrel.skills.thinking import thinking_state
from kestrel.skills.tool_forms import PLAIN_FORM, plain_turn
from kestrel.skills.tool_parsers import TOOL_PARSERS
from kestrel.skills.tool_state import NamingTokenizer, ToolState
from kestrel.skills.tools import ToolUse, earlier_calls, tool_choice, tool_use, tools
from kestrel.tokens import ImageSpan

MAX_TEMPLATE_CHARACTERS = 64 * 1024
"""Of `chat_template_kwargs`, as JSON."""


def conversation(name: str, value: Any) -> tuple[Message, ...]:
    """Messages of [{"role", "content"}, …].

    Content is text, or a list of {"type": "text", "text"} and (in user messages) {"type": "image", "image"} parts;
    text parts become lines.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise RequestError(name, f"must be a list of messages with at least one in it (got {shown(value)})")
    return tuple(_message(f"{name}[{index}]", raw) for index, raw in enumerate(value))


def _message(name: str, raw: Any) -> Message:
    if not isinstance(raw, Mapping):
        raise RequestError(name, f'must be {{"role": …, "content": …}} (got {shown(raw)})')
    extra = {key: value for key, value in raw.items() if key not in ("role", "content") and value is not None}
    role, calls = raw.get("role"), earlier_calls(f"{name}.tool_calls", extra.pop("tool_calls", ()))
    if calls:
        extra["tool_calls"] = calls
    if calls and role != "assistant":
        raise RequestError(f"{name}.tool_calls", f"is in a {shown(role)} message; only assistants call tools")
    content = "" if role == "assistant" and raw.get("content") is None else raw.get("content")
    words, images = _content(f"{name}.content", content)
    if images and role != "user":
        raise RequestError(f"{name}.content", f"holds a picture in a {shown(role)} message; only user messages may")
    return Message(name, role, words, images, extra)  # pyright: ignore[reportArgumentType] - checked with the format


def _require_known(message: Message, chat: ChatFormat) -> None:
    """Which roles and further fields there are, is the format's to say."""
    for name, value in message.extra.items():
        if name not in chat.message_fields:
            known = ", ".join(sorted({"content", "role", "tool_calls", *chat.message_fields}))
            raise RequestError(f"{message.field}.{name}", f"is not a field of a message; known fields: {known}")
        if name != "tool_calls":
            any_text(f"{message.field}.{name}", value)
    if message.role not in chat.roles:
        known = ", ".join(dict.fromkeys((*chat.roles, "tool")))
        raise RequestError(f"{message.field}.role", f"must be one of: {known} (got {shown(message.role)})")


def template_values(name: str, value: Any) -> Mapping[str, Any]:
    """Variables for a chat template: JSON, and not too much of it."""
    if not isinstance(value, Mapping):
        raise RequestError(name, f'must be an object such as {{"enable_thinking": false}} (got {shown(value)})')
    try:
        size = len(json.dumps(value, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError):
        raise RequestError(name, "must hold JSON values only, not nested too deeply") from None
    if size > MAX_TEMPLATE_CHARACTERS:
        raise RequestError(name, f"has {size} bytes as JSON; give at most {MAX_TEMPLATE_CHARACTERS}")
    return value


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

_FIELDS = FieldTable(
    "chat",
    {
        "messages": conversation,
        "reasoning": boolean,
        "response_format": response_format,
        "chat_template_kwargs": template_values,
        "add_generation_prompt": boolean,
        "continue_final_message": boolean,
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": boolean,
    },
)


class Writing:
    """A conversation that is written by the first who wants it: a long one takes a template a while."""

    def __init__(self, chat: ChatFormat, conversation: Conversation) -> None:
        self._chat = chat
        self.conversation = conversation

    @cached_property
    def written(self) -> WrittenChat:
        return self._chat.write(self.conversation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(SampledRequest):
    writing: Writing
    tools: ToolUse | None = None
    """What may be called; None: nothing."""

    @property
    def written(self) -> WrittenChat:
        return self.writing.written

    @property
    def reasoning(self) -> bool | None:
        return self.writing.conversation.reasoning


class ChatSkill(BuiltinSkill[ChatRequest]):
    """Result: as the query skill's, with `tool_calls` where tools may be called. An `image` beside the messages is the
    first user message's, before its own."""

    name = "chat"

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> ChatRequest:
        chat = _format_of(profile)
        values = _FIELDS.read(fields)
        given: tuple[Message, ...] = values.required(
            "messages", 'a list such as [{"role": "user", "content": "Hello"}]'
        )
        if chat.tools is None:
            given = tuple(map(plain_turn, given))
        for message in given:
            _require_known(message, chat)
        images = (*values.images, *(image for message in given for image in message.images))
        check_pictures(profile, images)
        use = tool_use(values.own)
        if use is not None and chat.tools is None:
            use = _as_format(use, chat)
        writing = Writing(chat, _asked(values, _with_pictures(given, values.images), profile, chat, use))
        if chat.template is None:
            _ = writing.written  # refuses what it cannot write; templates do so when the prompt is laid out
        return ChatRequest(
            writing=writing,
            sampling=self.text_sampling(values, profile),
            images=images,
            max_crops=values.max_crops,
            adapter=values.adapter,
            response_format=_format(values, use, chat),
            tools=None if use is None or use.choice.kind == "none" else use,
        )

    def prompt(self, request: ChatRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        items = _format_of(profile).items(profile, request.written, images)
        grammar = _rules(request, profile)
        return laid_out(items, grammar, request.sampling, answer_constraint(request, grammar, profile))

    def start(self, request: ChatRequest, profile: ModelProfile) -> SkillState:
        marks, use = _format_of(profile).thinking, request.tools
        if use is not None:
            return _tool_state(request, use, profile)
        if marks is not None:
            return thinking_state(profile, request.sampling, marks, is_thinking=request.written.is_thinking)
        if request.reasoning:
            return ReasoningState(profile, request.sampling)
        return TextState(profile, request.sampling, "answer")


def _as_format(use: ToolUse, chat: ChatFormat) -> ToolUse | None:
    """For a model that cannot be told of tools: a call that has to be is a format, to which any model can be held."""
    if use.choice.kind == "auto":
        raise RequestError("tools", f"is not supported: {_why_no_tools(chat)}, or name one in tool_choice")
    return None if use.choice.kind == "none" else use


def _why_no_tools(chat: ChatFormat) -> str:
    if chat.template is None:
        return "the model was not trained to call tools; leave it out"
    remedy = "leave it out, or start with --tool-parser to name the form that the model knows"
    return f"the model's chat template does not tell how tools are called; {remedy}"


def _format(values: Values, use: ToolUse | None, chat: ChatFormat) -> ResponseFormat | None:
    wanted = values.own.get("response_format")
    return wanted if use is None else use.format(chat.tools or PLAIN_FORM, wanted, chat.thinking)


def _tool_state(request: ChatRequest, use: ToolUse, profile: ModelProfile) -> ToolState:
    chat = _format_of(profile)
    form = chat.tools or PLAIN_FORM
    profile = replace(profile, tokenizer=NamingTokenizer(profile.tokenizer, form.ids))
    sampling = replace(request.sampling, stop=())
    if chat.thinking is None and request.reasoning:
        inner = ReasoningState(profile, sampling)
    elif chat.thinking is None:
        inner = TextState(profile, sampling, "answer", by_words=False)
    else:
        is_thinking = request.written.is_thinking
        inner = thinking_state(profile, sampling, chat.thinking, is_thinking=is_thinking, by_words=False)
    parser = TOOL_PARSERS[form.name](use.names, is_exact=request.response_format is not None)
    return ToolState(inner, parser, request.sampling.stop, is_parallel=use.is_parallel)


def _asked(
    values: Values, messages: tuple[Message, ...], profile: ModelProfile, chat: ChatFormat, use: ToolUse | None
) -> Conversation:
    asked, continues = values.own.get("reasoning"), values.own.get("continue_final_message", False)
    opens_answer = values.own.get("add_generation_prompt", not continues)
    if continues and opens_answer:
        problem = "cannot be used together with add_generation_prompt; set one of them to false"
        raise RequestError("continue_final_message", problem)
    does_reason = opens_reasoning(profile, asked)
    return Conversation(
        messages=messages,
        reasoning=does_reason if chat.template is None else asked,
        opens_answer=opens_answer,
        continues=continues,
        template_values=values.own.get("chat_template_kwargs", {}),
        tools=() if use is None or chat.tools is None else use.definitions,
    )


def _rules(request: ChatRequest, profile: ModelProfile) -> Grammar:
    marks = _format_of(profile).thinking
    if marks is None:
        return reasoning_rules(profile) if request.reasoning else answer_rules(profile)
    if request.response_format is None or not request.written.is_thinking:
        return answer_rules(profile)
    if isinstance(marks, ThinkingIds):
        return open_thought_rules(profile, marks)
    problem = "cannot be used together with a chat template that opens a thought: the model has no token for its end"
    remedy = "leave it out, or switch thinking off if the template can"
    raise RequestError(request.response_format.field, f"{problem}; {remedy}")


def _format_of(profile: ModelProfile) -> ChatFormat:
    if profile.chat is None:
        raise not_supported(profile, "chat")
    return profile.chat


def _with_pictures(messages: tuple[Message, ...], images: Sequence[Any]) -> tuple[Message, ...]:
    first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if not images or first is None:
        return messages
    message = replace(messages[first], images=(*images, *messages[first].images))
    return (*messages[:first], message, *messages[first + 1 :])
