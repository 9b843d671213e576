"""What callers get back: results, chunks, and the stream they come from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from kestrel.errors import EngineStopped
from kestrel.request import GeneratedToken, RequestMetrics, StreamUpdate
from kestrel.threads import Threads, listed

T = TypeVar("T")
Size: TypeAlias = tuple[int, int]
"""Width and height of a picture in pixels."""


@dataclass(frozen=True, slots=True)
class EngineResult:
    """A finished request. `finish_reason` is "stop" (natural end) or "length" (a budget ended it)."""

    request_id: str
    skill: str
    output: dict[str, Any]
    text: str
    finish_reason: str
    metrics: RequestMetrics
    num_reasoning_tokens: int = 0
    """How many of `metrics.output_tokens` were thinking, the mark that ends it included."""
    adapter: str | None = None
    """The adapter it went through."""
    stop_text: str | None = None
    """Which of the `stop` texts ended it."""
    warnings: tuple[str, ...] = ()
    """What its caller should know of the model."""

    def body(self) -> dict[str, Any]:
        """As native answers have it over HTTP and in Python."""
        metrics = self.metrics
        return {
            "request_id": self.request_id,
            "finish_reason": self.finish_reason,
            **self.output,
            **({"warnings": list(self.warnings)} if self.warnings else {}),
            "metrics": {
                "input_tokens": metrics.input_tokens,
                "output_tokens": metrics.output_tokens,
                "cached_tokens": metrics.cached_tokens,
                "prefill_time_ms": metrics.prefill_time_ms,
                "decode_time_ms": metrics.decode_time_ms,
                "ttft_ms": metrics.ttft_ms,
                "queue_time_ms": metrics.queue_time_ms,
            },
            "processing_latency_s": metrics.processing_latency_s,
            "ttft_s": metrics.ttft_s,
            "decode_latency_s": metrics.decode_latency_s,
            "decode_tokens_per_s": metrics.decode_tokens_per_s,
        }


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """A piece of a stream. `kind` is "text", or the type of a structured event whose `data` says more."""

    text: str
    token_index: int
    kind: str = "text"
    data: Mapping[str, Any] | None = None
    logprobs: tuple[Mapping[str, Any], ...] = ()
    """When asked for: entries, as in `EngineResult.output["logprobs"]`, of the tokens whose text begins here."""
    tokens: tuple[GeneratedToken, ...] = ()
    """For `tells_tokens`: those since the chunk before."""


class EngineStream:
    """The caller's end of a running request: an async iterator over chunks; `await result()` gives the final result.

    Leaving the iteration early does not end the request: call `cancel()`, or use `async with`. Cancelling the task
    that waits here cancels the request.
    """

    def __init__(self, request_id: str, skill: str, cancel: Callable[[str], None], threads: Threads) -> None:
        """`threads` make the lists of a result that take long."""
        self.request_id = request_id
        self.skill = skill
        self.num_prompt_tokens = 0  # positions of the laid-out prompt, set by the engine
        self.adapter: str | None = None  # set by the engine once it is loaded
        self.picture_size: Size | None = None  # set by the engine when places on the picture are asked for
        self.warnings: tuple[str, ...] = ()  # as above
        self._cancel = cancel
        self._threads = threads
        self._chunks: asyncio.Queue[StreamChunk | None] = asyncio.Queue()
        self._late: Mapping[str, Iterable[Any]] = {}
        self._making: asyncio.Task[dict[str, Any]] | None = None
        self._result: asyncio.Future[EngineResult] = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> EngineStream:
        return self

    async def __anext__(self) -> StreamChunk:
        try:
            chunk = await self._chunks.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if chunk is not None:
            return chunk
        self._chunks.put_nowait(None)  # keep the end visible for a second iteration
        if (error := self._result.exception()) is not None:
            raise error
        raise StopAsyncIteration

    async def chunks(self) -> list[StreamChunk]:
        """All that are there, after waiting for one; none at the end."""
        taken: list[StreamChunk] = []
        async for chunk in self:
            taken.append(chunk)
            if self._chunks.empty():
                break
        return taken

    async def result(self) -> EngineResult:
        try:
            result = await asyncio.shield(self._result)
            if self._late:
                self._making = self._making or asyncio.create_task(self._threads.run(self._list_late))
                result.output.update(await asyncio.shield(self._making))
            return result
        except asyncio.CancelledError:
            if self._making is not None and self._making.cancelled():
                raise EngineStopped("the engine was shut down before the result was complete") from None
            self.cancel()
            raise

    def _list_late(self) -> dict[str, Any]:
        return {name: listed(entries) for name, entries in self._late.items()}

    async def result_as(self, make: Callable[[EngineResult], T]) -> tuple[EngineResult, T]:
        """The result without its output, and what `make` makes of the whole, in a thread.

        For large outputs: few are in memory at a time. `make` gets iterators in place of the lists that take long.
        """
        try:
            result = await asyncio.shield(self._result)
            late, self._late = self._late, {}
            whole = replace(result, output={**result.output, **late})
            return replace(result, output={}), await self._threads.run(make, whole)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the request; a no-op when it is over. Waiting callers get RequestCancelled."""
        if not self._result.done():
            self._cancel(self.request_id)

    @property
    def is_done(self) -> bool:
        return self._result.done()

    @property
    def error(self) -> BaseException:
        """Why it failed; only for a stream that did."""
        error = self._result.exception()
        assert error is not None
        return error

    def require_open(self) -> None:
        """Raises why it failed, if it did."""
        if self.is_done:
            raise self.error

    async def __aenter__(self) -> EngineStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def deliver(self, update: StreamUpdate) -> None:
        """Called on the event loop, in order, by the engine."""
        if self._result.done():
            return
        if update.delta is not None:
            delta = update.delta
            data = delta.data
            if self.picture_size is not None and data is not None:
                data = _chunk_with_pixels(data, self.picture_size)
            self.put(StreamChunk(delta.text, update.token_index, delta.kind, data, delta.logprobs, update.tokens))
        if update.error is not None:
            self.fail(update.error)
        elif update.output is not None and update.finish_reason is not None and update.metrics is not None:
            self._late = update.output.late
            if self.picture_size is not None:
                _add_pixels(update.output.fields, self.picture_size)
            self.end(
                EngineResult(
                    request_id=self.request_id,
                    skill=self.skill,
                    output=update.output.fields,
                    text=update.output.text,
                    finish_reason=update.finish_reason.value,
                    metrics=update.metrics,
                    num_reasoning_tokens=update.output.num_reasoning_tokens,
                    adapter=self.adapter,
                    stop_text=update.output.stop_text,
                    warnings=self.warnings,
                )
            )

    def put(self, chunk: StreamChunk) -> None:
        self._chunks.put_nowait(chunk)

    def end(self, result: EngineResult) -> None:
        if self._result.done():
            return
        self._result.set_result(result)
        self._chunks.put_nowait(None)

    def fail(self, error: BaseException) -> None:
        if self._result.done():
            return
        self._result.set_exception(error)
        self._result.exception()  # mark as seen: a caller that never awaits must not cause a warning
        self._chunks.put_nowait(None)


