"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: a body of the Messages API as a call of the chat skill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine.intake import require_readable, size_of
from kestrel.engine.served import ServedEngine
from kestrel.errors import RequestError, shown
from kestrel.server.anthropic.answers import message_response
from kestrel.server.calls import AcceptedRequest, accept
from kestrel.server.json_body import read_object
from kestrel.server.native import take_model
from kestrel.server.openai.chat import MAX_MESSAGES, PartReader
from kestrel.server.openai.generation import EngineWork, client_names, sampling_fields
from kestrel.server.openai.parameters import (
    LENGTHS,
    PARAMETERS,
    REMEDIES,
    Body,
    EngineFields,
    given,
    require_known,
    require_list,
    type_of,
)
from kestrel.server.request_images import NotFetched
from kestrel.server.responses import json_response
from kestrel.server.state import state_of
from kestrel.settings import any_text, boolean, whole
from kestrel.skills.base import ChatFormat
from kestrel.tokens import ImageSpan, num_positions

UNUSED = ("metadata", "service_tier", "cache_control")
"""Taken without effect: prefixes are cached anyway."""
SAMPLING = ("temperature", "top_p", "top_k")
CONVERSATION = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
COUNT_FIELDS = (*CONVERSATION, "cache_control")
FIELDS = (*CONVERSATION, "max_tokens", *SAMPLING, "stop_sequences", "stream", *UNUSED)
_ADAPTER = "write model: name/adapter"
_FORMAT = "use output_config.format, which takes a JSON schema"
_CHAT = "ask /v1/chat/completions for it"
NEIGHBOURS: Mapping[str, str] = {
    **REMEDIES,
    **dict.fromkeys((*PARAMETERS, "n", "logprobs", "top_logprobs", "chat_template_kwargs"), _CHAT),
    **dict.fromkeys(("repeat_penalty", "min_new_tokens", "allowed_ids", "suppressed_ids", "grammar"), _CHAT),
    **dict.fromkeys(("adapter", "variant"), _ADAPTER),
    **dict.fromkeys(("input", "prompt", "question"), "use messages"),
    **dict.fromkeys(("image_url", "images"), "send an image block in messages"),
    **dict.fromkeys(("instructions", "system_prompt"), "use system"),
    **dict.fromkeys(("max_completion_tokens", *LENGTHS), "use max_tokens"),
    **dict.fromkeys(("stop", "stop_words"), "use stop_sequences"),
    **dict.fromkeys(("output_format", "response_format", "format", "text", "json_schema", "guided_json"), _FORMAT),
    **dict.fromkeys(("guided_regex", "guided_choice", "structured_outputs", "regex"), f"{_FORMAT}, or {_CHAT}"),
    **dict.fromkeys(("reasoning", "reasoning_effort", "enable_thinking", "think"), "use thinking"),
    "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
    "functions": "use tools",
    "user": "use metadata.user_id",
    "mcp_servers": "tools that run at Anthropic are not there; leave it out",
    "context_management": "a conversation is never shortened; leave it out",
    "container": "nothing is run here; leave it out",
}
"""Names that clients of other routes know, or newer fields of the API, and what to use here."""
EFFORT = "high"
"""What the API does without one."""
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TOOL_FIELDS = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
"""Of a tool, and what the engine calls them."""
_BLOCKS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "user": {
        "text": ("text",),
        "image": ("source",),
        "tool_result": ("tool_use_id", "content", "is_error"),
    },
    "assistant": {
        "text": ("text",),
        "tool_use": ("id", "name", "input"),
        "thinking": ("thinking", "signature"),
    },
}
"""By role, the types of blocks and their fields."""


COUNT_NEIGHBOURS = {**NEIGHBOURS, **dict.fromkeys(FIELDS, "it changes no count; leave it out")}


