"""The connections below the requests: how many may be open, who gives way to a newcomer, and how one ends.

A connection counts from its acceptance on, so that a TLS handshake does too. When all places are taken, the connection
that has waited longest without a request gives way. When all have requests, a few more are let in, for health routes.
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

from starlette.types import Scope

from kestrel.errors import ConfigError
from kestrel.server.config import ServerConfig

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
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_RESET = struct.pack("ii", 1, 0)
_HANG_UP = "kestrel.hang_up"
_CROWDED = "kestrel.crowded"


def enable_hang_up(scope: Scope, reset: Callable[[], None]) -> None:
    """For the protocol that makes the scope."""
    scope[_HANG_UP] = reset


def hang_up(scope: Scope) -> None:
    """End the connection without waiting for a client that does not read. Other servers than ours only see it close."""
    abort: Callable[[], None] | None = scope.get(_HANG_UP)
    if abort is not None:
        abort()


def mark_crowded(scope: Scope) -> None:
    scope[_CROWDED] = True


def is_crowded(scope: Scope) -> bool:
    """Whether the request came on one of the connections beyond the limit."""
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

    register: OpenConnections | None = None
    unread_timeout_s = 0.0
    since_s = 0.0
    """When it was accepted, or its last request answered."""
    is_extra = False
    on_closed: Callable[[], None] | None = None

    def close(self) -> None:
        """What the client has not read stays with the kernel, as long as the client is there: it gets a time too."""
        if self.register is not None:
            self.register.forget(self)
            self.register = None
            if num_unread_bytes(self):
                _set_user_timeout(self, self.unread_timeout_s)
        super().close()
        if self.on_closed is not None:
            self.on_closed()

    def begin(self) -> None:
        """A request is under way."""
        if self.register is not None:
            self.register.begin(self)

    def rest(self) -> None:
        """The request is answered."""
        if self.register is not None:
            self.register.rest(self)


class OpenConnections:
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
        """Takes a newcomer in, unless every place has a request."""
        is_full = len(self) - len(self._leaving) >= self._limit
        if is_full and not self.makes_room():
            if len(self) >= self._limit + EXTRA:
                return False
            connection.is_extra = True
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

    def begin(self, connection: ClientSocket) -> None:
        if connection not in self._leaving:
            self.forget(connection)
            self._busy.add(connection)

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
        self._open = OpenConnections(limit)
        self._unread_timeout_s = unread_timeout_s
        self._spares: list[int] = []
        self._retry_at_s = 0.0
        self._hold_spares()

    def accept(self) -> tuple[ClientSocket, object]:
        """BlockingIOError is how asyncio learns that there is nothing more to accept in this turn of its loop."""
        for _ in range(ACCEPTS_PER_TURN):
            if self._open.awaits_leavers:
                break
            accepted, address, is_extra = self._accept_one()
            connection = ClientSocket(self.family, self.type, self.proto, accepted.detach())
            connection.unread_timeout_s, connection.is_extra = self._unread_timeout_s, is_extra
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


def client_socket_of(transport: asyncio.BaseTransport) -> ClientSocket | None:
    """asyncio shows a wrapped socket. None under another listening socket than ours."""
    inner = getattr(transport.get_extra_info("socket"), "_sock", None)
    return inner if isinstance(inner, ClientSocket) else None


def num_unread_bytes(connection: socket.socket) -> int:
    """Bytes that the kernel holds because the other side has not taken them; 0 where it does not tell."""
    try:
        return struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    except (OSError, ValueError):
        return 0


def reset(transport: asyncio.Transport) -> None:
    """End a connection at once, with all that was not read, in the kernel too."""
    inner = transport.get_extra_info("socket")
    if inner is not None:
        with contextlib.suppress(OSError):
            inner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


def _set_user_timeout(connection: socket.socket, seconds: float) -> None:
    option: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, max(int(seconds * 1000), 1))
