"""Streams of one or several choices as chunks, usage and `[DONE]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine import EngineResult, EngineStream, StreamChunk
from kestrel.server.errors import error_body
from kestrel.server.openai.engine_work import EngineWork, open_streams
from kestrel.server.openai.parameters import StreamWish
from kestrel.server.openai.usage import PromptShare, RunningUsage
from kestrel.server.responses import EventStream, event
from kestrel.server.state import state_of

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Piece:
    """Something one choice says; `result` comes with the last piece, which may have no chunk."""

    index: int
    chunk: StreamChunk | None = None
    result: EngineResult | None = None


class ChoiceShape(Protocol):
    """The dialect's side of a stream: from pieces to the entries of `choices`, one chunk each."""

    def choices(self, piece: Piece) -> Iterable[Mapping[str, Any]]: ...


def stream_response(
    request: Request,
    work: EngineWork,
    envelope: Mapping[str, Any],
    shape: ChoiceShape,
    wish: StreamWish,
    share: PromptShare,
) -> Response:
    """`envelope` is what all chunks have in common: id, object, created, model."""

    def events(streams: list[EngineStream]) -> AsyncIterator[bytes]:
        return _events(streams, envelope, shape, wish, RunningUsage(streams, share))

    return EventStream(open_streams(request, work), events, state_of(request).config, events_of_failure)


def events_of_failure(error: BaseException) -> bytes:
    return event(error_body(error)) + DONE


async def _events(
    streams: Sequence[EngineStream],
    envelope: Mapping[str, Any],
    shape: ChoiceShape,
    wish: StreamWish,
    usage: RunningUsage,
) -> AsyncIterator[bytes]:
    async for piece in merged(streams):
        if piece.chunk is not None:
            usage.note(piece.index, piece.chunk.token_index, piece.chunk.kind == "reasoning")
        if piece.result is not None:
            usage.results[piece.index] = piece.result
        for choice in shape.choices(piece):
            so_far = usage.so_far() if wish.continuous_usage else None
            yield event({**envelope, "choices": [choice], "usage": so_far})
    if wish.include_usage:
        yield event({**envelope, "choices": [], "usage": usage.final()})
    yield DONE


# ---------------------------------------------------------------------- from engine streams to pieces


async def pieces(index: int, stream: EngineStream) -> AsyncIterator[Piece]:
    """Every chunk as it comes. The last text and the result arrive together, so the last piece has both."""
    chunk = await anext(stream, None)
    while chunk is not None and not stream.is_done:
        yield Piece(index, chunk)
        chunk = await anext(stream, None)
    rest = [] if chunk is None else [chunk, *[later async for later in stream]]
    for earlier in rest[:-1]:
        yield Piece(index, earlier)
    yield Piece(index, rest[-1] if rest else None, await stream.result())


async def merged(streams: Sequence[EngineStream]) -> AsyncIterator[Piece]:
    """The pieces of all streams in the order they come. The first failure ends them all."""
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    pumps = [
        asyncio.ensure_future(_pump(pieces(index, stream), queue.put_nowait)) for index, stream in enumerate(streams)
    ]
    num_open = len(streams)
    try:
        while num_open:
            piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            num_open -= piece.result is not None
            yield piece
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(source: AsyncIterator[Piece], put: Callable[[Piece | Exception], None]) -> None:
    try:
        async for piece in source:
            put(piece)
    except Exception as error:
        put(error)
