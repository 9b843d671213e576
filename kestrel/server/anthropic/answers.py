"""Answers of the Messages API: one message of blocks, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine import EngineResult, EngineStream, StreamChunk
from kestrel.request import FinishReason
from kestrel.server.calls import accept, until_gone
from kestrel.server.errors import anthropic_body, error_body, kind_of
from kestrel.server.openai.generation import EngineWork, all_results, answering_model, open_streams, pieces, warned
from kestrel.server.records import request_id_of
from kestrel.server.responses import EventStream, event, json_response
from kestrel.server.state import state_of


async def message_response(request: Request, work: EngineWork, *, stream: bool) -> Response:
    """The answer to the one engine request of `work`."""
    envelope = {
        "id": f"msg_{request_id_of(request)}",
        "type": "message",
        "role": "assistant",
        "model": answering_model(request, work),
    }
    if stream:

        def events(streams: list[EngineStream]) -> AsyncIterator[bytes]:
            return _events(streams[0], envelope)

        return EventStream(open_streams(request, work), events, state_of(request).config, _event_of_failure)
    with accept(request).interruptible():
        results = all_results(request, work, lambda _, result: _content(result), is_large=False)
        ((result, content),) = await until_gone(request.receive, results)
    ending = {**_ending(result), "usage": _usage(result), **warned(result.warnings)}
    return json_response({**envelope, "content": content, **ending})


def _content(result: EngineResult) -> list[dict[str, Any]]:
    """A call that `max_tokens` cut has no input that could be shown, and is left out."""
    blocks: list[dict[str, Any]] = []
    thought = result.output.get("reasoning", {}).get("text")
    if thought:
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    uses: list[dict[str, Any]] = []
    for call in result.output.get("tool_calls", ()):
        with suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(call["function"]["arguments"])
            uses.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    if result.text or not uses:
        blocks.append({"type": "text", "text": result.text})
    return [*blocks, *uses]


def _ending(result: EngineResult) -> dict[str, Any]:
    stop_text = None
    if result.finish_reason != FinishReason.STOP.value:
        reason = "max_tokens"
    elif result.output.get("tool_calls"):
        reason = "tool_use"
    else:
        stop_text = result.stop_text
        reason = "end_turn" if stop_text is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop_text}


def _usage(result: EngineResult) -> dict[str, int]:
    """As the API counts: what came from the cache is no part of `input_tokens`."""
    metrics = result.metrics
    return {
        "input_tokens": metrics.input_tokens - metrics.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": metrics.cached_tokens,
        "output_tokens": metrics.output_tokens,
    }


# ---------------------------------------------------------------------- streams


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\n" % kind.encode() + event({"type": kind, **fields})


def _event_of_failure(error: BaseException) -> bytes:
    return b"event: error\n" + event(anthropic_body(kind_of(error).status, error_body(error)))


async def _events(stream: EngineStream, envelope: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """What of the prompt was cached is known at the end only."""
    blocks: _Blocks | None = None
    async for piece in pieces(0, stream):
        if blocks is None:
            blocks = _Blocks()
            usage = {"input_tokens": stream.num_prompt_tokens, "output_tokens": 0}
            message = {**envelope, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield _event("message_start", message={**message, **warned(stream.warnings)})
        if piece.chunk is not None:
            for told in blocks.of_chunk(piece.chunk):
                yield told
        if piece.result is not None:
            for told in blocks.end():
                yield told
            yield _event("message_delta", delta=_ending(piece.result), usage=_usage(piece.result))
            yield _event("message_stop")


class _Blocks:
    """Content blocks one after another: a chunk of another kind, or of another call, ends the open one."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def of_chunk(self, chunk: StreamChunk) -> Iterator[bytes]:
        if chunk.kind == "reasoning" and chunk.text:
            yield from self._begun("thinking", {"thinking": "", "signature": ""})
            yield self._delta("thinking_delta", thinking=chunk.text)
        elif chunk.text:
            yield from self._begun("text", {"text": ""})
            yield self._delta("text_delta", text=chunk.text)
        for call in (chunk.data or {}).get("tool_calls", ()):
            if "id" in call:
                yield from self._closed()
                yield from self._begun("tool_use", {"id": call["id"], "name": call["function"]["name"], "input": {}})
            if call["function"].get("arguments"):
                yield self._delta("input_json_delta", partial_json=call["function"]["arguments"])

    def end(self) -> Iterator[bytes]:
        """An answer without text or calls has an empty text."""
        if self._index < 0 or self._open == "thinking":
            yield from self._begun("text", {"text": ""})
        yield from self._closed()

    def _begun(self, kind: str, start: Mapping[str, Any]) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._closed()
            self._index, self._open = self._index + 1, kind
            yield _event("content_block_start", index=self._index, content_block={"type": kind, **start})

    def _closed(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._index)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})
