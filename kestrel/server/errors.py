"""Failures as HTTP: one table from error types to status, type and code, and the one shape that clients see.

Clients of the Messages API see the same in Anthropic's shape.
"""

from __future__ import annotations

import difflib
import logging
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kestrel.errors import (
    MAX_MESSAGE,
    MAX_SHOWN,
    AdapterGone,
    AdapterNotFound,
    AdapterSourceBusy,
    AdapterSourceDenied,
    AdapterSourceError,
    AdapterSourceTimeout,
    AdapterUnusable,
    CapacityError,
    ClusterFull,
    ContextTooLong,
    DeadlineExceeded,
    EngineStopped,
    KestrelError,
    ModelNotFound,
    NotAllowed,
    NotServing,
    NumericalError,
    QueueTimeout,
    RequestCancelled,
    RequestError,
    TooManyRequests,
    Unauthorised,
    cut,
    shown,
)
from kestrel.server.records import RequestRecord, is_messages_path, route_path

logger = logging.getLogger("kestrel.server")

_OBJECT = re.compile(r"<[^<>]{0,100} at 0x[0-9a-fA-F]+>")
"""How libraries print what they were given; it says nothing to a client and an address to an attacker."""
PAGES = ("/docs", "/openapi.json")
"""For people and programs that look for what there is."""
OTHER_PAGES = ("/swagger", "/swagger-ui", "/redoc", "/api", "/api-docs", "/help")
"""Where other servers have such a page."""
FEW_PATHS = 3
"""More of them with the same beginning say nothing about which one was meant."""
MOST_CAUSES = 16
RETRY_AFTER_S = 1
"""What a client is told to wait when the server is full."""


class BodyTooLarge(KestrelError):
    """The request body exceeds its limit."""


class HeadTooLarge(KestrelError):
    """Request line and headers exceed their limit."""


class AmbiguousLength(KestrelError):
    """A request says in two ways where its body ends."""


class UnsupportedEncoding(KestrelError):
    """The body is compressed."""


class NotJson(KestrelError):
    """The body is not declared as JSON."""


class ForeignHost(KestrelError):
    """The request names a host that this server is not known by."""


class ForeignOrigin(KestrelError):
    """A web page of another site sent the request."""


class SlowClient(KestrelError):
    """The request did not arrive in time."""


class TooManyConnections(KestrelError):
    """Every connection has a request under way."""


class ResponseNotFound(KestrelError):
    """No such response is stored for this client."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class ErrorKind:
    status: int
    type: str
    code: str | None = None
    retry_after_s: int | None = None
    message: str | None = None
    """Said in place of the error's own words, which may name what is no client's business."""
    closes: bool = False
    """Whether the connection ends with the answer, because the rest of the request is still on its way."""


ERROR_KINDS: tuple[tuple[type[BaseException], ErrorKind], ...] = (
    (Unauthorised, ErrorKind(401, "authentication_error", "invalid_api_key")),
    (NotAllowed, ErrorKind(403, "permission_error", "not_allowed")),
    (ModelNotFound, ErrorKind(404, "invalid_request_error", "model_not_found")),
    (ResponseNotFound, ErrorKind(404, "invalid_request_error", "response_not_found")),
    (AdapterGone, ErrorKind(410, "invalid_request_error", "adapter_gone")),
    (AdapterNotFound, ErrorKind(404, "invalid_request_error", "adapter_not_found")),
    (AdapterUnusable, ErrorKind(400, "invalid_request_error", "adapter_unusable")),
    (AdapterSourceDenied, ErrorKind(502, "server_error", "adapter_source_denied")),
    (AdapterSourceBusy, ErrorKind(503, "overloaded_error", "adapter_source_busy", RETRY_AFTER_S)),
    (AdapterSourceTimeout, ErrorKind(504, "server_error", "adapter_source_timeout")),
    (AdapterSourceError, ErrorKind(502, "server_error", "adapter_source_failed")),
    (BodyTooLarge, ErrorKind(413, "invalid_request_error", "body_too_large", closes=True)),
    (HeadTooLarge, ErrorKind(431, "invalid_request_error", "headers_too_large", closes=True)),
    (AmbiguousLength, ErrorKind(400, "invalid_request_error", "ambiguous_length", closes=True)),
    (ForeignHost, ErrorKind(403, "permission_error", "host_not_allowed")),
    (ForeignOrigin, ErrorKind(403, "permission_error", "origin_not_allowed")),
    (NotJson, ErrorKind(415, "invalid_request_error", "unsupported_content_type")),
    (UnsupportedEncoding, ErrorKind(415, "invalid_request_error", "unsupported_content_encoding")),
    (SlowClient, ErrorKind(408, "timeout_error", "request_timeout", closes=True)),
    (DeadlineExceeded, ErrorKind(408, "timeout_error", "deadline_exceeded")),
    (TooManyRequests, ErrorKind(429, "rate_limit_error", "rate_limit_exceeded", RETRY_AFTER_S)),
    (TooManyConnections, ErrorKind(503, "overloaded_error", "too_many_connections", RETRY_AFTER_S, closes=True)),
    (NotServing, ErrorKind(503, "overloaded_error", "not_serving", RETRY_AFTER_S)),
    (QueueTimeout, ErrorKind(503, "overloaded_error", "queue_timeout", RETRY_AFTER_S)),
    # Not 503: what stands before a cluster takes that for a broken one.
    (ClusterFull, ErrorKind(429, "rate_limit_error", "overloaded", RETRY_AFTER_S)),
    (CapacityError, ErrorKind(503, "overloaded_error", "overloaded", RETRY_AFTER_S)),
    (ContextTooLong, ErrorKind(400, "invalid_request_error", "context_length_exceeded")),
    (RequestError, ErrorKind(400, "invalid_request_error")),
    (
        EngineStopped,
        ErrorKind(503, "server_error", "engine_stopped", RETRY_AFTER_S, "the engine has stopped; retry later"),
    ),
    (RequestCancelled, ErrorKind(499, "cancelled_error", "cancelled", None, "the request was cancelled")),
    (
        NumericalError,
        ErrorKind(500, "server_error", "numerical_error", None, "the model's numbers for this request are not finite"),
    ),
    (ClientGone, ErrorKind(499, "cancelled_error", "client_gone", None, "the client went away")),
    (Exception, ErrorKind(500, "server_error", "internal_error", None, "an internal error; the server's log has it")),
)
"""The first entry an error is an instance of counts."""

HTTP_KINDS = {
    404: ErrorKind(404, "invalid_request_error", "not_found"),
    405: ErrorKind(405, "invalid_request_error", "method_not_allowed"),
}
LIKENESS = 0.8
"""From which on another route is named; /v1/ alone makes two short paths alike by 0.7."""


def kind_of(error: BaseException) -> ErrorKind:
    return next(kind for known, kind in ERROR_KINDS if isinstance(error, known))


def error_body(error: BaseException) -> dict[str, Any]:
    """{"error": {…}} as every client gets it, in a response or as an event of a stream."""
    kind = kind_of(error)
    message = _OBJECT.sub("the data", cut(kind.message or str(error), MAX_MESSAGE))
    param = error.field if isinstance(error, RequestError) else None
    return {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}


def error_response(error: BaseException, scope: Scope | None = None) -> Response:
    """In the shape that the route of the scope has."""
    return _response(kind_of(error), error_body(error), scope)


def _response(kind: ErrorKind, body: dict[str, Any], scope: Scope | None) -> Response:
    status = kind.status
    if scope is not None and is_messages_path(route_path(scope)):
        status, body = ANTHROPIC_STATUSES.get(status, status), anthropic_body(status, body)
    headers: dict[str, str] = {}
    if kind.retry_after_s is not None:
        headers["retry-after"] = str(kind.retry_after_s)
    if kind.closes:
        headers["connection"] = "close"
    if kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


ANTHROPIC_STATUSES = {503: 529}
"""Where the Messages API has a status of its own."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """A failure as the Messages API has it."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


