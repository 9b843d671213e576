"""A client's request and its engine requests: admission, the deadline, observers, and their end whatever happens."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Container, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope

from kestrel.api_keys import ApiKeys
from kestrel.engine import EngineResult, EngineStream
from kestrel.engine.joint_calls import num_at_once
from kestrel.errors import KestrelError, NotAllowed, RequestCancelled, shown
from kestrel.request import require_free_id
from kestrel.server.errors import ClientGone, DeadlineExceeded, QueueTimeout
from kestrel.server.records import RequestRecord, client_of, header_of, request_id_of, tenant_of
from kestrel.server.state import KEY_CLIENT, HeldBytes, RequestInfo, ServerState, state_of
from kestrel.settings import MAX_PRIORITY, whole

T = TypeVar("T")
_ACCEPTED = "accepted"


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
    """A client may send one x-request-id on several requests at a time; engine requests need ids of their own."""
    own = info.request_id == request_id_of(request)
    if own and any(info.request_id in ids for ids in _taken_ids(state_of(request))):
        return replace(info, request_id=f"{info.request_id}-{secrets.token_hex(4)}")
    return info


def _taken_ids(state: ServerState) -> tuple[Container[str], ...]:
    """Of requests that came by any protocol, and of whoever else uses the engine."""
    return (state.running,) if state.engine is None else (state.running, state.engine.taken_ids)


def engine_call(
    request: Request, info: RequestInfo, fields: dict[str, Any]
) -> AbstractAsyncContextManager[EngineStream]:
    """The running request. However the block is left, the request ends with it and the observers are told."""
    return engine_request(accept(request), _with_free_id(request, info), fields, tenant_of(request))


@asynccontextmanager
async def engine_request(
    accepted: AcceptedRequest, info: RequestInfo, fields: dict[str, Any], tenant: str | None
) -> AsyncIterator[EngineStream]:
    """The same for a request that came by any protocol."""
    state = accepted.state
    require_free_id(info.request_id, *_taken_ids(state))
    _require_priority(state.keys, info.client, fields.get("priority"))
    fields = {**fields, "tenant": tenant, "client": info.client, "request_id": info.request_id}
    fields["read_along"] = fields["has_reader"] = info.stream
    num_prompts, asked = 1, fields.get("object")
    if isinstance(asked, (list, tuple)) or (asked is not None and fields.get("instances") == "all"):
        num_prompts = fields["at_once"] = num_at_once(fields, state.config.max_requests_per_client)
    outcome: EngineResult | BaseException = RequestCancelled(f"request {info.request_id} was left before its end")
    state.running[info.request_id] = info
    state.tell_started(info)
    try:
        with state.clients.all_counted(info.client, num_prompts, "object"):
            async with await accepted.run(info, fields) as stream:
                record = RequestRecord.current()
                if record is not None:
                    record.add_settings(fields)
                yield stream
                if stream.is_done:
                    outcome = await stream.result()
    except BaseException as error:
        outcome = accepted.reason or error
        raise
    finally:
        accepted.let_go(info)
        state.running.pop(info.request_id, None)
        state.tell_finished(info, outcome)


def _require_priority(keys: ApiKeys, client: str, priority: object) -> None:
    """Only an urgent key goes before others. Raises NotAllowed; what is no priority is refused by the engine."""
    priority = whole(priority)
    if not isinstance(priority, int) or not -MAX_PRIORITY <= priority < 0:
        return
    if not client.startswith(KEY_CLIENT) or not keys.is_urgent(client.removeprefix(KEY_CLIENT)):
        remedy = "leave it out, or ask the operator for a key set with --urgent-api-key"
        raise NotAllowed("priority", f"{shown(priority)} is below 0, which needs an urgent API key; {remedy}")


# ---------------------------------------------------------------------- the request of a client


class AcceptedRequest:
    """One request of a client, from its receipt to its answer; made where it is admitted, released where it ends.

    One deadline holds for the whole of it: pictures and adapters that are fetched, all engine requests, what is made of
    their results. Whoever waits is told by the event loop's clock alone: no step, thread or process need get on first.
    """

    def __init__(self, state: ServerState, receive: Receive | None = None) -> None:
        """Raises NotServing while the server starts or drains. `receive` tells of a client that leaves."""
        self.state = state
        self._receive = receive
        self.engine = state.require_serving()
        self.reason: KestrelError | None = None
        """Why it was ended."""
        self._blocks: set[Interruption] = set()
        self._running: set[str] = set()
        self._has_begun = False
        self.held = HeldBytes(state)
        """Those of it that did not come in an HTTP body."""
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_later(state.config.queue_timeout_s, self._end_wait),
            loop.call_later(state.config.request_timeout_s, self._end_request),
        ]
        state.accepted.add(self)

    def release(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self.held.release()
        self._receive = None  # it leads back to the scope that this is kept in
        self.state.accepted.discard(self)

    async def fetch(self, url: str) -> bytes:
        """A picture behind a URL. Its bytes count as the body's, and its request as one of the queue."""
        self.engine.require_room(self.state.num_fetching)
        self.state.num_fetching += 1
        try:
            work = self.state.images.fetch(url, self.engine.config.max_image_bytes, self.held.add)
            with self.interruptible():
                return await (work if self._receive is None else until_gone(self._receive, work))
        finally:
            self.state.num_fetching -= 1

    async def run(self, info: RequestInfo, fields: dict[str, Any]) -> EngineStream:
        """One of its engine requests, from here to `let_go`."""
        self._running.add(info.request_id)
        with self.interruptible():
            return await self.engine.run(info.skill, stream=True, **fields)

    def let_go(self, info: RequestInfo) -> None:
        self._running.discard(info.request_id)
        self._has_begun = True

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raises the reason out of the block, wherever it waits, when the request is ended."""
        if self.reason is not None:
            raise self.reason
        with Interruption() as block:
            self._blocks.add(block)
            try:
                yield
            finally:
                self._blocks.discard(block)

    def end(self, reason: KestrelError) -> None:
        """The first reason counts."""
        if self.reason is not None:
            return
        self.reason = reason
        for request_id in self._running:
            self.engine.cancel(request_id, reason)
        for block in self._blocks:
            block.interrupt(reason)

    def _end_wait(self) -> None:
        """Of several engine requests one that has begun is enough: the others wait for it, not for strangers."""
        if not self._has_begun and not any(map(self.engine.has_begun, self._running)):
            waited = f"waited {self.state.config.queue_timeout_s:g} s for its turn (queue_timeout_s)"
            self.end(QueueTimeout(f"the request {waited}; retry later"))

    def _end_request(self) -> None:
        limit = f"{self.state.config.request_timeout_s:g} s (request_timeout_s)"
        self.end(DeadlineExceeded(f"the request took longer than {limit}; ask for a shorter answer"))


class Interruption:
    """Ends what a task is waiting for from a callback, without a second task to wait in.

    `with Interruption(error) as it:` raises `error` out of the block once `it.interrupt()` was called.

    The block sees a cancellation, as in `asyncio.wait_for`, and may clean up. If somebody else cancelled the task too,
    such as a block around this one, it stays a cancellation.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error
        self._task: asyncio.Task[object] | None = None
        self._has_fired = False
        self._num_cancels_before = 0

    def __enter__(self) -> Interruption:
        self._task = asyncio.current_task()
        if self._task is not None and sys.version_info >= (3, 11):
            self._num_cancels_before = self._task.cancelling()
        return self

    def interrupt(self, error: BaseException | None = None) -> None:
        """`error` may be given here instead. After the block, and the second time, it does nothing."""
        if self._task is not None and not self._has_fired:
            self._has_fired = True
            self._error = error or self._error
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._has_fired or task is None:
            return
        if sys.version_info >= (3, 11) and task.uncancel() > self._num_cancels_before:
            return
        if isinstance(error, asyncio.CancelledError) and self._error is not None:
            raise self._error from None


def accept(request: Request) -> AcceptedRequest:
    """To be called once the body is there: the deadline runs from the first call on. Raises NotServing."""
    kept: AcceptedRequest | None = request.scope["state"].get(_ACCEPTED)
    if kept is None:
        kept = request.scope["state"][_ACCEPTED] = AcceptedRequest(state_of(request), request.receive)
    return kept


def release_accepted(scope: Scope) -> None:
    """For the layer that sees the request's end."""
    kept: AcceptedRequest | None = scope["state"].get(_ACCEPTED)
    if kept is not None:
        kept.release()


# ---------------------------------------------------------------------- clients that leave


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
