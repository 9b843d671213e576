"""Routes for operators: is it alive, is it ready, what is it."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kestrel import __version__
from kestrel.server.errors import RETRY_AFTER_S
from kestrel.server.state import ServerState, state_of


def operation_routes() -> APIRouter:
    router = APIRouter(tags=["operations"])
    for path, endpoint in (("/healthz", healthy), ("/health", healthy), ("/ready", ready), ("/version", version)):
        router.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        router.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    return router


async def healthy(request: Request) -> Response:
    """200 once the engine is warm and as long as its worker lives; draining is healthy."""
    state = state_of(request)
    return _status(state, state.is_warm)


async def ready(request: Request) -> Response:
    """200 while new requests are taken."""
    state = state_of(request)
    return _status(state, state.ready)


async def version(request: Request) -> Response:
    body = {"version": __version__, "model": state_of(request).model_name}
    return Response(orjson.dumps(body), media_type="application/json")


def _status(state: ServerState, is_well: bool) -> Response:
    status = state.phase.value
    if state.engine is not None and state.engine.fault is not None:
        status = "failed"
    body = orjson.dumps({"status": status, "model": state.model_name})
    headers = {} if is_well else {"retry-after": str(RETRY_AFTER_S)}
    return Response(body, 200 if is_well else 503, headers, media_type="application/json")