async def create_message(request: Request) -> Response:
    """Answer a conversation of Anthropic's Messages API."""
    state_of(request).require_serving()
    body = given(await read_object(request))
    accepted = accept(request)
    require_known("", body, FIELDS, NEIGHBOURS)
    if "max_tokens" not in body:
        raise RequestError("max_tokens", "is required: give the longest answer in tokens")
    stream = boolean("stream", body.get("stream", False))
    settings = {name: body[name] for name in ("model", "max_tokens", *SAMPLING) if name in body}
    fields = sampling_fields(accepted.state, settings, None)
    if "stop_sequences" in body:
        require_list("stop_sequences", body["stop_sequences"])
        fields.add("stop", "stop_sequences", body["stop_sequences"])
    _add_format(body, fields)
    await _add_conversation(body, fields, accepted)
    return await message_response(request, EngineWork("chat", [fields.values], fields.names), stream=stream)


async def count_tokens(request: Request) -> Response:
    """The tokens of a conversation, pictures and tools included."""
    state_of(request).require_serving()
    body = given(await read_object(request))
    accepted, fields = accept(request), EngineFields()
    require_known("", body, COUNT_FIELDS, COUNT_NEIGHBOURS)
    take_model(accepted.state, {"model": body.get("model")})
    _add_format(body, EngineFields())  # checked; it changes the answer and not the prompt
    await _add_conversation(body, fields, accepted)
    if "tools" in fields.values:
        fields.values["tool_choice"] = "none"  # it changes the answer and not the prompt
    engine = accepted.engine
    with client_names(fields.names):
        size = size_of(fields.values, engine.vocab_size, engine.max_model_length)
        require_readable(size.num_characters, engine.max_model_length)
        return json_response({"input_tokens": await engine.text_threads.run(_num_positions, engine, fields.values)})


def _num_positions(engine: ServedEngine, values: Mapping[str, Any]) -> int:
    skill, profile = engine.skills.get("chat"), engine.profile
    request = skill.parse({name: value for name, value in values.items() if value is not None}, profile)
    spans = [ImageSpan("", engine.num_image_positions) for _ in request.images]
    return num_positions(skill.prompt(request, spans, profile).items)


async def _add_conversation(body: Body, fields: EngineFields, accepted: AcceptedRequest) -> None:
    """Adds everything that the prompt is made of."""
    chat = accepted.engine.profile.chat
    has_template = chat is not None and chat.template is not None
    fields.values["reasoning"] = None if has_template else False
    if "thinking" in body:
        fields.names["reasoning"] = "thinking"
        fields.values["reasoning"] = _thinking(body["thinking"])
    _add_tools(body, fields)
    written = _Conversation(PartReader(accepted), chat)
    if "system" in body:
        written.add("system", "system", _texts("system", body["system"], written.parts))
    await written.read(body.get("messages"))
    if has_template and written.messages[-1]["role"] == "assistant":
        fields.add("continue_final_message", "messages", True)
    fields.values["messages"] = written.messages
    places = written.parts.image_places
    fields.names |= written.names
    fields.names |= {"prompt": "messages", "image": places[0] if len(places) == 1 else "messages"}


def _add_format(body: Body, fields: EngineFields) -> None:
    config = body.get("output_config", {})
    if not isinstance(config, Mapping):
        raise RequestError("output_config", f'must be an object such as {{"format": …}} (got {shown(config)})')
    require_known("output_config.", config, ("format", "effort"))
    if config.get("effort") not in (None, EFFORT):
        problem = f'is not supported: the effort cannot be set; leave it out or send "{EFFORT}"'
        raise RequestError("output_config.effort", problem)
    asked, name = config.get("format"), "output_config.format"
    if asked is None:
        return
    type_of(name, asked, {"json_schema": None})
    require_known(f"{name}.", asked, ("type", "schema"))
    fields.add("response_format", name, {"type": "json_schema", "json_schema": {"schema": asked.get("schema")}})
    fields.names["response_format.json_schema.schema"] = f"{name}.schema"


def _thinking(value: Any) -> bool:
    """Its budget is checked and not used: a thought may be as long as an answer."""
    kind = type_of("thinking", value, THINKING)
    require_known("thinking.", value, ("type", "budget_tokens"))
    budget = whole(value.get("budget_tokens"))
    if (kind == "enabled") != (isinstance(budget, int) and not isinstance(budget, bool) and budget > 0):
        problem = f'must be a number of tokens with "enabled", and is for nothing else (got {shown(budget)})'
        raise RequestError("thinking.budget_tokens", problem)
    return THINKING[kind]


