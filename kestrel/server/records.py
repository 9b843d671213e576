"""One HTTP request: its id, what is read from its scope, the record that metrics and spans are made of, and the log.

`RecordedRequests` is the outermost ASGI layer. It gives the request its id, opens the record, which handlers fill, and
tells the watchers once the last byte is out or the client is gone. A record holds numbers and names only, never a
prompt or a picture.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, TextIO, TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kestrel.errors import ConfigError, shown
from kestrel.request import RequestMetrics
from kestrel.server.config import LOG_FORMATS, LOG_LEVELS

REQUEST_ID_HEADER = "x-request-id"
MESSAGES_ID_HEADER = "request-id"
"""What clients of the Messages API read, on its routes."""
MESSAGES_PATH = "/v1/messages"
HEALTH_PATHS = frozenset({"/healthz", "/health", "/readyz", "/ready"})
METRICS_PATH = "/metrics"
UNMATCHED = "unmatched"
"""The route of a request whose path no route knows, so that unknown paths do not become labels."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
OTHER_METHOD = "_OTHER"
"""In place of a method that HTTP does not know: clients may invent any number of them."""
SETTINGS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")
_SCOPE_KEY = "kestrel.record"
_ROUTES_KEY = "kestrel.routes"
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NUMBERS = random.Random()
"""Seeded once: reading OS entropy per request releases the GIL to the worker."""


# ---------------------------------------------------------------------- what is read from a scope


def header_of(scope: Scope, name: bytes) -> str | None:
    """The first header of that name, given in lower case. Starlette's mapping decodes and compares all of them."""
    for given, value in scope["headers"]:
        if given == name:
            return value.decode("latin-1")
    return None


def route_path(scope: Scope) -> str:
    """The path without `root_path`, which a proxy may have taken off or left on."""
    return scope["path"].removeprefix(scope.get("root_path", "")) or "/"


def is_messages_path(path: str) -> bool:
    """Whether it belongs to Anthropic's Messages API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def request_id_of(connection: HTTPConnection) -> str:
    return connection.scope["state"]["request_id"]


def client_of(connection: HTTPConnection) -> str:
    """Who calls, for limits and logs: a key's name or an address."""
    return connection.scope["state"]["client"]


def tenant_of(connection: HTTPConnection) -> str | None:
    """Whose cached KV the request may share."""
    return connection.scope["state"]["tenant"]


def fresh_id() -> str:
    return f"{_NUMBERS.getrandbits(128):032x}"


def _chosen_id(scope: Scope) -> str:
    """The client's own id when it is a plain one, else a new one."""
    given = header_of(scope, REQUEST_ID_HEADER.encode()) or ""
    return given if _PLAIN_ID.fullmatch(given) else fresh_id()


# ---------------------------------------------------------------------- the record


@dataclass(slots=True)
class RequestRecord:
    """What is known of one HTTP request so far."""

    request_id: str
    method: str
    route: str = UNMATCHED
    """The pattern, such as "/v1/{skill}"; found by itself for FastAPI's routes, or set by the handler."""
    skill: str | None = None
    status: int | None = None
    metrics: RequestMetrics | None = None
    finish_reason: str | None = None
    error_type: str | None = None
    """The class of the error that the client was told of."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Sampling settings as the client gave them; see SETTINGS."""
    client_gone: bool = False
    started_s: float = field(default_factory=time.monotonic)
    latency_s: float = 0.0

    @staticmethod
    def of(scope: Scope) -> RequestRecord:
        """The record of the request a handler is serving."""
        return scope[_SCOPE_KEY]

    @staticmethod
    def current() -> RequestRecord | None:
        """The record of the HTTP request this task works for, if it works for one."""
        return _current.get()

    def add_result(self, metrics: RequestMetrics, finish_reason: str) -> None:
        """Enter one engine request's numbers. Tokens of several add up; times and the reason are the first one's."""
        if self.metrics is None:
            self.metrics, self.finish_reason = metrics, finish_reason
            return
        self.metrics = replace(
            self.metrics,
            input_tokens=self.metrics.input_tokens + metrics.input_tokens,
            output_tokens=self.metrics.output_tokens + metrics.output_tokens,
            cached_tokens=self.metrics.cached_tokens + metrics.cached_tokens,
        )

    def add_settings(self, fields: Mapping[str, Any]) -> None:
        """Enter the sampling settings among an engine request's checked fields, whether inside `settings` or beside."""
        inner = fields.get("settings")
        given = {**fields, **(inner if isinstance(inner, Mapping) else {})}
        given["max_tokens"] = given.get("max_tokens", given.get("max_new_tokens"))
        self.settings = {name: given[name] for name in SETTINGS if isinstance(given.get(name), (int, float))}

    def find_route(self, scope: Scope) -> None:
        """Take the pattern from the route that was chosen, or would have been, unless the handler named one."""
        route = scope.get("route") or _route_of_path(scope)
        if self.route == UNMATCHED and isinstance(route, Route):
            self.route = route.path

    def tell(self, watchers: Sequence[RequestWatcher]) -> None:
        """The request is over."""
        self.latency_s = time.monotonic() - self.started_s
        for watcher in watchers:
            watcher(self)


