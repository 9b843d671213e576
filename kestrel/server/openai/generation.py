"""What chat, text completions and embeddings share: from the engine requests of one HTTP request to its answer.

Each choice, prompt or input is an engine request; all of them end together. The answer is sent whole, or streamed as
chunks, usage and `[DONE]`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kestrel import __version__
from kestrel.engine import EngineResult, EngineStream, StreamChunk
from kestrel.errors import AdapterNotFound, RequestError
from kestrel.server.calls import accept, engine_call, request_info, until_gone
from kestrel.server.errors import ModelNotFound, error_body
from kestrel.server.native import take_model
from kestrel.server.openai.formats import NAMES, take_format
from kestrel.server.openai.parameters import (
    PARAMETERS,
    UNUSED,
    Body,
    EngineFields,
    ForeignFields,
    StreamOptions,
    derived_seed,
    take_settings,
)
from kestrel.server.records import client_of, request_id_of
from kestrel.server.responses import EventStream, event, listed_response
from kestrel.server.state import RequestInfo, ServerState, state_of

DONE = b"data: [DONE]\n\n"
COMMON_FIELDS = ("model", "n", "best_of", "stream", "stream_options", *PARAMETERS, *NAMES, *UNUSED)
"""Of every generation, with those that have no effect."""
T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Something one choice says; `result` comes with the last piece, which may have no chunk."""

    index: int
    chunk: StreamChunk | None = None
    result: EngineResult | None = None


class Shape(Protocol):
    """How one kind of generation looks."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, index: int, result: EngineResult) -> Mapping[str, Any]: ...

    def choices(self, piece: Piece) -> Iterable[Mapping[str, Any]]:
        """In a stream: the entries of `choices`, one chunk each."""
        ...


@dataclass(frozen=True)
class Generation:
    """Everything a body asks for."""

    work: EngineWork
    shape: Shape
    options: StreamOptions
    share: PromptShare
    is_large: bool
    """Whether making the choices takes too long for the event loop."""
    foreign: ForeignFields

    def warnings(self, of_model: Sequence[str]) -> dict[str, Any]:
        return warned([*of_model, *self.foreign.warnings])


async def generation_response(request: Request, asked: Generation) -> Response:
    shape = asked.shape
    envelope = {
        "id": f"{shape.id_prefix}-{request_id_of(request)}",
        "object": shape.chunk_object if asked.options.stream else shape.object,
        "created": int(time.time()),
        "model": answering_model(request, asked.work),
        "system_fingerprint": f"kestrel-{__version__}",
    }
    if asked.options.stream:
        return _stream_response(request, asked, envelope)

    def written(index: int, result: EngineResult) -> bytes:
        return orjson.dumps(shape.choice(index, result))

    with accept(request).interruptible():
        results = all_results(request, asked.work, written, is_large=asked.is_large)
        finished = await until_gone(request.receive, results)
    results = [result for result, _ in finished]
    ending = {"usage": _usage_of(results, asked.share), **asked.warnings(results[0].warnings)}
    timeout_s = state_of(request).config.send_timeout_s
    return listed_response(envelope, "choices", (choice for _, choice in finished), ending, timeout_s)


def warned(warnings: Sequence[str]) -> dict[str, Any]:
    """What an answer has beside the fields of its API, if anything."""
    return {"warnings": list(warnings)} if warnings else {}


def sampling_fields(state: ServerState, body: Body, default_max: int | None) -> EngineFields:
    """The settings and the format of a body, and the adapter that its model names."""
    fields = take_settings(body)
    take_format(body, fields)
    fields.values["model"] = body.get("model")
    take_model(state, fields.values)
    default_max = state.config.default_max_new_tokens or default_max
    if default_max is not None:
        fields.values.setdefault("max_tokens", max(default_max, _least_tokens(fields)))
    return fields


def _least_tokens(fields: EngineFields) -> int:
    """What `min_tokens` asks for: a bound that the client did not set must not contradict it."""
    least = fields.values.get("min_tokens", 0)
    return least if isinstance(least, int) else 0


def one_per_choice(fields: Mapping[str, Any], num_choices: int) -> list[dict[str, Any]]:
    """The same request for each choice; a given seed gives each one of its own."""
    seed = fields.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool):
        return [dict(fields) for _ in range(num_choices)]
    first = dict(fields)
    return [first, *({**fields, "seed": derived_seed(seed, choice)} for choice in range(1, num_choices))]


# ---------------------------------------------------------------------- engine requests


@dataclass(frozen=True)
class EngineWork:
    """Fields of each engine request, in the order of the answer."""

    skill: str
    fields: Sequence[dict[str, Any]]
    names: Mapping[str, str]
    """What the client called the engine's fields, for refusals."""
    many: str = "n"
    """The client's field that says how many there are."""

    @property
    def adapter(self) -> str | None:
        """The one that all of them name."""
        adapter = self.fields[0].get("adapter")
        return adapter if isinstance(adapter, str) else None


def answering_model(request: Request, work: EngineWork) -> str | None:
    """The model's name for the answer, the adapter behind it."""
    name = state_of(request).model_name
    return name if work.adapter is None else f"{name}/{work.adapter}"