async def http_exception_response(paths: Sequence[str], request: Request, error: Exception) -> Response:
    """What the routing layer refuses, in the same shape. `paths`: those that there are."""
    assert isinstance(error, HTTPException)
    kind = HTTP_KINDS.get(error.status_code, ErrorKind(error.status_code, "invalid_request_error"))
    message = str(error.detail)
    if kind.status == 404:
        message = f"there is no such route; see /docs{_nearest(paths, route_path(request.scope))}"
    elif kind.status == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        message = f"this route does not take {shown(request.method)}; send {allowed}"
    body = {"error": {"message": message, "type": kind.type, "param": None, "code": kind.code}}
    response = _response(kind, body, request.scope)
    response.headers.update(error.headers or {})
    return response


def _nearest(paths: Sequence[str], path: str) -> str:
    """A path that begins with what was asked for, or that this begins with, or that is written nearly the same."""
    if len(path) > MAX_SHOWN:
        return ""
    asked = path.lower().rstrip("/")
    known = sorted(one for one in (*paths, *PAGES) if "{" not in one)
    longer = [one for one in known if one.startswith(asked)]
    shorter = [one for one in known if asked.startswith(one)]
    close = difflib.get_close_matches(asked, known, n=1, cutoff=LIKENESS)
    if 0 < len(longer) <= FEW_PATHS:
        close = [min(longer, key=len)]
    elif shorter:
        close = [max(shorter, key=len)]
    elif asked in OTHER_PAGES:
        close = ["/docs"]
    return f"; did you mean {close[0]}?" if close else ""


async def validation_response(request: Request, error: Exception) -> Response:
    """A body or query that a typed route refuses: 400, with the place of the first fault."""
    faults: list[dict[str, Any]] = list(error.errors()) if isinstance(error, RequestValidationError) else []
    first = faults[0] if faults else {"loc": ("body",), "msg": "is not valid"}
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path")) or "body"
    return error_response(RequestError(place, str(first["msg"])))


class ErrorBoundary:
    """Turns every failure of the application into a response, so that one request never harms another."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except ClientGone as error:
            forget_frames(error)  # nobody to answer
        except Exception as error:
            record = RequestRecord.current()
            if record is not None:
                record.error_type = type(error).__name__
            if kind_of(error).status == 500:
                logger.exception("request %s failed", scope["state"].get("request_id"))
            if started:
                raise
            response = error_response(error, scope)
            forget_frames(error)
            await response(scope, receive, send)


def forget_frames(error: BaseException | None) -> None:
    """Frames that an error went through hold the body and, often, the error: a cycle that only a full collection ends.

    So the locals of those that are over are let go of here.
    """
    for _ in range(MOST_CAUSES):
        if error is None:
            return
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
