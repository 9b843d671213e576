"""One line per request in the server's log: text for people, JSON for machines. Never bodies, never keys."""

from __future__ import annotations

import logging
import sys
import time
from datetime import datetime, timezone
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kestrel.server.auth import is_open

logger = logging.getLogger("kestrel.server.access")


class AccessLog:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope) or not logger.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["state"].setdefault("status", message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            _log(scope, (time.monotonic() - began_s) * 1000.0)


def _log(scope: Scope, duration_ms: float) -> None:
    state = scope["state"]
    record = {
        "request_id": state["request_id"],
        "client": state.get("client", "unknown"),
        "method": scope["method"],
        "path": scope["path"],
        "status": state.get("status", 0),
        "duration_ms": round(duration_ms, 1),
    }
    logger.info(
        "%s %s %s %.1f ms %s",
        record["method"],
        record["path"],
        record["status"],
        duration_ms,
        record["request_id"],
        extra={"fields": record},
    )


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        fields = record.__dict__.get("fields")
        line |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def set_up_logging(log_format: str) -> None:
    """The server's log to stderr. For the program; an application that embeds the server has its own logging."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    root = logging.getLogger("kestrel.server")
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