def _route_of_path(scope: Scope) -> Route | None:
    """The route that knows the path, for a request that was refused before the routes saw it."""
    app: Starlette | None = scope.get("app")
    routes = (*scope[_ROUTES_KEY], *(() if app is None else app.routes))
    known = (route for route in routes if isinstance(route, Route))
    return next((route for route in known if route.matches(scope)[0] is not Match.NONE), None)


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else OTHER_METHOD


RequestWatcher: TypeAlias = Callable[[RequestRecord], None]
_current: ContextVar[RequestRecord | None] = ContextVar("kestrel_record", default=None)


# ---------------------------------------------------------------------- who makes records


class RecordedRequests:
    """Wrap the whole application in this; each watcher is called once per request, at its end.

    `routes` are those of included routers, which an application does not always list as its own.
    """

    def __init__(self, app: ASGIApp, watchers: Sequence[RequestWatcher], routes: Sequence[BaseRoute] = ()) -> None:
        self._app = app
        self._watchers = watchers
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_chosen_id(scope), _method(scope))
        scope.setdefault("state", {})["request_id"] = record.request_id
        scope[_SCOPE_KEY] = record
        scope[_ROUTES_KEY] = self._routes
        token = _current.set(record)
        exchange = _Exchange(record, receive, send, names_id=is_messages_path(route_path(scope)))
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except BaseException as error:
            if record.error_type is None and not record.client_gone:
                record.error_type = type(error).__name__
            if record.status is None and not record.client_gone:
                record.status = 500
            raise
        finally:
            _current.reset(token)
            record.find_route(scope)
            record.tell(self._watchers)


class _Exchange:
    """The two directions of one request, watched."""

    def __init__(self, record: RequestRecord, receive: Receive, send: Send, *, names_id: bool) -> None:
        """`names_id`: whether the answer has MESSAGES_ID_HEADER too."""
        self._record = record
        self._names_id = names_id
        self._receive = receive
        self._send = send
        self._is_answered = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_answered:
            self._record.client_gone = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            message.setdefault("headers", [])
            headers = MutableHeaders(scope=message)
            headers.setdefault(REQUEST_ID_HEADER, self._record.request_id)
            self._record.request_id = headers[REQUEST_ID_HEADER]
            if self._names_id:
                headers[MESSAGES_ID_HEADER] = self._record.request_id
        try:
            await self._send(message)
        except OSError:
            self._record.client_gone = True
            raise
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True


@contextmanager
def recorded(record: RequestRecord, watchers: Sequence[RequestWatcher]) -> Iterator[None]:
    """The block serves a request that came by another protocol, and fills in the status."""
    token = _current.set(record)
    try:
        yield
    finally:
        _current.reset(token)
        record.client_gone = record.status is None
        record.tell(watchers)


# ---------------------------------------------------------------------- the log
# One line per request, as JSON for machines or as text for people.
#
# `access_log` is a watcher for `RecordedRequests`. A record has no prompt and no picture, so neither has a line.
# `lossy_stderr` keeps a standard error that takes no more from stopping the server.


LOGGERS = ("kestrel", "uvicorn")
"""Ours, and that of the HTTP server underneath, whose own account of its start and end is left out at info level."""
QUIET_ROUTES = HEALTH_PATHS | {"/metrics"}
"""Asked every few seconds by machines: logged at debug level, a 503 while starting or draining included."""
BUSY = 503
"""Overloaded, starting or draining: to be expected, and not a fault."""
PATIENCE_MS = 20
"""How long one line waits for room in standard error."""
_FIELDS = "kestrel_fields"