async def all_results(
    request: Request, work: EngineWork, make: Callable[[int, EngineResult], T], *, is_large: bool
) -> list[tuple[EngineResult, T]]:
    """Every result with what `make` makes of it, in order; the first failure ends the others.

    No more run at the same time than the engine has rows for. Large ones are made in a thread, and keep no output.
    """
    window = asyncio.Semaphore(accept(request).engine.max_batch_size)
    turns = asyncio.Lock()
    info = _info(request, work, stream=False)

    async def one(index: int, fields: dict[str, Any]) -> tuple[EngineResult, T]:
        async with window:
            if len(work.fields) > 1:
                async with turns:
                    await asyncio.sleep(0)  # one begins in each turn of the event loop
            async with engine_call(request, info, fields) as stream:
                if is_large:
                    return await stream.result_as(partial(make, index))
                result = await stream.result()
                return result, make(index, result)

    with _counted(request, work), client_names(work.names):
        tasks = [asyncio.ensure_future(one(index, fields)) for index, fields in enumerate(work.fields)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@asynccontextmanager
async def open_streams(request: Request, work: EngineWork) -> AsyncIterator[list[EngineStream]]:
    """All of them running at the same time, until the block is left."""
    info = _info(request, work, stream=True)
    with _counted(request, work), client_names(work.names):
        async with AsyncExitStack() as stack:
            streams: list[EngineStream] = []
            for fields in work.fields:
                if streams:
                    await asyncio.sleep(0)  # one begins in each turn of the event loop
                streams.append(await stack.enter_async_context(engine_call(request, info, fields)))
            yield streams


def _counted(request: Request, work: EngineWork) -> AbstractContextManager[None]:
    return state_of(request).clients.all_counted(client_of(request), len(work.fields), work.many)


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of the engine in the words of this API: the client's names of fields, adapters as models."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.field, error.field)
        if name == error.field:
            raise
        raise type(error)(name, str(error).removeprefix(f"{error.field}: ")) from error
    except AdapterNotFound as error:
        raise ModelNotFound(str(error)) from error


def _info(request: Request, work: EngineWork, *, stream: bool) -> RequestInfo:
    return request_info(request, work.skill, stream=stream, adapter=work.adapter)


# ---------------------------------------------------------------------- streams


def _stream_response(request: Request, asked: Generation, envelope: Mapping[str, Any]) -> Response:
    """`envelope` is what all chunks have in common: id, object, created, model."""

    def events(streams: list[EngineStream]) -> AsyncIterator[bytes]:
        return _events(streams, envelope, asked)

    return EventStream(open_streams(request, asked.work), events, state_of(request).config, _events_of_failure)


def _events_of_failure(error: BaseException) -> bytes:
    return event(error_body(error)) + DONE


async def _events(
    streams: Sequence[EngineStream], envelope: Mapping[str, Any], asked: Generation
) -> AsyncIterator[bytes]:
    usage, is_first = _RunningUsage(streams, asked.share), True
    async for piece in _merged(streams):
        if piece.chunk is not None:
            usage.note(piece.index, piece.chunk.token_index, piece.chunk.kind == "reasoning")
        if piece.result is not None:
            usage.results[piece.index] = piece.result
        for choice in asked.shape.choices(piece):
            so_far = usage.so_far() if asked.options.continuous_usage else None
            more = asked.warnings(streams[piece.index].warnings) if is_first else {}
            yield event({**envelope, "choices": [choice], "usage": so_far, **more})
            is_first = False
    if asked.options.include_usage:
        yield event({**envelope, "choices": [], "usage": usage.final()})
    yield DONE


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


async def _merged(streams: Sequence[EngineStream]) -> AsyncIterator[Piece]:
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


# ---------------------------------------------------------------------- usage


@dataclass(frozen=True)
class PromptShare:
    """How choices share prompts: of `choices_per_prompt` neighbours the prompt counts once."""

    choices_per_prompt: int = 1
    image_tokens: int = 0
    """Positions that the pictures of each prompt take."""


def _usage_of(results: Sequence[EngineResult], share: PromptShare) -> dict[str, Any]:
    prompts = results[:: share.choices_per_prompt]
    details = {
        "cached_tokens": sum(result.metrics.cached_tokens for result in prompts),
        "image_tokens": share.image_tokens * len(prompts),
    }
    return _usage(
        sum(result.metrics.input_tokens for result in prompts),
        sum(result.metrics.output_tokens for result in results),
        details,
        sum(result.num_reasoning_tokens for result in results),
    )


@dataclass
class _RunningUsage:
    """The tokens of streams so far. What was cached is known at the end only."""

    streams: Sequence[EngineStream]
    share: PromptShare
    results: dict[int, EngineResult] = field(default_factory=dict)
    _generated: dict[int, int] = field(default_factory=dict)
    _thinking: dict[int, int] = field(default_factory=dict)

    def note(self, index: int, num_generated: int, is_thinking: bool) -> None:
        self._generated[index] = num_generated
        if is_thinking:
            self._thinking[index] = num_generated

    def so_far(self) -> dict[str, Any]:
        if len(self.results) == len(self.streams):
            return self.final()
        prompts = self.streams[:: self.share.choices_per_prompt]
        prompt_tokens = sum(stream.num_prompt_tokens for stream in prompts)
        return _usage(prompt_tokens, sum(self._generated.values()), None, sum(self._thinking.values()))

    def final(self) -> dict[str, Any]:
        return _usage_of([self.results[index] for index in range(len(self.streams))], self.share)


def _usage(prompt: int, completion: int, details: dict[str, int] | None, reasoning: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
