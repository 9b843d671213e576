"""The connections below the requests: how many may be open, how long a client may take, and how one ends.

A connection counts from its acceptance on, so that a TLS handshake does too. When all places are taken, the connection
that has waited longest without a request gives way. When all have requests, a few more are let in, for health routes.

The protocol is uvicorn's h11 one, with limits on how long a head may take and an answer may lie unread. What is no HTTP
never reaches the application; its refusal has the shape and the id of all others. A client that has closed its writing
side still gets its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from kestrel.errors import ConfigError, RequestError
from kestrel.server.config import ServerConfig
from kestrel.server.errors import error_response
from kestrel.server.records import REQUEST_ID_HEADER, fresh_id

MOST_FILES = 65_536
"""The limit of open files is raised to this, or to as many as the system lets us."""
MOST_CONNECTIONS = 4096
RESERVED_FILES = 128
"""Descriptors for everything that is no HTTP connection: models, pictures, pipes."""
EXTRA = 16
"""Connections beyond the limit, for health routes and for refusals."""
PATIENCE_S = 1.0
"""How long a new connection may be silent before it gives way sooner than one that has been of use."""
ACCEPTS_PER_TURN = 64
RETRY_S = 1.0
"""How long asyncio stops to accept when there is no descriptor."""
PRESENCE_CHECK_S = 0.1
PROBE_AFTER_CHECKS = 5
"""Checks after which a client that has closed its writing side, and waits, is sent something: the reply tells whether
it is still there."""
MALFORMED = RequestError("request", "is not well-formed HTTP/1.1, or its head is larger than max_header_bytes")
_HEAD_OPENING = b"HTTP/1.1 "
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_RESET = struct.pack("ii", 1, 0)
_HANG_UP = "kestrel.hang_up"
_CROWDED = "kestrel.crowded"


def hang_up(scope: Scope) -> None:
    """End the connection without waiting for a client that does not read. Other servers than ours only see it close."""
    abort: Callable[[], None] | None = scope.get(_HANG_UP)
    if abort is not None:
        abort()


def is_crowded(scope: Scope) -> bool:
    """Whether the request came while every place had one."""
    return _CROWDED in scope


def raise_file_limit() -> None:
    """Every connection is a descriptor, and the usual soft limit of 1024 is meant for other programs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit(config: ServerConfig) -> int:
    """`max_connections`, or as many as the limit of open files leaves; gRPC gets half of them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    possible = num_files - min(RESERVED_FILES, num_files // 2) - 2 * EXTRA
    possible = max(possible if config.grpc_port is None else possible // 2, 1)
    if config.max_connections is None:
        return min(possible, MOST_CONNECTIONS)
    if config.max_connections > possible:
        raise ConfigError(
            "max_connections",
            f"{config.max_connections} is more than a limit of {num_files} open files leaves ({possible}); "
            "raise it (ulimit -n) or ask for fewer",
        )
    return config.max_connections


class ClientSocket(socket.socket):
    """A connection that was accepted. Its register learns of its end, however it ends."""

    register: _OpenConnections | None = None
    unread_timeout_s = 0.0
    since_s = 0.0
    """When it was accepted, or its last request answered."""
    took_spare = False
    """Whether it has one of the descriptors that are held back for health routes."""
    on_closed: Callable[[], None] | None = None

    def close(self) -> None:
        """What the client has not read stays with the kernel, as long as the client is there: it gets a time too."""
        if self.register is not None:
            self.register.forget(self)
            self.register = None
            if _num_unread_bytes(self):
                _set_user_timeout(self, self.unread_timeout_s)
        super().close()
        if self.on_closed is not None:
            self.on_closed()

    def begin(self) -> bool:
        """A request is under way. True: as many others are as there are places."""
        return self.took_spare or (self.register is not None and self.register.begin(self))

    def rest(self) -> None:
        """The request is answered."""
        if self.register is not None:
            self.register.rest(self)


class _OpenConnections:
    """All connections of one listening socket: silent ones and idle ones by age, busy ones, and those giving way."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._silent: dict[ClientSocket, None] = {}
        self._idle: dict[ClientSocket, None] = {}
        self._busy: set[ClientSocket] = set()
        self._leaving: set[ClientSocket] = set()

    def __len__(self) -> int:
        return len(self._silent) + len(self._idle) + len(self._busy) + len(self._leaving)

    @property
    def awaits_leavers(self) -> bool:
        """Whether places are about to be free, but are not yet."""
        return len(self) >= self._limit + EXTRA and bool(self._leaving)

    def admit(self, connection: ClientSocket) -> bool:
        """Takes a newcomer in, unless every place has a request, the extra ones too."""
        is_full = len(self) - len(self._leaving) >= self._limit
        if is_full and not self.makes_room() and len(self) >= self._limit + EXTRA:
            return False
        connection.register, connection.since_s = self, time.monotonic()
        self._silent[connection] = None
        return True

    def makes_room(self) -> bool:
        """The one that needs its place least gives way. False: all have requests."""
        oldest = next(iter(self._silent), None)
        if oldest is None or time.monotonic() - oldest.since_s < PATIENCE_S:
            oldest = next(iter(self._idle), oldest)
        if oldest is None:
            return False
        self.forget(oldest)
        self._leaving.add(oldest)
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
        return True

    def begin(self, connection: ClientSocket) -> bool:
        """True: as many others have a request as there are places."""
        if connection in self._leaving:
            return False
        self.forget(connection)
        self._busy.add(connection)
        return len(self._busy) > self._limit

    def rest(self, connection: ClientSocket) -> None:
        if connection in self._busy:
            self._busy.discard(connection)
            self._idle[connection] = None
            connection.since_s = time.monotonic()

    def forget(self, connection: ClientSocket) -> None:
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)
        self._leaving.discard(connection)


