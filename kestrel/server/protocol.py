"""The connection protocol: uvicorn's over a parser in C, with bounds of our own on what a client may make it hold.

- a request's head is bounded in time, and its bytes while they arrive, as are a chunked body's framing and trailers
- framing that another server may read otherwise is refused: two hosts, codings beside `chunked`, other versions
- an offer to change the protocol is passed over, and its request served as any other; unknown methods reach the routes
What is no HTTP never reaches the application; its refusal has the shape and the id of all others.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Message, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState as UvicornState

from kestrel.errors import RequestError
from kestrel.server import connections
from kestrel.server.errors import error_response
from kestrel.server.request_ids import HEADER, fresh_id

MALFORMED = RequestError("request", "is not well-formed HTTP/1.1, or its head is larger than max_header_bytes")
HEAD_OPENING = b"HTTP/1.1 "
MAX_PIPELINED = 16
"""Requests that may wait behind another on their connection. What follows is not read, and the connection ends."""

_METHOD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ")
KNOWN_METHOD = b"GET"
"""What the parser is shown in place of a method that it does not know; the application sees the client's own word."""


class _Malformed(Exception):
    """Raised in the parser's callbacks, which make a parser's error of it."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection that hangs up on a client whose request line and headers dawdle or do not end."""

    head_timeout_s: float
    max_head_bytes: int

    def __init__(
        self,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = self._fresh_parser()
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._watchers: set[Callable[[], None]] = set()
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._is_in_body = False  # of `cycle`, trailers included
        self._num_unframed = 0  # bytes since the last that ended a head or belonged to a body
        self._foreign_method: str | None = None
        self._has_failed = False
        self._is_lost = False

    def _fresh_parser(self) -> httptools.HttpRequestParser:
        """A parser with two leniencies, both of which end with the connection.

        - what follows a request with `connection: close` is parsed and never run, where an error would cost the answer
        - a body framed in two ways comes through, for `HeadLimit` to refuse by name, and its connection is not kept
        """
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_chunked_length=True)
        return parser

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._stop_waiting()
        super().connection_lost(exc)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        for on_gone in tuple(self._watchers):
            on_gone()

    def hang_up(self) -> None:
        self.transport.abort()

    def watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        if self._is_lost:  # while its body was parsed or its picture fetched
            return self.loop.call_soon(on_gone).cancel
        self.flow.resume_reading()  # a connection that nobody reads does not end
        self._watchers.add(on_gone)
        return partial(self._watchers.discard, on_gone)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._has_failed:
            return
        self._num_unframed += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self._refuse()
            return
        if self._num_unframed > self.max_head_bytes:
            self._refuse()
        elif self._unanswered:  # a head that dawdles behind them has its time when they are answered
            self._stop_waiting()
        else:
            self._await_head()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            line = self.scope["method"], self.url, self.scope["http_version"]
            head = _head_without_upgrade(*line, self.headers)
            self.parser = self._fresh_parser()
            self._feed(head + data[offer.args[0] :])
        except httptools.HttpParserInvalidMethodError:
            named = _METHOD.match(data)
            if named is None or self._num_unframed != len(data):  # else it is the piece's first request
                raise
            self._foreign_method = named.group(1).decode("ascii")
            self.parser = self._fresh_parser()
            self._feed(KNOWN_METHOD + data[named.end(1) :])

    # ------------------------------------------------------------------ what the parser finds

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # else it is a trailer, which nothing here reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_unframed = False, 0
        version = self.parser.get_http_version()
        method = self.parser.get_method()
        _require_sound(version, method, self.headers)
        if self.parser.should_upgrade():
            self.scope["method"], self.scope["http_version"] = method.decode("ascii"), version
            return
        if len(self._unanswered) > MAX_PIPELINED:
            raise _Malformed("too many requests wait on one connection")
        super().on_headers_complete()
        self.flow.resume_reading()  # else the one in front would not learn that its client has left
        if self._foreign_method is not None:
            self.scope["method"], self._foreign_method = self._foreign_method, None
        is_framed_twice = {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers}
        self.cycle.keep_alive = version == "1.1" and self.parser.should_keep_alive() and not is_framed_twice
        self._unanswered.append(self.cycle)
        connections.enable(cast(Scope, self.cycle.scope), self)
        self.cycle.transport = cast(asyncio.Transport, HeadWithBody(self.transport, self.loop))
        if version == "1.0":
            self.cycle.waiting_for_100_continue = False
            self.cycle.send = UntilClose(self.cycle).send  # type: ignore[method-assign]
        self._is_in_body = True

    def on_body(self, body: bytes) -> None:
        self._num_unframed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body, self._num_unframed = False, 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    # ------------------------------------------------------------------ answers

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self._is_in_head and not self._unanswered:
            self._await_head()

    def _refuse(self) -> None:
        """What is no HTTP ends the connection, after the answers to whole requests before it.

        It is answered itself unless they come first, or its own answer has begun.
        """
        self._has_failed = True
        self._stop_waiting()
        if self._is_in_body and len(self._unanswered) > 1:  # the broken request waits, and never begins
            self.pipeline.popleft()
            self._unanswered.pop()
            self._is_in_body = False
        if self._unanswered and not self._is_in_body:
            self._unanswered[-1].keep_alive = False
            return
        if not self._is_in_body or not self.cycle.response_started:
            self.transport.write(_malformed())
        self.transport.close()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def bounded_protocol(head_timeout_s: float, max_head_bytes: int) -> type[BoundedProtocol]:
    """The connection class of one server: uvicorn makes its connections without arguments of ours."""
    bounds = {"head_timeout_s": head_timeout_s, "max_head_bytes": max_head_bytes}
    return type(BoundedProtocol.__name__, (BoundedProtocol,), bounds)


def _require_sound(version: str, method: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises for heads that the parser takes and that servers read in different ways."""
    hosts = [value for name, value in headers if name == b"host"]
    if version not in ("1.0", "1.1") or method == b"CONNECT":
        raise _Malformed("another version of HTTP, or a tunnel")
    if len(hosts) != 1 and (hosts or version == "1.1"):
        raise _Malformed("not one Host")
    if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in headers):
        raise _Malformed("a coding of the body beside chunked")


def _head_without_upgrade(method: str, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A server may pass over an offer to change the protocol; the parser does so when it does not see it."""
    lines = (b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade")
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method.encode("ascii"), url, version.encode("ascii"), b"".join(lines))


class UntilClose:
    """How an exchange answers HTTP/1.0: a body without a declared length has no chunks and ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cast(Send, cycle.send)
        self._has_length = True

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            self._cycle.chunked_encoding = None if self._has_length else False
        elif not self._has_length:
            await self._until_writable()  # another message may come meanwhile, so its length is not set before
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)

    async def _until_writable(self) -> None:
        flow = self._cycle.flow
        while flow.write_paused and not self._cycle.disconnected:
            await flow.drain()


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


def _malformed() -> bytes:
    """The bytes of the refusal."""
    response = error_response(MALFORMED)
    headers = [*response.raw_headers, (b"connection", b"close"), (HEADER.encode(), fresh_id().encode())]
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"HTTP/1.1 400 Bad Request\r\n%b\r\n%b" % (lines, bytes(response.body))