def chunk_body(chunk: StreamChunk) -> dict[str, Any]:
    """A chunk as plain data, the way every front end writes it.

    Text has no type. Thinking has one and no `chunk`, so that joined chunks are the answer alone. With a point that
    thinking has named comes `grounding`, shaped as in the result: later ones of the same `start_idx` add to it.
    """
    place = {"completed": False, "token_index": chunk.token_index}
    match chunk.kind:
        case "text":
            return {"chunk": chunk.text, **place}
        case "tool_calls":
            return {"type": "tool_calls", "chunk": chunk.text, **(chunk.data or {}), **place}
        case "reasoning":
            return {"type": "reasoning", "reasoning": chunk.text, **(chunk.data or {}), **place}
        case "path_delta":
            return {"type": "path_delta", "chunk": chunk.text, **(chunk.data or {}), **place}
        case "bbox":
            return {"type": "bbox", **(chunk.data or {}), **place}
    return {"type": chunk.kind, chunk.kind: chunk.data, **place}


# ---------------------------------------------------------------------- places in pixels


def _add_pixels(fields: dict[str, Any], size: Size) -> None:
    """Beside the shares in a result: the same places in pixels, and the picture's size."""
    for place in (*fields.get("objects", ()), *fields.get("points", ())):
        place["pixels"] = _pixels(place, size)
    for outline in (fields, *fields.get("segments", ())):
        if "bbox" in outline:
            outline["pixels"] = None if outline["bbox"] is None else _pixels(outline["bbox"], size)
    fields["image"] = {"width": size[0], "height": size[1]}


def _chunk_with_pixels(data: Mapping[str, Any], size: Size) -> Mapping[str, Any]:
    pixels = _pixels(data.get("bbox", data), size)
    return {**data, "pixels": pixels} if pixels else data


def _pixels(place: Mapping[str, Any], size: Size) -> dict[str, float]:
    """Shares across (x) and down (y), inside the picture."""
    sides = {side: size[side.startswith("y")] for side in PLACE_SIDES if side in place}
    return {side: round(min(max(place[side], 0.0), 1.0) * length, 2) for side, length in sides.items()}


PLACE_SIDES = ("x_min", "y_min", "x_max", "y_max", "x", "y")
"""What places are made of."""