class ListeningSocket(socket.socket):
    """A listening socket that leaves no connection waiting for a descriptor: asyncio would try, and log, without end.

    It holds a few descriptors back, so that health routes answer even when others (gRPC) have taken all the rest.
    """

    def __init__(self, family: socket.AddressFamily, limit: int, unread_timeout_s: float) -> None:
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._open = _OpenConnections(limit)
        self._unread_timeout_s = unread_timeout_s
        self._spares: list[int] = []
        self._retry_at_s = 0.0
        self._hold_spares()

    def accept(self) -> tuple[ClientSocket, object]:
        """BlockingIOError is how asyncio learns that there is nothing more to accept in this turn of its loop."""
        for _ in range(ACCEPTS_PER_TURN):
            if self._open.awaits_leavers:
                break
            accepted, address, took_spare = self._accept_one()
            connection = ClientSocket(self.family, self.type, self.proto, accepted.detach())
            connection.unread_timeout_s, connection.took_spare = self._unread_timeout_s, took_spare
            connection.on_closed = self._hold_spares
            if self._open.admit(connection):
                return connection, address
            connection.close()
        raise BlockingIOError

    def close(self) -> None:
        super().close()
        while self._spares:
            os.close(self._spares.pop())

    def _accept_one(self) -> tuple[socket.socket, object, bool]:
        """Also whether it took a spare descriptor. With none left somebody gives way, or asyncio pauses, told once."""
        if time.monotonic() < self._retry_at_s:
            raise BlockingIOError
        try:
            return *super().accept(), False
        except OSError as error:
            if error.errno not in _OUT_OF_FILES:
                raise
        try:
            if self._spares:
                os.close(self._spares.pop())
            return *super().accept(), True
        except OSError as error:
            if error.errno in _OUT_OF_FILES:
                if self._open.makes_room():
                    raise BlockingIOError from error
                self._retry_at_s = time.monotonic() + RETRY_S / 2
            raise

    def _hold_spares(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._spares) < EXTRA and self.fileno() != -1:
                self._spares.append(os.open(os.devnull, os.O_RDONLY))


def _client_socket(transport: asyncio.BaseTransport) -> ClientSocket | None:
    """asyncio shows a wrapped socket. None under another listening socket than ours."""
    inner = getattr(transport.get_extra_info("socket"), "_sock", None)
    return inner if isinstance(inner, ClientSocket) else None


def _num_unread_bytes(connection: socket.socket) -> int:
    """Bytes that the kernel holds because the other side has not taken them; 0 where it does not tell."""
    try:
        return struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    except (OSError, ValueError):
        return 0


def _set_user_timeout(connection: socket.socket, seconds: float) -> None:
    option: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, max(int(seconds * 1000), 1))


# ---------------------------------------------------------------------- HTTP on a connection


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
        self._socket = _client_socket(transport)
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
        """End the connection immediately, with all that was not read, in the kernel too."""
        inner = self.transport.get_extra_info("socket")
        if inner is not None:
            with contextlib.suppress(OSError):
                inner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def _begin_request(self) -> None:
        scope = cast(Scope, self.cycle.scope)
        scope[_HANG_UP] = self.hang_up
        self.cycle.transport = cast(asyncio.Transport, HeadWithBody(self.transport, self.loop))
        if self._socket is not None and self._socket.begin():
            self.cycle.keep_alive = False
            scope[_CROWDED] = True
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
        in_kernel = 0 if self._socket is None else _num_unread_bytes(self._socket)
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
        if data.startswith(_HEAD_OPENING) and not self._head:
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
