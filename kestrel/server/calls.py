"""One engine request of one HTTP request: admission, deadlines, observers, and its end whatever happens."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from kestrel.engine import EngineResult, EngineStream, InferenceEngine
from kestrel.errors import KestrelError, RequestCancelled, RequestError
from kestrel.server.auth import client_of, require_priority, tenant_of
from kestrel.server.config import ServerConfig
from kestrel.server.errors import ClientGone, DeadlineExceeded, QueueTimeout
from kestrel.server.headers import header_of
from kestrel.server.interruption import Interruption
from kestrel.server.records import RequestRecord
from kestrel.server.request_ids import request_id_of
from kestrel.server.state import RequestInfo, ServerState, state_of

T = TypeVar("T")


def request_info(
    request: Request, skill: str, *, stream: bool, request_id: str | None = None, adapter: str | None = None
) -> RequestInfo:
    """What is known of an engine request before it starts. Without `request_id` it is named as the HTTP request."""
    state = state_of(request)
    return RequestInfo(
        request_id=request_id_of(request) if request_id is None else request_id,
        skill=skill,
        route=request.scope["path"],
        model=state.model_name or "",
        client=client_of(request),
        stream=stream,
        adapter=adapter,
        traceparent=header_of(request.scope, b"traceparent"),
    )


def _with_free_id(request: Request, info: RequestInfo) -> RequestInfo:
    """A client may send one x-request-id on several requests at once; engine requests need ids of their own."""
    taken = state_of(request).running
    if info.request_id not in taken:
        return info
    if info.request_id == request_id_of(request):
        return replace(info, request_id=f"{info.request_id}-{secrets.token_hex(4)}")
    raise RequestError("request_id", f"{info.request_id!r} is in use; give each running request its own")


def engine_call(
    request: Request, info: RequestInfo, fields: dict[str, Any]
) -> AbstractAsyncContextManager[EngineStream]:
    """The running request. However the block is left, the request ends with it and the observers are told."""
    state = state_of(request)
    state.require_serving()
    return engine_request(state, _with_free_id(request, info), fields, tenant_of(request))


@asynccontextmanager
async def engine_request(
    state: ServerState, info: RequestInfo, fields: dict[str, Any], tenant: str | None
) -> AsyncIterator[EngineStream]:
    """The same for a request that came by any protocol."""
    engine = state.require_serving()
    require_priority(state.keys, info.client, fields.get("priority"))
    fields = {**fields, "tenant": tenant, "client": info.client, "request_id": info.request_id}
    fields["read_along"] = info.stream
    deadlines = Deadlines(engine, info, state.config)
    outcome: EngineResult | BaseException = RequestCancelled(f"request {info.request_id} was left before its end")
    state.running[info.request_id] = info
    state.tell_started(info)
    try:
        async with await engine.run(info.skill, stream=True, **fields) as stream:
            _record_settings(fields)
            yield stream
            if stream.is_done:
                outcome = await stream.result()
    except BaseException as error:
        outcome = deadlines.reason or error
        if deadlines.reason is not None and isinstance(error, RequestCancelled):
            raise deadlines.reason from error
        raise
    finally:
        deadlines.stop()
        state.running.pop(info.request_id, None)
        state.tell_finished(info, outcome)


def _record_settings(fields: dict[str, Any]) -> None:
    record = RequestRecord.current()
    if record is not None:
        record.add_settings(fields)


class Deadlines:
    """Cancels a request that waits or takes too long, and keeps the reason."""

    def __init__(self, engine: InferenceEngine, info: RequestInfo, config: ServerConfig) -> None:
        self.reason: KestrelError | None = None
        self._engine = engine
        self._info = info
        self._config = config
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_later(config.queue_timeout_s, self._end_wait),
            loop.call_later(config.request_timeout_s, self._end_request),
        ]

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _end_wait(self) -> None:
        if not self._engine.has_begun(self._info.request_id):
            waited = f"waited {self._config.queue_timeout_s:g} s for its turn (queue_timeout_s)"
            self._end(QueueTimeout(f"the request {waited}; retry later"))

    def _end_request(self) -> None:
        limit = f"{self._config.request_timeout_s:g} s (request_timeout_s)"
        self._end(DeadlineExceeded(f"the request took longer than {limit}; ask for a shorter answer"))

    def _end(self, reason: KestrelError) -> None:
        self.reason = self.reason or reason
        self._engine.cancel(self._info.request_id)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises ClientGone, and ends the work, when the client hangs up first."""
    with Interruption(ClientGone()) as gone:
        watching = asyncio.ensure_future(disconnected(receive))
        watching.add_done_callback(lambda watched: None if watched.cancelled() else gone.interrupt())
        try:
            return await work
        finally:
            watching.cancel()


async def unless(work: Coroutine[Any, Any, T], *ends: Coroutine[Any, Any, None]) -> T:
    """The result of `work`; raises ClientGone, and ends the work, when one of the others returns first."""
    working = asyncio.ensure_future(work)
    ending = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait({working, *ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for end in ending:
            end.cancel()
        await _end(working)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(work: asyncio.Future[Any]) -> None:
    """Cancel and let it clean up; what it still has to say is of no interest."""
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
    if not work.cancelled():
        work.exception()
