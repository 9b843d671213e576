"""How a model is told of tools and how it calls them: by its chat template, which also tells the form of its calls.

The form is found by trying: the template writes an answer that calls a tool, and the parser that finds the call in it
is the model's. To a template that writes no tools they can be told in a system message, in the form of Hermes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from kestrel.constraints.calls import CallSpelling, ControlToken
from kestrel.errors import ConfigError, RequestError
from kestrel.settings import any_text
from kestrel.skills.base import Message, ToolForm
from kestrel.skills.chat_template import ChatTemplate
from kestrel.skills.tool_parsers import TOOL_PARSERS

_TOOL = "find_probe"
_ARGUMENTS = {"probe": "found", "number": 7}
_ID = "a1b2c3d4e"
"""Some templates take ids of nine letters and digits only."""
_DEFINITION = {"name": _TOOL, "description": "Finds.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = {"tools": [{"type": "function", "function": _DEFINITION}]}
_QUESTION = {"role": "user", "content": "Where?"}
_BLANK = "[TOOL_CALLS] ["
PLAIN_FORM = ToolForm("llama3", {}, is_in_template=False)
"""For models that are told of no tools and held to call one: a JSON object without marks."""


def spelling_of(form: ToolForm, *, is_parallel: bool) -> CallSpelling:
    """How calls are written by a model that is held to write them. Llama 3 makes one at a time."""

    def mark(text: str) -> str | ControlToken:
        return (text, form.ids[text]) if text in form.ids else text

    opens, between, closes = ('{"name": "',), ('", "arguments": ',), ("}",)
    if form.name == "llama3":
        return CallSpelling(opens=opens, between=('", "parameters": ',), closes=closes, is_marked=False)
    if form.name == "hermes":
        opens, closes = (mark("<tool_call>"), '\n{"name": "'), ("}\n", mark("</tool_call>"))
        return CallSpelling(opens=opens, between=between, closes=closes, separates=("\n",) if is_parallel else None)
    if form.has_args_mark:
        opens, between = (mark("[TOOL_CALLS]"),), (mark("[ARGS]"),)
        return CallSpelling(opens=opens, between=between, separates=() if is_parallel else None)
    first = (mark("[TOOL_CALLS]"), " [" if form.has_blank else "[")
    separates = (", ",) if is_parallel else None
    return CallSpelling(first=first, opens=opens, between=between, closes=closes, separates=separates, last=("]",))


def tool_form(template: ChatTemplate, controls: Mapping[str, int], wanted: str | None) -> ToolForm | None:
    """The form of a template's calls; None if it has none that is known. `wanted`: the name of a form to take."""
    knows_tools = _TOOL in (_written(template, [_QUESTION]) or "")
    found = _found(template, controls) if knows_tools else None
    if wanted is None or (found is not None and found.name == wanted):
        return found
    if not knows_tools and wanted != "hermes":
        problem = f"{wanted!r} needs a chat template that writes tools, which the model's does not"
        raise ConfigError("tool_parser", f"{problem}; use hermes, or give a template with --chat-template FILE")
    return ToolForm(wanted, _ids(wanted, controls), is_in_template=knows_tools)


def _ids(name: str, controls: Mapping[str, int]) -> dict[str, int]:
    parser = TOOL_PARSERS[name]
    return {mark: controls[mark] for mark in (parser.marker, *parser.closing_marks) if mark in controls}


def _found(template: ChatTemplate, controls: Mapping[str, int]) -> ToolForm | None:
    call = {"id": _ID, "type": "function", "function": {"name": _TOOL, "arguments": _ARGUMENTS}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "here", "tool_call_id": _ID, "name": _TOOL}
    opened, written = _written(template, [_QUESTION]) or "", _written(template, [_QUESTION, answer, result]) or ""
    num_same = next((at for at, (a, b) in enumerate(zip(opened, written, strict=False)) if a != b), len(opened))
    said = written[len(re.sub(r"[^\s>\]]*$", "", opened[:num_same])) :]  # <think> and <tool_call> begin alike
    for name, kind in TOOL_PARSERS.items():
        parser = kind((_TOOL,))
        parser.push(said, is_end=True)
        calls = parser.result(keeps_unfinished=False)[1]
        if calls and json.loads(calls[0].arguments) == _ARGUMENTS:
            return ToolForm(name, _ids(name, controls), has_args_mark="[ARGS]" in said, has_blank=_BLANK in said)
    return None


def _written(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str | None:
    try:
        return "".join(template.render(messages, _TOOLS))
    except RequestError:
        return None


# ---------------------------------------------------------------------- for templates that write no tools

_TOLD = """\
You may call functions. To call one, write a JSON object with its name and its arguments:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of an argument": "its value"}}}}
</tool_call>

These are the functions:
<tools>
{tools}
</tools>"""


def told_in_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The same conversation without tools, calls and results of calls: they stand in texts, in the form of Hermes."""
    told: list[dict[str, Any]] = []
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            told.append({"role": "user", "content": "\n".join(results)})
        else:
            told += [_with_calls(message) for message in group]
    if tools:
        text = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        first = told.pop(0) if told[0]["role"] == "system" else {"role": "system", "content": ""}
        told.insert(0, {**first, "content": f"{first['content']}\n\n{text}".strip()})
    return told


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    parts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join(part for part in parts if part or not calls)}


# ---------------------------------------------------------------------- for models without tools


def plain_turn(message: Message) -> Message:
    """The same as words: a call as `PLAIN_FORM` writes it, the result of a call as a turn of the user."""
    extra = dict(message.extra)
    calls = [_plain_call(call["function"]) for call in extra.pop("tool_calls", ())]
    if message.role == "tool":
        for name in ("tool_call_id", "name"):
            if name in extra:
                any_text(f"{message.field}.{name}", extra.pop(name))
        return replace(message, role="user", extra=extra)
    return replace(message, text="\n".join([message.text, *calls] if message.text else calls), extra=extra)


def _plain_call(function: Mapping[str, Any]) -> str:
    return json.dumps({"name": function["name"], "parameters": function["arguments"]}, ensure_ascii=False)
