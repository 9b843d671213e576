"""Calls in the tokens of an answer: marks that are control tokens, thoughts before calls, what a template is told."""

from __future__ import annotations

from typing import Any

import pytest

from kestrel.request import FinishReason
from kestrel.skills.base import ModelProfile
from kestrel.skills.chat import ChatSkill
from kestrel.skills.template_chat import TemplateChat
from kestrel.skills.tool_forms import told_in_messages
from kestrel.tokens import TextToken
from tests.llama.chat_shapes import CHATML, HERMES, NAMES, byte_level, encoder, text_tokenizer

TOOLS = [{"type": "function", "function": {"name": "find", "description": "the cat"}}]
MARKS = ("<tool_call>", "</tool_call>")
MISTRAL = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}{{- eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}"""
CALL = ('\n{"name": "find", "arguments": {"a": "', '"}}\n')


def profile(described: str, template: str, **options: Any) -> ModelProfile:
    chat = TemplateChat(template, NAMES, encoder(described), **options)
    return ModelProfile(name="x", tokenizer=text_tokenizer(described), bos=None, stop_ids=(0,), chat=chat)


def run(model: ModelProfile, parts: list[str], **fields: Any) -> tuple[list[tuple[str, str, Any]], dict[str, Any]]:
    """Kind, text and data of what a stream gets, and the result. `parts`: text and control strings in turn."""
    skill = ChatSkill()
    request = skill.parse({"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **fields}, model)
    state = skill.start(request, model)
    assert isinstance(model.chat, TemplateChat)
    ids = model.chat._encoder.encode(parts)
    deltas = [state.consume(TextToken(token_id), None) for token_id in ids]
    said = [(one.kind, one.text, one.data) for one in [*deltas, state.flush()] if one is not None]
    return said, state.finish(FinishReason.STOP).fields


def function_of(fields: dict[str, Any]) -> dict[str, Any]:
    (call,) = fields["tool_calls"]
    return call["function"]


@pytest.mark.parametrize("extra", [MARKS, ()], ids=["hidden", "letters"])
@pytest.mark.parametrize("thinks", [True, False])
def test_a_call_behind_a_thought(extra: tuple[str, ...], thinks: bool) -> None:
    """With the marks as control tokens, and spelt in letters."""
    model = profile(byte_level(extra), HERMES)
    inside = "".join(("the <tool_call>", CALL[0], "x", CALL[1])) if thinks else ""
    parts = ["", "<think>", f"{inside}\n", "</think>", "\n\n"] if thinks else [""]
    call = f"{CALL[0]}the mat{CALL[1]}"
    parts = [*parts[:-1], parts[-1] + "I look.\n", MARKS[0], call, MARKS[1], ""] if extra else [
        *parts[:-1], f"{parts[-1]}I look.\n{MARKS[0]}{call}{MARKS[1]}"
    ]  # fmt: skip
    said, fields = run(model, parts)
    assert function_of(fields) == {"name": "find", "arguments": '{"a": "the mat"}'}
    assert fields["answer"] == "I look."
    assert "".join(text for kind, text, _ in said if kind != "reasoning") == "I look."
    thought = "".join(text for kind, text, _ in said if kind == "reasoning")
    assert thought == (f"{inside}\n" if thinks else "")
    assert ("reasoning" in fields) == thinks
    pieces = [piece for kind, _, data in said if kind == "tool_calls" for piece in data["tool_calls"]]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"a": "the mat"}'
    assert len(pieces) > 3


def test_marks_that_decoding_hides_are_seen() -> None:
    model = profile(byte_level(("[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")), MISTRAL)
    assert model.chat is not None
    assert model.chat.tools is not None
    assert (model.chat.tools.name, model.chat.tools.has_args_mark) == ("mistral", True)
    _, fields = run(model, ["", "[TOOL_CALLS]", "find", "[ARGS]", '{"a": 1}'])
    assert function_of(fields) == {"name": "find", "arguments": '{"a": 1}'}
    assert len(fields["tool_calls"][0]["id"]) == 9
    _, fields = run(model, ["the ", "[TOOL_CALLS]", "cat"])
    assert (fields["answer"], fields["tool_calls"]) == ("the [TOOL_CALLS]cat", [])


def test_what_a_template_without_tools_is_told_in_messages() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "find", "arguments": {"a": "é"}}}
    messages = [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "b", "tool_call_id": "x"},
        {"role": "tool", "content": "c", "tool_call_id": "y"},
        {"role": "assistant", "content": "d"},
    ]
    told = told_in_messages(messages, TOOLS)
    assert [one["role"] for one in told] == ["system", "user", "assistant", "user", "assistant"]
    assert told[0]["content"].startswith("Help.\n\nYou may call functions.")
    assert '{"type": "function", "function": {"name": "find", "description": "the cat"}}' in told[0]["content"]
    written = '<tool_call>\n{"name": "find", "arguments": {"a": "é"}}\n</tool_call>'
    assert told[2] == {"role": "assistant", "content": f"{written}\n{written}"}
    assert told[3]["content"] == "<tool_response>\nb\n</tool_response>\n<tool_response>\nc\n</tool_response>"
    assert told[4] == messages[-1]
    model = profile(byte_level(), CHATML, tool_parser="hermes")
    request = ChatSkill().parse({"messages": messages[1:2], "tools": TOOLS}, model)
    assert "".join(request.written.parts).startswith("<|im_start|>system\nYou may call functions.")
    plain = ChatSkill().parse({"messages": messages[1:2]}, model)
    assert "".join(plain.written.parts).startswith("<|im_start|>user\na")
