"""`POST /v1/chat/completions`: a conversation, with pictures, answered by the chat skill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine import EngineResult
from kestrel.errors import RequestError, shown
from kestrel.server.calls import AcceptedRequest, accept
from kestrel.server.json_body import read_object
from kestrel.server.openai.generation import (
    EngineWork,
    Generation,
    Piece,
    PromptShare,
    generation_response,
    one_per_choice,
    sampling_fields,
)
from kestrel.server.openai.logprobs import LARGE_LOGPROBS, chat_logprobs, require_few_logprobs
from kestrel.server.openai.messages import PartReader, skill_messages
from kestrel.server.openai.parameters import (
    REFUSED_IN_CHAT,
    TOP_LOGPROBS,
    Body,
    EngineFields,
    given,
    refuse,
    take_choices,
    take_flag,
    take_integer,
    take_stream,
    token_bounds,
)
from kestrel.server.state import state_of
from kestrel.skills.base import Tokenizer

BOUNDS = token_bounds(1)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


async def chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state_of(request).require_serving()
    body = given(await read_object(request))
    return await generation_response(request, await chat_generation(accept(request), body))


async def chat_generation(accepted: AcceptedRequest, body: Body) -> Generation:
    state, engine = accepted.state, accepted.engine
    refuse(body, REFUSED_IN_CHAT)
    options, num_choices = take_stream(body), take_choices(body)
    fields = sampling_fields(state, body, BOUNDS, None)
    num_top = _take_logprobs(body, fields)
    num_logprobs = require_few_logprobs(state, "top_logprobs", fields.values, [()], num_choices)
    shows_thinking = _take_reasoning(body, fields)
    parts = PartReader(accepted)
    fields.values["messages"] = await skill_messages(body.get("messages"), parts)
    places = parts.image_places
    names = {**fields.names, "prompt": "messages", "image": places[0] if len(places) == 1 else "messages"}
    return Generation(
        EngineWork("chat", one_per_choice(fields.values, num_choices), names),
        ChatShape(engine.profile.tokenizer, num_top, shows_thinking),
        options,
        PromptShare(num_choices, len(places) * engine.num_image_positions),
        num_logprobs > LARGE_LOGPROBS,
    )


def _take_logprobs(body: Body, fields: EngineFields) -> int | None:
    """How many likely tokens to show beside each; None for no log-probabilities."""
    wants, num_top = take_flag(body, "logprobs"), take_integer(body, "top_logprobs", TOP_LOGPROBS, 0)
    if not wants:
        if num_top:
            raise RequestError("top_logprobs", "goes with logprobs only; set logprobs to true or leave it out")
        return None
    fields.add("logprobs", "top_logprobs", num_top)
    return num_top


def _take_reasoning(body: Body, fields: EngineFields) -> bool:
    """Whether thinking is shown. It happens when any of three parameters asks for it, else not."""
    reasoning, effort = body.get("reasoning", False), body.get("reasoning_effort", "none")
    if isinstance(reasoning, Mapping):
        effort = reasoning.get("effort") or effort
        reasoning = reasoning.get("enabled", effort != "none")
    if not isinstance(reasoning, bool):
        raise RequestError("reasoning", f'must be true, false or {{"effort": …}} (got {shown(body["reasoning"])})')
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise RequestError("reasoning_effort", f"must be one of: {', '.join(EFFORTS)} (got {shown(effort)})")
    asks = {
        "reasoning": reasoning,
        "reasoning_effort": effort != "none",
        "include_reasoning": take_flag(body, "include_reasoning"),
    }
    asked = [name for name, is_asked in asks.items() if is_asked]
    fields.values["reasoning"] = bool(asked)
    if asked:
        fields.names["reasoning"] = asked[0]
    return take_flag(body, "include_reasoning", default=True)


class ChatShape:
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, num_top: int | None, shows_thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._shows_thinking = shows_thinking
        self._opened: set[int] = set()

    def choice(self, index: int, result: EngineResult) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
        if self._shows_thinking and "reasoning" in result.output:
            message["reasoning_content"] = result.output["reasoning"]["text"]
        logprobs = self._logprobs(result.output.get("logprobs", ()))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": result.finish_reason}

    def choices(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.index not in self._opened:
            self._opened.add(piece.index)
            yield _chunk_choice(piece.index, {"role": "assistant", "content": ""})
        finish_reason = None if piece.result is None else piece.result.finish_reason
        chunk = piece.chunk
        if chunk is None or (chunk.kind == "reasoning" and not self._shows_thinking):
            if finish_reason is not None:
                yield _chunk_choice(piece.index, {"content": ""}, None, finish_reason)
            return
        field = "reasoning_content" if chunk.kind == "reasoning" else "content"
        logprobs = self._logprobs(chunk.logprobs) if chunk.kind == "text" else None
        yield _chunk_choice(piece.index, {field: chunk.text}, logprobs, finish_reason)

    def _logprobs(self, entries: Any) -> dict[str, Any] | None:
        return None if self._num_top is None else chat_logprobs(self._tokenizer, entries, self._num_top)


def _chunk_choice(
    index: int, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
