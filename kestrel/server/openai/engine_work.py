"""The engine requests of one HTTP request: one per choice, prompt or input, which all end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from kestrel.engine import EngineResult, EngineStream
from kestrel.errors import AdapterNotFound, RequestError
from kestrel.server.auth import client_of
from kestrel.server.calls import accept, engine_call, request_info
from kestrel.server.errors import ModelNotFound
from kestrel.server.state import RequestInfo, state_of


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


async def all_results(request: Request, work: EngineWork) -> list[EngineResult]:
    """Every result, in order; the first failure ends the others. No more at once than the engine has rows for."""
    window = asyncio.Semaphore(accept(request).engine.max_batch_size)
    info = _info(request, work, stream=False)

    async def one(fields: dict[str, Any]) -> EngineResult:
        async with window, engine_call(request, info, fields) as stream:
            return await stream.result()

    with _counted(request, work), client_names(work.names):
        tasks = [asyncio.ensure_future(one(fields)) for fields in work.fields]
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
            yield [await stack.enter_async_context(engine_call(request, info, fields)) for fields in work.fields]


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
