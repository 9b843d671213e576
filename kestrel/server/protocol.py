"""The connection protocol: uvicorn's h11 one, with a limit on how long a request's head may take.

What is no HTTP never reaches the application; its refusal has the shape and the id of all others.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from kestrel.errors import RequestError
from kestrel.server.connections import enable_hang_up
from kestrel.server.errors import error_response
from kestrel.server.request_ids import HEADER, fresh_id

MALFORMED = RequestError("request", "is not well-formed HTTP/1.1, or its head is larger than max_header_bytes")
HEAD_OPENING = b"HTTP/1.1 "


def timed_protocol(head_timeout_s: float) -> type[H11Protocol]:
    """A connection class that hangs up on a client whose request line and headers dawdle."""

    class TimedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            before: Any = self.cycle
            if before is not None and before.response_complete and self._head_timer is None:
                self._await_head()
            super().data_received(data)
            if self.cycle is not before:
                self._stop_waiting()

        def handle_events(self) -> None:
            before: Any = self.cycle
            super().handle_events()
            if self.cycle is not before:
                enable_hang_up(cast(Scope, self.cycle.scope), self.transport.abort)
                self.cycle.transport = cast(asyncio.Transport, HeadWithBody(self.transport, self.loop))

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.write(_malformed(self.conn))
            self.transport.close()

        def _await_head(self) -> None:
            self._head_timer = self.loop.call_later(head_timeout_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return TimedProtocol


class HeadWithBody:
    """A connection as a response writes to it: a head leaves together with what follows, in one packet.

    It waits until the event loop's turn ends at most, so that the head of a stream without events leaves too.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if data.startswith(HEAD_OPENING) and not self._head:
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


def _malformed(connection: h11.Connection) -> bytes:
    """The bytes of the refusal."""
    response = error_response(MALFORMED)
    extra = [(b"connection", b"close"), (HEADER.encode(), fresh_id().encode())]
    events = (
        h11.Response(status_code=response.status_code, headers=[*response.raw_headers, *extra], reason=b"Bad Request"),
        h11.Data(data=bytes(response.body)),
        h11.EndOfMessage(),
    )
    return b"".join(connection.send(event) or b"" for event in events)
