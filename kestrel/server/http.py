"""The application: routes and middleware around one engine.

Another surface is one line in `routers`, another watcher one object in `app.state.kestrel.observers`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from kestrel import __version__
from kestrel.server.config import ServerConfig
from kestrel.server.errors import ErrorBoundary, http_exception_response, validation_response
from kestrel.server.images import ImageFetcher, NoRemoteImages
from kestrel.server.lifecycle import EngineSource, engine_lifespan
from kestrel.server.metrics import Observation
from kestrel.server.middleware import Authentication, BodyLimit, ClientLimit, DirectRoutes, HeadLimit, WebPages
from kestrel.server.native import native_routes
from kestrel.server.openai.routes import openai_routes
from kestrel.server.operations import operation_routes
from kestrel.server.playground import router as playground_routes
from kestrel.server.records import REQUEST_ID_HEADER
from kestrel.server.remote_images import RemoteImages
from kestrel.server.state import ServerState
from kestrel.server.tracing import otlp_provider


def create_app(engine_or_factory: EngineSource, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application over an engine, or over one that `factory()` makes on the server's event loop.

    The engine is got ready in the background of the start: `/healthz` says 503 until it is warm. An engine that a
    factory made is shut down with the application; one that was handed over is the caller's.
    """
    config = config or ServerConfig()
    state = ServerState(config, images=image_fetcher(config))
    watch = observation(state)
    state.observers.append(watch)
    included = [*routers(), watch.router()]
    app = FastAPI(
        title="Kestrel",
        version=__version__,
        root_path=config.root_path,
        lifespan=engine_lifespan(engine_or_factory),
        middleware=_middleware(state, watch, [route for router in included for route in router.routes]),
        exception_handlers={
            HTTPException: http_exception_response,
            RequestValidationError: validation_response,
        },
        docs_url=None,
        redoc_url=None,
    )
    app.state.kestrel = state
    for router in included:
        app.include_router(router)
    return app


def image_fetcher(config: ServerConfig) -> ImageFetcher:
    if not config.allowed_image_hosts:
        return NoRemoteImages()
    return RemoteImages(config.allowed_image_hosts, max_fetches=config.max_image_fetches)


def observation(state: ServerState) -> Observation:
    endpoint = state.config.otlp_endpoint
    tracer = None if endpoint is None else otlp_provider("kestrel", endpoint)
    return Observation(lambda: state.engine, lambda: state.model_name, tracer)


def routers() -> list[APIRouter]:
    return [operation_routes(), native_routes(), openai_routes(), playground_routes()]


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
                expose_headers=[REQUEST_ID_HEADER],
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
