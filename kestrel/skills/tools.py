"""Tools of a request: what may be called, whether something has to be, and the calls that earlier messages made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kestrel.constraints import ResponseFormat, closed
from kestrel.constraints.calls import call_format
from kestrel.constraints.cost_limits import check_shape
from kestrel.errors import RequestError, did_you_mean, shown
from kestrel.settings import any_text, boolean
from kestrel.skills.base import ThinkingIds, ThinkingTags, ToolForm
from kestrel.skills.tool_forms import spelling_of

MAX_TOOLS = 128
MAX_TOOL_BYTES = 128 * 1024
"""Of all tools of a request, as JSON."""
MAX_ARGUMENT_CHARACTERS = 64 * 1024
"""Of a call in a message whose arguments are text; as an object they may be longer."""
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    definition: Mapping[str, Any]
    """As chat templates get it."""
    parameters: Mapping[str, Any]
    """The schema that arguments are held to."""
    is_strict: bool


@dataclass(frozen=True, slots=True)
class ToolChoice:
    kind: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The one that has to be called."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Everything that a request says about tools."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice()
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def definitions(self) -> list[Mapping[str, Any]]:
        return [tool.definition for tool in self.tools]

    def format(
        self, form: ToolForm, wanted: ResponseFormat | None = None, marks: ThinkingIds | ThinkingTags | None = None
    ) -> ResponseFormat | None:
        """What the answer is held to; None: it is free. `wanted`: the format of an answer that is no call. `marks`:
        around a thought that the model may have before."""
        if self.choice.kind == "required":
            schemas = {tool.name: tool.parameters for tool in self.tools if self.choice.name in (None, tool.name)}
            return call_format(spelling_of(form, is_parallel=self.is_parallel and self.choice.name is None), schemas)
        if self.choice.kind == "auto" and (wanted is not None or any(tool.is_strict for tool in self.tools)):
            schemas = {tool.name: tool.parameters if tool.is_strict else {"type": "object"} for tool in self.tools}
            thought = (marks.opens, marks.closes) if isinstance(marks, ThinkingIds) else ()
            spelling = spelling_of(form, is_parallel=self.is_parallel)
            return call_format(spelling, schemas, is_free=wanted is None, otherwise=wanted, thought=thought)
        return wanted


def tool_use(own: Mapping[str, Any]) -> ToolUse | None:
    """From the checked fields of a request; None without tools."""
    tools: tuple[Tool, ...] = own.get("tools", ())
    choice: ToolChoice = own.get("tool_choice", ToolChoice())
    if not tools:
        if choice.kind == "required":
            raise RequestError("tool_choice", "asks for a call, but there are no tools; give some or leave it out")
        return None
    names = [tool.name for tool in tools]
    if choice.name is not None and choice.name not in names:
        close = did_you_mean(choice.name, names)
        problem = f"names {shown(choice.name)}, which is none of the tools{close}"
        raise RequestError("tool_choice.function.name", problem)
    return ToolUse(tools, choice, own.get("parallel_tool_calls", True))


# ---------------------------------------------------------------------- fields


def tools(name: str, value: Any) -> tuple[Tool, ...]:
    """Tools of [{"type": "function", "function": {"name", "description", "parameters", "strict"}}, …]."""
    if not isinstance(value, (list, tuple)):
        raise RequestError(name, f"must be a list of functions (got {shown(value)})")
    if len(value) > MAX_TOOLS:
        raise RequestError(name, f"has {len(value)} entries; give at most {MAX_TOOLS}")
    found: list[Tool] = []
    num_left = MAX_TOOL_BYTES
    for index, raw in enumerate(value):
        tool, size = _tool(f"{name}[{index}]", raw)
        num_left -= size
        if num_left < 0:
            raise RequestError(name, f"take more than {MAX_TOOL_BYTES} bytes together; give fewer or smaller ones")
        found.append(tool)
    first: dict[str, int] = {}
    for index, tool in enumerate(found):
        if first.setdefault(tool.name, index) != index:
            problem = f"is {shown(tool.name)}, as of {name}[{first[tool.name]}]; give each its own"
            raise RequestError(f"{name}[{index}].function.name", problem)
    return tuple(found)


def _tool(name: str, raw: Any) -> tuple[Tool, int]:
    """The tool and roughly the bytes that it takes."""
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(raw, Mapping) or raw.get("type") != "function" or not isinstance(function, Mapping):
        raise RequestError(name, f'must be {{"type": "function", "function": {{"name": …}}}} (got {shown(raw)})')
    name = f"{name}.function"
    for key in function:
        if key not in _FUNCTION_FIELDS:
            close = did_you_mean(key, _FUNCTION_FIELDS)
            known = ", ".join(_FUNCTION_FIELDS)
            raise RequestError(f"{name}.{key}", f"is not known here; known fields: {known}{close}")
    given = {key: value for key, value in function.items() if value is not None}
    if not isinstance(given.get("name"), str) or not NAME.fullmatch(given["name"]):
        problem = f"must be 1 to 64 letters, digits, _ or - (got {shown(given.get('name'))})"
        raise RequestError(f"{name}.name", problem)
    size = len(any_text(f"{name}.description", given.get("description", "")))
    is_strict = boolean(f"{name}.strict", given.pop("strict", False))
    schema = given.get("parameters", NO_ARGUMENTS)
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        problem = f'must be a JSON schema of an object, {{"type": "object", …}} (got {shown(schema)})'
        raise RequestError(f"{name}.parameters", problem)
    size += check_shape(f"{name}.parameters", schema)
    # Who calls a function with arguments of its own invention gets nowhere.
    held_to = closed({"type": "object", **schema}, is_deep=is_strict)
    return Tool(given["name"], {"type": "function", "function": given}, held_to, is_strict), size


def tool_choice(name: str, value: Any) -> ToolChoice:
    if value in ("auto", "none", "required"):
        return ToolChoice(value)
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    named = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(named, str):
        shapes = '"auto", "none", "required" or {"type": "function", "function": {"name": …}}'
        raise RequestError(name, f"must be {shapes} (got {shown(value)})")
    return ToolChoice("required", named)


# ---------------------------------------------------------------------- calls in messages


def earlier_calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Calls of an assistant's message, with arguments as objects."""
    if not isinstance(value, (list, tuple)):
        raise RequestError(name, f"must be a list of calls (got {shown(value)})")
    return [_call(f"{name}[{index}]", raw) for index, raw in enumerate(value)]


def _call(name: str, raw: Any) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(raw, Mapping) or raw.get("type", "function") != "function" or not isinstance(function, Mapping):
        shape = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
        raise RequestError(name, f"must be {shape} (got {shown(raw)})")
    called = any_text(f"{name}.function.name", function.get("name"))
    arguments = arguments_of(f"{name}.function.arguments", function.get("arguments", ""))
    identity = {} if raw.get("id") is None else {"id": any_text(f"{name}.id", raw["id"])}
    return {**identity, "type": "function", "function": {"name": called, "arguments": arguments}}


def arguments_of(name: str, value: Any) -> Mapping[str, Any]:
    """From text that is a JSON object, or from the object itself; nothing means no arguments."""
    if isinstance(value, str) and len(value) > MAX_ARGUMENT_CHARACTERS:
        raise RequestError(name, f"has {len(value)} characters; give more than {MAX_ARGUMENT_CHARACTERS} as an object")
    given = value
    if isinstance(value, str):
        try:
            given = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            given = None
    if not isinstance(given, Mapping):
        raise RequestError(name, f"must be a JSON object, as text (got {shown(value)})")
    return given