# ---------------------------------------------------------------------- tools


def _add_tools(body: Body, fields: EngineFields) -> None:
    if "tools" in body:
        require_list("tools", body["tools"])
        fields.add("tools", "tools", [_tool(f"tools[{at}]", raw, fields) for at, raw in enumerate(body["tools"])])
    choice = body.get("tool_choice")
    if choice is None:
        return
    kind = type_of("tool_choice", choice, {**CHOICES, "tool": None})
    choice = given(choice)
    require_known("tool_choice.", choice, ("type", "name", "disable_parallel_tool_use"))
    if ("name" in choice) != (kind == "tool"):
        raise RequestError("tool_choice.name", 'is needed with the type "tool", and with no other type')
    named = {"type": "function", "function": {"name": choice.get("name")}}
    fields.add("tool_choice", "tool_choice", CHOICES.get(kind, named))
    fields.names["tool_choice.function.name"] = "tool_choice.name"
    if boolean("tool_choice.disable_parallel_tool_use", choice.get("disable_parallel_tool_use", False)):
        fields.add("parallel_tool_calls", "tool_choice.disable_parallel_tool_use", False)


def _tool(name: str, raw: Any, fields: EngineFields) -> dict[str, Any]:
    if not isinstance(raw, Mapping) or raw.get("type") not in (None, "custom"):
        remedy = "tools that run at Anthropic are not there"
        raise RequestError(name, f'must be {{"name": …, "input_schema": …}}; {remedy} (got {shown(raw)})')
    tool = given(raw)
    require_known(f"{name}.", tool, ("type", *TOOL_FIELDS, "cache_control"))
    if "input_schema" not in tool:
        raise RequestError(f"{name}.input_schema", 'is required: give a JSON schema such as {"type": "object"}')
    fields.names |= {f"{name}.function.{engine}": f"{name}.{own}" for own, engine in TOOL_FIELDS.items()}
    fields.names[f"tools.{tool.get('name')}.parameters"] = f"{name}.input_schema"
    return {"type": "function", "function": {TOOL_FIELDS[key]: tool[key] for key in TOOL_FIELDS if key in tool}}


# ---------------------------------------------------------------------- messages and their blocks


