"""Answers: JSON, whole or in pieces, and streams of Server-Sent Events.

Events are sent as they happen, a stream is kept open by comments, and ended by an error event if need be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import Any, Generic, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kestrel.errors import DeadlineExceeded
from kestrel.server.calls import disconnected, unless
from kestrel.server.config import ServerConfig
from kestrel.server.connections import hang_up
from kestrel.server.errors import ClientGone, error_body, forget_frames, kind_of
from kestrel.server.records import RequestRecord

logger = logging.getLogger("kestrel.server")

PIECE_BYTES = 2**18
"""More JSON than this leaves in pieces, as the client reads it: otherwise it would be copied as a whole."""
PING = b": ping\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
FIRST_EVENT_WAIT_S = 0.25
"""How long the headers wait for the first event, so that a request refused immediately gets a status of its own."""
STALL_CHECK_S = 0.25
T = TypeVar("T")
"""What runs: one engine request or several."""


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def listed_response(
    before: Mapping[str, Any], name: str, entries: Iterable[bytes], after: Mapping[str, Any], timeout_s: float
) -> Response:
    """One object: the fields before, a list of entries that are JSON already, the fields after."""
    head = orjson.dumps({**before, name: []}).removesuffix(b"]}")
    tail = b"]," + orjson.dumps(after).removeprefix(b"{")
    commas = chain.from_iterable((b",", entry) for entry in entries)
    next(commas, None)
    parts = [head, *commas, tail]
    if sum(map(len, parts)) <= PIECE_BYTES:
        return Response(b"".join(parts), media_type="application/json")
    return _InPieces(parts, timeout_s)


class _InPieces(Response):
    """Hangs up on a client that has not read it within `timeout_s`."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes], timeout_s: float) -> None:
        super().__init__()
        self._parts = parts
        self._timeout_s = timeout_s
        self.headers["content-length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timer = asyncio.get_running_loop().call_later(self._timeout_s, hang_up, scope)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for piece in _pieces(self._parts):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            timer.cancel()


def _pieces(parts: Iterable[bytes]) -> Iterable[bytes]:
    """Small parts together, large ones cut."""
    waiting = bytearray()
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            waiting += part[at : at + PIECE_BYTES]
            if len(waiting) >= PIECE_BYTES:
                yield bytes(waiting)
                waiting.clear()
    yield bytes(waiting)


# ---------------------------------------------------------------------- Server-Sent Events


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class EventStream(Response, Generic[T]):
    """Runs engine requests and sends their events. A client that goes away ends them, as does one that stops reading:
    when the request's time is over and what was written is still not taken, the connection ends too.

    `events` makes the events of what `call` opens, last one included. `events_of_failure` makes what follows a failure
    in the middle: the error, and the API's own end mark.
    """

    def __init__(
        self,
        call: AbstractAsyncContextManager[T],
        events: Callable[[T], AsyncIterator[bytes]],
        config: ServerConfig,
        events_of_failure: Callable[[BaseException], bytes] = lambda error: event(error_body(error)),
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._call = call
        self._events = events
        self._config = config
        self._events_of_failure = events_of_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _Out(send, self.status_code, self.raw_headers)
        await unless(self._run(out), disconnected(receive), self._hang_up_when_stalled(scope, out))

    async def _hang_up_when_stalled(self, scope: Scope, out: _Out) -> None:
        await out.until_stalled(self._config.request_timeout_s)
        logger.warning("the client of request %s stopped reading; it is hung up on", scope["state"].get("request_id"))
        _record_failure(DeadlineExceeded("it was not read in time"))
        hang_up(scope)

    async def _run(self, out: _Out) -> None:
        try:
            async with self._call as stream:
                await self._send_all(self._events(stream), out)
        except Exception as error:
            if not out.started:
                raise
            _record_failure(error)
            if kind_of(error).status == 500:
                logger.exception("a stream failed")
            event_of_failure = self._events_of_failure(error)
            forget_frames(error)
            await out.write(event_of_failure)
        await out.end()

    async def _send_all(self, events: AsyncIterator[bytes], out: _Out) -> None:
        first = asyncio.ensure_future(anext(events))
        try:
            await asyncio.wait({first}, timeout=FIRST_EVENT_WAIT_S)
            if first.done() and first.exception() is not None:
                first.result()
            await out.start()
            pinging = asyncio.ensure_future(out.keep_open(self._config.ping_interval_s))
            try:
                await out.write(await first)
                async for data in events:
                    await out.write(data)
            finally:
                pinging.cancel()
        finally:
            first.cancel()


def _record_failure(error: BaseException) -> None:
    """The client has read 200; what became of the request is for the log and the counts."""
    record = RequestRecord.current()
    if record is not None and not isinstance(error, ClientGone):
        record.status, record.error_type = kind_of(error).status, type(error).__name__


class _Out:
    """The open response."""

    def __init__(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._status = status
        self._headers = headers
        self._last_write_s = time.monotonic()
        self._num_waiting = 0
        self.started = False

    async def start(self) -> None:
        if not self.started:
            self.started = True
            await self._put({"type": "http.response.start", "status": self._status, "headers": self._headers})

    async def write(self, data: bytes) -> None:
        self._last_write_s = time.monotonic()
        try:
            await self._put({"type": "http.response.body", "body": data, "more_body": True})
        except OSError:
            raise ClientGone from None

    async def keep_open(self, interval_s: float) -> None:
        while True:
            silent_s = time.monotonic() - self._last_write_s
            if silent_s >= interval_s:
                with contextlib.suppress(ClientGone):
                    await self.write(PING)
                silent_s = 0.0
            await asyncio.sleep(interval_s - silent_s)

    async def end(self) -> None:
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def until_stalled(self, after_s: float) -> None:
        """Returns when, so many seconds from now or later, something written is not taken."""
        await asyncio.sleep(after_s)
        while not self._num_waiting:
            await asyncio.sleep(STALL_CHECK_S)

    async def _put(self, message: Message) -> None:
        """The server below waits here while the client does not read."""
        self._num_waiting += 1
        try:
            await self._send(message)
        finally:
            self._num_waiting -= 1
