"""The engine requests of one HTTP request: one per choice, prompt or input, which all end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from kestrel.engine import EngineResult, EngineStream
from kestrel.errors import AdapterNotFound, RequestError
from kestrel.server.calls import accept, engine_call, request_info
from kestrel.server.errors import ModelNotFound
from kestrel.server.records import client_of
from kestrel.server.state import RequestInfo, state_of

T = TypeVar("T")


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

    No more run at once than the engine has rows for. Large ones are made in a thread, and keep no output.
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
    """All of them running at once, until the block is left."""
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
    """Refusals of the engine in the words of this dialect: the client's names of fields, adapters as models."""
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
