"""`POST /v1/chat/completions`: a conversation, with pictures, answered by the chat skill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine import EngineResult
from kestrel.errors import RequestError, did_you_mean, shown
from kestrel.request import FinishReason
from kestrel.server.calls import AcceptedRequest, accept
from kestrel.server.json_body import parse_in_pieces, read_object
from kestrel.server.openai.generation import (
    COMMON_FIELDS,
    EngineWork,
    Generation,
    Piece,
    PromptShare,
    generation_response,
    one_per_choice,
    sampling_fields,
)
from kestrel.server.openai.logprobs import LARGE_LOGPROBS, chat_logprobs, require_few_logprobs
from kestrel.server.openai.parameters import (
    REFUSED_IN_CHAT,
    Body,
    EngineFields,
    ForeignFields,
    given,
    refuse,
    take_choices,
    take_stream,
)
from kestrel.server.request_images import image_bytes
from kestrel.server.state import state_of
from kestrel.settings import SETTINGS, boolean
from kestrel.skills.base import ChatFormat, Tokenizer
from kestrel.skills.builtin import reads_no_pictures

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
ROLES = {"developer": "system"}
"""Other names of roles, for chat formats that do not know these."""
TEMPLATE_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""For models with a chat template."""
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
OLD_FIELDS = {"function_call": "send tool_calls", "audio": "send texts"}
"""Of a message, and what to do instead."""
MESSAGE_FIELDS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", *OLD_FIELDS))
UNUSED_IN_MESSAGES = frozenset(
    ("refusal", "annotations", "parsed", "reasoning", "reasoning_details", "cache_control", "id")
)
"""Answers have them, and clients send those back."""
PART_FIELDS = {"text": frozenset(("type", "text")), "image_url": frozenset(("type", "image_url"))}
UNUSED_IN_PARTS = frozenset(("cache_control",))
URL_FIELDS = frozenset(("url",))
UNUSED_IN_URLS = frozenset(("detail",))
"""All pictures are seen in the same detail."""
_REASONING = frozenset(("effort", "enabled", "exclude", "max_tokens"))
REASONING_FIELDS = ("reasoning", "reasoning_effort", "include_reasoning")
FIELDS = frozenset(
    (
        *(*COMMON_FIELDS, "messages", "logprobs", "top_logprobs"),
        *(*REASONING_FIELDS, *TEMPLATE_FIELDS, *TOOL_FIELDS, *REFUSED_IN_CHAT),
    )
)
LONG_ARGUMENTS = 2**14
"""Characters of arguments in one request beyond which they are parsed off the event loop."""
MAX_MESSAGES = 1000
MAX_PARTS = 4096
"""Parts and calls in one request, where the context has room for so many."""
MAX_IMAGES = 8
"""Pictures in one request."""
_SHAPES = '{"type": "text", "text": …} or {"type": "image_url", "image_url": {"url": …}}'


async def chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state_of(request).require_serving()
    body = given(await read_object(request))
    return await generation_response(request, await _chat_generation(accept(request), body))


async def _chat_generation(accepted: AcceptedRequest, body: Body) -> Generation:
    state, engine = accepted.state, accepted.engine
    refuse(body, REFUSED_IN_CHAT)
    foreign = ForeignFields()
    foreign.note("", body, FIELDS)
    options, num_choices = take_stream(body, foreign), take_choices(body)
    fields = sampling_fields(state, body, None)
    num_top = _take_logprobs(body, fields)
    num_logprobs = require_few_logprobs(state, "top_logprobs", fields.values, [()], num_choices)
    for name in TOOL_FIELDS:
        if name in body:
            fields.add(name, name, body[name])
    parts = PartReader(accepted, foreign)
    shows_thinking = await add_conversation(body, fields, parts, engine.profile.chat)
    places = parts.image_places
    names = {**fields.names, "prompt": "messages", "image": places[0] if len(places) == 1 else "messages"}
    return Generation(
        EngineWork("chat", one_per_choice(fields.values, num_choices), names),
        _ChatShape(engine.profile.tokenizer, num_top, shows_thinking),
        options,
        PromptShare(num_choices, len(places) * engine.num_image_positions),
        num_logprobs > LARGE_LOGPROBS,
        foreign,
    )


async def add_conversation(body: Body, fields: EngineFields, parts: PartReader, chat: ChatFormat | None) -> bool:
    """Adds everything that the prompt is made of; whether thinking is shown."""
    by_default = None if chat is not None and chat.template else False
    shows_thinking = take_reasoning(body, fields, parts.foreign, by_default)
    for name in TEMPLATE_FIELDS:
        if name in body:
            fields.add(name, name, body[name])
    fields.values["messages"] = await _skill_messages(body.get("messages"), parts, chat)
    return shows_thinking


