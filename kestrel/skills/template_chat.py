"""`ChatFormat` of models whose conversations are written by a jinja template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kestrel.errors import RequestError
from kestrel.skills.base import (
    Conversation,
    Message,
    ModelProfile,
    ThinkingIds,
    ThinkingTags,
    WrittenChat,
    joined_turns,
)
from kestrel.skills.chat_template import RESERVED, ChatTemplate
from kestrel.skills.tool_forms import told_in_messages, tool_form
from kestrel.tokens import ContextItem, ImageSpan, Text

THINKING_SWITCH = "enable_thinking"
"""The variable by which templates of the hub are told whether to think."""
THINKING_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class Encoder(Protocol):
    controls: Mapping[str, int]
    """The strings that a template may write as control ids."""

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Ids of plain text and control strings in turn."""
        ...


class TemplateChat:
    roles = ("system", "developer", "user", "assistant", "tool")

    def __init__(
        self, text: str, special_tokens: Mapping[str, str], encoder: Encoder, tool_parser: str | None = None
    ) -> None:
        """`tool_parser`: the form of calls, where the template does not tell. Raises TemplateFault if the text is no
        template, ConfigError if it does not fit that form."""
        self._template = ChatTemplate(text, special_tokens, encoder.controls)
        self._reserved = frozenset((*RESERVED, *special_tokens))
        self._encoder = encoder
        self._knows_developers = self._template.mentions("developer")
        self._has_switch = self._template.mentions(THINKING_SWITCH)
        self.thinking = _thinking_marks(self._template, encoder.controls)
        self.tools = tool_form(self._template, encoder.controls, tool_parser)

    @property
    def message_fields(self) -> tuple[str, ...]:
        return ("name", "reasoning_content", "tool_call_id", *(() if self.tools is None else ("tool_calls",)))

    @property
    def template(self) -> str:
        return self._template.text

    def write(self, conversation: Conversation) -> WrittenChat:
        """A template that refuses the messages as they came, as some do with neighbours of one role, gets them
        joined."""
        values = self._values(conversation)
        try:
            parts = self._rendered(conversation, conversation.messages, values)
        except RequestError as refusal:
            turns = joined_turns(conversation.messages)
            if turns == conversation.messages:
                raise
            try:
                parts = self._rendered(conversation, turns, values)
            except RequestError:
                raise refusal from None
        return WrittenChat(conversation, tuple(parts), self._is_thinking(parts))

    def _rendered(
        self, conversation: Conversation, given: Sequence[Message], values: Mapping[str, Any]
    ) -> Sequence[str]:
        messages = [self._message(message) for message in given]
        if self.tools is not None and not self.tools.is_in_template:
            messages = told_in_messages(messages, conversation.tools)
        elif conversation.tools:
            values = {**values, "tools": conversation.tools}
        parts = self._template.render(
            messages,
            values,
            add_generation_prompt=conversation.opens_answer,
            continues=conversation.continues,
        )
        if parts == [""]:
            raise RequestError("messages", "are written as nothing by the model's chat template")
        return parts

    def items(self, profile: ModelProfile, written: WrittenChat, images: Sequence[ImageSpan]) -> Sequence[ContextItem]:
        assert not images, "templates here are of text models"
        return Text(self._encoder.encode(written.parts))

    def _message(self, message: Message) -> dict[str, Any]:
        """A developer is the system to templates that know none."""
        role = "system" if message.role == "developer" and not self._knows_developers else message.role
        return {"role": role, "content": message.text, **message.extra}

    def _values(self, conversation: Conversation) -> dict[str, Any]:
        values = dict(conversation.template_values)
        for name in values:
            if name in self._reserved:
                raise RequestError(f"chat_template_kwargs.{name}", "is set by the server; leave it out")
        wish = conversation.reasoning
        if wish is None or THINKING_SWITCH in values:
            return values
        if self._has_switch:
            values[THINKING_SWITCH] = wish
        elif not wish and self.thinking is not None:
            problem = "cannot be switched off: the model's chat template has no variable for it; leave it out"
            raise RequestError("reasoning", problem)
        return values

    def _is_thinking(self, parts: Sequence[str]) -> bool:
        """Whether the last thought that the template opened is still open."""
        match self.thinking:
            case ThinkingIds(opens, closes):
                ids = (self._encoder.controls[control] for control in reversed(parts[1::2]))
                return next((token_id for token_id in ids if token_id in (opens, closes)), None) == opens
            case ThinkingTags(opens):
                return parts[-1].rstrip().endswith(opens)
        return False


def _thinking_marks(template: ChatTemplate, controls: Mapping[str, int]) -> ThinkingIds | ThinkingTags | None:
    """Ids of the vocabulary, else what the template takes for a thought."""
    for opens, closes in THINKING_PAIRS:
        if opens in controls and closes in controls:
            return ThinkingIds(controls[opens], controls[closes])
    opens, closes = THINKING_PAIRS[0]
    return ThinkingTags(opens, closes) if opens in template.text or closes in template.text else None