@dataclass
class _Conversation:
    """Messages for the chat skill. One of the client's can become several: each result of a tool is one of its own."""

    parts: PartReader
    chat: ChatFormat | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """What the client called the parts of each."""

    def add(self, name: str, role: str, content: Any, **more: Any) -> None:
        own = f"messages[{len(self.messages)}]"
        self.names[f"{own}.role"] = f"{name}.role"
        self.names[f"{own}.content"] = name if name == "system" else f"{name}.content"
        self.messages.append({"role": role, "content": content, **more})

    async def read(self, value: Any) -> None:
        if value is None:
            raise RequestError("messages", 'is required: a list such as [{"role": "user", "content": "Hello"}]')
        if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
            raise RequestError("messages", f"must be a list of 1 to {MAX_MESSAGES} messages (got {shown(value)})")
        for index, raw in enumerate(value):
            await self._read_message(f"messages[{index}]", raw)

    async def _read_message(self, name: str, raw: Any) -> None:
        if not isinstance(raw, Mapping):
            raise RequestError(name, f'must be {{"role": …, "content": …}} (got {shown(raw)})')
        require_known(f"{name}.", raw, ("role", "content"))
        role, content = raw.get("role"), raw.get("content")
        if role not in ("user", "assistant"):
            remedy = "instructions go into the field system"
            raise RequestError(f"{name}.role", f"must be user or assistant; {remedy} (got {shown(role)})")
        if isinstance(content, str):
            self.add(name, role, any_text(f"{name}.content", content))
            return
        if content is None:
            fault = "is null" if "content" in raw else "is missing"
            raise RequestError(f"{name}.content", f"{fault}; give a text or a list of blocks")
        if not isinstance(content, list) or not content:
            raise RequestError(f"{name}.content", f"must be a text or a list of blocks (got {shown(content)})")
        self.parts.count(f"{name}.content", len(content))
        places = [f"{name}.content[{at}]" for at in range(len(content))]
        blocks = [(place, _block(place, raw, role)) for place, raw in zip(places, content, strict=True)]
        if role == "user":
            await self._add_user(name, blocks)
        else:
            self._add_assistant(name, blocks)

    async def _add_user(self, name: str, blocks: Sequence[tuple[str, Body]]) -> None:
        said: list[dict[str, Any]] = []
        for place, block in blocks:
            if block["type"] == "text":
                said.append(_text(place, block))
            elif block["type"] == "image":
                said.append(await self._image(place, block.get("source")))
            else:
                if said:
                    self.add(name, "user", said)
                self._add_tool_result(place, block)
                said = []
        if said:
            self.add(name, "user", said)

    def _add_tool_result(self, place: str, block: Body) -> None:
        boolean(f"{place}.is_error", block.get("is_error", False))
        content = _texts(f"{place}.content", block.get("content", ""), self.parts)
        self.add(place, "tool", content, tool_call_id=any_text(f"{place}.tool_use_id", block.get("tool_use_id")))

    def _add_assistant(self, name: str, blocks: Sequence[tuple[str, Body]]) -> None:
        """Earlier thoughts are left out where the model's format has no place for them."""
        fields = () if self.chat is None else self.chat.message_fields
        said = [_text(place, block) for place, block in blocks if block["type"] == "text"]
        calls = [_call(place, block) for place, block in blocks if block["type"] == "tool_use"]
        thoughts = [
            any_text(f"{place}.thinking", block.get("thinking"))
            for place, block in blocks
            if block["type"] == "thinking"
        ]
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if thoughts and "reasoning_content" in fields:
            more["reasoning_content"] = "\n".join(thoughts)
        self.add(name, "assistant", said or ("" if not calls else None), **more)

    async def _image(self, place: str, source: Any) -> dict[str, Any]:
        name = f"{place}.source"
        kind = type_of(name, source, {"base64": None, "url": None})
        if kind == "url":
            require_known(f"{name}.", source, ("type", "url"))
            try:
                return await self.parts.read_image(place, f"{name}.url", source.get("url"))
            except NotFetched:
                remedy = 'send the picture as {"type": "base64", "media_type": …, "data": …}'
                raise RequestError(f"{name}.url", f"web addresses are not fetched here; {remedy}") from None
        require_known(f"{name}.", source, ("type", "media_type", "data"))
        data = any_text(f"{name}.data", source.get("data"))
        return await self.parts.read_image(place, f"{name}.data", f"data:;base64,{data}")


def _block(name: str, raw: Any, role: str) -> dict[str, Any]:
    """Null means not given. A cache_control has no effect."""
    kind = type_of(name, raw, _BLOCKS[role])
    block = given(raw)
    require_known(f"{name}.", block, ("type", *_BLOCKS[role][kind], "cache_control"))
    return block


def _text(name: str, block: Body) -> dict[str, Any]:
    return {"type": "text", "text": any_text(f"{name}.text", block.get("text"))}


def _call(name: str, block: Body) -> dict[str, Any]:
    if not isinstance(block.get("input"), Mapping):
        raise RequestError(f"{name}.input", f"must be an object (got {shown(block.get('input'))})")
    function = {"name": any_text(f"{name}.name", block.get("name")), "arguments": block["input"]}
    return {"id": any_text(f"{name}.id", block.get("id")), "type": "function", "function": function}


def _texts(name: str, value: Any, parts: PartReader) -> Any:
    """Content that may be a text or blocks of text: a system prompt, what a tool returned."""
    if isinstance(value, str):
        return any_text(name, value)
    if not isinstance(value, list):
        raise RequestError(name, f"must be a text or a list of text blocks (got {shown(value)})")
    parts.count(name, len(value))
    for at, raw in enumerate(value):
        if not isinstance(raw, Mapping) or raw.get("type") != "text":
            raise RequestError(f"{name}[{at}]", f'must be {{"type": "text", "text": …}} (got {shown(raw)})')
    return [_text(f"{name}[{at}]", _block(f"{name}[{at}]", raw, "user")) for at, raw in enumerate(value)]