def _take_logprobs(body: Body, fields: EngineFields) -> int | None:
    """How many likely tokens to show beside each; None for no log-probabilities."""
    wants = boolean("logprobs", body.get("logprobs", False))
    num_top = SETTINGS["logprobs"].kind("top_logprobs", body.get("top_logprobs", 0))
    if not wants:
        if num_top:
            raise RequestError("top_logprobs", "needs logprobs; set logprobs to true, or leave top_logprobs out")
        return None
    fields.add("logprobs", "top_logprobs", num_top)
    return num_top


def take_reasoning(body: Body, fields: EngineFields, foreign: ForeignFields, by_default: bool | None) -> bool:
    """Whether thinking is shown. It happens when any of three parameters asks for it, else `by_default`.

    None means that the model's template decides; then to include thoughts is not to ask for them.
    """
    reasoning, effort, is_shown = body.get("reasoning", False), body.get("reasoning_effort", "none"), True
    if isinstance(reasoning, Mapping):
        reasoning = given(reasoning)
        foreign.note("reasoning.", reasoning, _REASONING)
        if "max_tokens" in reasoning:
            raise RequestError("reasoning.max_tokens", "is not supported: leave it out, and set max_tokens")
        is_shown = not boolean("reasoning.exclude", reasoning.get("exclude", False))
        effort = reasoning.get("effort", effort)
        reasoning = reasoning.get("enabled", effort != "none")
    if not isinstance(reasoning, bool):
        raise RequestError("reasoning", f'must be true, false or {{"effort": …}} (got {shown(body["reasoning"])})')
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise RequestError("reasoning_effort", f"must be one of: {', '.join(EFFORTS)} (got {shown(effort)})")
    asks = {
        "reasoning": reasoning,
        "reasoning_effort": effort != "none",
        "include_reasoning": boolean("include_reasoning", body.get("include_reasoning", False)) and by_default is False,
    }
    asked = [name for name, is_asked in asks.items() if is_asked]
    said = asked or [name for name in ("reasoning", "reasoning_effort") if name in body]
    fields.values["reasoning"] = bool(asked) if said else by_default
    if said:
        fields.names["reasoning"] = said[0]
    return is_shown and body.get("include_reasoning", True)


