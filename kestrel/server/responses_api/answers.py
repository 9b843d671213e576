"""Answers of the Responses API: output items, whole or as a stream of events, and the response around them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine import EngineResult, EngineStream, StreamChunk
from kestrel.request import FinishReason
from kestrel.server.calls import accept, until_gone
from kestrel.server.errors import error_body, kind_of
from kestrel.server.openai.generation import EngineWork, all_results, answering_model, open_streams, pieces, warned
from kestrel.server.records import client_of
from kestrel.server.responses import EventStream, event
from kestrel.server.responses_api.store import StoredResponse
from kestrel.server.state import state_of

_TEXT_PARTS: Mapping[str, Mapping[str, Any]] = {
    "message": {"type": "output_text", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text"},
}
"""The part that an item of text holds; `text` comes to it."""


@dataclass(frozen=True)
class AskedResponse:
    work: EngineWork
    echoed: Mapping[str, Any]
    """What the response repeats of the request."""
    items: tuple[bytes, ...] | None
    """The conversation up to here, each item as JSON; None: it is not to be stored."""
    stream: bool


async def response_to(request: Request, asked: AskedResponse) -> Response:
    """The answer to the one engine request of `asked`."""
    answer = _Answer(request, asked)
    if asked.stream:
        call = open_streams(request, asked.work)
        return EventStream(call, answer.events, state_of(request).config, answer.events_of_failure)
    with accept(request).interruptible():
        results = all_results(request, asked.work, lambda _, result: _whole(result), is_large=False)
        ((result, items),) = await until_gone(request.receive, results)
    return Response(answer.kept(answer.finished(result, items)), media_type="application/json")


class _Answer:
    """The response object in its states."""

    def __init__(self, request: Request, asked: AskedResponse) -> None:
        self._request = request
        self._asked = asked
        self._output = _Output()
        self._envelope = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": answering_model(request, asked.work),
            **asked.echoed,
        }

    def _in_state(self, status: str, **fields: Any) -> dict[str, Any]:
        nothing = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**self._envelope, "status": status, **nothing, **fields}

    def finished(self, result: EngineResult, items: list[dict[str, Any]]) -> dict[str, Any]:
        said = {"output": items, "usage": _usage(result), **warned(result.warnings)}
        if _has_ended(result):
            return self._in_state("completed", **said)
        return self._in_state("incomplete", incomplete_details={"reason": "max_output_tokens"}, **said)

    def kept(self, response: Mapping[str, Any]) -> bytes:
        """As JSON, and in the store if it belongs there."""
        body = orjson.dumps(response)
        if self._asked.items is not None:
            stored = StoredResponse(body, (*self._asked.items, *map(orjson.dumps, response["output"])))
            state_of(self._request).responses.keep(client_of(self._request), response["id"], stored)
        return body

    async def events(self, streams: list[EngineStream]) -> AsyncIterator[bytes]:
        output = self._output
        async for piece in pieces(0, streams[0]):
            for told in self._opening():
                yield told
            if piece.chunk is not None:
                for told in output.of_chunk(piece.chunk):
                    yield told
            if piece.result is not None:
                for told in output.end(has_ended=_has_ended(piece.result)):
                    yield told
                response = self.finished(piece.result, output.items)
                self.kept(response)
                yield output.event(f"response.{response['status']}", response=response)

    def _opening(self) -> Iterator[bytes]:
        if not self._output.num_events:
            for kind in ("created", "in_progress"):
                yield self._output.event(f"response.{kind}", response=self._in_state("in_progress"))

    def events_of_failure(self, error: BaseException) -> bytes:
        opening = b"".join(self._opening())
        code = "server_error" if kind_of(error).status >= 500 else kind_of(error).code
        told = {"code": code or "invalid_prompt", "message": error_body(error)["error"]["message"]}
        failed = self._in_state("failed", error=told, output=self._output.items)
        return opening + self._output.event("response.failed", response=failed)


def _has_ended(result: EngineResult) -> bool:
    return result.finish_reason == FinishReason.STOP.value


def _usage(result: EngineResult) -> dict[str, Any]:
    metrics = result.metrics
    return {
        "input_tokens": metrics.input_tokens,
        "input_tokens_details": {"cached_tokens": metrics.cached_tokens},
        "output_tokens": metrics.output_tokens,
        "output_tokens_details": {"reasoning_tokens": result.num_reasoning_tokens},
        "total_tokens": metrics.input_tokens + metrics.output_tokens,
    }


def _whole(result: EngineResult) -> list[dict[str, Any]]:
    """The items that a stream would end with; its events have no reader."""
    output = _Output()
    thought = result.output.get("reasoning", {}).get("text")
    calls = result.output.get("tool_calls", ())
    for kind, text in (("reasoning", thought), ("message", result.text)):
        list(output.of_text(kind, text or ""))
    list(output.of_calls(calls))
    list(output.end(has_ended=_has_ended(result)))
    return output.items


class _Output:
    """Items one after another, and the events that tell of them. Text of another kind, or a call, ends the open one."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.num_events = 0
        self._said: list[str] | None = None
        """Text or arguments of the open item."""

    def event(self, kind: str, **fields: Any) -> bytes:
        told = event({"type": kind, "sequence_number": self.num_events, **fields})
        self.num_events += 1
        return b"event: %b\n" % kind.encode() + told

    def of_chunk(self, chunk: StreamChunk) -> Iterator[bytes]:
        yield from self.of_text("reasoning" if chunk.kind == "reasoning" else "message", chunk.text)
        yield from self.of_calls((chunk.data or {}).get("tool_calls", ()))

    def of_text(self, kind: str, text: str) -> Iterator[bytes]:
        if not text:
            return
        if self._said is None or self.items[-1]["type"] != kind:
            yield from self._begun_text(kind)
        logprobs = {"logprobs": []} if kind == "message" else {}
        yield self._delta(_TEXT_PARTS[kind]["type"], text, content_index=0, **logprobs)

    def of_calls(self, calls: Any) -> Iterator[bytes]:
        for call in calls:
            if "id" in call:
                names = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                yield from self._begun("function_call", "fc", names)
            if call["function"].get("arguments"):
                yield self._delta("function_call_arguments", call["function"]["arguments"])

    def end(self, *, has_ended: bool) -> Iterator[bytes]:
        """An answer without text or calls has an empty text."""
        if not any(item["type"] != "reasoning" for item in self.items):
            yield from self._begun_text("message")
        yield from self._closed("completed" if has_ended else "incomplete")

    def _begun_text(self, kind: str) -> Iterator[bytes]:
        fields = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield from self._begun(kind, "msg" if kind == "message" else "rs", {**fields, "content": []})
        part = {**_TEXT_PARTS[kind], "text": ""}
        yield self.event("response.content_part.added", **self._place(), content_index=0, part=part)

    def _begun(self, kind: str, prefix: str, fields: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._closed("completed")
        self.items.append({"type": kind, "id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress", **fields})
        self._said = []
        yield self.event("response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1])

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _delta(self, kind: str, text: str, **fields: Any) -> bytes:
        assert self._said is not None
        self._said.append(text)
        return self.event(f"response.{kind}.delta", **self._place(), delta=text, **fields)

    def _closed(self, status: str) -> Iterator[bytes]:
        if self._said is None:
            return
        item, said, place = self.items[-1], "".join(self._said), self._place()
        self._said = None
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = said
            yield self.event("response.function_call_arguments.done", **place, name=item["name"], arguments=said)
        else:
            part = {**_TEXT_PARTS[item["type"]], "text": said}
            item["content"] = [part]
            logprobs = {"logprobs": []} if item["type"] == "message" else {}
            yield self.event(f"response.{part['type']}.done", **place, content_index=0, text=said, **logprobs)
            yield self.event("response.content_part.done", **place, content_index=0, part=part)
        yield self.event("response.output_item.done", output_index=place["output_index"], item=item)
