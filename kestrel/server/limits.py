"""Bounds on what a client may send and hold: a head's size, a body's size and time, all bodies, requests each."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kestrel.errors import QueueFull
from kestrel.server.auth import is_health, is_open
from kestrel.server.calls import release_accepted
from kestrel.server.config import ServerConfig
from kestrel.server.connections import is_crowded
from kestrel.server.errors import (
    AmbiguousLength,
    BodyTooLarge,
    HeadTooLarge,
    SlowClient,
    TooManyConnections,
)
from kestrel.server.interruption import Interruption
from kestrel.server.records import header_of
from kestrel.server.state import ServerState

LINGER_S = 5.0
"""How long the rest of a refused body is read and dropped, so that the client sees the refusal and no reset."""
LINGER_BYTES = 256 * 2**20


class HeadLimit:
    """Refuses a head that is too large, or that frames its body in two ways, which a proxy may read otherwise, and
    all but health routes on a connection beyond the limit.

    The connection's own bound stops a head that is still arriving; one that came in a single piece is seen here.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._limit = config.max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if is_crowded(scope) and not is_health(scope):
                raise TooManyConnections("no connection is free (max_connections, ulimit -n); retry later")
            if _head_bytes(scope) > self._limit:
                raise HeadTooLarge(f"request line and headers exceed {self._limit} bytes (max_header_bytes); send less")
            if header_of(scope, b"transfer-encoding") is not None and header_of(scope, b"content-length") is not None:
                raise AmbiguousLength("Content-Length and Transfer-Encoding are both given; send one of them")
        await self._app(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    line = len(scope["method"]) + len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return line + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])


class ClientLimit:
    """Refuses a client with too many unanswered requests, before its body is read."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._clients = state.clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope):
            await self._app(scope, receive, send)
            return
        with self._clients.counted(scope["state"]["client"]):
            await self._app(scope, receive, send)


class BodyLimit:
    """Counts a body while it arrives: too large, too slow or too much in all ends it before it is buffered."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _IncomingBody(self._state, scope, receive)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release()
            release_accepted(scope)


class _IncomingBody:
    def __init__(self, state: ServerState, scope: Scope, receive: Receive) -> None:
        self._state = state
        self._receive = receive
        self._declared = _declared_length(scope)
        self._awaits_go_ahead = (header_of(scope, b"expect") or "").lower() == "100-continue"
        self._deadline_s = time.monotonic() + state.config.receive_timeout_s
        self._held = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        limit = self._state.config.max_body_bytes
        if self._declared > limit:
            await self._refuse(limit)
        message = await self._next_in_time()
        if message["type"] == "http.request":
            self._hold(len(message.get("body", b"")))
            if self._held > limit:
                await self._refuse(limit)
            self._complete = not message.get("more_body", False)
        return message

    def release(self) -> None:
        self._state.pending_body_bytes -= self._held
        self._held = 0

    async def _next_in_time(self) -> Message:
        if self._state.draining:
            self._state.require_serving()
        seconds = self._state.config.receive_timeout_s
        late = SlowClient(f"the body did not arrive within {seconds:g} s (receive_timeout_s); send it faster")
        with Interruption(late) as waiting:
            self._state.arriving.add(waiting)
            left_s = max(self._deadline_s - time.monotonic(), 0.001)
            timer = asyncio.get_running_loop().call_later(left_s, waiting.interrupt)
            try:
                return await self._receive()
            finally:
                timer.cancel()
                self._state.arriving.discard(waiting)

    def _hold(self, num_bytes: int) -> None:
        self._held += num_bytes
        self._state.pending_body_bytes += num_bytes
        if self._state.pending_body_bytes > self._state.config.max_pending_body_bytes:
            raise QueueFull("bodies of unanswered requests fill max_pending_body_bytes; retry later")

    async def _refuse(self, limit: int) -> None:
        """Raises. Most clients send everything before they listen, so the rest is let in and dropped for a while."""
        self.release()
        if not self._awaits_go_ahead:
            await self._drop_rest()
        raise BodyTooLarge(f"the body exceeds {limit} bytes (max_body_bytes); send less, such as a smaller picture")

    async def _drop_rest(self) -> None:
        deadline_s, dropped = time.monotonic() + LINGER_S, 0
        while dropped < LINGER_BYTES:
            try:
                message = await asyncio.wait_for(self._receive(), max(deadline_s - time.monotonic(), 0.001))
            except asyncio.TimeoutError:
                return
            if message["type"] != "http.request" or not message.get("more_body", False):
                return
            dropped += len(message["body"])


def _declared_length(scope: Scope) -> int:
    value = header_of(scope, b"content-length") or ""
    return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else 0
