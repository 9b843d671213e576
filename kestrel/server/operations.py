"""Routes for operators: is it alive, is it ready, what is it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kestrel import __version__
from kestrel.server.errors import RETRY_AFTER_S
from kestrel.server.state import STALLED, Phase, ServerState, state_of

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def operation_routes() -> APIRouter:
    router = APIRouter(tags=["operations"])
    for path, endpoint in ROUTES:
        router.add_api_route(path, endpoint, methods=["GET"], responses=RESPONSES[endpoint], response_model=None)
        router.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    return router


async def healthy(request: Request) -> Response:
    """200 once the engine is warm and as long as its worker lives and gets on; draining is healthy."""
    state = state_of(request)
    return _status(state, state.is_warm)


async def ready(request: Request) -> Response:
    """200 while new requests are taken and steps end in time."""
    state = state_of(request)
    return _status(state, state.ready)


async def version(request: Request) -> Response:
    body = {"version": __version__, "model": state_of(request).model_name}
    return Response(orjson.dumps(body), media_type="application/json")


def _status(state: ServerState, is_well: bool) -> Response:
    body = orjson.dumps({"status": state.status, "model": state.model_name})
    headers = {} if is_well else {"retry-after": str(RETRY_AFTER_S)}
    return Response(body, 200 if is_well else 503, headers, media_type="application/json")


_MODEL = {"type": ["string", "null"]}
_STATUS = {
    "type": "object",
    "properties": {"status": {"enum": [*(phase.value for phase in Phase), STALLED]}, "model": _MODEL},
    "required": ["status", "model"],
}
_VERSION = {
    "type": "object",
    "properties": {"version": {"type": "string"}, "model": _MODEL},
    "required": ["version", "model"],
}


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


ROUTES: tuple[tuple[str, Endpoint], ...] = (
    *(("/healthz", healthy), ("/health", healthy)),
    *(("/readyz", ready), ("/ready", ready)),
    ("/version", version),
)
RESPONSES: dict[Endpoint, dict[int | str, dict[str, Any]]] = {
    healthy: {200: _answer("It is warm and alive.", _STATUS), 503: _answer("Not yet, or no more.", _STATUS)},
    ready: {200: _answer("New requests are taken.", _STATUS), 503: _answer("Starting, draining or stalled.", _STATUS)},
    version: {200: _answer("The program and the model.", _VERSION)},
}
