"""The application: routes and middleware around one engine, and the routes for operators (health, version).

Another surface is one line in `routers`, another watcher one object in `app.state.kestrel.observers`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from kestrel import __version__
from kestrel.server.anthropic.routes import anthropic_routes
from kestrel.server.config import ServerConfig
from kestrel.server.docs_page import docs_routes
from kestrel.server.errors import RETRY_AFTER_S, ErrorBoundary, http_exception_response, validation_response
from kestrel.server.facts import fact_routes
from kestrel.server.lifecycle import EngineSource, engine_lifespan
from kestrel.server.metrics import Observation
from kestrel.server.middleware import (
    Authentication,
    BodyLimit,
    ClientLimit,
    DirectRoutes,
    HeadLimit,
    WebPages,
    is_open,
    key_headers,
)
from kestrel.server.native import native_routes
from kestrel.server.openai.routes import openai_routes
from kestrel.server.playground.routes import playground_routes
from kestrel.server.records import MESSAGES_ID_HEADER, REQUEST_ID_HEADER
from kestrel.server.request_images import ImageFetcher, NoRemoteImages, RemoteImages
from kestrel.server.responses import json_response
from kestrel.server.responses_api.routes import responses_routes
from kestrel.server.schemas import Schema, record
from kestrel.server.state import STALLED, Phase, ServerState, state_of
from kestrel.server.tracing import otlp_provider

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-moondream-auth": {"type": "apiKey", "in": "header", "name": "X-Moondream-Auth"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""By the names of `key_headers`."""


def create_app(engine_or_factory: EngineSource, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application over an engine, or over one that `factory()` makes on the server's event loop.

    The engine is got ready in the background of the start: `/healthz` says 503 until it is warm. An engine that a
    factory made is shut down with the application; one that was handed over is the caller's.
    """
    config = config or ServerConfig()
    state = ServerState(config, images=image_fetcher(config))
    watch = _observation(state)
    state.observers.append(watch)
    included = [*routers(), watch.router()]
    routes = [route for router in included for route in router.routes]
    paths = [route.path for route in routes if isinstance(route, APIRoute) and route.include_in_schema]
    app = _Application(
        config,
        title="Kestrel",
        version=__version__,
        root_path=config.root_path,
        lifespan=engine_lifespan(engine_or_factory),
        middleware=_middleware(state, watch, routes),
        exception_handlers={
            HTTPException: partial(http_exception_response, paths),
            RequestValidationError: validation_response,
        },
        docs_url=None,
        redoc_url=None,
    )
    app.state.kestrel = state
    for router in included:
        app.include_router(router)
    return app


class _Application(FastAPI):
    """Its description tells where a key is needed, and in which headers it may come."""

    def __init__(self, config: ServerConfig, **options: Any) -> None:
        super().__init__(**options)
        self._config = config

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            schema.setdefault("components", {})["securitySchemes"] = SECURITY_SCHEMES
            for path, item in schema["paths"].items() if self._config.has_keys else ():
                ways = () if is_open(path, self._config) else ("bearer", *key_headers(path))
                for operation in item.values():
                    operation["security"] = [{way: []} for way in ways]
        return super().openapi()


def image_fetcher(config: ServerConfig) -> ImageFetcher:
    if not config.allowed_image_hosts:
        return NoRemoteImages()
    return RemoteImages(config.allowed_image_hosts, max_fetches=config.max_image_fetches)


def _observation(state: ServerState) -> Observation:
    endpoint = state.config.otlp_endpoint
    tracer = None if endpoint is None else otlp_provider("kestrel", endpoint)
    return Observation(lambda: state.engine, lambda: state.model_name, tracer)


def routers() -> list[APIRouter]:
    others = [openai_routes(), responses_routes(), anthropic_routes()]
    return [_operation_routes(), fact_routes(), native_routes(), *others, playground_routes(), docs_routes()]


def _middleware(state: ServerState, watch: Observation, routes: Sequence[BaseRoute]) -> list[Middleware]:
    """Outermost first."""
    config = state.config
    layers = watch.middleware(routes)
    if config.cors_origins:
        everything = ["*"]
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=everything,
                allow_headers=everything,
                expose_headers=[REQUEST_ID_HEADER, MESSAGES_ID_HEADER],
            )
        )
    return [
        *layers,
        Middleware(ErrorBoundary),
        Middleware(HeadLimit, config=config),
        Middleware(WebPages, config=config),
        Middleware(Authentication, state=state),
        Middleware(ClientLimit, state=state),
        Middleware(BodyLimit, state=state),
        Middleware(DirectRoutes, routes=routes),
    ]


# ---------------------------------------------------------------------- routes for operators


async def healthy(request: Request) -> Response:
    """200 while the engine is warm and its worker makes progress, also while the server drains."""
    state = state_of(request)
    return _status(state, state.is_warm)


async def ready(request: Request) -> Response:
    """200 while new requests are accepted and steps end in time."""
    state = state_of(request)
    return _status(state, state.ready)


async def version(request: Request) -> Response:
    return json_response({"version": __version__, "model": state_of(request).model_name})


def _status(state: ServerState, is_well: bool) -> Response:
    headers = {} if is_well else {"retry-after": str(RETRY_AFTER_S)}
    return json_response({"status": state.status, "model": state.model_name}, 200 if is_well else 503, headers)


_MODEL: Schema = {"type": ["string", "null"]}
_STATUS = record({"status": {"enum": [*(phase.value for phase in Phase), STALLED]}, "model": _MODEL})
_VERSION = record({"version": {"type": "string"}, "model": _MODEL})


def _answer(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_ROUTES = {"/healthz": healthy, "/health": healthy, "/readyz": ready, "/ready": ready, "/version": version}
_RESPONSES: dict[Callable[[Request], Awaitable[Response]], dict[int | str, dict[str, Any]]] = {
    healthy: {
        200: _answer("The engine is warm and works.", _STATUS),
        503: _answer("Starting, failed or stalled.", _STATUS),
    },
    ready: {
        200: _answer("New requests are accepted.", _STATUS),
        503: _answer("Starting, draining or stalled.", _STATUS),
    },
    version: {200: _answer("The program and the model.", _VERSION)},
}


def _operation_routes() -> APIRouter:
    router = APIRouter(tags=["operations"])
    for path, endpoint in _ROUTES.items():
        router.add_api_route(path, endpoint, methods=["GET"], responses=_RESPONSES[endpoint], response_model=None)
        router.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    return router
