"""`POST /v1/responses`: a body of the Responses API as a call of the chat skill; and stored responses by their ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kestrel.errors import RequestError, shown
from kestrel.server.calls import AcceptedRequest, accept
from kestrel.server.errors import ResponseNotFound
from kestrel.server.json_body import parse_in_pieces, read_object
from kestrel.server.openai.chat import PartReader, take_reasoning
from kestrel.server.openai.generation import EngineWork, client_names, sampling_fields
from kestrel.server.openai.parameters import (
    LENGTHS,
    PARAMETERS,
    REMEDIES,
    THINKING,
    Body,
    EngineFields,
    ForeignFields,
    Refusal,
    given,
    refuse,
    require_known,
    require_list,
    type_of,
)
from kestrel.server.records import client_of
from kestrel.server.responses import json_response
from kestrel.server.responses_api.answers import AskedResponse, response_to
from kestrel.server.responses_api.items import Conversation
from kestrel.server.responses_api.store import StoredResponse
from kestrel.server.state import ServerState, state_of
from kestrel.settings import SETTINGS, any_text, boolean
from kestrel.skills.base import ModelProfile

SAMPLING = tuple(name for name in PARAMETERS if name not in SETTINGS["max_tokens"].openai_names)
"""Settings by the names that the other routes of OpenAI have for them."""
UNUSED = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
    "max_tool_calls",
)
"""Taken without effect: prefixes are cached anyway, and no tool runs here."""
INCLUDED = ("reasoning.encrypted_content",)
"""Of `include`, likewise: thoughts are there as text."""
_STATELESS = "send everything that the model should read in input, or name a previous_response_id"
REFUSED: Mapping[str, Refusal] = {
    "background": Refusal("nothing runs in the background; leave it out, and set stream for long answers", (False,)),
    "conversation": Refusal(_STATELESS),
    "prompt": Refusal(_STATELESS),
    "context_management": Refusal("a conversation is never shortened; leave it out", ([],)),
    "truncation": Refusal('a conversation is never cut; leave it out or send "disabled"', ("disabled",)),
    "top_logprobs": Refusal("leave it out, and ask /v1/chat/completions for log-probabilities", (0,)),
    "moderation": Refusal("nothing is moderated here; leave it out"),
    "image": Refusal("answers are text; leave it out"),
    "stream_options": Refusal("leave it out: events have no padding", ({}, {"include_obfuscation": False})),
}
_FORMAT = "use text.format, which takes a JSON schema"
_CHAT = "ask /v1/chat/completions for it"
NEIGHBOURS: Mapping[str, str] = {
    **REMEDIES,
    **dict.fromkeys(("messages", "question"), "use input"),
    **dict.fromkeys(("image_url", "images"), "send an input_image in input"),
    **dict.fromkeys(("system", "system_prompt"), "use instructions"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", *LENGTHS), "use max_output_tokens"),
    **dict.fromkeys(("response_format", "format", "output_format", "json_schema", "guided_json"), _FORMAT),
    **dict.fromkeys(
        ("guided_regex", "guided_choice", "structured_outputs", "regex", "grammar"), f"{_FORMAT}, or {_CHAT}"
    ),
    **dict.fromkeys(("n", "best_of", "logprobs", "chat_template_kwargs"), _CHAT),
    **dict.fromkeys((*THINKING, "reasoning_effort", "include_reasoning"), 'use reasoning, such as {"effort": "low"}'),
    "verbosity": "use text.verbosity",
    "functions": "use tools",
    "function_call": "use tool_choice",
}
"""Names that clients of other routes know, and what to use here."""
FIELDS = (
    *("model", "input", "instructions", "previous_response_id", "store", "stream", "max_output_tokens", *SAMPLING),
    *("text", "reasoning", "tools", "tool_choice", "parallel_tool_calls", "include", "metadata", *UNUSED),
)
FORMATS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("name", "description", "schema", "strict"),
}
TOOL_FIELDS = ("name", "description", "parameters", "strict")
CHOICES = ("auto", "none", "required")
MAX_METADATA = 16
MAX_METADATA_CHARACTERS = 512


async def create_response(request: Request) -> Response:
    """Answer what OpenAI's Responses API asks."""
    state_of(request).require_serving()
    body = given(await read_object(request))
    accepted, names = accept(request), dict[str, str]()
    refuse(body, REFUSED)
    require_known("", {name: body[name] for name in body if name not in REFUSED}, FIELDS, NEIGHBOURS)
    with client_names(names):
        return await response_to(request, await _asked(request, accepted, body, names))


