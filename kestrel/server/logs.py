"""The server's log: one line per request, as JSON for machines or as text for people.

`access_log` is a watcher for `RecordedRequests`. A record has no prompt and no picture, so neither has a line.
`lossy_stderr` keeps a standard error that takes no more from stopping the server.
Importing this module configures nothing; `configure_logs` does.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, TextIO

from kestrel.errors import ConfigError, shown
from kestrel.server.config import LOG_FORMATS
from kestrel.server.records import HEALTH_PATHS, RequestRecord

LEVELS = ("debug", "info", "warning", "error")
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


def configure_logs(format: str = "json", level: str = "info", stream: TextIO | None = None) -> None:
    """Send the server's logs to `stream` (standard error). A second call replaces the first."""
    if format not in LOG_FORMATS:
        raise ConfigError("log_format", f"{shown(format)} is not a format; use one of: {', '.join(LOG_FORMATS)}")
    if level not in LEVELS:
        raise ConfigError("log_level", f"{shown(level)} is not a level; use one of: {', '.join(LEVELS)}")
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