class _ChatShape:
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, num_top: int | None, shows_thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._shows_thinking = shows_thinking
        self._opened: set[int] = set()

    def choice(self, index: int, result: EngineResult) -> dict[str, Any]:
        calls = result.output.get("tool_calls")
        content = None if calls and not result.text else result.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if self._shows_thinking and "reasoning" in result.output:
            message["reasoning_content"] = result.output["reasoning"]["text"]
        logprobs = self._logprobs(result.output.get("logprobs", ()))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _finish_reason(result)}

    def choices(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.index not in self._opened:
            self._opened.add(piece.index)
            yield _chunk_choice(piece.index, {"role": "assistant", "content": ""})
        finish_reason = None if piece.result is None else _finish_reason(piece.result)
        chunk = piece.chunk
        if chunk is None or (chunk.kind == "reasoning" and not (self._shows_thinking and chunk.text)):
            if finish_reason is not None:
                yield _chunk_choice(piece.index, {"content": ""}, None, finish_reason)
            return
        if chunk.kind == "reasoning":
            yield _chunk_choice(piece.index, {"reasoning_content": chunk.text}, None, finish_reason)
            return
        delta = {"content": chunk.text} if chunk.text or chunk.kind == "text" else {}
        yield _chunk_choice(piece.index, {**delta, **(chunk.data or {})}, self._logprobs(chunk.logprobs), finish_reason)

    def _logprobs(self, entries: Any) -> dict[str, Any] | None:
        return None if self._num_top is None else chat_logprobs(self._tokenizer, entries, self._num_top)


def _finish_reason(result: EngineResult) -> str:
    has_ended = result.finish_reason == FinishReason.STOP.value
    return "tool_calls" if has_ended and result.output.get("tool_calls") else result.finish_reason


def _chunk_choice(
    index: int, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


# ---------------------------------------------------------------------- messages and their parts


async def _skill_messages(value: Any, parts: PartReader, chat: ChatFormat | None) -> list[dict[str, Any]]:
    """Roles and contents, and the further fields that the model's chat format knows."""
    if value is None:
        raise RequestError("messages", 'is required: a list such as [{"role": "user", "content": "Hello"}]')
    if not isinstance(value, list) or not value:
        raise RequestError("messages", f"must be a list of 1 to {MAX_MESSAGES} messages (got {shown(value)})")
    if len(value) > MAX_MESSAGES:
        raise RequestError("messages", f"has {len(value)} entries; give at most {MAX_MESSAGES}")
    return [await _message(f"messages[{index}]", raw, parts, chat) for index, raw in enumerate(value)]


async def _message(name: str, raw: Any, parts: PartReader, chat: ChatFormat | None) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise RequestError(name, f'must be {{"role": …, "content": …}} (got {shown(raw)})')
    parts.foreign.note(f"{name}.", raw, MESSAGE_FIELDS, UNUSED_IN_MESSAGES)
    role, content = raw.get("role"), raw.get("content")
    roles = () if chat is None else chat.roles
    fields = dict.fromkeys((*(() if chat is None else chat.message_fields), "tool_calls"))
    if role == "function":
        raise RequestError(f"{name}.role", 'is "function", which is not supported: send the result of a call as "tool"')
    for field, remedy in OLD_FIELDS.items():
        if raw.get(field) not in (None, []):
            raise RequestError(f"{name}.{field}", f"is not supported: {remedy}")
    if isinstance(content, list):
        content = await parts.read_all(f"{name}.content", content)
    if isinstance(role, str) and role not in roles:
        role = ROLES.get(role, role)
    if chat is not None and role not in (*roles, "tool"):
        known = tuple(dict.fromkeys((*roles, *ROLES, "tool")))
        told = f"must be one of: {', '.join(known)} (got {shown(role)}){did_you_mean(role, known)}"
        raise RequestError(f"{name}.role", told)
    if content is None and role not in ("assistant", "tool"):
        fault = "is null" if "content" in raw else "is missing"
        raise RequestError(f"{name}.content", f"{fault}; give a text, or a list of parts such as {_SHAPES}")
    extra = {field: raw[field] for field in fields if field in raw}
    if isinstance(calls := extra.get("tool_calls"), list):
        extra["tool_calls"] = await parts.read_calls(f"{name}.tool_calls", calls)
    return {"role": role, "content": content, **extra}


class PartReader:
    """Reads the parts of one request, and counts them and its pictures."""

    def __init__(
        self, accepted: AcceptedRequest, foreign: ForeignFields | None = None, *, takes_images: bool = True
    ) -> None:
        self._profile = accepted.engine.profile
        self._takes_images = takes_images
        self._fetch = accepted.fetch
        self._threads = accepted.state.body_threads
        self._max_values = accepted.state.config.max_body_values
        self._max_bytes = accepted.engine.config.max_image_bytes
        self._max_parts = min(MAX_PARTS, accepted.engine.max_model_length)
        self._num_parts = 0
        self._num_argument_characters = 0
        self.image_places: list[str] = []
        self.foreign = foreign or ForeignFields()

    async def read_all(self, name: str, parts: Sequence[Any]) -> list[dict[str, Any]]:
        self.count(name, len(parts))
        return [await self._read(f"{name}[{index}]", part) for index, part in enumerate(parts)]

    def count(self, name: str, number: int) -> None:
        self._num_parts += number
        if self._num_parts > self._max_parts:
            raise RequestError(name, f"brings the request to {self._num_parts} parts; give at most {self._max_parts}")

    async def read_calls(self, name: str, calls: Sequence[Any]) -> list[Any]:
        self.count(name, len(calls))
        return [await self.read_call(f"{name}[{index}]", call) for index, call in enumerate(calls)]

    async def read_call(self, name: str, call: Any) -> Any:
        """With long arguments as an object: text of many values would hold up others while it is parsed."""
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        self._num_argument_characters += len(arguments) if isinstance(arguments, str) else 0
        if not isinstance(arguments, str) or self._num_argument_characters <= LONG_ARGUMENTS:
            return call
        assert isinstance(function, Mapping)
        try:
            parsed = await self._threads.run(parse_in_pieces, arguments.encode(), self._max_values)
        except RequestError as error:
            raise RequestError(f"{name}.function.arguments", str(error).removeprefix(f"{error.field}: ")) from error
        return {**call, "function": {**function, "arguments": parsed}}

    async def _read(self, name: str, part: Any) -> dict[str, Any]:
        """A part as the chat skill takes it: {"type": "text", "text"} or {"type": "image", "image": bytes}."""
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in PART_FIELDS:
            self.foreign.note(f"{name}.", part, PART_FIELDS[kind], UNUSED_IN_PARTS)
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind != "image_url":
            raise RequestError(name, f"must be {_SHAPES} (got {shown(part)})")
        place, url = f"{name}.image_url", part.get("image_url")
        if isinstance(url, Mapping):
            self.foreign.note(f"{place}.", url, URL_FIELDS, UNUSED_IN_URLS)
            return await self.read_image(place, f"{place}.url", url.get("url"))
        return await self.read_image(place, place, url)

    async def read_image(self, place: str, name: str, value: Any) -> dict[str, Any]:
        """`value` is a URL or base64 in the field `name`, `place` the picture's in the request."""
        if not self._profile.has_vision:
            raise reads_no_pictures(place, self._profile)
        if not self._takes_images:
            raise RequestError(place, "is a picture, which has no token ids; leave it out")
        if len(self.image_places) >= MAX_IMAGES:
            raise RequestError(place, f"is one picture too many; send at most {MAX_IMAGES} in a request")
        self.image_places.append(place)
        try:
            data = await image_bytes(value, self._max_bytes, self._fetch, self._threads, name)
        except RequestError as error:
            if error.field == name:
                raise
            raise type(error)(name, str(error).removeprefix(f"{error.field}: ")) from error
        return {"type": "image", "image": data}
