"""The connection protocol: uvicorn's h11 one, with limits on how long a head may take and an answer may lie unread.

What is no HTTP never reaches the application; its refusal has the shape and the id of all others. A client that has
closed its writing side still gets its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from kestrel.errors import RequestError
from kestrel.server.connections import (
    ClientSocket,
    client_socket_of,
    enable_hang_up,
    mark_crowded,
    num_unread_bytes,
    reset,
)
from kestrel.server.errors import error_response
from kestrel.server.records import REQUEST_ID_HEADER, fresh_id

MALFORMED = RequestError("request", "is not well-formed HTTP/1.1, or its head is larger than max_header_bytes")
HEAD_OPENING = b"HTTP/1.1 "


PRESENCE_CHECK_S = 0.1
PROBE_AFTER_CHECKS = 5
"""Checks after which a client that has closed its writing side, and waits, is sent something: the reply tells whether
it is still there."""


def timed_protocol(head_timeout_s: float, send_timeout_s: float) -> type[H11Protocol]:
    times = {"head_timeout_s": head_timeout_s, "send_timeout_s": send_timeout_s}
    return type("ConfiguredProtocol", (TimedProtocol,), times)


class TimedProtocol(H11Protocol):
    """Hangs up on a client whose request line and headers dawdle, and on one that does not read."""

    head_timeout_s: float
    send_timeout_s: float
    _socket: ClientSocket | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _presence_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = client_socket_of(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        before: Any = self.cycle
        if before is not None and before.response_complete and self._head_timer is None:
            self._await_head()
        super().data_received(data)
        if self.cycle is not before:
            self._stop(self._head_timer)
            self._head_timer = None

    def handle_events(self) -> None:
        before: Any = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._begin_request()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: the client may have closed its writing side only.

        TLS as Python has it knows no such state.
        """
        cycle: Any = self.cycle
        if self.scheme == "https" or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        self._check_presence(PROBE_AFTER_CHECKS)
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_reading()
        if self.cycle.response_complete:  # and no pipelined request has begun
            if self._socket is not None:
                self._socket.rest()
            if self._presence_timer is not None:
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._unread_timer, self._presence_timer):
            self._stop(timer)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_malformed(self.conn))
            self._await_reading()
        self.transport.close()

    def hang_up(self) -> None:
        reset(self.transport)

    def _begin_request(self) -> None:
        scope = cast(Scope, self.cycle.scope)
        enable_hang_up(scope, self.hang_up)
        self.cycle.transport = cast(asyncio.Transport, HeadWithBody(self.transport, self.loop))
        if self._socket is not None:
            self._socket.begin()
            if self._socket.is_extra:
                self.cycle.keep_alive = False
                mark_crowded(scope)
        if self._unread_timer is not None and not self._num_unread():
            self._stop(self._unread_timer)
            self._unread_timer = None

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _await_reading(self) -> None:
        """A client that asks on, without reading, gains no time."""
        if self._unread_timer is None and self._num_unread():
            self._unread_timer = self.loop.call_later(self.send_timeout_s, self._end_unread)

    def _end_unread(self) -> None:
        self._unread_timer = None
        if self._num_unread():
            self.hang_up()

    def _num_unread(self) -> int:
        in_kernel = 0 if self._socket is None else num_unread_bytes(self._socket)
        return in_kernel + self.transport.get_write_buffer_size()

    def _check_presence(self, num_checks_left: int) -> None:
        """Who has gone altogether refuses what it is sent, so that an error is noted on the connection."""
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if num_checks_left == 0 and not self.cycle.response_started:
            self._probe()
        self._presence_timer = self.loop.call_later(PRESENCE_CHECK_S, self._check_presence, num_checks_left - 1)

    def _probe(self) -> None:
        """Clients of HTTP/1.1 skip a 100 that they did not ask for; older ones do not know it."""
        if self.cycle.scope["http_version"] == "1.1":
            with contextlib.suppress(h11.LocalProtocolError):
                event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self.transport.write(self.conn.send(event) or b"")

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


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
    extra = [(b"connection", b"close"), (REQUEST_ID_HEADER.encode(), fresh_id().encode())]
    events = (
        h11.Response(status_code=response.status_code, headers=[*response.raw_headers, *extra], reason=b"Bad Request"),
        h11.Data(data=bytes(response.body)),
        h11.EndOfMessage(),
    )
    return b"".join(connection.send(event) or b"" for event in events)