async def get_response(request: Request) -> Response:
    """A stored response."""
    if request.query_params:
        name = next(iter(request.query_params))
        raise RequestError(name, "is not supported here; leave it out: a stored response is sent whole")
    stored = state_of(request).responses.find(client_of(request), request.path_params["response_id"])
    if stored is None:
        raise _not_found(request)
    return Response(stored.body, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Forget a stored response."""
    response_id = request.path_params["response_id"]
    if not state_of(request).responses.remove(client_of(request), response_id):
        raise _not_found(request)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _not_found(request: Request) -> ResponseNotFound:
    return ResponseNotFound(
        f"no response {shown(request.path_params['response_id'])} is stored here; it may be too old"
    )


# ---------------------------------------------------------------------- what is asked


async def _asked(request: Request, accepted: AcceptedRequest, body: Body, names: dict[str, str]) -> AskedResponse:
    """`names` is filled with what the client called everything."""
    state, profile = accepted.state, accepted.engine.profile
    stream = boolean("stream", body.get("stream", False))
    is_stored, previous = _take_store(state, body), _previous(request, body)
    fields = _settings(state, body)
    names |= {**fields.names, "messages": "input", "prompt": "input", "body": "previous_response_id"}
    fields.names = names
    reasoning = _take_reasoning(body, fields, profile)
    _take_tools(body, fields)
    conversation = Conversation(PartReader(accepted), profile.chat, names=names)
    if "instructions" in body:
        conversation.add("instructions", "system", any_text("instructions", body["instructions"]))
        names["messages[0].content"] = "instructions"
    items = _items(body)
    if previous is not None:
        told, most = b"[" + b",".join(previous.items) + b"]", state.config.max_body_values
        earlier = await state.body_threads.run(parse_in_pieces, told, most)
        assert isinstance(earlier, list)
        await conversation.read("previous_response_id.input", earlier)
    await conversation.read("input", items)
    fields.values["messages"] = conversation.messages
    places = conversation.parts.image_places
    names["image"] = places[0] if len(places) == 1 else "input"
    return AskedResponse(
        EngineWork("chat", [fields.values], names),
        {**_echoed(body, fields, profile), "reasoning": reasoning, "store": is_stored, "metadata": _metadata(body)},
        (*([] if previous is None else previous.items), *await _as_json(accepted, items)) if is_stored else None,
        stream,
    )


def _settings(state: ServerState, body: Body) -> EngineFields:
    """As chat completions have them."""
    there = {name: body[name] for name in ("model", *SAMPLING) if name in body}
    if "max_output_tokens" in body:
        there["max_tokens"] = body["max_output_tokens"]
    text = body.get("text", {})
    if not isinstance(text, Mapping):
        raise RequestError("text", f'must be an object such as {{"format": {{"type": "text"}}}} (got {shown(text)})')
    require_known("text.", text, ("format", "verbosity"))
    if text.get("verbosity") not in (None, "medium"):
        raise RequestError("text.verbosity", "is not supported: say in instructions how long answers should be")
    if text.get("format") is not None:
        there["response_format"] = _format(text["format"])
    fields = sampling_fields(state, there, None)
    fields.names["max_tokens"] = "max_output_tokens"
    fields.names["response_format"] = "text.format"
    inner = "response_format.json_schema"
    fields.names |= {f"{inner}.{name}": f"text.format.{name}" for name in FORMATS["json_schema"]}
    return fields


def _format(value: Any) -> dict[str, Any]:
    kind = type_of("text.format", value, FORMATS)
    given_format = given(value)
    require_known("text.format.", given_format, ("type", *FORMATS[kind]))
    inner = {name: given_format[name] for name in FORMATS[kind] if name in given_format}
    return {"type": kind, **({"json_schema": inner} if inner or kind == "json_schema" else {})}


def _take_reasoning(body: Body, fields: EngineFields, profile: ModelProfile) -> dict[str, Any]:
    """What the response repeats. A summary of any kind is the thought itself, so only "auto" may be asked for."""
    asked = body.get("reasoning", {})
    if not isinstance(asked, Mapping):
        raise RequestError("reasoning", f'must be an object such as {{"effort": "low"}} (got {shown(asked)})')
    require_known("reasoning.", asked, ("effort", "summary"))
    if asked.get("summary") not in (None, "auto"):
        raise RequestError(
            "reasoning.summary", 'is not supported: thoughts are shown whole; leave it out or send "auto"'
        )
    effort = asked.get("effort")
    there = {} if effort is None else {"reasoning_effort": effort}
    has_template = profile.chat is not None and bool(profile.chat.template)
    fields.names["reasoning_effort"] = "reasoning.effort"
    take_reasoning(there, fields, ForeignFields(), by_default=None if has_template else False)
    fields.names["reasoning"] = "reasoning"
    return {"effort": effort, "summary": asked.get("summary")}


def _take_tools(body: Body, fields: EngineFields) -> None:
    if "tools" in body:
        require_list("tools", body["tools"])
        fields.add("tools", "tools", [_tool(f"tools[{at}]", raw, fields) for at, raw in enumerate(body["tools"])])
    if "tool_choice" in body:
        fields.add("tool_choice", "tool_choice", _tool_choice(body["tool_choice"]))
        fields.names["tool_choice.function.name"] = "tool_choice.name"
    if "parallel_tool_calls" in body:
        fields.add("parallel_tool_calls", "parallel_tool_calls", body["parallel_tool_calls"])
    if "include" in body:
        require_list("include", body["include"])
        for at, name in enumerate(body["include"]):
            if name not in INCLUDED:
                raise RequestError(f"include[{at}]", f"is {shown(name)}, which cannot be included; leave it out")


def _tool(name: str, raw: Any, fields: EngineFields) -> dict[str, Any]:
    tool = given(raw) if isinstance(raw, Mapping) else {}
    kind = tool.get("type")
    if kind != "function":
        remedy = 'only functions of your own can be called: {"type": "function", "name": …}'
        raise RequestError(f"{name}.type" if tool else name, f"is not supported: {remedy} (got {shown(kind)})")
    require_known(f"{name}.", tool, ("type", *TOOL_FIELDS))
    fields.names |= {f"{name}.function.{own}": f"{name}.{own}" for own in TOOL_FIELDS}
    fields.names[f"tools.{tool.get('name')}.parameters"] = f"{name}.parameters"
    return {"type": "function", "function": {key: tool[key] for key in TOOL_FIELDS if key in tool}}


def _tool_choice(value: Any) -> Any:
    if isinstance(value, str):
        return value  # the chat skill knows which there are
    type_of("tool_choice", value, {"function": None})
    require_known("tool_choice.", value, ("type", "name"))
    return {"type": "function", "function": {"name": any_text("tool_choice.name", value.get("name"))}}


# ---------------------------------------------------------------------- what was said before, and what is kept


def _items(body: Body) -> list[Any]:
    value = body.get("input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if value is None:
        raise RequestError("input", "is required: a text, or a list of messages and other items")
    if not isinstance(value, list) or not value:
        raise RequestError("input", f"must be a text or a list of items (got {shown(value)})")
    return value


async def _as_json(accepted: AcceptedRequest, items: list[Any]) -> tuple[bytes, ...]:
    """As they will be stored; they count as the body does until the answer."""
    try:
        told = await accepted.state.body_threads.run(lambda: tuple(map(orjson.dumps, items)))
    except orjson.JSONEncodeError:
        raise RequestError("input", "is nested too deeply to be stored; send less, or store: false") from None
    accepted.held.add(sum(map(len, told)))
    return told


def _take_store(state: ServerState, body: Body) -> bool:
    """As in the API this follows, a response is stored unless it is told otherwise."""
    is_on = not state.responses.is_off
    stored = boolean("store", body.get("store", is_on))
    if stored and not is_on:
        raise RequestError("store", "is true, but this server keeps nothing (max_stored_responses); send false")
    return stored


def _previous(request: Request, body: Body) -> StoredResponse | None:
    if "previous_response_id" not in body:
        return None
    given_id = any_text("previous_response_id", body["previous_response_id"])
    stored = state_of(request).responses.find(client_of(request), given_id)
    if stored is None:
        remedy = "it may be too old, or was not stored; send the conversation in input"
        raise RequestError("previous_response_id", f"{shown(given_id)} is not stored here: {remedy}")
    return stored


def _metadata(body: Body) -> Mapping[str, str]:
    value = body.get("metadata", {})
    is_right = isinstance(value, Mapping) and len(value) <= MAX_METADATA
    if not is_right or not all(
        isinstance(one, str) and len(one) <= MAX_METADATA_CHARACTERS for pair in value.items() for one in pair
    ):
        most = f"{MAX_METADATA} texts of at most {MAX_METADATA_CHARACTERS} characters"
        raise RequestError("metadata", f"must be an object of at most {most} (got {shown(value)})")
    return value


def _echoed(body: Body, fields: EngineFields, profile: ModelProfile) -> dict[str, Any]:
    defaults = profile.defaults
    tools = [{"type": "function", "parameters": None, "strict": False, **given(tool)} for tool in body.get("tools", ())]
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "temperature": fields.values.get("temperature", defaults.temperature),
        "text": {"format": body.get("text", {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": tools,
        "top_p": fields.values.get("top_p", defaults.top_p),
        "truncation": "disabled",
    }