_logger = logging.getLogger("kestrel.server.access")


def configure_logs(
    format: str = "json", level: str = "info", stream: TextIO | None = None, *, access: bool = True
) -> None:
    """Send the server's logs to `stream` (standard error), with a line per request if `access`. A second call replaces
    the first."""
    if format not in LOG_FORMATS:
        raise ConfigError("log_format", f"{shown(format)} is not a format; use one of: {', '.join(LOG_FORMATS)}")
    if level not in LOG_LEVELS:
        raise ConfigError("log_level", f"{shown(level)} is not a level; use one of: {', '.join(LOG_LEVELS)}")
    _logger.disabled = not access
    handler = _ServerHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [h for h in logger.handlers if not isinstance(h, _ServerHandler)]
        logger.addHandler(handler)
        logger.setLevel("WARNING" if (name, level) == ("uvicorn", "info") else level.upper())
        logger.propagate = False


@contextmanager
def lossy_stderr() -> Iterator[None]:
    """Within the block nothing that is written to `sys.stderr` blocks or fails."""
    before = sys.stderr
    try:
        descriptor = before.fileno()
    except (AttributeError, OSError):  # closed, or not a file: nothing to wait for
        yield
        return
    sys.stderr = LossyStream(descriptor)
    try:
        yield
    finally:
        sys.stderr = before


class LossyStream(io.TextIOBase):
    """Text to a descriptor. What it does not take now (a full pipe or disk, a reader that has gone) is lost, and told.

    Who reads slowly is waited for a moment, once.
    """

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._num_lost = 0
        self._lock = threading.Lock()
        self._room = select.poll()
        self._room.register(descriptor, select.POLLOUT)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        with self._lock:
            if self._num_lost and self._has_put(f"\n{self._num_lost} lines were lost: standard error was full\n"):
                self._num_lost = 0
            if self._num_lost or not self._has_put(text):
                self._num_lost += text.count("\n")
        return len(text)

    def _has_put(self, text: str) -> bool:
        """In pieces: a pipe that has room has it for PIPE_BUF bytes."""
        data = text.encode(errors="backslashreplace")
        while data:
            if not self._room.poll(0 if self._num_lost else PATIENCE_MS):
                return False
            try:
                data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
            except OSError:
                return False
        return True


class _ServerHandler(logging.StreamHandler):
    """A type of our own, to find it again."""


def access_log(record: RequestRecord) -> None:
    """Log one request."""
    if not _logger.isEnabledFor(_level(record)):
        return
    _logger.log(_level(record), "request", extra={_FIELDS: _request_fields(record)})


def _level(record: RequestRecord) -> int:
    status = record.status or 0
    if status >= 500 and status != BUSY:
        return logging.ERROR
    if record.route in QUIET_ROUTES:
        return logging.DEBUG
    return logging.WARNING if status == BUSY else logging.INFO


def _request_fields(record: RequestRecord) -> dict[str, Any]:
    """Flat names and values; what is not known is left out."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "route": record.route,
        "skill": record.skill,
        "status": record.status,
        "latency_ms": round(record.latency_s * 1000.0, 3),
        "finish_reason": record.finish_reason,
        "error": record.error_type,
    }
    if record.metrics is not None:
        fields |= {
            "input_tokens": record.metrics.input_tokens,
            "output_tokens": record.metrics.output_tokens,
            "cached_tokens": record.metrics.cached_tokens,
            "ttft_ms": round(record.metrics.ttft_ms, 3),
        }
    if record.client_gone:
        fields["client_gone"] = True
    return {name: value for name, value in fields.items() if value is not None}


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **vars(record).get(_FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """`12:00:00.000 info  request method=POST route=/v1/{skill} status=200 …`"""

    def format(self, record: logging.LogRecord) -> str:
        when = _time(record).strftime("%H:%M:%S.%f")[:-3]
        pairs = (f"{name}={_one_word(value)}" for name, value in vars(record).get(_FIELDS, {}).items())
        line = " ".join((when, f"{record.levelname.lower():<7}", _printable(record.getMessage()), *pairs))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, timezone.utc)


def _printable(text: str) -> str:
    """Text that cannot fake a second line or move the cursor."""
    return text if text.isprintable() else json.dumps(text)


def _one_word(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
